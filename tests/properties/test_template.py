"""Template: where a checkpoint goes in memory that is there already."""

from __future__ import annotations

import contextlib
import tracemalloc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given

from aiockpt import register_leaf
from aiockpt.errors import (
    RemoteProtocolError,
    TemplateMismatchError,
    UnsupportedLeafError,
)
from aiockpt.memory.arena import Arena
from aiockpt.memory.copies import CopyPlan
from aiockpt.state.equality import elements
from aiockpt.state.load_plan import Matching, Template
from aiockpt.state.match import RECEIVE
from aiockpt.state.segment import Segment
from aiockpt.testing import assert_same
from tests.support.states import (
    LIMITS,
    State,
    backings_of,
    host_only,
    match,
    matching,
    staged,
    states,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def fill(state: object, template: object, *, direct: bool) -> None:
    """Fill a template as a receive does."""
    manifest, segment = staged(state)
    rule, arena = matching(manifest, template), Arena(len(segment))
    (home,) = rule._segments
    home.arena = arena
    plan = rule.plan().copies(arena, host_only)
    assert plan is not None
    memory = plan.in_place() if direct else arena
    for view in memory.buffers(0, len(segment)):
        view[:] = segment[: view.nbytes]
        segment = segment[view.nbytes :]
    rule.assemble()
    if not direct:
        plan.load_host(0, manifest.segment_bytes)
    rule.finish()


def mismatch(state: object, template: object) -> TemplateMismatchError:
    """Return why a template does not fit."""
    with pytest.raises(TemplateMismatchError) as caught:
        match(state, template)
    return caught.value


class TestMismatch:
    """The error says where and why a template does not fit, in words of both sides."""

    def test_the_first_that_only_one_has(self) -> None:
        """Theirs come first, also where the trees have parted before."""
        one, two = torch.ones(1), torch.ones(1)
        error = mismatch({"a": one, "c": two}, {"b": one, "a": two})
        words = "nothing, but b, which the checkpoint lacks"
        assert (error.path, error.actual) == ("c", words)
        error = mismatch({"a": one}, {"c": two, "b": torch.ones(1), "a": one})
        assert (error.path, error.expected) == ("c", "nothing")
        error = mismatch({"a": {"x": one}}, {"a": {"x": one}, "b": {"y": two}})
        assert (error.path, error.expected) == ("b.y", "nothing")
        error = mismatch({"a": one, "b": [one * 1]}, {"a": torch.ones(2), "b": []})
        assert (error.path, error.actual) == ("b", "empty")

    @pytest.mark.parametrize(
        ("theirs", "own", "words"),
        [
            (torch.ones(2), torch.ones(2).int(), "int32 [2]"),
            (torch.ones(2, 3), torch.ones(3, 2), "float32 [3, 2]"),
            (torch.ones(2), torch.ones(1).expand(2), "stride [0]"),
        ],
    )
    def test_another_tensor(
        self, theirs: torch.Tensor, own: torch.Tensor, words: str
    ) -> None:
        """The message shows both."""
        error = mismatch({"w": theirs}, {"w": own})
        assert error.path == "w"
        assert words in error.actual
        assert error.expected != error.actual
        assert error.actual in str(error)


def test_many_tensors_take_little_memory() -> None:
    """No object is made for one of them that is like all others; bytes for each."""
    count = 5000
    state = {f"layer.{n}": torch.zeros(4) for n in range(count)}
    manifest, _ = staged(state)
    kept, arena = [], Arena(manifest.segment_bytes)

    def takes(kept_bytes: int, peak_bytes: int, make: Callable[[], object]) -> bool:
        """Say whether it takes no more for each tensor."""
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        kept.append(make())
        after, peak = tracemalloc.get_traced_memory()
        return (
            after - before < kept_bytes * count and peak - before < peak_bytes * count
        )

    tracemalloc.start()
    try:
        template = Template(state, limits=LIMITS, watched=True)

        def matched() -> object:
            segment = Segment(manifest, arena=arena)
            return Matching(
                [segment], RECEIVE, limits=LIMITS, allow_pickle=False, template=template
            )

        found: Any = matched()  # whatever is made once is made
        assert takes(280, 480, lambda: Template(state, limits=LIMITS, watched=True))
        assert takes(80, 150, matched)
        assert takes(
            50,
            60,
            lambda: CopyPlan(
                found.backings, manifest.entries, arena=arena, port_for=host_only
            ),
        )
    finally:
        tracemalloc.stop()


def lookalike(state: State) -> tuple[State, list[torch.Tensor]]:
    """Return a state dict like another one, in memory that is full of 0xAA."""
    storages: dict[int, torch.Tensor] = {}

    def like(tensor: torch.Tensor) -> torch.Tensor:
        old = tensor.untyped_storage()
        new = torch.full((old.nbytes(),), 0xAA, dtype=torch.uint8)
        new = storages.setdefault(old.data_ptr(), new)
        twin = torch.empty(0, dtype=tensor.dtype).set_(
            new.untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        twin = twin.conj() if tensor.is_conj() else twin
        return torch._neg_view(twin) if tensor.is_neg() else twin

    tensors = [like(tensor.detach()) for tensor in state["tensors"]]
    return State(tensors=tensors), [*storages.values()]


def outside(tensors: list[torch.Tensor], storage: torch.Tensor) -> torch.Tensor:
    """Return which bytes of a storage belong to none of the tensors."""
    mask = torch.ones(storage.numel(), dtype=torch.bool)
    places = torch.arange(storage.numel())
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() == storage.data_ptr():
            own = elements(tensor.detach())
            with contextlib.suppress(RuntimeError):  # an empty one may lie outside
                mask[
                    places.as_strided(own.shape, own.stride(), own.storage_offset())
                ] = 0
    return mask


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd dtypes
@given(state=states())
def test_any_template_is_filled_and_nothing_else(state: State, direct: bool) -> None:
    """Every element arrives; every other byte stays as it was.

    Sparse views that share an element travel as copies of it, and cannot be filled.
    """
    state = State(tensors=[tensor.detach() for tensor in state["tensors"]])
    template, storages = lookalike(state)
    try:
        fill(dict(state), dict(template), direct=direct)
    except UnsupportedLeafError as refused:
        if "shares elements with another tensor" not in str(refused):
            raise
        untouched: Any = [(storage == 0xAA).all() for storage in storages]
        assert all(untouched)
        return
    for theirs, own in zip(state["tensors"], template["tensors"], strict=True):
        assert torch.equal(elements(own), elements(theirs))
    for storage in storages:
        beside: Any = storage[outside(template["tensors"], storage)]
        assert (beside == 0xAA).all()


def test_assert_same_is_exact() -> None:
    """The tests above are worth as much as the comparison."""
    one = torch.ones(2)
    for other in (
        torch.ones(2).double(),
        torch.ones(1, 2),
        torch.tensor([1.0, -1.0]),
        torch.nn.Parameter(one, requires_grad=False),
        torch.ones(2).requires_grad_(),
        torch._neg_view(-one),
        torch.ones(1).expand(2),
    ):
        with pytest.raises(AssertionError):
            assert_same({"w": other}, {"w": one})
    for wrong, right in (
        ([one, one.clone()], [one, one]),
        ([one, one], [one, one.clone()]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (True, 1),
        (0.0, -0.0),
        ([1], (1,)),
    ):
        with pytest.raises(AssertionError):
            assert_same(wrong, right)


@dataclass
class Holder:
    """A type of the user's."""

    weight: torch.Tensor


register_leaf(Holder, tag="tests.Holder")


WEIGHT = torch.zeros(1)


class TestValues:
    """These values are made anew from what arrived."""

    def test_registered_leaves_are_values(self) -> None:
        """A registered leaf that is made of tensors fills none of the template's."""
        found = match({"x": Holder(torch.ones(2)), "w": torch.ones(1)}, {"w": WEIGHT})
        assert [*found.changed()] == [WEIGHT]

    @pytest.mark.parametrize("shared", ["values", "bytes"])
    def test_a_value_in_the_memory_of_a_tensor(self, shared: str) -> None:
        """Both get the bytes, which then arrive elsewhere."""
        sparse: Any = ["tuple", [["tensor", 0], ["tensor", 0]]]
        trees: dict[str, Any] = {"values": ["ext", "x", sparse], "bytes": ["blob", 0]}
        manifest, _ = staged({"w": torch.ones(2), "x": None})
        tree: Any = ["dict", ["w", "x"], [["tensor", 0], trees[shared]]]
        own = {"w": torch.ones(2), "x": None}
        found = matching(replace(manifest, tree=tree), own)
        assert [each.nbytes for each in backings_of(found)] == [0]

    @pytest.mark.parametrize("number", [-1, 1, 1 << 40])
    def test_a_number_of_no_tensor(self, number: int) -> None:
        """The sender's fault."""
        manifest, _ = staged({"w": torch.ones(2)})
        tree: list[Any] = ["dict", ["w"], [["tensor", number]]]
        with pytest.raises(RemoteProtocolError, match="names tensor"):
            matching(replace(manifest, tree=tree), {"w": torch.ones(2)})

    def test_a_leaf_that_is_made_of_tensors(self) -> None:
        """It is made anew: its parts need not fit."""
        leaf = Holder(torch.zeros(3))
        own = {"x": leaf, "w": torch.zeros(1)}
        fill({"x": Holder(torch.ones(2)), "w": torch.ones(1)}, own, direct=True)
        assert own["x"] is not leaf
        assert_same(leaf.__dict__, Holder(torch.zeros(3)).__dict__)
