"""Templates and checkpoints whose tensors, keys or containers meet in odd ways."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import aiockpt
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.errors import RemoteProtocolError, TemplateMismatchError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.state.template import Template
from tests.support.states import LIMITS, staged
from tests.support.transports import pair, receive


class Summed:
    """A registered leaf whose decoder reads the elements of its tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.total = tensor, float(tensor.sum())


class Point(NamedTuple):
    """A named tuple."""

    x: torch.Tensor


class Named(dict[str, Any]):
    """A registered dict."""


aiockpt.register_leaf(
    Summed, tag="odd.Summed", encode=lambda s: s.tensor, decode=Summed
)
aiockpt.register_leaf(Named, tag="odd.Named", encode=dict, decode=Named)


def save(place: Path, state: Any) -> Path:
    """Save a state dict."""
    with aiockpt.make_sync_checkpointer() as saver:
        saver.save(state, place / "step-1")
    return place / "step-1"


def zeros(*shape: int) -> torch.Tensor:
    """Return what a template has."""
    return torch.zeros(shape)


@pytest.mark.asyncio
@pytest.mark.parametrize("direct", [False, True])
async def test_a_leaf_is_made_of_what_was_received(direct: bool) -> None:
    """Not of what the template had in the memory of a tied tensor."""
    weight = torch.ones(4)
    into: dict[str, Any] = {"w": zeros(4), "leaf": Summed(zeros(4))}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, {"w": weight, "leaf": Summed(weight)})
        await receive(sender, receiver, into=into, direct=direct)
    assert into["leaf"].total == 4
    into["w"].zero_()
    assert into["leaf"].tensor.tolist() == [1, 1, 1, 1]


@pytest.mark.asyncio
async def test_memory_that_is_conjugated_once_has_one_value() -> None:
    """One of two values would be lost."""
    base = torch.zeros(2, 2, dtype=torch.complex64)
    weight = torch.randn(2, 2, dtype=torch.complex64)
    into = {"a": base.t().conj(), "b": base.t()}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, {"a": weight, "b": weight})
        with pytest.raises(TemplateMismatchError, match="shared with a"):
            await receive(sender, receiver, into=into)


@pytest.mark.asyncio
async def test_tensors_in_attributes_are_filled() -> None:
    """Those of an OrderedDict, as its items."""
    state, into = OrderedDict(w=torch.ones(1)), OrderedDict(w=zeros(1))
    state.t, into.t = torch.ones(2), zeros(2)  # type: ignore[attr-defined]
    own = into.t  # type: ignore[attr-defined]
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, state)
        await receive(sender, receiver, into=into)
        assert into.t is own  # type: ignore[attr-defined]
        assert own.tolist() == [1, 1]
        odd: dict[str, Any] = {"w": zeros(1), "x": object()}
        await receive(sender, receiver, into=odd, have=True)
        assert odd["w"].tolist() == [1]


def test_a_longer_tuple_is_taken_as_it_is(tmp_path: Path) -> None:
    """The template's tensor at its first place belongs to another path."""
    shared = zeros(2)
    path = save(tmp_path, {"w": torch.ones(2), "v": (torch.full((2,), 7.0),)})
    got = aiockpt.load(path, {"w": shared, "v": (shared, 1)})
    assert got["w"] is shared
    assert shared.tolist() == [1, 1]
    assert [each.tolist() for each in got["v"]] == [[7, 7]]


def test_a_registered_dict_is_filled_from_a_plain_one(tmp_path: Path) -> None:
    """Its keys count, as those of any dict."""
    path = save(tmp_path, {"v": {"a": torch.ones(2), "b": torch.ones(1)}})
    own = zeros(2)
    got = aiockpt.load(path, {"v": Named(a=own)})
    assert got["v"] == {"a": own}
    assert own.tolist() == [1, 1]
    with pytest.raises(TemplateMismatchError, match=r"v\.a"):
        aiockpt.load(path, {"v": Named(a=zeros(3))})


def test_a_leaf_stays_whole_beside_a_device(tmp_path: Path) -> None:
    """Only tensors of the state dict go there."""
    weight = torch.ones(2)
    path = save(tmp_path, {"w": weight, "leaf": Summed(weight)})
    assert aiockpt.load(path, map_location="meta")["leaf"].total == 2


KEYS = (
    (3, np.int64(3)),
    (np.str_("q"), "q"),
    (Decimal("1.0"), Decimal(1)),
    (((torch.float32, 1), 2), ((torch.float32, 1), 2)),
    (frozenset({torch.float32}), frozenset({torch.float32})),
)


@pytest.mark.parametrize("number", range(len(KEYS)))
def test_keys_are_equal_as_in_a_dict(tmp_path: Path, number: int) -> None:
    """However they are encoded; and a selection names them as text."""
    there, here = KEYS[number]
    path, own = save(tmp_path, {"a": {there: torch.ones(2)}}), zeros(2)
    aiockpt.load(path, {"a": {here: own}})
    assert own.tolist() == [1, 1]
    assert aiockpt.load(path, select=[f"a.{there}"]) == {
        "a": {there: pytest.approx(own)}
    }


def test_numbers_of_numpy_and_bytearrays(tmp_path: Path) -> None:
    """A number is a number; a file of torch may have a bytearray."""
    path = save(tmp_path, {"n": 0.5, "s": np.float64(2)})
    got = aiockpt.load(path, {"n": np.float64(1), "s": 1.0})
    assert got == {"n": 0.5, "s": 2.0}
    torch.save({"b": bytearray(100), "w": zeros(1)}, tmp_path / "x.pt")
    assert aiockpt.load(tmp_path / "x.pt", select=["b"]) == {"b": bytearray(100)}


def test_a_module_that_the_checkpoint_lacks_may_stay(tmp_path: Path) -> None:
    """If it is not selected, or the load is not strict."""
    path = save(tmp_path, {"w": torch.ones(1)})
    module = torch.nn.Linear(1, 1)
    for options in ({"select": ["w"]}, {"strict": False}):
        got = aiockpt.load(path, {"w": zeros(1), "m": module}, **options)
        assert got["m"] is module


def test_a_named_tuple_is_no_dict(tmp_path: Path) -> None:
    """Nor is it replaced by one."""
    path, own = save(tmp_path, {"v": {"x": torch.ones(1)}}), Point(zeros(1))
    with pytest.raises(TemplateMismatchError, match="v: the checkpoint has a dict"):
        aiockpt.load(path, {"v": own})
    assert not own.x.any()


@pytest.mark.asyncio
async def test_keys_of_many_bytes_are_told_apart() -> None:
    """They are part of the data segment, so only their values are compared."""
    keys = [letter * 5000 for letter in (b"a", b"b")]
    into: dict[str, Any] = {"w": zeros(1), "d": dict.fromkeys(keys, 0)}
    state = {"w": torch.ones(1), "d": dict.fromkeys(keys, 7)}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, state)
        await receive(sender, receiver, into=into)
    assert into["d"] == state["d"]


def test_what_is_in_memory_already_needs_no_more(tmp_path: Path) -> None:
    """A file of torch is loaded before a part of it is taken."""
    torch.save({"w": torch.ones(1000)}, tmp_path / "x.pt")
    reader = CheckpointReader(limits=replace(FILE_LIMITS, max_bytes=100))
    got, _ = reader.read(tmp_path / "x.pt", {"w": zeros(1000)})
    assert got["w"].all()


@pytest.mark.asyncio
async def test_a_new_leaf_has_memory_of_its_own() -> None:
    """Also beside a tensor whose elements are copied."""
    weight = torch.ones(64, dtype=torch.complex64)
    into: dict[str, Any] = {"w": torch.zeros(64, dtype=torch.complex64), "leaf": None}
    state = {"w": weight.conj(), "leaf": Summed(weight.real[:4])}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, state)
        await receive(sender, receiver, into=into)
    assert into["leaf"].total == 4
    assert into["leaf"].tensor.untyped_storage().resizable()


def test_a_backing_ends_with_its_storage() -> None:
    """Two storages that meet in memory by chance are not one."""
    base = torch.arange(8.0)
    manifest, _ = staged({"a": base[:4], "b": base[4:]})
    memory = np.zeros(8, dtype=np.float32)
    apart = {"a": torch.from_numpy(memory[:4]), "b": torch.from_numpy(memory[4:])}
    found = Template(apart, limits=LIMITS, allow_pickle=False).match(manifest)
    for each in found.backings:
        assert each.parts or each.nbytes <= each.tensor.untyped_storage().nbytes()


FORGED: tuple[Any, ...] = (
    ["list"],
    ["ext"],
    ["ext", 1, 2],
    ["ext", [], 0],
    ["ext", "?", 0],
    ["ext", "?", 99],
    ["defaultdict", 1],
    ["dict", [{}], [5]],
    ["dict", ["b", "b"], [5, 6]],
    ["dict", ["b"], [5, 6]],
    [],
)


@pytest.mark.parametrize("number", range(len(FORGED)))
@pytest.mark.parametrize("own", [1, {"b": 1}, [1], object()], ids="idlo")
def test_a_malformed_tree_is_an_error_of_ours(number: int, own: Any) -> None:
    """Never one of Python."""
    manifest, _ = staged({"w": torch.ones(2), "x": 1})
    tree: Any = ["dict", ["w", "x"], [["tensor", 0], FORGED[number]]]
    template = Template({"w": zeros(2), "x": own}, limits=LIMITS, allow_pickle=False)
    try:
        template.match(replace(manifest, tree=tree))
    except (RemoteProtocolError, TemplateMismatchError):
        return


def test_keys_that_collide_are_refused() -> None:
    """They would take minutes."""
    manifest, _ = staged({"t": torch.ones(2)})
    keys = ["t", *(["int", f"{n * (2**61 - 1):x}"] for n in range(1, 3000))]
    tree: Any = ["dict", keys, [["tensor", 0], *[0] * (len(keys) - 1)]]
    template = Template({"t": zeros(2)}, limits=LIMITS, allow_pickle=False)
    with pytest.raises(RemoteProtocolError, match="collide"):
        template.match(replace(manifest, tree=tree))
