"""The plan of a load: which entries go straight to a template, and which do not."""

from __future__ import annotations

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


def overlapping() -> State:
    """Two tensors that overlap in memory."""
    whole = torch.ones(12)
    return {"a": whole[:4], "b": whole[2:10]}


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
