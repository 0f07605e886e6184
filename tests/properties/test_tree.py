"""The tree carries every value exactly, and refuses what it would change."""

from __future__ import annotations

import math
import struct
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import Limits
from aiockpt.errors import LimitExceededError, UnsupportedLeafError
from aiockpt.format.registry import REGISTRY, Registry
from aiockpt.format.tree import BLOB_BYTES, decode_tree, encode_tree

if TYPE_CHECKING:
    from aiockpt.format.paths import Node, Path

LIMITS = Limits()


class Tensor:
    """Something that only the leaf encoder knows."""

    def __repr__(self) -> str:
        return "Tensor()"  # no address: names of tests must not change


class Leaves:
    """Numbers tensors (and large bytes), as the owner of the tree does."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __call__(self, value: object, path: Path) -> Node:
        """Return the node of a tensor or of bytes; None for anything else."""
        if not isinstance(value, Tensor | bytes):
            return None
        self.found.append(value)
        return ["blob" if type(value) is bytes else "tensor", len(self.found) - 1]


def encode(value: object, limits: Limits = LIMITS, leaf: Any = None) -> Node:
    """Encode with the package's registry."""
    return encode_tree(value, registry=REGISTRY, leaf=leaf or Leaves(), limits=limits)


def through_json(value: object) -> Any:
    """Encode, travel as bytes, decode."""
    leaves = Leaves()
    text = msgspec.json.encode(encode(value, leaf=leaves))
    return decode_tree(
        msgspec.json.decode(text),
        registry=REGISTRY,
        tensors=leaves.found,
        limits=LIMITS,
    )


def exact(value: Any) -> object:
    """Return something that is equal exactly if types, order and bits are."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack(">d", value)
    if kind is complex:
        return kind, exact(value.real), exact(value.imag)
    if kind in (set, frozenset):
        return kind, sorted(map(exact, value), key=repr)
    if kind in (list, tuple, deque):
        return kind, getattr(value, "maxlen", None), [*map(exact, value)]
    if isinstance(value, dict):
        pairs = [(exact(key), exact(each)) for key, each in value.items()]
        attributes = {} if kind is dict else vars_of(value)
        factory = getattr(value, "default_factory", None)
        return kind, factory, pairs, [*map(exact, attributes.items())]
    return kind, id(value) if kind is Tensor else value


def vars_of(value: object) -> dict[str, object]:
    """Return the instance attributes that an object has, if any."""
    return getattr(value, "__dict__", {})


FLOATS = st.floats() | st.integers(0, 2**64 - 1).map(
    lambda bits: struct.unpack(">d", struct.pack(">Q", bits))[0]
)
TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**300), 2**300),
    st.sampled_from([2**53, 2**53 - 1, -(2**53), 1 - 2**53, 2**63, 2**64]),
    FLOATS,
    st.builds(complex, FLOATS, FLOATS),
    TEXT,
    st.binary(max_size=8),
    st.binary(min_size=BLOB_BYTES, max_size=BLOB_BYTES + 2),
)
KEYS = st.recursive(
    SCALARS,
    lambda keys: st.tuples(keys, keys) | st.frozensets(keys, max_size=3),
    max_leaves=4,
)
FACTORIES = st.sampled_from([None, list, dict, int, float, set, str, bool, tuple])
ATTRIBUTES = st.dictionaries(st.sampled_from(["_metadata", "x", "é"]), SCALARS)


def containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for each container around values."""
    dicts = st.dictionaries(KEYS, values, max_size=4)
    lists = st.lists(values, max_size=4)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(deque),
        st.builds(deque, lists, st.integers(0, 5)),
        st.sets(KEYS, max_size=4),
        st.frozensets(KEYS, max_size=4),
        dicts,
        st.dictionaries(TEXT, st.builds(Tensor), max_size=4),
        st.builds(defaultdict, FACTORIES, dicts),
        st.builds(attributed, dicts, ATTRIBUTES),
        st.lists(TEXT).map(Counter),
        st.binary().map(bytearray),
        st.builds(range, st.integers(), st.integers(), st.integers(1)),
    )


def attributed(items: dict[Any, Any], attributes: dict[str, Any]) -> OrderedDict:
    """Return an OrderedDict with instance attributes, as torch makes them."""
    ordered = OrderedDict(items)
    vars(ordered).update(attributes)
    return ordered


VALUES = st.recursive(SCALARS | st.builds(Tensor), containers, max_leaves=12)


@given(VALUES)
def test_every_value_comes_back_exactly(value: object) -> None:
    """Types, order, bits, aliases of tensors: nothing is rounded or generalised."""
    assert exact(through_json(value)) == exact(value)


@given(VALUES)
def test_equal_values_are_encoded_alike(value: object) -> None:
    """Encoding what was decoded gives the same bytes, so ids are of the content."""
    node, again = encode(value), encode(through_json(value))
    assert msgspec.json.encode(node) == msgspec.json.encode(again)


def test_the_order_of_a_set_is_not_encoded() -> None:
    """It is an accident of the history of the set."""
    assert encode(set(range(0, 8000, 8))) == encode(set(range(7992, -1, -8)))


@pytest.mark.parametrize(
    ("value", "node"),
    [
        (None, None),
        (True, True),
        (2**53 - 1, 9007199254740991),
        (-(2**53), ["int", "-20000000000000"]),
        (1.0, 1.0),
        (math.inf, ["float", "inf"]),
        (-math.inf, ["float", "-inf"]),
        (math.nan, ["float", "nan:7ff8000000000000"]),
        (1 - 2j, ["complex", 1.0, -2.0]),
        ("ü", "ü"),
        ("\ud800", ["str", "7aCA"]),
        (b"\x00\xff", ["bytes", "AP8="]),
        ([1], ["list", [1]]),
        ((1,), ["tuple", [1]]),
        ({2, 1}, ["set", [1, 2]]),
        (frozenset({1}), ["frozenset", [1]]),
        (deque([1], 3), ["deque", 3, [1]]),
        (deque(), ["deque", None, []]),
        ({}, ["dict", [], []]),
        ({"a": 1, 2: "b"}, ["dict", ["a", 2], [1, "b"]]),
        (OrderedDict(a=1), ["odict", ["a"], [1]]),
        (attributed({}, {"x": 1}), ["odict", [], [], ["dict", ["x"], [1]]]),
        (defaultdict(list, a=[]), ["defaultdict", "list", ["a"], [["list", []]]]),
        (defaultdict(), ["defaultdict", None, [], []]),
        (Tensor(), ["tensor", 0]),
        ({"a": Tensor(), "b": Tensor()}, ["tensors", ["a", "b"], [0, 1]]),
        ({"a": Tensor(), "b": 1}, ["dict", ["a", "b"], [["tensor", 0], 1]]),
        ({1: Tensor()}, ["dict", [1], [["tensor", 0]]]),
        ({"\ud800": Tensor()}, ["dict", [["str", "7aCA"]], [["tensor", 0]]]),
        (bytes(BLOB_BYTES + 1), ["blob", 0]),
        (range(3), ["ext", "range", ["tuple", [0, 3, 1]]]),
        (Counter("aa"), ["ext", "Counter", ["dict", ["a"], [2]]]),
        (bytearray(b"a"), ["ext", "bytearray", ["bytes", "YQ=="]]),
    ],
    ids=lambda case: repr(case)[:100],
)
def test_the_encoding_is_the_documented_one(value: object, node: Node) -> None:
    """Version 1 of the format writes exactly these nodes."""
    assert msgspec.json.encode(encode(value)) == msgspec.json.encode(node)


def test_large_bytes_stay_in_the_tree_where_nobody_takes_them() -> None:
    """A leaf encoder may refuse them; they are never lost."""
    node = encode(bytes(BLOB_BYTES + 1), leaf=lambda value, path: None)
    assert isinstance(node, list)
    assert node[0] == "bytes"


class Str(str):
    """A subclass whose values would come back as something else."""

    __slots__ = ()


@pytest.mark.parametrize(
    "value", [Str("a"), ChainMap(), object(), memoryview(b""), len, Tensor]
)
def test_other_types_are_refused_with_their_path(value: object) -> None:
    """Nothing is silently turned into its base class, pickled or left out."""
    with pytest.raises(UnsupportedLeafError, match=r"a\.b\[0\]") as caught:
        encode({"a": {"b": [value]}})
    assert caught.value.path == "a.b[0]"
    assert type(value).__qualname__ in caught.value.type_name
    for refused, why in (
        (defaultdict(lambda: 0), "default_factory"),
        (attributed({}, {"items": 1}), "shadows"),
    ):
        with pytest.raises(UnsupportedLeafError, match=why):
            encode({"a": refused})


def test_nesting_is_limited() -> None:
    """The limits end what nests deeply, repeats itself, or never ends."""
    value: Any = []
    for _ in range(9):
        value = [value]
    encode(value, Limits(max_depth=10))
    with pytest.raises(LimitExceededError, match="nesting") as caught:
        encode([value], Limits(max_depth=10))
    assert (caught.value.limit, caught.value.actual) == (10, 11)
    for _ in range(30):  # shared containers are encoded each time
        value = [value, value]
    with pytest.raises(LimitExceededError):
        encode(value, Limits(max_nodes=10_000))
    endless = Registry()  # an encoder may return its own type
    endless.register("t", Tensor, lambda tensor: tensor, lambda value: Tensor())
    with pytest.raises(LimitExceededError):
        encode_tree(Tensor(), registry=endless, leaf=Leaves(), limits=LIMITS)


@pytest.mark.parametrize("max_depth", [64, 10**9])
def test_a_value_that_contains_itself_is_refused(max_depth: int) -> None:
    """A cycle ends at the limit, or at Python's own."""
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    with pytest.raises(LimitExceededError, match="nesting"):
        encode(cycle, Limits(max_depth=max_depth))
