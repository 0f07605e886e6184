"""The matcher: what it decides about each difference, and which memory bytes go to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed

from aiockpt.errors import (
    RankValuesError,
    RemoteProtocolError,
    StateDictError,
    TemplateMismatchError,
)
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.paths import Node
from aiockpt.state.catalogue import Catalogue
from aiockpt.state.flatten import wanted
from aiockpt.state.match import LAX, LOAD, RECEIVE, Matched, Rule, match
from aiockpt.state.reshard import Claim, Policy, unite
from tests.support.states import described, manifest_of
from tests.support.template_rows import on_mesh


@pytest.fixture(scope="module")
def a_group() -> Iterator[None]:
    """Be the only rank of a group, which meshes need."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def matched(
    template: object, *states: object, rule: Rule = LOAD, **options: Any
) -> tuple[Matched, Catalogue]:
    """Match a template with the state dicts of some sources."""
    manifests = [*map(described, states)]
    own = None if template is None else wanted(template, limits=FILE_LIMITS)
    tree = None
    if len(manifests) > 1:
        known: dict[Claim, bool] = {}
        policy = Policy(name="run")
        tree = unite(manifests, own, policy, limits=FILE_LIMITS, known=known).tree
    catalogue = Catalogue(manifests, limits=FILE_LIMITS, tree=tree)
    return match(catalogue, own, rule, **options), catalogue


def names_of(found: Matched, catalogue: Catalogue) -> tuple[list[str], ...]:
    """Return the names of the entries that go straight, are copied, and are new."""
    return tuple(
        sorted(
            catalogue.sources[source].names[entry]
            for source, entry in map(catalogue.entry_of, numbers)
        )
        for numbers in (found.straight.pieces, found.copied.pieces, found.new)
    )


W = torch.arange(6.0)
C = torch.complex(W, W + 1)

# What a source has, the template, and what goes straight, is copied, is new.
DISPOSITIONS: dict[str, tuple[Any, Any, tuple[list[str], ...]]] = {
    "alike": ({"a": W, "b": W + 1}, {"a": W * 0, "b": W * 0}, (["a", "b"], [], [])),
    "some keys": ({"a": W, "b": W + 1}, {"b": W * 0}, (["b"], [], [])),
    "no place": ({"a": W, "b": W + 1}, {"a": None, "b": W * 0}, (["b"], [], ["a"])),
    "tied there": ({"a": W, "b": W}, {"a": W * 0, "b": W * 0}, ([], ["a", "a"], [])),
    "half of a tied pair": ({"a": W, "b": W}, {"b": W * 0}, (["a"], [], [])),
    "tied, and new": ({"a": W, "b": W}, {"a": W * 0, "b": None}, ([], ["a"], ["a"])),
    "a view": ({"a": W, "b": W[2:]}, {"b": W[2:] * 0}, (["a"], [], [])),
    "a column": ({"a": W.view(2, 3)[:, 1]}, {"a": torch.zeros(2)}, ([], ["a"], [])),
    "few of many": (
        {"a": torch.ones(90)[::30]},
        {"a": torch.zeros(3)},
        (["a"], [], []),
    ),
    "transposed": (
        {"a": W.view(2, 3).t(), "b": W.view(2, 3) * 1},
        {"a": torch.zeros(2, 3).t(), "b": torch.zeros(3, 2).t()},
        (["a"], ["b"], []),
    ),
    "gaps on both sides": (
        {"a": torch.ones(2, 2)[:, 0]},
        {"a": torch.zeros(2, 2)[:, 0]},
        ([], ["a"], []),
    ),
    "conjugated here": ({"a": C}, {"a": C.conj()}, ([], ["a"], [])),
    "conjugated there": ({"a": C.conj()}, {"a": C * 0}, ([], ["a"], [])),
    "conjugated": ({"a": C.conj()}, {"a": (C * 0).conj()}, (["a"], [], [])),
    "a parameter": (
        {"a": torch.nn.Parameter(W)},
        {"a": torch.nn.Parameter(W * 0)},
        (["a"], [], []),
    ),
    "no elements": ({"a": W[:0]}, {"a": torch.zeros(0)}, (["a"], [], [])),
    "only selected": ({"a": W, "b": W + 1}, None, ([], [], ["a", "b"])),
}


@pytest.mark.parametrize("name", DISPOSITIONS)
def test_where_bytes_go(name: str) -> None:
    """Straight if nothing else is in either memory; else by way of an arena."""
    state, template, expected = DISPOSITIONS[name]
    assert names_of(*matched(template, state)) == expected


def test_overlapping_tensors_go_straight_together() -> None:
    """If they overlap in the same way on both sides, they are one piece of memory."""
    there, here, apart = torch.arange(6.0), torch.zeros(6), torch.zeros(8)
    state = {"a": there[:4], "b": there[2:]}
    found, _ = matched({"a": here[:4], "b": here[2:]}, state, rule=RECEIVE)
    assert len(found.straight.pieces) == 2
    found, _ = matched({"a": here[:4].clone(), "b": here[2:]}, state)
    assert len(found.copied.pieces) == 2
    with pytest.raises(TemplateMismatchError, match=r"b: .* shared with a"):
        matched({"a": apart[:4], "b": apart[3:7]}, state)
    with pytest.raises(TemplateMismatchError, match=r"a\.one: .* shared with b"):
        matched({"b": here, "a": {"one": here}}, {"b": there, "a": {"one": there + 1}})
    # Columns of one matrix share no element, but the bytes between theirs.
    matrix = torch.zeros(2, 2)
    state = {"a": torch.ones(2), "b": torch.zeros(2)}
    found, _ = matched({"a": matrix[:, 0], "b": matrix[:, 1]}, state)
    assert len(found.copied.pieces) == 2


def test_several_sources_are_one() -> None:
    """Each has other keys, at any depth; one key has one value."""
    many = {f"{n}": torch.full((2,), float(n)) for n in range(20)}
    sources = {**many, "m": {"x": W}}, {"m": {"y": W}, "z": W}, {"t": W}
    template = {"m": {"x": W * 0, "y": W * 0}, "t": W * 0, "3": torch.zeros(2)}
    found, catalogue = matched(template, *sources)
    assert names_of(found, catalogue)[0] == ["3", "m.x", "m.y", "t"]
    owners = [*map(catalogue.source_of, found.straight.pieces)]
    assert sorted(owners) == [0, 0, 1, 2]
    with pytest.raises(RankValuesError, match=r"m\.x") as caught:
        matched(template, sources[0], {"m": {"x": W.double()}})
    assert caught.value.paths == ["m.x"]


def test_a_piece_says_where_it_is() -> None:
    """A view's first element may lie inside its entry."""
    _, catalogue = matched(None, {"a": W, "b": W.view(2, 3)[:, 1]})
    piece = catalogue.piece(len(catalogue) - 1)
    assert (piece.start, piece.stop, piece.stride) == (4, 20, (3,))
    with pytest.raises(RemoteProtocolError):
        catalogue.piece(len(catalogue))


MALFORMED: list[Node] = [
    ["dict", ["a"], [["tensor", 7]]],
    ["dict", ["a"], [["tensor", -1]]],
    ["dict", ["a"], [["tensor", "x"]]],
    ["dict", ["a"], [["tensor"]]],
    ["tensors", ["a"], [7]],
    ["tensors", ["a"], [-1]],
    ["tensors", ["a"], []],
    ["tensors", ["a"], ["x"]],
    ["dict", ["a"], [["ext", "torch.DTensor", ["tuple", []]]]],
    ["dict", ["a"], [["ext", "torch.DTensor", None]]],
]


@pytest.mark.parametrize("tree", MALFORMED)
@pytest.mark.parametrize("rule", [RECEIVE, LOAD])
def test_a_peer_may_send_any_tree(tree: Node, rule: Rule) -> None:
    """The sender is blamed, or has nothing at that place."""
    catalogue = Catalogue([manifest_of(tree)], limits=FILE_LIMITS)
    own = wanted({"a": torch.zeros(16, dtype=torch.uint8)}, limits=FILE_LIMITS)
    with pytest.raises((RemoteProtocolError, StateDictError)):
        match(catalogue, own, rule)


def test_each_distinct_layout_is_decoded_once(a_group: None) -> None:
    """There may be thousands of distributed tensors on one mesh."""
    state = {f"{n}": on_mesh(W) for n in range(30)}
    found, catalogue = matched(state, state)
    assert len(found.straight.pieces) == 30
    assert repr(catalogue.layouts) == "<LayoutReader layouts=1>"


def test_a_template_may_have_what_no_checkpoint_can_hold() -> None:
    """Such a value is no error while the checkpoint has nothing or None there."""
    odd = {"a": W * 0, "lock": object(), "sparse": torch.eye(2).to_sparse()}
    found, _ = matched(odd, {"a": W}, rule=LAX)
    assert found.missing == ["lock", "sparse"]
    for name, there in (("lock", 7), ("sparse", torch.eye(2))):
        with pytest.raises(StateDictError) as caught:
            matched(odd, {"a": W, name: there}, rule=LAX)
        assert name in str(caught.value)
