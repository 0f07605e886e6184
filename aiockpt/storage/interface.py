"""Where checkpoints are stored: the interface, and its implementation for file systems.

`storage_at` turns a path into a `Storage`. The checkpointers and the command line ask
it for everything that they need of a checkpoint's directory. Everything here blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from aiockpt.errors import CheckpointNotFoundError
from aiockpt.format.manifest import Manifest
from aiockpt.storage import directory as directories
from aiockpt.storage.checkpoint_file import OpenFile, opened
from aiockpt.storage.commit import Draft, is_committed
from aiockpt.storage.directory import (
    MARKER,
    Checkpoint,
    StrPath,
    expanded,
    identity,
    is_address,
    old_of,
    resolve_path,
    resolve_target,
    split_address,
)
from aiockpt.storage.files import named
from aiockpt.storage.retention import retire, sweep
from aiockpt.storage.write import Writable

if TYPE_CHECKING:
    from obstore.store import ObjectStore


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

    def arrival(self, header: Manifest) -> str:
        """Return what rank 0 needs to commit the file with this header."""

    def commit(self, step: int, arrivals: Mapping[int, str]) -> list[Path]:
        """Commit the files of all ranks, in one step; for rank 0.

        Args:
            step: The checkpoint's step.
            arrivals: The `arrival` of each rank.

        Returns:
            Directories that can be removed at leisure.

        Raises:
            StorageError: it is not committed, or ``may_be_committed`` is true.
        """

    def is_committed(self) -> bool:
        """Say whether a checkpoint with this rank's file is committed."""

    def discard(self, *, agreed: bool = False) -> None:
        """Remove what this rank has written. Never raises.

        Args:
            agreed: Whether all ranks know that rank 0 will not commit it. Without that,
                what rank 0 may commit just now stays.
        """


class Storage(Protocol):
    """A checkpoint, a directory of checkpoints, or a file, wherever it is stored.

    ``str()`` returns its path, for errors.
    """

    @property
    def name(self) -> str:
        """The last part of the path."""

    def kind(self) -> Literal["file", "directory"] | None:
        """Say what is there, or None if nothing is."""

    def listed(self) -> tuple[list[str], list[str]]:
        """Return the names of the files, and of the directories, in a directory."""

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

    def listed(self) -> tuple[list[str], list[str]]:
        """Return the names of the files, and of the directories, in a directory."""
        with named(self.path):
            found = sorted(self.path.iterdir())
            files = [each.name for each in found if each.is_file()]
            return files, [each.name for each in found if each.is_dir()]

    def open(self, name: str = "") -> AbstractContextManager[OpenFile]:
        """Open a file for reading."""
        return opened(self.path / name)

    def checkpoint(self) -> Checkpoint:
        """Return the complete checkpoint that is stored there."""
        return directories.checkpoint_at(self.path)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the complete checkpoints of a directory."""
        return directories.checkpoints_in(self.path)

    def was_saved(self) -> bool:
        """Say whether a checkpointer has committed a checkpoint there."""
        with named(self.path):
            is_file = self.path.is_file()
            marked = (self.path / MARKER).exists() or old_of(self.path).exists()
            return marked and not is_file

    def local(self) -> Path:
        """Return the path."""
        return self.path

    def version(self) -> object:
        """Return what changes when a checkpoint is replaced."""
        return identity(self.path)

    def draft(self, rank: int, *, durable: bool, shared: bool) -> RankDraft:
        """Begin to save one rank's file."""
        path = resolve_target(self.path)
        if not rank:
            sweep(path.parent, shared=shared)
        return Draft(path, rank, durable=durable)

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


_stores: dict[str, ObjectStore | None] = {}


def register_store(address: str, store: ObjectStore | None) -> None:
    """Use a store of obstore for every address in its bucket.

    It is for a store that the address and the environment do not describe, such as one
    with another endpoint, or with a credential provider. Register it before you make a
    checkpointer, because a checkpoint process gets the stores of that moment.

    Args:
        address: A scheme and a bucket, such as ``s3://bucket``.
        store: The store of the bucket, without a prefix. None: refuse its addresses.

    Raises:
        ValueError: it is no address of a bucket, or the store has a prefix.
    """
    text = expanded(address)
    if not is_address(text) or split_address(text)[1]:
        raise ValueError(f"address is a scheme and a bucket, not {address!r}")
    if getattr(store, "prefix", None) is not None:
        raise ValueError("store has a prefix: make one of the whole bucket")
    _stores[text] = store


def registered_stores() -> dict[str, ObjectStore | None]:
    """Return the registered stores by their addresses."""
    return dict(_stores)


def storage_at(path: StrPath) -> Storage:
    """Return what is stored at a path, with all symbolic links resolved.

    Raises:
        StorageError: the system cannot look up the path.
        MissingExtraError: it is the address of an object store, and obstore is not
            installed.
    """
    text = expanded(path)
    if is_address(text):
        from aiockpt.storage.bucket import Bucket  # obstore may be missing
        from aiockpt.storage.objects import ObjectStorage

        root, key = split_address(text)
        return ObjectStorage(Bucket(root, _stores), key)
    return FileStorage(resolve_path(path))


def list_checkpoints(directory: StrPath) -> list[Checkpoint]:
    """Return the complete checkpoints in a directory, in the order of their commits.

    If two savers have committed at the same time, the higher step is the later one.
    Checkpoints without a serial number come first, in the order of their file times.
    A checkpoint whose marker cannot be read is left out, and a warning is logged. A
    directory that does not exist has no checkpoints.

    Args:
        directory: A path of a file system, or an address such as ``s3://bucket/run``.

    Raises:
        StorageError: the directory cannot be read.
    """
    return storage_at(directory).checkpoints()


def find_checkpoint(path: StrPath) -> Checkpoint | None:
    """Return the complete checkpoint of this name, or None.

    Raises:
        StorageError: it cannot be looked up; or its marker is damaged.
    """
    with suppress(CheckpointNotFoundError):
        return storage_at(path).checkpoint()
    return None


def latest(directory: StrPath) -> Checkpoint | None:
    """Return the complete checkpoint that was committed last, or None.

    After a rollback, this is the newest checkpoint of the new branch, even if the old
    branch has higher steps.
    """
    return next(reversed(list_checkpoints(directory)), None)
