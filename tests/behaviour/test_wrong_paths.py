"""A path that is not a checkpoint: the error says what it is, and its advice works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

import aiockpt
from aiockpt.cli import main
from aiockpt.errors import (
    CheckpointNotFoundError,
    DeviceMeshError,
    StorageError,
    WorldSizeMismatchError,
)
from tests.support.saving import save_by_two

SUPPORT = Path(__file__).parents[1] / "support"
STATE = {"w": torch.ones(2)}


def save(path: Path | str, state: object) -> None:
    """Save in the foreground."""
    with aiockpt.make_sync_checkpointer() as checkpointer:
        checkpointer.save(state, path)


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_dcp(tmp_path: Path) -> None:
    """The command that the message has makes a file that loads."""
    save_by_dcp(dict(STATE), checkpoint_id=tmp_path / "a dcp", no_dist=True)
    with pytest.raises(CheckpointNotFoundError) as caught:
        aiockpt.load(tmp_path / "a dcp")
    found = re.search(r"with python (-m .*?) FILE\.pt, and load", str(caught.value))
    assert found is not None
    target = tmp_path / "whole.pt"
    command = [sys.executable, *shlex.split(found[1]), os.fspath(target)]
    subprocess.run(command, check=True, capture_output=True)
    assert torch.equal(aiockpt.load(target)["w"], STATE["w"])


def test_a_directory_of_files(tmp_path: Path) -> None:
    """They are named, and each loads by its own path."""
    torch.save(STATE, tmp_path / "a.pt")
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointNotFoundError, match=r"a\.pt, pytorch_model\.bin"):
        aiockpt.load(tmp_path)
    assert torch.equal(aiockpt.load(tmp_path / "pytorch_model.bin")["w"], STATE["w"])


def test_a_part_that_is_no_shard(tmp_path: Path) -> None:
    """`rank=` loads it, as the message says."""
    path = tmp_path / "step-1"
    save_by_two(path, STATE)
    with pytest.raises(WorldSizeMismatchError, match="say rank= for one") as caught:
        aiockpt.load(path)
    assert not caught.value.sharded
    assert aiockpt.load(path, rank=1) == {"rank": 1}


def test_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No message sends to an option that fails: only a job of two ranks loads them."""
    path = tmp_path / "step-1"
    command = [sys.executable, f"{SUPPORT / 'two_sharded_ranks.py'}", f"{path}"]
    subprocess.run(
        command, check=True, timeout=120, env={**os.environ, "PYTHONPATH": "."}
    )
    job = re.escape("load it in a job of 2 ranks (torchrun --nproc-per-node 2)")
    for into in (None, {"w": torch.zeros(4)}):
        with pytest.raises(WorldSizeMismatchError, match=job) as caught:
            aiockpt.load(path, into=into)
        assert caught.value.sharded
        assert "rank=" not in str(caught.value)
        with pytest.raises(DeviceMeshError, match="start a job of as many ranks") as no:
            aiockpt.load(path, into=into, rank=0)
        assert "into=" not in str(no.value)
    for rank in ([], ["--rank", "0"]):
        assert main(["convert", f"{path}", f"{tmp_path / 'x.pt'}", *rank])
        said = capsys.readouterr().err
        assert "convert cannot join them" in said
        assert "--rank" not in said
        assert "aiockpt convert" not in said
    assert not (tmp_path / "x.pt").exists()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home directory, which is not the current one."""
    monkeypatch.setenv("HOME", f"{tmp_path / 'home'}")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "home"


@pytest.mark.parametrize("use_process", [False, True])
def test_a_tilde_is_the_home_directory(home: Path, *, use_process: bool) -> None:
    """In each path that is given, by every way to save and to load."""
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


def test_a_tilde_of_the_command_line(home: Path) -> None:
    """A shell leaves `--output=~/x` as it is."""
    save("~/step-1", {"n": torch.ones(1)})
    assert not main(["convert", "~/step-1", "~/x.safetensors"])
    assert (home / "x.safetensors").exists()
    assert not main(["inspect", "~/x.safetensors"])
    assert not main(["ls", "~"])
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
