"""What a message suggests works: each suggestion is followed here."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

import aiockpt
from aiockpt import TemplateMismatchError
from aiockpt.checkpointers import (
    CheckpointReader,
    CheckpointWriterConfig,
    DefaultStager,
    RankInfo,
)
from aiockpt.errors import LimitExceededError, StorageError, UnsupportedLeafError
from aiockpt.testing import assert_same
from tests.support.commandline import Commands

IN_A_THREAD = aiockpt.CheckpointerConfig(use_process=False)
READER = CheckpointReader(RankInfo(0, 1))


def words(**given: Any) -> dict[str, Any]:
    """Return keywords as a type checker accepts them, wherever they go."""
    return given


def save(path, state, **options: Any) -> str:
    """Save a state dict; return its path."""
    with aiockpt.make_sync_checkpointer() as checkpointer:
        checkpointer.save(state, path, **options)
    return str(path)


# ------------------------------------------------------------------------- steps


@pytest.mark.parametrize("kind", ["sync", "background"])
def test_a_name_without_a_step_is_remarked_once(tmp_path, caplog, kind) -> None:
    """The checkpoint is step 0, unless the save says another."""
    if kind == "sync":
        made: Any = aiockpt.make_sync_checkpointer()
    else:
        made = aiockpt.make_background_checkpointer(IN_A_THREAD)
    with made as checkpointer:
        checkpointer.save({"a": 1}, tmp_path / "last.ckpt")
        checkpointer.save({"a": 2}, tmp_path / "best")
        said = [each for each in caplog.messages if "no step in its name" in each]
        assert len(said) == 1
        assert f"{tmp_path / 'last.ckpt'} has no step" in said[0]
        assert "saved as step 0: say save(..., step=)" in said[0]
        checkpointer.save({"a": 3}, tmp_path / "last.ckpt", step=7)
    found = {each.name: each.step for each in aiockpt.list_checkpoints(tmp_path)}
    assert found == {"best": 0, "last.ckpt": 7}
    newest = aiockpt.latest(tmp_path)
    assert newest is not None
    assert (newest.name, newest.step) == ("last.ckpt", 7)


@pytest.mark.parametrize(
    ("name", "options"),
    [("step-0", {}), ("epoch=1-step=10.ckpt", {}), ("last", {"step": 0})],
)
def test_a_step_that_is_known_is_not_remarked(tmp_path, caplog, name, options) -> None:
    """Step 0 counts as a known step, too."""
    save(tmp_path / name, {"a": 1}, **options)
    assert "no step in its name" not in caplog.text


def test_convert_remarks_it_too(tmp_path, capsys) -> None:
    """It has an option for the step."""
    torch.save({"a": 1}, tmp_path / "model.pt")
    source = str(tmp_path / "model.pt")
    run = Commands(capsys)
    _, said = run("convert", source, tmp_path / "final")
    assert "final has no step in its name, so it is step 0" in said
    _, said = run("convert", source, tmp_path / "other", "--step", 3)
    assert "no step" not in said
    listed, _ = run("ls", tmp_path)
    rows = [line.split()[:2] for line in listed.splitlines()[1:]]
    assert rows == [["final", "0"], ["other", "3"]]


# ------------------------------------------------------------------------- keys


def test_a_warning_about_missing_keys_names_the_prefix(tmp_path, caplog) -> None:
    """A load that is not strict says what a strict one would say."""
    state = {"model": {"module.w": torch.ones(1), "module.b": torch.ones(1)}, "n": 1}
    path = save(tmp_path / "step-1", state)
    template = {"model": {"w": torch.zeros(1), "b": torch.zeros(1)}, "n": 0}
    READER.read(path, template)
    assert "is missing keys: model.w, model.b" in caplog.text
    assert "take 'module.' out of the keys" in caplog.text
    loaded = aiockpt.load(path)
    inner = {key.replace("module.", ""): v for key, v in loaded["model"].items()}
    path = save(tmp_path / "step-2", {**loaded, "model": inner})
    assert aiockpt.load(path, template)["model"]["w"] == 1


@pytest.mark.parametrize(
    "template",
    [{"x": 0}, {"module.a": 0, "module.b": 0}, {"b": {"z": 1}}, {"b": {}, "x": 1}],
)
@pytest.mark.asyncio
async def test_a_receive_of_values_in_which_no_key_fits(template) -> None:
    """It is an error, as for tensors, and the template stays as it is."""
    before = repr(template)
    async with aiockpt.HTTPTransport(10) as one, aiockpt.HTTPTransport(10) as other:
        await one.send_checkpoint([1], 1, {"a": 1, "b": {"c": 2}})
        if template == {"b": {}, "x": 1}:  # a container of it fits
            found = await other.recv_checkpoint(0, one.metadata(), 1, into=template)
            assert found["b"] == {"c": 2}
            return
        with pytest.raises(TemplateMismatchError, match="none of them"):
            await other.recv_checkpoint(0, one.metadata(), 1, into=template)
        assert repr(template) == before
        partly: Any = {"a": 0, "x": 1}
        found = await other.recv_checkpoint(0, one.metadata(), 1, into=partly)
        assert found == {"a": 1, "b": {"c": 2}, "x": 1}


# ------------------------------------------------------------------------- keywords


FACTORIES = [
    aiockpt.make_sync_checkpointer,
    aiockpt.make_async_checkpointer,
    aiockpt.make_background_checkpointer,
]


@pytest.mark.parametrize("make", FACTORIES)
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("confg", "did you mean 'config'?"),
        ("rankinfo", "did you mean 'rank_info'?"),
        ("use_process", "say CheckpointerConfig(use_process=...)"),
        ("keep_last", "say CheckpointerConfig(writer_config="),
    ],
)
def test_a_factory_names_the_nearest_keyword(make, name, hint) -> None:
    """The error names the nearest keyword, or the record that has it."""
    with pytest.raises(TypeError) as caught:
        make(**words(**{name: None}))
    assert f"has no option {name!r}: {hint}" in str(caught.value)


# ------------------------------------------------------------------------- convert


def test_the_form_that_convert_suggests(tmp_path, capsys) -> None:
    """The command works as it stands, also if the first name is taken."""
    run = Commands(capsys)
    for taken in (False, True):
        source = tmp_path / f"model-{taken}.pt"
        torch.save({"w": torch.ones(1), "n": [1]}, source)
        target = tmp_path / f"plain-{taken}.safetensors"
        if taken:
            target.with_suffix("").write_text("somebody's")
        said = run.error("convert", source, target)
        command = said.partition("to a checkpoint directory: ")[2].strip()
        program, *arguments = shlex.split(command)
        assert program == "aiockpt"
        run(*arguments)
        loaded = aiockpt.load(arguments[2])
        assert loaded == {"w": torch.ones(1), "n": [1]}


# ------------------------------------------------------------------------- limits


@pytest.mark.parametrize("kind", ["sync", "thread", "process"])
@pytest.mark.allow_error_logs
def test_a_save_beyond_a_limit_names_no_option(tmp_path, kind) -> None:
    """It has none; what the message says works."""
    deep: Any = torch.ones(1)
    for _ in range(70):
        deep = [deep]
    if kind == "sync":
        made: Any = aiockpt.make_sync_checkpointer()
    else:
        config = aiockpt.CheckpointerConfig(use_process=kind == "process")
        made = aiockpt.make_background_checkpointer(config)
    with made as checkpointer:
        with pytest.raises(LimitExceededError, match="nest the state dict less") as no:
            checkpointer.save({"a": deep}, tmp_path / "step-1")
        assert "Limits(" not in str(no.value)
        checkpointer.save({"a": deep[0][0][0][0][0][0][0][0][0]}, tmp_path / "step-1")


def test_a_file_beyond_a_limit(tmp_path) -> None:
    """The reader that the message names reads it."""
    path = save(tmp_path / "step-1", {"a": [*range(100)]})
    small = CheckpointReader(RankInfo(0, 1), limits=aiockpt.Limits(max_nodes=50))
    with pytest.raises(StorageError) as caught:
        small.read(path)
    found = re.search(r"(aiockpt\.checkpointers\.Chec.*)$", str(caught.value))
    assert found is not None
    reader = eval(found[1].replace("...", "1000"), {"aiockpt": aiockpt})
    assert reader.read(path)[0] == {"a": [*range(100)]}


@pytest.mark.asyncio
async def test_a_peer_beyond_a_limit_of_the_command_line(tmp_path, capsys) -> None:
    """No command has an option for it; a program that the message names receives it."""
    long = "x" * ((8 << 20) + 1)
    more = aiockpt.Receive(limits=aiockpt.Limits(max_text_bytes=1 << 24))
    async with aiockpt.HTTPTransport(receive=more) as transport:
        await transport.send_checkpoint(step=1, state_dict={"a": long})
        metadata = transport.metadata()
        run, target = Commands(capsys), tmp_path / "x.safetensors"
        said = await asyncio.to_thread(run.error, "fetch", metadata, "-o", target)
        assert "no option of this command raises that" in said
        assert "Limits(max_text_bytes=...)" in said
        found = re.search(r"with (aiockpt\.Receive\(.*\))$", said.strip())
        assert found is not None
        receive = eval(found[1].replace("...", "1 << 24"), {"aiockpt": aiockpt})
        async with aiockpt.HTTPTransport(receive=receive) as receiver:
            assert await receiver.recv_checkpoint(metadata=metadata) == {"a": long}


def test_too_little_memory_is_no_limit_of_ours(tmp_path, monkeypatch) -> None:
    """The message says what helps, and names no option."""
    path = save(tmp_path / "step-1", {"a": torch.ones(1000), "b": torch.ones(1)})
    monkeypatch.setattr("aiockpt.state.segment.spare_memory", lambda: 100)
    with pytest.raises(LimitExceededError, match="free memory on this host") as caught:
        aiockpt.load(path)
    assert "Limits" not in str(caught.value)
    assert aiockpt.load(path, select=["b"])["b"] == 1


# ------------------------------------------------------------------------- pickles


class Odd:
    """A type that travels as a pickle only."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


def test_a_pickle(tmp_path, capsys) -> None:
    """The error has its path and the option, which works; a command says what to do."""
    config = aiockpt.CheckpointerConfig(
        writer_config=CheckpointWriterConfig(allow_pickle=True)
    )
    path = str(tmp_path / "step-1")
    with aiockpt.make_sync_checkpointer(config) as checkpointer:
        checkpointer.save({"a": [1, Odd()]}, path)
    with pytest.raises(UnsupportedLeafError) as caught:
        aiockpt.load(path)
    assert caught.value.path == "a[1]"
    assert "say allow_pickle=True" in str(caught.value)
    assert aiockpt.load(path, allow_pickle=True) == {"a": [1, Odd()]}
    run = Commands(capsys)
    said, _ = run("inspect", path)
    assert "a[1]: it runs code; say allow_pickle=True" in said
    assert "register_leaf" not in said
    said = run.error("convert", path, tmp_path / "x.pt")
    assert "convert runs no such code, so load it in a program" in said


# ------------------------------------------------------------------ on the command line


@pytest.mark.parametrize("place", ["value", "key", "item of a set"])
def test_a_command_that_does_not_know_a_type(
    tmp_path, capsys, monkeypatch, place
) -> None:
    """It names `--import`, and the path of the value, and works with it."""
    name = f"types_of_{place.replace(' ', '_')}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / f"{name}.py").write_text(
        "import aiockpt\nimport enum\n\n\n@aiockpt.register_leaf\n"
        "class Phase(enum.Enum):\n    WARMUP = 1\n"
    )
    sys.path.insert(0, str(tmp_path))
    values = {"value": "[kind]", "key": "{kind: 1}", "item of a set": "{kind}"}
    path = "step-1"
    code = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        f"import aiockpt, {name}\n"
        f"kind = {name}.Phase.WARMUP\n"
        "with aiockpt.make_sync_checkpointer() as checkpointer:\n"
        f"    checkpointer.save({{'a': {values[place]}}}, {path!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    run = Commands(capsys)
    said, _ = run("inspect", path)
    where = "a[key " if place == "key" else "a[0]"
    assert where in said
    assert "class" not in said
    for verb in ("convert", "serve"):
        more = ["x.pt"] if verb == "convert" else []
        said = run.error(verb, path, *more)
        assert f"{verb} --import MODULE imports what registers it" in said
    run("convert", "--import", name, path, "x-1")
    (loaded,) = aiockpt.load("x-1")["a"]
    assert loaded.name == "WARMUP"


class Pair(NamedTuple):
    """A type that is registered at last."""

    a: int
    b: int


def test_a_named_tuple_needs_a_template_or_registering(tmp_path) -> None:
    """Both remedies of the load's error work."""
    path = save(tmp_path / "step-1", {"p": Pair(1, 2)})
    with pytest.raises(UnsupportedLeafError, match=r"register_leaf.*into a template"):
        aiockpt.load(path)
    assert aiockpt.load(path, {"p": Pair(0, 0)})["p"] == Pair(1, 2)
    aiockpt.register_leaf(Pair)
    assert aiockpt.load(path)["p"] == Pair(1, 2)


class Stranger(NamedTuple):
    """A type that is not registered."""

    a: int
    b: int


def with_an_attribute(value: Any) -> OrderedDict[str, Any]:
    """Return a dict with an attribute, as a module's state dict has one."""
    made: Any = OrderedDict(x=1)
    made.more = {"m": value}
    return made


@pytest.mark.parametrize(
    "around",
    [
        lambda pair: {pair},
        lambda pair: frozenset({(1, pair)}),
        lambda pair: {pair: 1},
        lambda pair: {("k", pair): torch.ones(1)},
        with_an_attribute,
    ],
    ids=["set", "tuple in a frozenset", "key", "tuple of a key", "attribute"],
)
@pytest.mark.asyncio
async def test_a_template_has_it_wherever_it_may_be(tmp_path, around) -> None:
    """A load, a receive and a staged state rebuild it, as the messages say."""
    state = {"a": around(Stranger(1, 2))}
    path = save(tmp_path / "step-1", state)
    with pytest.raises(UnsupportedLeafError, match="into a template that has one"):
        aiockpt.load(path)
    assert_same(aiockpt.load(path, {"a": around(Stranger(1, 2))}), state)
    async with aiockpt.HTTPTransport(10) as transport:
        await transport.send_checkpoint(step=1, state_dict=state)
        into = {"a": around(Stranger(1, 2))}
        found = await transport.recv_checkpoint(
            metadata=transport.metadata(), into=into
        )
        assert_same(found, state)
    stager = DefaultStager()
    with await stager.stage(state) as staged:
        assert_same(staged.state_dict(), state)
    await stager.close()
