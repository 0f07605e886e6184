"""A tree from a hostile peer ends in a value or in a typed error, soon, and small."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import (
    AiockptError,
    LimitExceededError,
    ProtocolError,
    RemoteProtocolError,
)
from aiockpt.format.limits import IS_CANCELLED, Limits, WorkCancelledError
from aiockpt.format.paths import Node
from aiockpt.format.references import registered, tensor_leaves, tensor_paths
from aiockpt.format.registry import REGISTRY, Registry
from aiockpt.format.tree import decode_tree

LIMITS = Limits()
TENSORS = ("t0", "t1")
TAGS = [
    "int",
    "float",
    "complex",
    "str",
    "bytes",
    "list",
    "tuple",
    "set",
    "frozenset",
    "deque",
    "dict",
    "odict",
    "defaultdict",
    "tensor",
    "tensors",
    "blob",
    "ext",
]


def decode(node: Any, limits: Limits = LIMITS, registry: Registry = REGISTRY) -> Any:
    """Decode with two tensors."""
    return decode_tree(
        node,
        registry=registry,
        tensors=TENSORS,
        limits=limits,
        blob=lambda index: TENSORS[index].encode(),
    )


@pytest.mark.parametrize(
    "node",
    [
        [],
        [[]],
        [1],
        [None],
        [True, 1],
        {},
        {"a": 1},
        ["list", [{"a": 1}]],
        ["nope"],
        ["list"],
        ["list", 1],
        ["list", "ab"],
        ["list", [], []],
        ["tuple", None],
        ["int"],
        ["int", 5],
        ["int", ""],
        ["int", "-"],
        ["int", "+1"],
        ["int", "0x10"],
        ["int", "1_0"],
        ["int", " 1"],
        ["int", "FF"],
        ["int", "1\n"],
        ["float", "1.0"],
        ["float", "nan"],
        ["float", "Infinity"],
        ["float", "nan:3ff0000000000000"],
        ["float", "nan:7ff0000000000000"],
        ["float", "nan:7FF8000000000000"],
        ["float", "nan:7ff8"],
        ["complex", 1.0],
        ["complex", 1, 2],
        ["complex", True, 1.0],
        ["complex", ["list", []], 1.0],
        ["complex", ["int", "1"], 1.0],
        ["str", "YQ"],
        ["str", "/w=="],
        ["bytes", "YQ"],
        ["bytes", "YQ==YQ=="],
        ["bytes", "Y Q="],
        ["bytes", "Y\nQ=="],
        ["bytes", "é"],
        ["bytes", None],
        ["set", [1, 1]],
        ["set", [1, 1.0]],
        ["set", [1, True]],
        ["set", [["list", []]]],
        ["frozenset", [["dict", [], []]]],
        ["deque", [], []],
        ["deque", -1, []],
        ["deque", True, []],
        ["deque", 1.0, []],
        ["deque", 1, [1, 2]],
        ["deque", 2**63, []],
        ["deque", 10**40, []],
        ["dict", ["a"], []],
        ["dict", [], [1]],
        ["dict", ["a", "a"], [1, 2]],
        ["dict", [0, False], [1, 2]],
        ["dict", [["list", []]], [1]],
        ["dict", [["tuple", [["set", []]]]], [1]],
        ["dict", {"a": 1}, []],
        ["odict", ["a", "a"], [1, 2]],
        ["odict", [], [], 5],
        ["odict", [], [], ["list", []]],
        ["odict", [], [], ["dict", [1], [1]]],
        ["odict", [], [], ["dict", ["items"], [1]]],
        ["odict", [], [], ["dict", ["__class__"], [1]]],
        ["odict", [], [], ["dict", [], []], []],
        ["defaultdict", "eval", [], []],
        ["defaultdict", "builtins.list", [], []],
        ["defaultdict", "__import__", [], []],
        ["defaultdict", 1, [], []],
        ["tensor", 2],
        ["tensor", -1],
        ["tensor", True],
        ["tensor", 0.0],
        ["tensor", "0"],
        ["tensor", 10**30],
        ["tensors", [], []],
        ["tensors", ["a"], [2]],
        ["tensors", ["a"], [-1]],
        ["tensors", ["a", "b"], [0, -1]],
        ["tensors", ["a"], [True]],
        ["tensors", ["a"], ["0"]],
        ["tensors", [1], [0]],
        ["tensors", ["a"], [0, 1]],
        ["tensors", ["a", "a"], [0, 1]],
        ["tensors", ["a", "b"], [0]],
        ["blob", 2],
        ["blob", -1],
        ["ext", "range"],
        ["ext", 1, 2],
        ["ext", "range", {}],
        ["ext", "range", ["tuple", [1, 2, 0]]],
        ["ext", "range", ["tuple", ["a"]]],
        ["ext", "range", 5],
        ["ext", "bytearray", 1099511627776],
        ["ext", "Counter", 5],
    ],
    ids=repr,
)
def test_a_malformed_node_is_refused(node: Node) -> None:
    """Wrong tags, arities, types, indices, keys: the peer is told, nothing crashes."""
    with pytest.raises(RemoteProtocolError):
        decode(["list", [0, node]])


@pytest.mark.parametrize("tag", ["os.system", "builtins.eval", "collections.deque"])
def test_a_name_is_never_imported(tag: str) -> None:
    """An unregistered tag is an error that names it, its place and the remedy."""
    node = ["dict", ["a"], [["ext", tag, "true"]]]
    with pytest.raises(RemoteProtocolError, match=rf"at a: .*{tag}.*register_leaf"):
        decode(node)


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (["int", "f" * 6000], "int"),
        (["tensor", 0], "Loud"),
        (["tuple", [["tensor", 0]]], "tuple"),
        (["bytes", "YWJj"], "b'abc'"),
        ("a", "at a:"),
    ],
)
def test_a_key_is_not_asked_for_its_text(key: Node, shown: str) -> None:
    """It may have more digits than Python prints, or be a tensor."""

    class Loud:
        def __repr__(self) -> str:
            raise AssertionError("asked")

    node: Node = ["dict", [key], [["ext", "unknown", None]]]
    with pytest.raises(RemoteProtocolError, match=shown):
        decode_tree(node, registry=REGISTRY, tensors=[Loud()], limits=LIMITS)


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


@given(st.recursive(JSON_SCALARS, tagged, max_leaves=20))
def test_any_json_can_be_inspected(node: Node) -> None:
    """Naming the tensors of a tree needs no tree that decodes."""
    paths = tensor_paths(node)
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
        ["list", [None]],
        ["set", [None]],
        ["deque", 1, [None]],
        ["dict", [1], [None]],
        ["dict", [None], [1]],
        ["odict", [], [], None],
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


def test_a_blob_is_read_once() -> None:
    """A tree that names one blob a million times holds one copy of it."""
    calls = []

    def blob(index: int) -> bytes:
        calls.append(index)
        return bytes(1 << 20)

    node: Node = ["list", [["blob", 0]] * 1000]
    value = decode_tree(
        node, registry=REGISTRY, tensors=TENSORS, limits=LIMITS, blob=blob
    )
    assert calls == [0]
    assert len({*map(id, value)}) == 1  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", ["set", "dict"])
def test_colliding_keys_are_refused_in_time(kind: str) -> None:
    """All of these ints have the same hash; a table of them takes quadratic time."""
    keys: list[Node] = [["int", f"{n * (2**61 - 1):x}"] for n in range(1, 20_000)]
    node: Node = ["set", keys] if kind == "set" else ["dict", keys, [None] * len(keys)]
    start = time.process_time()
    with pytest.raises(RemoteProtocolError, match="hash"):
        decode(node)
    assert time.process_time() - start < 2


def test_ordinary_keys_do_not_collide() -> None:
    """Many int, float and tuple keys are no attack."""
    keys = [*range(3000), *(n + 0.5 for n in range(3000))]
    node = ["dict", [*keys, *(["tuple", [n, -n]] for n in range(3000))], [0] * 9000]
    assert len(decode(node)) == 9000


def test_a_claim_allocates_nothing() -> None:
    """Large numbers are only numbers."""
    tracemalloc.start()
    try:
        decode(["deque", 2**62, []])
        decode(["ext", "range", ["tuple", [0, 2**62, 1]]])
        for node in (["tensor", 2**62], ["ext", "bytearray", 2**40]):
            with pytest.raises(RemoteProtocolError):
                decode(node)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_failing_decoder_is_the_peers_fault() -> None:
    """The error names the tag and the place, and keeps its cause."""
    registry = Registry()

    def fail(value: object) -> Exception:
        raise KeyError(value)

    registry.register("odd", Exception, str, fail)
    with pytest.raises(
        RemoteProtocolError, match=r"'odd' refused a: KeyError"
    ) as caught:
        decode(["dict", ["a"], [["ext", "odd", 1]]], registry=registry)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("kind", [AiockptError, WorkCancelledError])
def test_a_decoder_may_blame_as_it_likes(kind: type[Exception]) -> None:
    """An error of the package passes through."""
    registry = Registry()

    def fail(value: object) -> Exception:
        raise kind("mine")

    registry.register("odd", Exception, str, fail)
    with pytest.raises(kind, match=r"^mine$"):
        decode(["ext", "odd", 1], registry=registry)


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
