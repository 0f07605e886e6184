"""What a message suggests works: each suggestion is followed here."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

import pytest
import torch

import aiockpt
from aiockpt import TemplateMismatchError
from aiockpt.checkpointers import CheckpointReader, DefaultStager, RankInfo
from aiockpt.cli import main
from aiockpt.errors import UnsupportedLeafError
from aiockpt.format.registry import REGISTRY

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
    """Step 0 is one, too."""
    save(tmp_path / name, {"a": 1}, **options)
    assert "no step in its name" not in caplog.text


def test_convert_remarks_it_too(tmp_path, capsys) -> None:
    """It has an option for the step."""
    torch.save({"a": 1}, tmp_path / "model.pt")
    source = str(tmp_path / "model.pt")
    assert main(["convert", source, str(tmp_path / "final")]) == 0
    assert "final has no step in its name, so it is step 0" in capsys.readouterr().err
    assert main(["convert", source, str(tmp_path / "other"), "--step", "3"]) == 0
    assert "no step" not in capsys.readouterr().err
    assert main(["ls", str(tmp_path)]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["final", "0"], ["other", "3"]]


# ------------------------------------------------------------- types that are unknown


class Buffer:
    """A type that needs functions of its own."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def register() -> None:
    """Register the type."""
    aiockpt.register_leaf(
        Buffer, tag="suggested.Buffer", encode=lambda b: b.data, decode=Buffer
    )


def forget() -> None:
    """Make this process one that has not registered the type."""
    if REGISTRY._by_type.pop(Buffer, None):
        del REGISTRY._by_tag["suggested.Buffer"]


@pytest.fixture
def registered():
    """Register a type for one test."""
    register()
    yield
    forget()


@pytest.mark.asyncio
async def test_a_staged_state_says_what_is_not_registered(registered) -> None:
    """The error is a local one with path, type and remedy, which works."""
    stager = DefaultStager()
    async with aiockpt.make_async_checkpointer(IN_A_THREAD):
        staged = await stager.stage({"a": [Buffer(b"x")]})
        forget()
        with pytest.raises(UnsupportedLeafError) as caught:
            staged.state_dict()
        assert caught.value.path == "a[0]"
        assert "suggested.Buffer" in str(caught.value)
        assert "register" in str(caught.value)
        register()
        assert staged.state_dict()["a"][0].data == b"x"
        staged.release()
    await stager.close()


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
    """Or the record that has it."""
    with pytest.raises(TypeError) as caught:
        make(**words(**{name: None}))
    assert f"has no option {name!r}: {hint}" in str(caught.value)


# ------------------------------------------------------------------------- convert


def test_the_form_that_convert_suggests(tmp_path, capsys) -> None:
    """The command works as it stands, also if the first name is taken."""
    for taken in (False, True):
        source = tmp_path / f"model-{taken}.pt"
        torch.save({"w": torch.ones(1), "n": [1]}, source)
        target = tmp_path / f"plain-{taken}.safetensors"
        if taken:
            target.with_suffix("").write_text("somebody's")
        assert main(["convert", str(source), str(target)]) == 1
        said = capsys.readouterr().err
        command = said.partition("to a checkpoint directory: ")[2].strip()
        program, *arguments = shlex.split(command)
        assert program == "aiockpt"
        assert main(arguments) == 0
        loaded = aiockpt.load(arguments[2])
        assert loaded == {"w": torch.ones(1), "n": [1]}
        capsys.readouterr()


class Pair(NamedTuple):
    """A type that is not registered."""

    a: int
    b: int


def test_a_named_tuple_needs_a_template_or_registering(tmp_path) -> None:
    """Both remedies of the load's error work."""
    path = save(tmp_path / "step-1", {"p": Pair(1, 2)})
    with pytest.raises(UnsupportedLeafError, match=r"register_leaf.*into a template"):
        aiockpt.load(path)
    assert aiockpt.load(path, {"p": Pair(0, 0)})["p"] == Pair(1, 2)
    aiockpt.register_leaf(Pair)
    try:
        assert aiockpt.load(path)["p"] == Pair(1, 2)
    finally:
        codec = REGISTRY._by_type.pop(Pair)
        del REGISTRY._by_tag[codec.tag]
