"""What a path of this host stands for: a file, a checkpoint, or several of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiockpt.cli.arguments import UsageError
from aiockpt.cli.text import counted
from aiockpt.errors import CheckpointNotFoundError
from aiockpt.storage.directory import Checkpoint, checkpoint_at, list_checkpoints

__all__ = ["checkpoint_or_file", "one_file", "pointing_below"]


def checkpoint_or_file(path: Path) -> Checkpoint | Path:
    """Return the checkpoint at a path; or the path, where there is no directory.

    Raises:
        CheckpointNotFoundError: it is a directory without a whole checkpoint.
    """
    if not path.is_dir():
        return path
    with pointing_below(path):
        return checkpoint_at(path)


@contextmanager
def pointing_below(path: Path) -> Iterator[None]:
    """Name a checkpoint in the directory where the directory itself is none."""
    try:
        yield
    except CheckpointNotFoundError:
        below = list_checkpoints(path) if path.is_dir() else []
        if not below:
            raise
        count = counted(len(below), "checkpoint")
        detail = f"it is a directory of {count}: name one, such as {below[-1].path}"
        raise CheckpointNotFoundError(str(path), detail) from None


def one_file(path: Path, rank: int | None) -> Path:
    """Return the file of one rank.

    Raises:
        UsageError: several ranks, and none was chosen; or a file was given.
        CheckpointNotFoundError: no whole checkpoint, or no such rank in it.
    """
    found = checkpoint_or_file(path)
    if isinstance(found, Path):
        if rank is not None:
            raise UsageError("--rank is for checkpoint directories")
        return found
    if rank is None and found.world_size > 1:
        raise UsageError(
            f"{found.world_size} ranks wrote {path}: choose one with --rank"
        )
    return found.file_of(rank or 0)
