"""The plan of a load: which entries go straight to a template, and which do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.checkpointers import make_sync_checkpointer
from aiockpt.errors import TemplateMismatchError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.state.load_plan import LoadPlan, Matching, Template
from aiockpt.state.match import LAX
from aiockpt.state.selection import Select
from aiockpt.storage.checkpoint_file import opened
from aiockpt.storage.directory import checkpoint_at
from aiockpt.storage.read import FileSource, manifest_of_file

State = dict[str, Any]


def save(place: Path, state: State) -> Path:
    """Save a state; return the file that holds it."""
    with make_sync_checkpointer() as checkpointer:
        checkpointer.save(state, place)
    return checkpoint_at(place).file_of(0)


def planned(file: Path, template: Any, select: Select | None = None) -> LoadPlan:
    """Plan a load of a file into a template."""
    with opened(file) as found:
        manifest = manifest_of_file(found, limits=FILE_LIMITS)
        source = FileSource(found, manifest, mapped=False)
        own = None if template is None else Template(template, limits=FILE_LIMITS)
        return Matching(
            [source.segment],
            LAX,
            limits=FILE_LIMITS,
            allow_pickle=False,
            select=select,
            template=own,
        ).plan()


def two() -> State:
    """Two tensors of their own."""
    return {"a": torch.ones(4), "b": torch.ones(8)}


def tied() -> State:
    """One tensor under two names."""
    weight = torch.ones(4)
    return {"a": weight, "b": weight}


def views() -> State:
    """Two halves of one storage."""
    whole = torch.ones(8)
    return {"a": whole[:4], "b": whole[4:]}


def overlapping() -> State:
    """Two tensors that overlap in memory."""
    whole = torch.ones(12)
    return {"a": whole[:4], "b": whole[2:10]}


def strided() -> State:
    """The first tensor is a column."""
    return {"a": torch.ones(4, 2)[:, 0], "b": torch.ones(8)}


CASES: dict[str, tuple[Callable[[], State], Callable[[], State | None], int, int]] = {
    # name: (what was saved, the template, straight ranges, kept ranges)
    "alike": (two, two, 2, 0),
    "no template": (two, lambda: None, 0, 1),
    "a key": (two, lambda: {"b": torch.zeros(8)}, 1, 0),
    "a place without a tensor": (two, lambda: {"a": None, "b": torch.zeros(8)}, 1, 1),
    "tied in both": (tied, tied, 1, 0),
    "tied in the checkpoint": (
        tied,
        lambda: {"a": torch.zeros(4), "b": torch.zeros(4)},
        0,
        1,
    ),
    "views that are apart": (views, views, 2, 0),
    "overlapping in both": (overlapping, overlapping, 1, 0),
    "strided in the template": (two, strided, 1, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_go_straight_where_both_are_alike(tmp_path: Path, case: str) -> None:
    """Everything else is kept in the arena, and copied at the end."""
    saved, template, straight, kept = CASES[case]
    plan = planned(save(tmp_path / "c", saved()), template())
    assert plan.backings is not None
    assert sum(size > 0 for size in plan.backings.sizes) == straight
    assert sum(plan.kept) == kept


def test_two_tensors_for_overlapping_memory_are_refused(tmp_path: Path) -> None:
    """One of them would be lost."""
    with pytest.raises(TemplateMismatchError, match=r"b: .* shared with a"):
        planned(save(tmp_path / "c", two()), overlapping())


def test_only_what_is_selected_is_read(tmp_path: Path) -> None:
    """Ranges are those of the tensor, and neighbours are joined."""
    file = save(tmp_path / "c", {name: torch.ones(16) for name in "abc"})
    assert planned(file, None, ["b"]).ranges == [(64, 128)]
    assert planned(file, None, ["a", "b"]).ranges == [(0, 128)]
    assert planned(file, None, ["a", "c"]).ranges == [(0, 64), (128, 192)]
