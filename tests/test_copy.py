"""The data segment in a state dict's own memory looks like one run of bytes."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.format.limits import Limits
from aiockpt.memory.arena import Arena
from aiockpt.memory.copies import CopyPlan
from aiockpt.memory.device import Port
from aiockpt.state.flatten import describe


def host_only(_: torch.device) -> Port | None:
    """Find no device."""
    return None


def planned(state: object, arena: Arena | None = None) -> tuple[CopyPlan, int]:
    """Return the copies of a state dict, and the length of its segment."""
    own = describe(state, limits=Limits(), allow_pickle=False, writing=True)
    arena = arena or Arena(own.entries.nbytes)
    plan = CopyPlan(own.backings, own.entries, arena=arena, port_for=host_only)
    return plan, own.entries.nbytes


def odd_state() -> dict[str, torch.Tensor]:
    """Tensors of every alignment, a sparse view, padding, and nothing at all."""
    flat = torch.arange(41, dtype=torch.uint8)
    return {
        "wide": torch.arange(5, dtype=torch.float64),
        "sparse": torch.arange(40.0)[::4],
        "odd": flat[1:4],
        "words": torch.arange(7, dtype=torch.int16),
        "empty": torch.empty(0),
        "mixed": flat[8:40].view(torch.int32)[:3],
        "rest": flat[9:33],
    }


STATE = odd_state()
PLAN, SEGMENT_BYTES = planned(STATE)
SPARSE = 256  # more than is staged element by element, or is padding


@given(bounds=st.lists(st.integers(0, SEGMENT_BYTES), max_size=6))
def test_any_cut_gives_the_same_bytes(bounds: list[int]) -> None:
    """Wherever a range starts and stops, its views join up to the whole."""
    memory = PLAN.in_place()
    whole = b"".join(memory.buffers(0, SEGMENT_BYTES))
    assert len(whole) == SEGMENT_BYTES
    cuts = sorted({0, SEGMENT_BYTES, *bounds})
    pieces = [memory.buffers(start, stop) for start, stop in pairwise(cuts)]
    assert b"".join(view for piece in pieces for view in piece) == whole
    assert all(view.nbytes for piece in pieces for view in piece)


@given(
    start=st.integers(0, SEGMENT_BYTES - 1),
    nbytes=st.integers(1, SEGMENT_BYTES),
    block=st.integers(1, 100),
)
def test_what_is_reported_as_staged_is_there(
    start: int, nbytes: int, block: int
) -> None:
    """Of any range, in blocks of any size; the last report is of its end."""
    arena = Arena(SEGMENT_BYTES)
    [staged] = arena.buffers(0, SEGMENT_BYTES)
    staged[:] = b"?" * SEGMENT_BYTES  # as another snapshot leaves it
    plan, _ = planned(STATE, arena)
    for each in (plan, PLAN):
        each.stage_parts({})
    whole = b"".join(PLAN.in_place().buffers(0, SEGMENT_BYTES))
    stop = min(start + nbytes, SEGMENT_BYTES)
    done = [start]
    for at in plan.staged(start, stop, block):
        assert staged[start:at] == whole[start:at]
        done.append(at)
    assert done == sorted(set(done))
    assert done[-1] == stop
    assert max(last - first for first, last in pairwise(done)) < 2 * block + SPARSE


def test_what_is_written_is_in_the_tensors() -> None:
    """Contiguous tensors are received into directly, the others by way of the arena."""
    state = odd_state()
    plan, size = planned(state)
    for view in plan.in_place().buffers(0, size):
        view[:] = bytes(view.nbytes)
    assert not state["wide"].any()
    assert not state["words"].any()
    assert state["sparse"].any()
    plan.load_parts(plan.part_ranges(), {})
    assert not state["sparse"].any()


def test_the_window_keeps_the_tensors_alive() -> None:
    """Memory is not freed while it can still be written to."""
    plan, size = planned({"only": torch.ones(1000)})
    views = plan.in_place().buffers(0, size)
    del plan
    views[0][:] = bytes(size)
    assert bytes(views[0]) == bytes(size)


def test_a_state_without_host_memory_has_an_empty_window() -> None:
    """A state dict may hold no tensor at all."""
    plan, size = planned({"step": 3})
    assert size == 0
    assert plan.in_place().buffers(0, 0) == []
