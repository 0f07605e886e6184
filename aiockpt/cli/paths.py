"""What a path of this host stands for: a file, a checkpoint, or several of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiockpt.cli.arguments import UsageError
from aiockpt.cli.text import command_line, counted
from aiockpt.errors import (
    CheckpointNotFoundError,
    DeviceMeshError,
    StateDictError,
    UnsupportedLeafError,
)
from aiockpt.format.paths import PICKLE
from aiockpt.format.tree import UnknownLeafError
from aiockpt.storage.directory import (
    Checkpoint,
    checkpoint_at,
    find_checkpoint,
    list_checkpoints,
)

__all__ = [
    "check_parts",
    "checkpoint_or_file",
    "for_a_command",
    "one_file",
    "pointing_below",
]


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
        one = command_line(str(below[-1].path))
        detail = f"it is a directory of {count}: name one, such as {one}"
        raise CheckpointNotFoundError(str(path), detail) from None


@contextmanager
def for_a_command(source: Path, verb: str) -> Iterator[None]:
    """Say what to do about a checkpoint that only a program can decode.

    Args:
        source: The checkpoint.
        verb: The command.

    Raises:
        StateDictError: it holds one rank's shards of tensors.
        UnsupportedLeafError: it has a pickle, or a type that no imported module has
            registered.
    """
    try:
        yield
    except DeviceMeshError as error:
        detail = (
            f"{source}: it holds one rank's shards of tensors, and {verb} cannot "
            "join them; load it in a job of as many ranks, gather the state "
            "(StateDictOptions(full_state_dict=True) of "
            "torch.distributed.checkpoint.state_dict), and save that on rank 0"
        )
        raise StateDictError(detail) from error
    except UnsupportedLeafError as error:
        unknown = error.__cause__
        if isinstance(unknown, UnknownLeafError) and unknown.tag != PICKLE:
            error.add_note(f"{verb} --import MODULE imports what registers it")
        elif unknown is not None:
            error.add_note(f"{verb} runs no such code, so load it in a program")
        raise


def check_parts(path: Path, rank: int | None, verb: str) -> None:
    """Refuse a checkpoint of shards where `one_file` would ask for a rank in vain.

    Raises:
        StateDictError: it holds the shards of several ranks.
    """
    found = find_checkpoint(path) if rank is None else None
    if found is not None and found.world_size > 1:
        from aiockpt.checkpointers.config import RankInfo
        from aiockpt.checkpointers.reader import CheckpointReader

        with for_a_command(path, verb):
            reader = CheckpointReader(RankInfo(0, 1))
            reader.read(found.file_of(0), mmap=True, verify="none")


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
