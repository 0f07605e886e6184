"""Names and ranges are looked for in manifests that a peer may have made up."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import LimitExceededError, RemoteProtocolError
from aiockpt.format.chunks import ChunkGrid, chunks_over
from aiockpt.state.match import names_without_a_path

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
