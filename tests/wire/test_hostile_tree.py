"""A tree from a hostile peer ends in a value or in a typed error, soon, and small."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import Limits
from aiockpt.errors import (
    LimitExceededError,
    ProtocolError,
    RemoteProtocolError,
)
from aiockpt.format.limits import IS_CANCELLED, WorkCancelledError
from aiockpt.format.references import registered, tensor_leaves
from aiockpt.format.registry import REGISTRY, Registry
from aiockpt.format.tree import decode_tree
from tests.support.headers import tensor_paths

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiockpt.format.paths import Node

LIMITS = Limits()
TENSORS = ("t0", "t1")


TAGS = (
    *("int", "float", "complex", "str", "bytes", "list", "tuple", "set", "frozenset"),
    *("deque", "dict", "odict", "defaultdict", "tensor", "tensors", "blob", "ext"),
)


def decode(node: Any, limits: Limits = LIMITS, registry: Registry = REGISTRY) -> Any:
    """Decode with two tensors."""
    return decode_tree(
        node,
        registry=registry,
        tensors=TENSORS,
        limits=limits,
        blob=lambda index: TENSORS[index].encode(),
    )


MALFORMED: list[Any] = [
    *([], [1], [None], [True, 1], {}, {"a": 1}, ["list", [{"a": 1}]], ["nope"]),
    *(["list"], ["list", 1], ["list", [], []]),
    *(["int"], ["int", 5], ["int", ""], ["int", "+1"], ["int", " 1"], ["int", "1\n"]),
    *(["float", "1.0"], ["float", "nan"], ["float", "nan:3ff0000000000000"]),
    *(["float", "nan:7ff0000000000000"], ["float", "nan:7FF8000000000000"]),
    *(["complex", 1.0], ["complex", True, 1.0], ["complex", ["list", []], 1.0]),
    *(["str", "YQ"], ["str", "/w=="]),
    *(["bytes", "YQ"], ["bytes", "Y Q="], ["bytes", "é"], ["bytes", None]),
    *(["set", [1, 1]], ["set", [1, 1.0]], ["set", [["list", []]]]),
    ["frozenset", [["dict", [], []]]],
    *(["deque", [], []], ["deque", -1, []], ["deque", True, []]),
    *(["deque", 1, [1, 2]], ["deque", 2**63, []]),
    *(["dict", ["a"], []], ["dict", [], [1]], ["dict", ["a", "a"], [1, 2]]),
    *(["dict", [["list", []]], [1]], ["dict", [["tuple", [["set", []]]]], [1]]),
    ["dict", {"a": 1}, []],
    *(["odict", ["a", "a"], [1, 2]], ["odict", [], [], ["list", []]]),
    *(["odict", [], [], ["dict", [key], [1]]] for key in (1, "items", "__class__")),
    ["odict", [], [], ["dict", [], []], []],
    *(["defaultdict", "eval", [], []], ["defaultdict", 1, [], []]),
    *(["tensor", number] for number in (2, -1, True, "0", 10**30)),
    *(["tensors", [], []], ["tensors", ["a"], [2]], ["tensors", ["a", "b"], [0, -1]]),
    *(["tensors", ["a"], [True]], ["tensors", [1], [0]], ["tensors", ["a"], [0, 1]]),
    *(["tensors", ["a", "a"], [0, 1]], ["tensors", ["a", "b"], [0]], ["blob", 2]),
    *(["ext", "range"], ["ext", 1, 2], ["ext", "range", {}], ["ext", "range", 5]),
    ["ext", "range", ["tuple", [1, 2, 0]]],
    *(["ext", "bytearray", 1099511627776], ["ext", "Counter", 5]),
]


@pytest.mark.parametrize("node", MALFORMED, ids=repr)
def test_a_malformed_node_is_refused(node: Node) -> None:
    """Wrong tags, arities, types, indices, keys: the peer is told, nothing crashes."""
    with pytest.raises(RemoteProtocolError):
        decode(["list", [0, node]])


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("a", "at a:"),
        (["int", "f" * 6000], "int"),
        (["tensor", 0], "Loud"),
        (["tuple", [["tensor", 0]]], "tuple"),
        (["bytes", "YWJj"], "b'abc'"),
    ],
)
def test_a_name_is_never_imported(key: Node, shown: str) -> None:
    """The error has the tag, its place and the remedy, but does not print a value."""

    class Loud:
        def __repr__(self) -> str:
            raise AssertionError("asked")

    before = set(sys.modules)
    node: Node = ["dict", [key], [["ext", "this.that", "true"]]]
    with pytest.raises(RemoteProtocolError, match=shown) as caught:
        decode_tree(node, registry=REGISTRY, tensors=[Loud()], limits=LIMITS)
    assert "this.that" in str(caught.value)
    assert "register_leaf" in str(caught.value)
    assert set(sys.modules) == before


JSON_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "a", "range", "Counter", "inf", "-ff", "YQ==", "list"]),
    st.text(max_size=4),
)


def tagged(nodes: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for nodes that look right from afar."""
    lists = st.lists(nodes, max_size=3)
    arguments = st.lists(nodes | lists, max_size=4)
    return st.builds(lambda tag, rest: [tag, *rest], st.sampled_from(TAGS), arguments)


@given(st.recursive(JSON_SCALARS, tagged, max_leaves=20))
def test_any_json_is_a_value_or_a_typed_error(node: Node) -> None:
    """No input makes anything else happen."""
    with suppress(ProtocolError):
        decode(node)
    paths = tensor_paths(node)  # naming the tensors needs no tree that decodes
    assert {number for _, number in tensor_leaves(node)} <= paths.keys()
    assert all(type(path) is str for path in paths.values())


def nested(depth: int, shell: list[Any]) -> Any:
    """Return a node in ``depth`` containers of one kind."""
    text = msgspec.json.encode(shell).decode()
    before, after = text.split("null")
    return msgspec.json.decode(before * depth + "null" + after * depth)


@pytest.mark.parametrize(
    "shell",
    [
        *(["list", [None]], ["set", [None]], ["deque", 1, [None]]),
        *(["dict", [1], [None]], ["dict", [None], [1]], ["odict", [], [], None]),
        ["ext", "range", None],
    ],
    ids=repr,
)
@pytest.mark.parametrize("max_depth", [64, 10**9])
def test_nesting_is_limited(shell: list[Any], max_depth: int) -> None:
    """A deep tree is refused at the limit, or at Python's own."""
    node = nested(400, shell)
    with pytest.raises(ProtocolError):
        decode(node, Limits(max_depth=max_depth))


def test_the_number_of_nodes_is_limited() -> None:
    """Every container counts what it holds, also tensors and keys."""
    limits = Limits(max_nodes=6)
    decode(["list", [["list", [1, 2]], 3]], limits)
    for node in (
        ["list", [["list", [1, 2, 3]], ["list", [4, 5]]]],
        ["dict", ["a", "b", "c"], [1, 2, 3]],
        ["tensors", list("abcdef"), [0] * 6],
    ):
        with pytest.raises(LimitExceededError, match="nodes"):
            decode(node, limits)


@pytest.mark.parametrize("kind", ["set", "dict"])
def test_colliding_keys_are_refused_in_time(kind: str) -> None:
    """All of these ints have the same hash; a table of them takes quadratic time."""
    keys: list[Node] = [["int", f"{n * (2**61 - 1):x}"] for n in range(1, 10_000)]
    node: Node = ["set", keys] if kind == "set" else ["dict", keys, [None] * len(keys)]
    start = time.process_time()
    with pytest.raises(RemoteProtocolError, match="hash"):
        decode(node)
    assert time.process_time() - start < 2
    ordinary = [*range(3000), *(["tuple", [n, -n]] for n in range(3000))]
    assert len(decode(["dict", ordinary, [0] * 6000])) == 6000


def test_a_blob_is_read_once_and_a_claim_allocates_nothing() -> None:
    """A tree that names one blob a thousand times holds one copy of it."""
    calls: list[int] = []

    def blob(index: int) -> bytes:
        calls.append(index)
        return bytes(1 << 20)

    node: Node = ["list", [["blob", 0]] * 1000]
    found: Any = decode_tree(
        node, registry=REGISTRY, tensors=TENSORS, limits=LIMITS, blob=blob
    )
    assert calls == [0]
    assert len({*map(id, found)}) == 1
    assert decode(["deque", 2**62, []]).maxlen == 2**62
    assert decode(["ext", "range", ["tuple", [0, 2**62, 1]]]).stop == 2**62


@pytest.mark.parametrize(
    "work", [decode, tensor_paths, lambda tree: [*registered(tree)]]
)
def test_work_on_a_tree_ends_soon_after_its_caller_is_cancelled(
    work: Callable[[Node], object],
) -> None:
    """A thread cannot be interrupted, so it asks in every container."""
    asked = count()
    token = IS_CANCELLED.set(lambda: next(asked) >= 3)
    try:
        with pytest.raises(WorkCancelledError):
            work(["list", [["list", [["list", [0]]]]] * 100])
    finally:
        IS_CANCELLED.reset(token)
    assert next(asked) == 4


def test_registered_leaves_count_for_the_limits() -> None:
    """A leaf whose payload is another one is nested too."""
    registry = Registry()
    registry.register("box", Exception, lambda error: error, lambda value: value)
    node = nested(70, ["ext", "box", None])
    decode(node, Limits(max_depth=70), registry)
    with pytest.raises(LimitExceededError, match="nesting"):
        decode(node, Limits(max_depth=69), registry)
    with pytest.raises(LimitExceededError, match="nodes"):
        decode(node, Limits(max_depth=70, max_nodes=70), registry)
