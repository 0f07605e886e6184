"""Templates and checkpoints whose tensors, keys or containers meet in odd ways."""

from __future__ import annotations

import asyncio
import functools
import re
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils import _pytree

import aiockpt
from aiockpt.checkpointers import CheckpointReader
from aiockpt.errors import (
    IntegrityError,
    MissingKeysError,
    StorageError,
    TemplateMismatchError,
    UnsupportedLeafError,
)
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


class Output(OrderedDict[str, Any]):
    """A dict that torch's pytree takes apart, as the outputs of transformers."""


class Checked(dict[str, Any]):
    """A pytree node that looks at its children, and counts how often."""

    made = 0


def checked(children: Any, keys: Any) -> Checked:
    """Make a node again."""
    items = dict(zip(keys, children, strict=True))
    assert isinstance(items["w"], torch.Tensor)
    assert isinstance(items["d"], dict)
    assert isinstance(items["n"], Named)
    Checked.made += 1
    return Checked(items)


class Chosen:
    """A key that compares with its own kind only."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return self.name == other.name  # type: ignore[attr-defined]


class Pair(NamedTuple):
    """A key of several values."""

    dtype: torch.dtype
    more: Any


_pytree.register_pytree_node(
    Output,
    lambda value: ([*value.values()], [*value]),
    lambda children, keys: Output(zip(keys, children, strict=True)),
)
_pytree.register_pytree_node(
    Checked, lambda value: ([*value.values()], [*value]), checked
)
aiockpt.register_leaf(
    Chosen, tag="odd.Chosen", encode=lambda key: key.name, decode=Chosen
)
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
    """The leaf gets received bytes, not old ones of a tied tensor."""
    weight = torch.ones(4)
    into: dict[str, Any] = {"w": zeros(4), "leaf": Summed(zeros(4))}
    async with pair(state={"w": weight, "leaf": Summed(weight)}) as (sender, receiver):
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
    async with pair(state={"a": weight, "b": weight}) as (sender, receiver):
        with pytest.raises(TemplateMismatchError, match="shared with a"):
            await receive(sender, receiver, into=into)


@pytest.mark.asyncio
async def test_tensors_in_attributes_are_filled() -> None:
    """The attributes of an OrderedDict are filled as its items are."""
    state, into = OrderedDict(w=torch.ones(1)), OrderedDict(w=zeros(1))
    state.t, into.t = torch.ones(2), zeros(2)  # type: ignore[attr-defined]
    own = into.t  # type: ignore[attr-defined]
    async with pair(state=state) as (sender, receiver):
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


KEYS = (
    (3, np.int64(3)),
    (np.str_("q"), "q"),
    (Decimal("1.0"), Decimal(1)),
    (((torch.float32, 1), 2), ((torch.float32, 1), 2)),
    (frozenset({torch.float32}), frozenset({torch.float32})),
)


STRUCTURED = (
    Pair(torch.int8, torch.int16),
    Pair(torch.int8, frozenset({torch.int8, torch.int16, (torch.int32,)})),
    frozenset({Pair(torch.int8, 1), Pair(torch.int16, 2)}),
    (Decimal(3), Pair(torch.int8, b"x")),
)


@pytest.mark.parametrize("number", range(len(STRUCTURED)))
def test_keys_may_have_registered_values_inside(tmp_path: Path, number: int) -> None:
    """Keys may nest registered values and named tuples at any depth."""
    key, own = STRUCTURED[number], zeros(2)
    path = save(tmp_path, {"a": {key: torch.ones(2), 1: 2}})
    assert aiockpt.load(path, {"a": {key: own}})["a"] == {key: own}
    assert own.tolist() == [1, 1]


@pytest.mark.parametrize("number", range(len(KEYS)))
def test_keys_are_equal_as_in_a_dict(tmp_path: Path, number: int) -> None:
    """Keys are equal in any encoding, and a selection names them as text."""
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
    """Neither of the two replaces the other."""
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
    async with pair(state=state) as (sender, receiver):
        await receive(sender, receiver, into=into)
    assert into["d"] == state["d"]


def test_what_is_in_memory_already_needs_no_more(tmp_path: Path) -> None:
    """A file of torch is loaded before a part of it is taken."""
    torch.save({"w": torch.ones(1000)}, tmp_path / "x.pt")
    reader = CheckpointReader(limits=aiockpt.Limits(max_bytes=100))
    got, _ = reader.read(tmp_path / "x.pt", {"w": zeros(1000)})
    assert got["w"].all()


@pytest.mark.asyncio
async def test_a_new_leaf_has_memory_of_its_own() -> None:
    """The leaf shares no memory with a tensor whose elements are copied."""
    weight = torch.ones(64, dtype=torch.complex64)
    into: dict[str, Any] = {"w": torch.zeros(64, dtype=torch.complex64), "leaf": None}
    state = {"w": weight.conj(), "leaf": Summed(weight.real[:4])}
    async with pair(state=state) as (sender, receiver):
        await receive(sender, receiver, into=into)
    assert into["leaf"].total == 4
    assert into["leaf"].tensor.untyped_storage().resizable()


def test_an_error_of_ours_is_no_malformed_tree(tmp_path: Path) -> None:
    """A defect, or an error of the caller's key, does not blame the peer."""
    state = {"k": {Chosen("a"): 1}, "w": torch.ones(1)}
    path = save(tmp_path, state)
    with pytest.raises(AttributeError, match="name"):
        aiockpt.load(path, {"k": {7: 1}, "w": zeros(1)})


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(zeros(3), 0.1, 0, torch.quint8),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([zeros(2), zeros(3)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("many", [1, 20])
def test_a_tensor_without_an_encoding_costs_who_asks(
    tmp_path: Path, name: str, many: int
) -> None:
    """The other tensors of a file of torch are loaded as if it were not there."""
    path, odd = tmp_path / "x.pt", ODD[name]()
    some: dict[str, Any] = {f"w{n}": torch.full((2,), float(n)) for n in range(many)}
    state: dict[str, Any] = {"v": {**some, "odd": odd}, "t": (odd, torch.ones(2))}
    torch.save(state, path)
    if refused := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        # torch 2.15 does not load a nested tensor without running pickled code.
        assert (name, refused) == ("nested", ["torch._utils._rebuild_nested_tensor"])
        with pytest.raises(StorageError, match="_rebuild_nested_tensor, which only"):
            aiockpt.load(path, select=["v.w0"])
        return
    assert len(aiockpt.load(path, select=["v.w0"])["v"]) == 1
    into = {"v": {"w0": torch.ones(2)}}
    assert not aiockpt.load(path, into)["v"]["w0"].any()
    for got in (
        aiockpt.load(path, select=["v.odd"]),
        aiockpt.load(path, {"v": {"w0": torch.ones(2), "odd": None}}),
        aiockpt.load(path, {"v": None}),
        aiockpt.load(path, map_location="cpu"),
    ):
        found = got["v"]["odd"]
        kinds = [(e.dtype, e.layout, e.device, e.is_nested) for e in (found, odd)]
        assert kinds[0] == kinds[1]
    for own in (zeros(3), odd):
        into = {"v": {"w0": torch.ones(2), "odd": own}}
        with pytest.raises(UnsupportedLeafError, match=r"v\.odd .*put None in its"):
            aiockpt.load(path, into)
        assert into["v"]["w0"].all()
    with pytest.raises(TemplateMismatchError, match=r"v\.odd"):
        aiockpt.load(path, {"v": {"odd": 3}})
    if name in ("quantized", "nested"):
        with pytest.raises(UnsupportedLeafError, match=r"v\.odd .*move"):
            aiockpt.load(path, select=["v"], map_location="meta")


@pytest.mark.asyncio
@pytest.mark.parametrize("here", [Output, dict])
async def test_a_node_that_is_a_dict_takes_a_plain_one(
    tmp_path: Path, here: Any
) -> None:
    """Key by key; the other way round, an error names both types."""
    state = {"v": {"a": torch.ones(2), "d": {"b": torch.ones(1)}}}
    into = {"v": here(a=zeros(2), d=here(b=zeros(1)))}
    own, inner = into["v"]["a"], into["v"]["d"]["b"]
    aiockpt.load(save(tmp_path / "plain", state), into)
    assert type(into["v"]) is type(into["v"]["d"]) is here
    assert into["v"]["a"] is own
    assert own.all()
    assert into["v"]["d"]["b"] is inner
    assert inner.all()
    own.zero_()
    async with pair(state=state) as (sender, receiver):
        await receive(sender, receiver, into=into)
        assert own.all()
    node = save(tmp_path / "node", {"v": Output(a=torch.ones(2))})
    plain = {"v": {"a": zeros(2)}}
    with pytest.raises(TemplateMismatchError, match=r"v: .*Output, .* a dict"):
        aiockpt.load(node, plain)
    assert aiockpt.load(node, {"v": Output(a=zeros(2))})["v"]["a"].all()


def test_deep_nodes_are_described_once(tmp_path: Path) -> None:
    """Nested nodes are not described again as dicts at each depth."""
    inner = Output(w=zeros(1))
    for _ in range(40):
        inner = Output(x=inner)
    path = save(tmp_path, {"w": torch.ones(1)})
    got = aiockpt.load(path, {"w": zeros(1), "v": inner}, strict=False)
    assert got["v"] is inner


def test_a_node_sees_no_stand_in(tmp_path: Path) -> None:
    """A container that stays empty is given as the template has it."""
    full = {"a": torch.ones(1)}
    there = Checked(w=torch.ones(2), d=full, n=Named(a=1), o=OrderedDict(full), t=(1,))
    path = save(tmp_path, {"v": there})
    bare = OrderedDict[str, Any]()
    bare.x = zeros(1)  # type: ignore[attr-defined]
    own = Checked(w=zeros(2), d={}, n=Named(), o=bare, t=())
    before, kept = Checked.made, dict(own)
    got = aiockpt.load(path, {"v": own}, strict=False)["v"]
    assert Checked.made > before
    assert got["w"] is kept["w"]
    assert got["w"].all()
    assert got["d"] is kept["d"]
    assert not got["d"]
    assert got["o"] is bare
    assert not bare
    assert got["t"] == ()


TEXTS = ((np.float64(1), "x"), ("x", np.float64(1)), (np.str_("x"), np.float64(1)))


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_a_number_of_numpy_is_no_text(tmp_path: Path, number: int) -> None:
    """A number does not replace a text, nor a text a number."""
    there, here = TEXTS[number]
    path = save(tmp_path, {"v": there, "t": "y", "b": True})
    with pytest.raises(TemplateMismatchError, match="v"):
        aiockpt.load(path, {"v": here})
    got = aiockpt.load(path, {"t": np.str_("z"), "b": np.float32(0)})
    assert got == {"t": "y", "b": True}


@pytest.mark.parametrize("path", ["o[0].a", "o.0.a", "l[1]", "l.1", "k[(1, 2)]"])
def test_a_path_is_selected_as_an_error_writes_it(tmp_path: Path, path: str) -> None:
    """A path may have brackets or dots, and an error repeats it as given."""
    state = {"o": {0: {"a": 1, "b": 2}}, "l": [1, {"x": 2}], "k": {(1, 2): 3}}
    place = save(tmp_path, state)
    assert aiockpt.load(place, select=[path])
    with pytest.raises(MissingKeysError, match=re.escape("o[7]")):
        aiockpt.load(place, select=[path, "o[7]"])


def test_a_tensor_of_a_leaf_stays_with_it(tmp_path: Path) -> None:
    """Such a tensor stays on the CPU, and others go to the device."""
    weight = torch.ones(2)
    path = save(tmp_path, {"w": weight, "leaf": Summed(weight), "x": torch.ones(1)})
    got = aiockpt.load(path, map_location="meta")
    assert [got[key].device.type for key in "wx"] == ["cpu", "meta"]
    assert got["leaf"].total == 2


def test_a_longer_list_is_filled_where_it_is_selected(tmp_path: Path) -> None:
    """Its other items stay as they are."""
    path = save(tmp_path, {"a": [torch.ones(1), torch.ones(1)]})
    into = {"a": [zeros(1), zeros(1), zeros(1)]}
    aiockpt.load(path, into, select=["a[0]"])
    assert [each.tolist() for each in into["a"]] == [[1], [0], [0]]
    for select in (["a[2]"], ["a"], None):
        with pytest.raises(TemplateMismatchError, match="a list of 2"):
            aiockpt.load(path, into, select=select)


def test_a_damaged_value_is_read_before_the_template_is_touched(tmp_path: Path) -> None:
    """The error says that the template was not modified."""
    state = {"n": np.arange(50_000), "w": torch.ones(1)}
    path = save(tmp_path, state)
    (file,) = path.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - 1000)
        opened.write(b"\xff" * 8)
    with pytest.raises(IntegrityError) as caught:
        aiockpt.load(path, {"n": None, "w": zeros(1)})
    assert caught.value.__notes__ == ["the template was not modified"]


@pytest.mark.asyncio
async def test_new_views_of_a_peer_on_the_meta_device() -> None:
    """They have no memory there, so nothing is copied and waited for."""
    base = torch.arange(10.0)
    async with pair(state={"a": base[:6], "b": base[4:]}) as (sender, _):
        into = {"a": zeros(6), "b": None}
        load = functools.partial(aiockpt.load, sender.metadata(), into)
        got = await asyncio.to_thread(load, map_location="meta")
    assert torch.equal(got["a"], base[:6])
    assert got["b"].is_meta
