"""``select=``: a part is fetched alone, is what a load gives, and must be there."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import Limits, TransferEvent, add_hook, register_leaf
from aiockpt.errors import (
    LimitExceededError,
    MissingKeysError,
    RemoteProtocolError,
)
from aiockpt.format.chunks import ChunkGrid, chunks_over
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.state import load_plan
from aiockpt.state.match import LAX, names_without_a_path
from aiockpt.state.segment import Segment
from aiockpt.state.selection import Selection
from aiockpt.testing import assert_same
from tests.support.accelerators import FakeAccelerator
from tests.support.saving import load, save
from tests.support.states import rich
from tests.support.transports import (
    CHUNK,
    WIDE,
    chunked,
    counted,
    pair,
    receive,
    transport,
)

pytestmark = pytest.mark.usefixtures("no_blocking")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("select", "chunks"),
    [
        ([], 0),
        (["n"], 0),
        (["w3"], 1),
        (["w3", "w4"], 2),
        (["w0", "w7"], 2),
        (lambda path: path in ("w1", "w5", "w6"), 3),
        ([""], 8),
    ],
)
@pytest.mark.parametrize("how", ["anew", "into", "direct"])
async def test_no_other_chunk_is_fetched(select: Any, chunks: int, how: str) -> None:
    """The sender counts the bytes; progress and event tell as many."""
    seen: list[Any] = []
    events: list[TransferEvent] = []
    options: dict[str, Any] = {"select": select, "progress": seen.append}
    if how != "anew":
        options |= {"into": {k: v * 0 for k, v in chunked().items()}}
    if how == "direct":
        options |= {"direct": True}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, chunked())
        remove = add_hook(events.append)
        try:
            got, nbytes = await counted(sender, receiver, **options)
        finally:
            remove()
    assert nbytes == chunks * CHUNK
    assert (seen[-1].bytes_done, seen[-1].bytes_total) == (nbytes, nbytes)
    assert (seen[-1].chunks_done, seen[-1].chunks_total) == (chunks, chunks)
    assert [e.nbytes for e in events if e.stop == "recv"][-1] == nbytes
    for key, value in got.items():
        taken = Selection(select).takes_leaf(key)
        expected = chunked()[key] if taken else chunked()[key] * 0
        assert_same(value, expected)


@pytest.mark.asyncio
async def test_what_is_selected_is_fetched_by_few_requests() -> None:
    """Neighbouring chunks go together: there is one plan for all of it."""
    state = {f"layer.{n}": torch.full((WIDE // 8,), float(n)) for n in range(800)}
    async with pair(connections=2) as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
        before = sender.statistics().requests
        names = [f"layer.{n}" for n in range(400)]
        got = await receive(sender, receiver, select=names)
        assert [*got] == names
        # The header, two runs of chunks for each of two connections, and the end.
        assert sender.statistics().requests - before <= 1 + 4 + 1


PATHS = [
    "model", "model.norm", "model.embed", "optimizer", "optimizer.state.0",
    "optimizer.state.0.avg", "optimizer.groups[1]", "optimizer.groups[0].lr", "array",
    "blob", "made.a", "(1, 'key')", "view", "conj", "",
]  # fmt: skip


def as_a_load(state: dict[str, Any], select: Any, template: Any = None) -> Any:
    """Return what the checkpointers' rules make of a state that is here already."""
    segment = Segment.of(state, limits=FILE_LIMITS)
    own = load_plan.Template(template, limits=FILE_LIMITS) if template else None
    rule = load_plan.Matching(
        [segment],
        LAX,
        limits=FILE_LIMITS,
        allow_pickle=False,
        select=select,
        template=own,
    )
    rule.plans()
    rule.finish()
    return rule.assemble()


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PATHS)
async def test_the_result_is_that_of_a_load(path: str) -> None:
    """Paths and functions select the same, with and without a template."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, rich())
        for select in ([path], lambda each: each.startswith(path) and "lr" not in each):
            got = await receive(sender, receiver, select=select)
            assert_same(got, as_a_load(rich(), select))
        for direct in (False, True):
            into, expected = zeroed(rich()), zeroed(rich())
            as_a_load(rich(), [path], expected)
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
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
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
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
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
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, {"k": chunked()})
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
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, {"l": [0, {"x": 1, "y": 2}, 2, None]})
        got = await receive(sender, receiver, select=select, into={"l": [7]})
    assert got == {"l": expected}


@pytest.mark.asyncio
async def test_more_than_there_is_memory_for_is_refused(monkeypatch: Any) -> None:
    """What counts is what is selected, not what the checkpoint has."""
    monkeypatch.setattr("aiockpt.runtime.system.available_memory", lambda _: 3 * CHUNK)
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, chunked())
        await receive(sender, receiver, select=["w0", "w1"])
        with pytest.raises(LimitExceededError):
            await receive(sender, receiver, select=["w0", "w1", "w2"])
    async with pair(limits=Limits(max_bytes=9 * CHUNK)) as (sender, receiver):
        await sender.send_checkpoint([], 1, chunked())
        await receive(sender, receiver, select=["w0"])


@pytest.mark.asyncio
@pytest.mark.parametrize("direct", [False, True])
async def test_a_template_on_a_device(direct: bool, monkeypatch: Any) -> None:
    """Its bytes go there by way of host memory, behind what it was given before."""
    device = FakeAccelerator(held=False)
    monkeypatch.setattr("aiockpt.http_transport.port_for", device.port_for)
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, chunked())
        into = {k: v * 0 for k, v in chunked().items()}
        await receive(sender, receiver, into=into, select=["w1", "n"], direct=direct)
    assert device.copied
    assert_same(into["w1"], chunked()["w1"])
    assert (into["n"], into["w2"].max()) == (1, 0)


RANGES = st.lists(
    st.tuples(st.integers(0, 999), st.integers(0, 99)).map(
        lambda pair: (pair[0], min(sum(pair), 1000))
    )
)


@given(ranges=RANGES, chunk_bytes=st.integers(1, 200))
def test_chunks_over_ranges(ranges: list[tuple[int, int]], chunk_bytes: int) -> None:
    """Each that holds a byte of one, once and in order."""
    grid = ChunkGrid(1000, chunk_bytes)
    bytes_wanted = {at for start, stop in ranges for at in range(start, stop)}
    expected = sorted({grid.index_of(at) for at in bytes_wanted})
    assert chunks_over(grid, ranges) == expected


TREES = st.recursive(
    st.sampled_from([1, None, "text", ["tensor", 0], ["blob", 1], ["ext", "t", 0]]),
    lambda nodes: st.one_of(
        nodes.map(lambda node: ["list", [node, node]]),
        nodes.map(lambda node: ["tuple", [node]]),
        nodes.map(lambda node: ["dict", ["a", 3], [node, node]]),
        nodes.map(lambda node: ["defaultdict", "int", ["b"], [node]]),
        st.lists(nodes, max_size=3),
        nodes.map(lambda node: {"a": node}),
    ),
    max_leaves=20,
)


@given(tree=TREES, names=st.lists(st.sampled_from(["", "a", "3", "a.b", "b[0]"])))
def test_names_are_looked_for_in_any_tree(tree: Any, names: list[str]) -> None:
    """What is malformed has no path, or is refused; the tree is not changed."""
    before = copy.deepcopy(tree)
    with suppress(RemoteProtocolError):
        assert {*names_without_a_path(names, tree)} <= {*names} - {""}
    assert tree == before


def test_looking_into_a_deep_tree_is_no_recursion() -> None:
    """A hostile one cannot exhaust the stack."""
    tree: Any = ["blob", 0]
    for _ in range(5000):
        tree = ["list", [tree]]
    assert names_without_a_path(["x"], tree) == ["x"]


def test_absurd_paths_are_refused() -> None:
    """Building and comparing such paths would take as long as a peer likes."""
    tree: Any = ["blob", 0]
    for _ in range(50):
        tree = ["dict", ["x." * 1000], [tree]]
    with pytest.raises(LimitExceededError, match="length of a path"):
        names_without_a_path(["y"], tree)


def test_names_are_found_below_keys_of_any_kind() -> None:
    """What is below a selected path is found with it."""
    tree: Any = ["dict", ["a", 3, ["tuple", [1]]], [["blob", n] for n in range(3)]]
    names = ["a", "3", "(1,)", "z", "a.b"]
    assert names_without_a_path(names, tree) == ["z", "a.b"]


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
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, {"w": weight, "box": Box(weight)})
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


@pytest.mark.asyncio
@pytest.mark.parametrize(("select", "named"), WRONG)
@pytest.mark.parametrize("template", [True, False])
async def test_a_receive_raises(
    select: list[str], named: str, *, template: bool
) -> None:
    """A receive is always strict."""
    into = zeros() if template else None
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, STATE)
        with pytest.raises(MissingKeysError, match=named):
            await receive(sender, receiver, select=select, into=into)
    if into is not None:
        assert_same(into, zeros())
