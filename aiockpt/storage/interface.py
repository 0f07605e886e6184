"""Where checkpoints are stored: the interface, and its implementation for file systems.

`storage_at` turns a path into a `Storage`. The checkpointers and the command line ask
it for everything that they need of a checkpoint's directory. Everything here blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from aiockpt.format.manifest import Manifest
from aiockpt.storage.checkpoint_file import OpenFile, opened
from aiockpt.storage.commit import Draft, is_committed
from aiockpt.storage.directory import (
    MARKER,
    Checkpoint,
    StrPath,
    checkpoint_at,
    identity,
    list_checkpoints,
    old_of,
    resolve_target,
)
from aiockpt.storage.files import named
from aiockpt.storage.retention import retire, sweep
from aiockpt.storage.write import Writable


class RankDraft(AbstractContextManager["RankDraft"], Protocol):
    """One rank's file in a checkpoint that is being saved."""

    @property
    def identity(self) -> tuple[int, int]:
        """Two numbers that tell this rank's file from every other one."""

    def write(self, writable: Writable) -> Manifest:
        """Write the file, and return its header. It is durable, and not committed.

        Raises:
            StorageError: it cannot be written. The caller must discard the draft.
        """

    def commit(self, step: int, snapshots: Mapping[int, str]) -> list[Path]:
        """Commit the files of all ranks, in one step; for rank 0.

        Args:
            step: The checkpoint's step.
            snapshots: The `Manifest.snapshot_id` of what each rank has written.

        Returns:
            Directories that can be removed at leisure.

        Raises:
            StorageError: it is not committed, or ``may_be_committed`` is true.
        """

    def is_committed(self) -> bool:
        """Say whether a checkpoint with this rank's file is committed."""

    def discard(self) -> None:
        """Remove what this rank has written. Never raises."""


class Storage(Protocol):
    """A checkpoint, a directory of checkpoints, or a file, wherever it is stored.

    ``str()`` returns its path, for errors.
    """

    @property
    def name(self) -> str:
        """The last part of the path."""

    def kind(self) -> Literal["file", "directory"] | None:
        """Say what is there, or None if nothing is."""

    def names(self) -> list[str]:
        """Return the names of the files in a directory, in order."""

    def open(self, name: str = "") -> AbstractContextManager[OpenFile]:
        """Open a file of a directory, or the file itself, for reading.

        Raises:
            StorageError: there is no such file, or it cannot be read.
        """

    def checkpoint(self) -> Checkpoint:
        """Return the complete checkpoint that is stored there.

        Raises:
            CheckpointNotFoundError: there is none; the message says what was found.
            StorageError: the marker is damaged, or has a later version.
        """

    def checkpoints(self) -> list[Checkpoint]:
        """Return the complete checkpoints of a directory, in the order of commits."""

    def was_saved(self) -> bool:
        """Say whether a checkpointer has committed a checkpoint there, whole or not."""

    def local(self) -> Path:
        """Return the path, for what only a file system has.

        Raises:
            StorageError: it is not on a file system.
        """

    def version(self) -> object:
        """Return what changes when a checkpoint is replaced; None if none is there."""

    def draft(self, rank: int, *, durable: bool, shared: bool) -> RankDraft:
        """Begin to save one rank's file. Rank 0 first removes what dead saves left.

        Args:
            rank: The rank.
            durable: Whether to sync each step to the disk before the next one.
            shared: Whether several ranks save the checkpoint.

        Raises:
            StorageError: no checkpoint can be saved there. What is there is untouched.
        """

    def is_committed(self, rank: int, identity: tuple[int, int]) -> bool:
        """Say whether the checkpoint has the file of a rank's draft."""

    def retire_others(self, *, keep_last: int, keep_every: int | None) -> None:
        """Remove the checkpoints beside this one that need not be kept.

        Raises:
            StorageError: one cannot be removed; the others are removed nevertheless.
        """


@dataclass(frozen=True, slots=True)
class FileStorage:
    """A path of a file system; see `Storage`."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    def kind(self) -> Literal["file", "directory"] | None:
        """Say what is there, or None if nothing is."""
        with named(self.path):
            if self.path.is_file():
                return "file"
            return "directory" if self.path.exists() else None

    def names(self) -> list[str]:
        """Return the names of the files in a directory, in order."""
        with named(self.path):
            return sorted(each.name for each in self.path.iterdir() if each.is_file())

    def open(self, name: str = "") -> AbstractContextManager[OpenFile]:
        """Open a file for reading."""
        return opened(self.path / name)

    def checkpoint(self) -> Checkpoint:
        """Return the complete checkpoint that is stored there."""
        return checkpoint_at(self.path)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the complete checkpoints of a directory."""
        return list_checkpoints(self.path)

    def was_saved(self) -> bool:
        """Say whether a checkpointer has committed a checkpoint there."""
        with named(self.path):
            return (self.path / MARKER).exists() or old_of(self.path).exists()

    def local(self) -> Path:
        """Return the path."""
        return self.path

    def version(self) -> object:
        """Return what changes when a checkpoint is replaced."""
        return identity(self.path)

    def draft(self, rank: int, *, durable: bool, shared: bool) -> RankDraft:
        """Begin to save one rank's file."""
        if not rank:
            sweep(self.path.parent, shared=shared)
        return Draft(self.path, rank, durable=durable)

    def is_committed(self, rank: int, identity: tuple[int, int]) -> bool:
        """Say whether the checkpoint has the file of a rank's draft."""
        return is_committed(self.path, rank, identity)

    def retire_others(self, *, keep_last: int, keep_every: int | None) -> None:
        """Remove the checkpoints beside this one that need not be kept."""
        retire(
            self.path.parent,
            keep_last=keep_last,
            keep_every=keep_every,
            spare=self.path,
        )


def storage_at(path: StrPath) -> Storage:
    """Return what is stored at a path, with all symbolic links resolved.

    Raises:
        StorageError: the path is the root, or the system cannot look it up.
    """
    return FileStorage(resolve_target(path))
