"""The plan of a load: which entries go straight to a template, and which do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from aiockpt.checkpointers import make_sync_checkpointer
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


def test_only_what_is_selected_is_read(tmp_path: Path) -> None:
    """Ranges are those of the tensor, and neighbours are joined."""
    file = save(tmp_path / "c", {name: torch.ones(16) for name in "abc"})
    assert planned(file, None, ["b"]).ranges == [(64, 128)]
    assert planned(file, None, ["a", "b"]).ranges == [(0, 128)]
    assert planned(file, None, ["a", "c"]).ranges == [(0, 64), (128, 192)]
