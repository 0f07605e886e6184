"""Where tensors are in a tree, without decoding it, and how such places read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.paths import Node, Path, format_path
from aiockpt.format.references import (
    mentions,
    registered,
    renumber,
    tensor_leaves,
)
from tests.support.headers import tensor_paths

TREE: Node = [
    "dict",
    ["model", "opt", 3, ["tuple", [1, 2]], "big"],
    [
        ["tensors", ["w", "tied"], [0, 0]],
        ["list", [["tensor", 1], ["ext", "x", ["dict", ["y"], [["tensor", 2]]]]]],
        ["odict", ["a"], [["tensor", 3]], ["dict", ["a"], [["tensor", 4]]]],
        ["defaultdict", None, ["d"], [["deque", 1, [["set", [["tensor", 5]]]]]]],
        ["blob", 6],
    ],
]


def test_every_tensor_has_a_readable_path() -> None:
    """The first place counts, and bytes that travel as a tensor are named too."""
    assert tensor_paths(TREE) == {
        0: "model.w",
        1: "opt[0]",
        2: "opt[1].y",
        3: "[3].a",
        4: "[3][attributes].a",
        5: '[["tuple",[1,2]]].d[0][0]',
        6: "big",
    }


def test_leaves_are_the_tensors_of_the_state_dict() -> None:
    """Every mention counts, in the order of the tree; bytes are no tensors."""
    leaves = list(tensor_leaves(TREE))
    assert [number for _, number in leaves] == [0, 0, 1, 2, 3, 4, 5]
    assert leaves[:3] == [(("model", "w"), 0), (("model", "tied"), 0), (("opt", 0), 1)]
    assert tensor_paths(["tensor", 0]) == {0: ""}
    assert list(tensor_leaves(["tensor", 0])) == [((), 0)]


def test_tensors_in_a_row_are_mentioned_at_once() -> None:
    """Values between them do not part them, so trees of one structure read alike."""
    mixed: Node = ["odict", ["a", "lr", "b"], [["tensor", 1], 0.1, ["tensor", 0]]]
    (row,) = mentions(mixed)
    assert (row.path, row.names, row.numbers) == ((), ["a", "b"], [1, 0])
    (same,) = mentions(["tensors", ["a", "b"], [1, 0]])
    assert same == row
    parted: Node = ["list", [["tensor", 0], ["list", [["blob", 1]]], ["tensor", 2]]]
    assert [(row.path, row.names, row.numbers) for row in mentions(parted)] == [
        ((), [0], [0]),
        ((1, 0), None, (1,)),
        ((), [2], [2]),
    ]


def test_a_tensor_within_a_leaf_names_the_outermost_one() -> None:
    """It is part of that leaf's payload, and none of the state dict's own."""
    inner: Node = ["ext", "inner", ["list", [["tensor", 0]]]]
    pytree: Node = ["ext", "pytree:x", ["list", [["tensor", 1]]]]
    (within, own) = mentions(["dict", ["a", "b"], [["ext", "x", inner], pytree]])
    assert (within.path, within.leaf) == (("a",), (("a",), "x"))
    assert (own.path, own.leaf) == (("b",), None)


def test_registered_leaves_have_a_path() -> None:
    """The outermost ones, in the order of the tree, keys included."""
    inner: Node = ["ext", "inner", None]
    tree: Node = ["list", [["dict", ["a", inner], [["ext", "x", inner], 1]], inner]]
    found = [(path, tag, payload) for path, tag, payload in registered(tree)]
    assert found[0] == ((0, "a"), "x", inner)
    assert [tag for _, tag, _ in found[1:]] == ["inner", "inner"]
    assert list(registered(["tensors", ["a"], [0]])) == []


def test_paths_of_leaves_never_coincide() -> None:
    """Keys that read alike are different keys."""
    keys: list[Node] = ["a.b", "a", 0, "0", ["bytes", "MA=="], ["tuple", [0]], None]
    tree: Node = ["dict", keys, [["tensor", n] for n in range(len(keys))]]
    assert len(dict(tensor_leaves(tree))) == len(keys)


def test_renumbering_reaches_every_reference() -> None:
    """Tensors get their final numbers when the segment is laid out."""
    tree: Node = [
        "dict",
        ["a", "b", "c"],
        [
            ["tensors", ["x", "y"], [2, 1]],
            ["list", [["tensor", 0]]],
            ["ext", "tensor", ["blob", 1]],
        ],
    ]
    renumber(tree, [10, 11, 12])
    assert list(tensor_leaves(tree)) == [
        (("a", "x"), 12),
        (("a", "y"), 11),
        (("b", 0), 10),
    ]
    assert tensor_paths(tree)[11] == "a.y"


def test_a_key_may_refer_to_a_tensor() -> None:
    """Long bytes travel as a tensor in a key as they do in a value."""
    tree: Node = ["dict", [["blob", 0], ["tuple", [["tensor", 1]]]], [2, ["tensor", 2]]]
    renumber(tree, [10, 11, 12])
    assert sorted(tensor_paths(tree)) == [10, 11, 12]
    assert [number for _, number in tensor_leaves(tree)] == [11, 12]


def test_a_path_through_a_bottomless_key_is_refused() -> None:
    """Nothing recurses into what a peer sent."""
    key: Node = []
    for _ in range(100_000):
        key = [key]
    tree: Node = ["dict", [key], [["tensor", 0]]]
    with pytest.raises(RemoteProtocolError, match="nested too deeply"):
        tensor_paths(tree)
    tree = ["tensor", 0]
    for _ in range(5000):
        tree = ["ext", "x", tree]
    assert tensor_paths(tree) == {0: ""}


@pytest.mark.parametrize(
    ("names", "numbers"),
    [(["a", []], [3, 4]), (["a", "b"], [3, "4"]), (["a", "b"], [3]), (["a"], [3, 4])],
)
def test_what_is_malformed_in_a_node_of_tensors_counts_as_empty(
    names: list[Node], numbers: list[Node]
) -> None:
    """A name that cannot be a key, a number that is none, one without the other."""
    assert list(tensor_leaves(["tensors", names, numbers])) == [(("a",), 3)]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), ""),
        (("model",), "model"),
        (("optimizer", "state", 0, "step"), "optimizer.state[0].step"),
        (("model", "layers.0.weight"), "model.layers.0.weight"),
        ((0, 1), "[0][1]"),
        (("a", None, True, 1.5), "a[None][True][1.5]"),
        (("a", (1, "b")), "a[(1, 'b')]"),
        (("", "a"), "[''].a"),
        (("\ud800",), "['\\ud800']"),
    ],
)
def test_a_path_reads_like_python(path: Path, text: str) -> None:
    """Strings are joined by dots, everything else is in brackets."""
    assert format_path(path) == text


@given(st.lists(st.text(st.characters(exclude_categories=())) | st.integers()))
def test_a_path_is_valid_unicode(path: list[object]) -> None:
    """It can be printed, logged, and become the name of an entry."""
    format_path(path).encode()
