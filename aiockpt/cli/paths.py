"""What a path of this host stands for: a file, a checkpoint, or several of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aiockpt.cli.arguments import UsageError
from aiockpt.cli.text import counted
from aiockpt.errors import (
    CheckpointNotFoundError,
    StorageError,
    UnsupportedLeafError,
)
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import Manifest
from aiockpt.format.paths import PICKLE
from aiockpt.format.references import registered
from aiockpt.format.tree import UnknownLeafError
from aiockpt.runtime.words import command_line
from aiockpt.storage.directory import Checkpoint, StrPath, expanded
from aiockpt.storage.interface import storage_at


def checkpoint_or_file(path: Path) -> Checkpoint | Path:
    """Return the checkpoint at a path; or the path, where there is no directory.

    Raises:
        CheckpointNotFoundError: it is a directory without a whole checkpoint.
    """
    where = storage_at(path)
    if where.kind() != "directory":
        return path
    with pointing_below(path):
        return where.checkpoint()


@contextmanager
def pointing_below(path: StrPath) -> Iterator[None]:
    """Name a checkpoint in the directory where the directory itself is none."""
    try:
        yield
    except CheckpointNotFoundError:
        where = storage_at(path)
        below = where.checkpoints() if where.kind() == "directory" else []
        if not below:
            raise
        count = counted(len(below), "checkpoint")
        one = command_line(os.fspath(below[-1]))
        detail = f"it is a directory of {count}: name one, such as {one}"
        raise CheckpointNotFoundError(expanded(path), detail) from None


@contextmanager
def for_a_command(verb: str) -> Iterator[None]:
    """Say what to do about a checkpoint that only a program can decode.

    Args:
        verb: The command.

    Raises:
        UnsupportedLeafError: it has a pickle, or a type that no imported module has
            registered.
    """
    try:
        yield
    except UnsupportedLeafError as error:
        unknown = error.__cause__
        if isinstance(unknown, UnknownLeafError) and unknown.tag != PICKLE:
            error.add_note(f"{verb} --import MODULE imports what registers it")
        elif unknown is not None:
            error.add_note(f"{verb} runs no such code, so load it in a program")
        raise


def holds_shards(file: StrPath) -> bool:
    """Say whether a file has parts of distributed tensors.

    Raises:
        IntegrityError: the header of our file is damaged.
    """
    from aiockpt.state.sharding import LAYOUTS  # most commands need no torch

    with suppress(StorageError):  # such as a file of torch.save, which has no header
        with storage_at(file).open() as opened:
            header = opened.header(limits=FILE_LIMITS)
        tree = header.tree if isinstance(header, Manifest) else None
        return any(tag in LAYOUTS for _, tag, _ in registered(tree))
    return False


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
            f"{found.world_size} ranks wrote {expanded(path)}: choose one with --rank"
        )
    return found.file_of(rank or 0)
