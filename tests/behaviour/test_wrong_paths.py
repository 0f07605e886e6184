"""A path that is not a checkpoint: the error says what it is, and its advice works."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import aiockpt
from aiockpt.errors import (
    CheckpointNotFoundError,
    RankValuesError,
    StorageError,
    TemplateMismatchError,
)
from tests.support.commandline import Commands
from tests.support.joined import cut
from tests.support.mesh_ranks import assembled
from tests.support.saving import save_by_two

STATE = {"w": torch.ones(2)}


def save(path: Path | str, state: object) -> None:
    """Save in the foreground."""
    with aiockpt.make_sync_checkpointer() as checkpointer:
        checkpointer.save(state, path)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Commands:
    """Run commands in this process."""
    return Commands(capsys)


@pytest.mark.parametrize("count", [1, 3])
def test_a_directory_of_checkpoints(tmp_path: Path, count: int) -> None:
    """The message names the newest one; both of its suggestions load it."""
    run = tmp_path / "run"
    for step in range(1, count + 1):
        save(run / f"step-{step}00", {"step": step})
    with pytest.raises(CheckpointNotFoundError) as caught:
        aiockpt.load(run)
    many = "1 checkpoint" if count == 1 else "3 checkpoints"
    words = rf"it holds {many}, the newest is (\S+); load that, or (aiockpt\..*)$"
    found = re.search(words, str(caught.value))
    assert found is not None
    assert aiockpt.load(found[1]) == {"step": count}
    newest = eval(found[2], {"aiockpt": aiockpt})
    assert aiockpt.load(newest) == {"step": count}


def test_a_directory_of_files(tmp_path: Path) -> None:
    """They are named, and each loads by its own path."""
    torch.save(STATE, tmp_path / "a.pt")
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointNotFoundError, match=r"a\.pt, pytorch_model\.bin"):
        aiockpt.load(tmp_path)
    assert torch.equal(aiockpt.load(tmp_path / "pytorch_model.bin")["w"], STATE["w"])


def test_values_of_several_ranks(tmp_path: Path) -> None:
    """The message lists what differs, and each of its ways out works."""
    path = tmp_path / "step-1"
    save_by_two(path, STATE)
    with pytest.raises(RankValuesError, match=r"at rank: pass rank_values=0") as caught:
        aiockpt.load(path)
    assert [*caught.value.paths] == ["rank"]
    found = aiockpt.load(path, rank_values=1)
    assert found["rank"] == 1
    assert torch.equal(found["w"], STATE["w"])
    into: dict[str, Any] = {"rank": 5, "w": torch.zeros(2)}
    aiockpt.load(path, into=into, rank_values="keep")
    assert into["rank"] == 5
    assert torch.equal(into["w"], STATE["w"])
    assert {*aiockpt.load(path, select=["w"])} >= {"w"}
    assert aiockpt.load(path, rank=1) == {"rank": 1}


def test_shards(tmp_path: Path, cli: Commands) -> None:
    """One process puts them together, and so does a command; or it takes one part."""
    whole = torch.arange(4.0)
    path = assembled(tmp_path / "step-1", 2, lambda _: {"w": cut(2, whole=whole)})
    for into in (None, {"w": torch.zeros(4)}):
        assert torch.equal(aiockpt.load(path, into=into)["w"], whole)
    assert torch.equal(aiockpt.load(path, rank=1)["w"], whole[2:])
    with pytest.raises(TemplateMismatchError, match=r"\[2\].*\[4\]"):
        aiockpt.load(path, into={"w": torch.zeros(4)}, rank=0)
    for rank, expected in (([], whole), (["--rank", "0"], whole[:2])):
        target = tmp_path / f"{len(rank)}.pt"
        cli("convert", path, target, *rank)
        assert torch.equal(aiockpt.load(target)["w"], expected)
        said = cli.error("serve", path, *rank)
        assert "serve offers one file" in said
        assert "--rank" not in said
        remedies = re.findall(r"aiockpt (convert .*?), and serve", said)
    cli(*shlex.split(remedies[0]))
    assert torch.equal(aiockpt.load(f"{path}-joined")["w"], whole)


def test_a_suffix_that_means_nothing(tmp_path: Path, cli: Commands) -> None:
    """What the message offers instead can be pasted."""
    torch.save(STATE, tmp_path / "a.pt")
    source, target = f"{tmp_path / 'a.pt'}", str(tmp_path / "it's `x` $y.v2")
    _, err = cli("convert", source, target, code=2)
    said = err.partition("or write ")[2].partition(" for a")[0]
    cli("convert", source, *shlex.split(said))
    assert torch.equal(aiockpt.load(target)["w"], STATE["w"])


@pytest.mark.parametrize("index", [True, False])
def test_two_files_with_one_name(tmp_path: Path, cli: Commands, index: bool) -> None:
    """One of the tensors would be lost, so the files are named; each loads alone."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        tensors = {"w": torch.full((1,), value), name: torch.zeros(1)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    if index:
        places = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
        (tmp_path / "m.safetensors.index.json").write_text(json.dumps(places))
    words = "a.safetensors and b.safetensors both hold 'w'"
    for options in ({}, {"into": {"w": torch.zeros(1)}}, {"select": ["a"]}):
        arguments: dict[str, Any] = options
        with pytest.raises(StorageError, match=words):
            aiockpt.load(tmp_path, **arguments)
    assert words in cli.error("convert", tmp_path, tmp_path / "x-1")
    assert aiockpt.load(tmp_path / "b.safetensors")["w"] == 2


def save_behind(path: Path | str) -> None:
    """Save in the background."""
    config = aiockpt.CheckpointerConfig(use_process=False)
    with aiockpt.make_background_checkpointer(config) as checkpointer:
        checkpointer.save(STATE, path).result(60)


VERBS: dict[str, Any] = {
    "load": aiockpt.load,
    "latest": aiockpt.latest,
    "list_checkpoints": aiockpt.list_checkpoints,
    "save": lambda path: save(path, STATE),
    "save in the background": save_behind,
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_path_of_a_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Neither a URL nor an empty text becomes a directory here."""
    monkeypatch.chdir(tmp_path)
    for path in ("hdfs://bucket/step-1", Path("hdfs://bucket/step-1"), "file:///x"):
        with pytest.raises(StorageError, match="as a URL does") as caught:
            VERBS[verb](path)
        assert str(caught.value).count("bucket/step-1: ") <= 1
    with pytest.raises(StorageError, match=r"empty; write \. for this directory"):
        VERBS[verb]("")
    for other in (None, 3, b"x"):
        with pytest.raises(TypeError, match="path must be a str"):
            VERBS[verb](other)
    if "save" in verb:
        with pytest.raises(StorageError) as caught:
            VERBS[verb]("http://host/step-1#tok")
        assert "tok" not in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["hdfs:/bucket", "~nobody-like-this"])
def test_a_name_that_looks_like_another_thing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Commands,
    name: str,
) -> None:
    """Written as the message says, it is a name for every verb and command."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError) as caught:
        save(f"{name}/step-1", STATE)
    found = re.search(r"write (\./\S+)", str(caught.value))
    assert found is not None
    save(found[1], STATE)
    assert torch.equal(aiockpt.load(found[1])["w"], STATE["w"])
    newest = aiockpt.latest(f"./{name}")
    assert newest is not None
    assert torch.equal(aiockpt.load(newest)["w"], STATE["w"])
    for command in (["ls", f"./{name}"], ["inspect", found[1]], ["verify", found[1]]):
        assert "step" in cli(*command)[0]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home directory, which is not the current one."""
    monkeypatch.setenv("HOME", f"{tmp_path / 'home'}")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "home"


@pytest.mark.parametrize("use_process", [False, True])
def test_a_tilde_is_the_home_directory(home: Path, *, use_process: bool) -> None:
    """Each path of every verb that saves or loads may have one."""
    save("~/run/step-1", {"n": 1})
    config = aiockpt.CheckpointerConfig(use_process=use_process)
    with aiockpt.make_background_checkpointer(config) as checkpointer:
        assert checkpointer.save({"n": 2}, Path("~/run/step-2")).result()
        assert checkpointer.load("~/run/step-2") == {"n": 2}
    newest = aiockpt.latest("~/run")
    assert newest is not None
    assert newest.path == home / "run" / "step-2"
    assert len(aiockpt.list_checkpoints(Path("~/run"))) == 2
    assert aiockpt.load("~/run/step-1") == {"n": 1}
    save_file(STATE, home / "x.safetensors")
    assert torch.equal(aiockpt.load("~/x.safetensors")["w"], STATE["w"])
    assert not [*Path().iterdir()]


def test_a_tilde_of_the_command_line(home: Path, cli: Commands) -> None:
    """A shell leaves `--output=~/x` as it is."""
    save("~/step-1", {"n": torch.ones(1)})
    cli("convert", "~/step-1", "~/x.safetensors")
    assert (home / "x.safetensors").exists()
    cli("inspect", "~/x.safetensors")
    cli("ls", "~")
    assert not [*Path().iterdir()]


def test_nobodys_home(home: Path) -> None:
    """A name with a tilde that is no user's is refused, and so is loading it."""
    with pytest.raises(
        StorageError, match=r"no such home directory; write \./~nobody9"
    ):
        aiockpt.load("~nobody9/x")
    with pytest.raises(StorageError, match="no such home directory"):
        save("~nobody9/x", STATE)
    save("./~nobody9/x", {"n": 1})
    assert aiockpt.load("./~nobody9/x") == {"n": 1}
    assert not home.exists()


def test_a_list_looks_at_no_other_directories(tmp_path: Path) -> None:
    """It would walk through all data beside the checkpoints, or a loop of links."""
    with aiockpt.make_sync_checkpointer() as made:
        made.save({"w": torch.ones(1)}, tmp_path / "step-1")
        made.save({"w": torch.ones(1)}, tmp_path / "data" / "more" / "step-2")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [each.step for each in aiockpt.list_checkpoints(tmp_path)] == [1]
    assert isinstance(aiockpt.list_checkpoints("/"), list)
    with pytest.raises(aiockpt.StorageError, match="root directory"):
        aiockpt.load("/")
