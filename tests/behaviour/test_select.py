"""``select=``: a part is fetched alone, is what a load gives, and must be there."""

from __future__ import annotations

import asyncio
import copy
import logging
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import Limits, register_leaf
from aiockpt.errors import (
    LimitExceededError,
    MissingKeysError,
    RemoteProtocolError,
)
from aiockpt.testing import assert_same
from tests.support.saving import load, save
from tests.support.states import rich
from tests.support.transports import (
    CHUNK,
    WIDE,
    chunked,
    counted,
    pair,
    receive,
    told,
    transport,
)

pytestmark = pytest.mark.usefixtures("no_blocking")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("select", "names"),
    [
        ([], []),
        (["n"], ["n"]),
        (["w3"], ["w3"]),
        (["w0", "w7"], ["w0", "w7"]),
        (lambda path: path in ("w1", "w5", "w6"), ["w1", "w5", "w6"]),
        ([""], [*chunked()]),
    ],
)
@pytest.mark.parametrize("how", ["anew", "direct"])
async def test_no_other_chunk_is_fetched(
    select: Any, names: list[str], how: str
) -> None:
    """The sender counts the bytes; progress and event tell as many."""
    seen: list[Any] = []
    options: dict[str, Any] = {"select": select, "progress": seen.append}
    if how == "direct":
        options |= {"into": {k: v * 0 for k, v in chunked().items()}, "direct": True}
    async with pair() as (sender, receiver), told() as events:
        await sender.send_checkpoint([], 1, chunked())
        got, nbytes = await counted(sender, receiver, **options)
    chunks = sum(name != "n" for name in names)
    assert nbytes == chunks * CHUNK
    assert (seen[-1].bytes_done, seen[-1].bytes_total) == (nbytes, nbytes)
    assert (seen[-1].chunks_done, seen[-1].chunks_total) == (chunks, chunks)
    assert [e.nbytes for e in events if e.stop == "recv"][-1] == nbytes
    assert [*got] == (names if how == "anew" else [*chunked()])
    for key, value in got.items():
        assert_same(value, chunked()[key] if key in names else chunked()[key] * 0)


@pytest.mark.asyncio
async def test_what_is_selected_is_fetched_by_few_requests() -> None:
    """Neighbouring chunks go together: there is one plan for all of it."""
    state = {f"layer.{n}": torch.full((WIDE // 8,), float(n)) for n in range(800)}
    async with pair(state=state, connections=2) as (sender, receiver):
        before = sender.statistics().requests
        names = [f"layer.{n}" for n in range(400)]
        got = await receive(sender, receiver, select=names)
        assert [*got] == names
        # The header, two runs of chunks for each of two connections, and the end.
        assert sender.statistics().requests - before <= 1 + 4 + 1


PATHS = [
    "model.embed", "optimizer.state.0", "optimizer.groups[1]", "blob", "made.a",
    "(1, 'key')", "view", "",
]  # fmt: skip


@pytest.mark.asyncio
async def test_the_result_is_that_of_a_load(tmp_path: Path) -> None:
    """Paths and functions select the same, with and without a template."""
    saved = await asyncio.to_thread(save, tmp_path / "s", rich())
    async with pair(state=rich()) as (sender, receiver):
        for path in PATHS:

            def some(name: str, path: str = path) -> bool:
                return name.startswith(path) and "lr" not in name

            for select in ([path], some):
                got = await receive(sender, receiver, select=select)
                found = await asyncio.to_thread(load, saved, select=select)
                assert_same(got, found)
            expected = zeroed(rich())
            await asyncio.to_thread(load, saved, expected, select=[path])
            for direct in (False, True):
                into = zeroed(rich())
                options: dict[str, Any] = {"select": [path], "direct": direct}
                got = await receive(sender, receiver, into=into, **options)
                assert got is into
                assert_same(into, expected)


def zeroed(value: Any) -> Any:
    """Return the same with other tensors, and other values."""
    match value:
        case torch.Tensor() if value.layout is torch.strided:
            return torch.zeros_like(value)
        case dict():
            made = copy.copy(value)
            made.update({key: zeroed(each) for key, each in value.items()})
            return made
        case list():
            return [zeroed(each) for each in value]
        case int() | float():
            return value * 0
    return value


@pytest.mark.asyncio
async def test_values_that_are_not_selected_cost_nothing() -> None:
    """They need not be known here, nor is what they are made of fetched."""
    state = {"w": torch.ones(WIDE), "blob": b"x" * 10 * CHUNK, "n": 5}
    async with pair(state=state) as (sender, receiver):
        got, nbytes = await counted(sender, receiver, select=["w", "n"])
        assert_same(got, {"w": torch.ones(WIDE), "n": 5})
        assert nbytes <= 2 * CHUNK
        into = {"w": torch.zeros(WIDE), "blob": b"", "n": 0}
        _, nbytes = await counted(sender, receiver, select=["w"], into=into)
        assert into["blob"] == b""
        assert nbytes <= 2 * CHUNK


@pytest.mark.asyncio
async def test_a_value_that_nobody_knows_here_may_stay_away() -> None:
    """A pickled leaf, say, which is refused where it is selected."""
    async with (
        transport(allow_pickle=True) as sender,
        transport() as receiver,
    ):
        await sender.send_checkpoint([], 1, {"w": torch.ones(2), "odd": Fraction(1, 2)})
        for select in (None, ["odd"]):
            with pytest.raises(RemoteProtocolError):
                await receive(sender, receiver, select=select)
        got = await receive(sender, receiver, select=["w"])
        assert_same(got, {"w": torch.ones(2)})


@pytest.mark.asyncio
async def test_names_are_taken_once_and_a_function_is_asked_once() -> None:
    """The function is called once for each value."""
    asked: list[str] = []
    state = {"a": 1, "b": {"c": b"x" * 9000, "d": [torch.ones(1), (1, 2)]}}
    async with pair(state=state) as (sender, receiver):
        await receive(sender, receiver, select=asked.append)
        got = await receive(sender, receiver, select=iter(["a"]))
    assert sorted(asked) == ["a", "b.c", "b.d[0]", "b.d[1]"]
    assert got == {"a": 1}


@pytest.mark.asyncio
@pytest.mark.parametrize("select", ["w1", b"w1", 5, [1], ["w1", None]])
async def test_what_is_no_selection_is_refused_at_once(select: Any) -> None:
    """The call refuses it before it waits for the step."""
    async with pair() as (sender, receiver):
        with pytest.raises(TypeError):
            await receive(sender, receiver, select=select)
        assert not sender.statistics().requests


@pytest.mark.asyncio
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    "select",
    [["k.w1"], lambda path: path == "k.w1"],
    ids=["names", "function"],
)
async def test_a_place_that_is_empty_gets_what_is_selected_only(
    select: Any, direct: bool
) -> None:
    """None in a template stands for a whole container, of which a part is wanted."""
    seen: list[Any] = []
    async with pair(state={"k": chunked()}) as (sender, receiver):
        into: dict[str, Any] = {"k": None, "other": 5}
        options: dict[str, Any] = {"into": into, "direct": direct, "select": select}
        got = await receive(sender, receiver, progress=seen.append, **options)
    assert got is into
    assert_same(got, {"k": {"w1": chunked()["w1"]}, "other": 5})
    assert seen[-1].bytes_total == CHUNK


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (["l[0]"], [0]),
        (["l[2]"], [7, None, 2]),
        (["l[1].x"], [7, {"x": 1}]),
        (["l"], [0, {"x": 1, "y": 2}, 2, None]),
        (lambda path: path == "l[2]", [7, None, 2]),
        ([], [7]),
    ],
)
async def test_a_short_list_grows_as_far_as_something_is_selected(
    select: Any, expected: list[Any]
) -> None:
    """The list gets only the selected items."""
    async with pair(state={"l": [0, {"x": 1, "y": 2}, 2, None]}) as (sender, receiver):
        got = await receive(sender, receiver, select=select, into={"l": [7]})
    assert got == {"l": expected}


@pytest.mark.asyncio
async def test_more_than_there_is_memory_for_is_refused(monkeypatch: Any) -> None:
    """What counts is what is selected, not what the checkpoint has."""
    monkeypatch.setattr("aiockpt.runtime.system.available_memory", lambda _: 3 * CHUNK)
    async with pair(state=chunked()) as (sender, receiver):
        await receive(sender, receiver, select=["w0", "w1"])
        with pytest.raises(LimitExceededError):
            await receive(sender, receiver, select=["w0", "w1", "w2"])
    async with pair(limits=Limits(max_bytes=9 * CHUNK)) as (sender, receiver):
        await sender.send_checkpoint([], 1, chunked())
        await receive(sender, receiver, select=["w0"])


class Box:
    """A registered leaf that is made of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


register_leaf(
    Box,
    tag="tests.selecting.box",
    encode=lambda box: box.tensor,
    decode=Box,
)


@pytest.mark.asyncio
@pytest.mark.parametrize("direct", [False, True])
async def test_a_leaf_keeps_the_bytes_that_it_shares_with_a_tensor(
    direct: bool,
) -> None:
    """The tensor's bytes go into the template, and the leaf's stay where they came."""
    weight = torch.arange(1 << 18, dtype=torch.float32) + 1
    into = {"w": torch.zeros_like(weight), "box": None}
    async with pair(state={"w": weight, "box": Box(weight)}) as (sender, receiver):
        got = await receive(
            sender, receiver, 1, select=["w", "box"], into=into, direct=direct
        )
        assert torch.equal(got["w"], weight)
        assert torch.equal(got["box"].tensor, weight)


# ---------------------------------------------------------- paths at which nothing is

STATE = {"model": {"w": torch.ones(3)}, "step": 5}


def zeros() -> dict[str, Any]:
    """Return a template."""
    return {"model": {"w": torch.zeros(3)}, "step": 0}


WRONG: list[tuple[list[str], str]] = [
    (["typo"], "typo"),
    (["model.typo"], r"model\.typo"),
    (["model", "typo"], "typo"),
    (["model.w.typo"], r"model\.w\.typo"),
    (["step[0]"], r"step\[0\]"),
]


@pytest.mark.parametrize(("select", "named"), WRONG)
@pytest.mark.parametrize("template", [True, False])
def test_a_strict_load_raises(
    tmp_path: Path, select: list[str], named: str, *, template: bool
) -> None:
    """The load raises before the template is changed."""
    path, into = save(tmp_path / "s", STATE), zeros() if template else None
    with pytest.raises(MissingKeysError, match=named) as caught:
        load(path, into, select=select, strict=True)
    assert len(caught.value.keys) == 1
    if into is not None:
        assert_same(into, zeros())


def test_another_load_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A lenient load warns, and loads what there is."""
    path, into = save(tmp_path / "s", STATE), zeros()
    with caplog.at_level(logging.WARNING, logger="aiockpt"):
        load(path, into, select=["step", "typo"])
    assert "is missing keys: typo" in caplog.text
    assert_same(into, zeros() | {"step": 5})
