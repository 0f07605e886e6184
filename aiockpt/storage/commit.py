"""Commits a checkpoint directory: builds it under another name, then renames it.

Every rank opens a `Draft` and fills its file. The file is locked until the draft is
closed. So a sweep can tell a file that is being written from one that a dead process
left behind. When all files are written, rank 0 commits.

Everything here blocks, and needs no tensors.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from aiockpt.errors import StorageError
from aiockpt.format.chunks import ALGORITHM
from aiockpt.format.header import CHECK_SLICE, LENGTH_BYTES, PREFIX
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import Manifest
from aiockpt.storage.checkpoint_file import read_header
from aiockpt.storage.directory import (
    MARKER,
    RankFile,
    encode_commit,
    old_of,
    part_of,
    rank_file,
)
from aiockpt.storage.files import (
    exchange,
    is_at,
    move_directory,
    named,
    open_locked,
    sync_directory,
    trash,
)

__all__ = ["Draft"]

_OCCUPIED: Final = {errno.ENOTEMPTY, errno.EEXIST}

_HEAD_BYTES: Final = 4096  # the first bytes of a header, with step and algorithm
_SAID = re.compile(
    rb'\\"step\\":([0-9]{1,19}),\\"chunk_bytes\\":[0-9]{1,19},'
    rb'\\"algorithm\\":\\"([a-z0-9-]{1,40})\\"'
)

_LOCK_WAIT: Final = 1.0  # a sweep locks a file just long enough to remove it
_TRIES: Final = 20


class Draft:
    """One rank's file in a checkpoint that is being built.

    Args:
        target: The checkpoint's final path; see `directory.resolve_target`.
        rank: The rank whose file this is.
        durable: Whether to sync each step to the disk before the next one.

    Attributes:
        target: The checkpoint's final path.
        part: The directory in which the checkpoint is built.
        path: The file's path in ``part`` once it is complete.
        temporary: The file's path in ``part`` while it is being filled.
        fd: The file, locked; -1 once the draft is closed.

    Raises:
        StorageError: no checkpoint can be built there. Existing files are untouched.
    """

    def __init__(self, target: Path, rank: int, *, durable: bool) -> None:
        self.target = target
        self.part = part_of(target)
        self.path = self.part / rank_file(rank)
        self._durable = durable
        self.temporary = self.part / f"{self.path.name}.tmp"
        _check_free(target)
        with named(target):
            self._make_parents()
            self.fd = self._open_locked()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Draft {self.path}>"

    def keep_file(self) -> None:
        """Give the file its final name; if durable, sync the directory entry."""
        with named(self.path):
            if not self._durable:
                # A network file system reports late errors when a file is closed.
                os.close(os.dup(self.fd))
            os.rename(self.temporary, self.path)
            self._sync(self.part)

    def commit(self, step: int, world_size: int) -> list[Path]:
        """Write the marker, then move the whole directory to its name; for rank 0.

        Returns:
            Directories that can be removed at leisure.

        Raises:
            StorageError: a rank's file is missing or is of another step, or the disk
                failed. The final name still has its previous contents.
        """
        with named(self.target):
            paths = [self.part / rank_file(rank) for rank in range(world_size)]
            files = {path.name: _described(path, step) for path in paths}
            self._remove_others(files)
            try:
                self._put_marker(encode_commit(step, files))
                unused = [*self._put_in_place()]
            except BaseException:
                with suppress(OSError):
                    self._remove_others(files)
                raise
            self._sync(self.target.parent)
        return unused

    def is_committed(self) -> bool:
        """Say whether this rank's file is at its final path, with the marker."""
        # The directory is moved as a whole, with the marker in it.
        with suppress(OSError):
            return is_at(self.target / self.path.name, self.fd)
        return False

    def discard(self) -> None:
        """Remove what this rank has written. Never raises."""
        for path in (self.temporary, self.path):
            with suppress(OSError):
                if is_at(path, self.fd):
                    path.unlink()
        with suppress(OSError):
            self.part.rmdir()  # the last rank succeeds

    def close(self) -> None:
        """Unlock and close the file. Idempotent. Never raises."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def _make_parents(self) -> None:
        parent = self.target.parent
        missing = [parent, *parent.parents]
        missing = [each for each in missing if not each.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        for each in missing:
            self._sync(each.parent)

    def _open_locked(self) -> int:
        busy = "another process is writing it"
        for _ in range(_TRIES):
            self.part.mkdir(exist_ok=True)
            # The files would go to the link's target, and replace the files there.
            if self.part.is_symlink():
                raise StorageError(str(self.part), "it is a symbolic link: remove it")
            # A sweep may remove the directory at the same time.
            with suppress(FileNotFoundError):
                return open_locked(
                    self.temporary, busy=busy, empty=True, patience=_LOCK_WAIT
                )
        raise StorageError(str(self.temporary), busy)

    def _remove_others(self, files: Mapping[str, RankFile]) -> None:
        """Remove files of a failed save, or of a save by more ranks."""
        for each in os.scandir(self.part):
            if each.name not in files:
                if each.is_dir(follow_symlinks=False):
                    shutil.rmtree(each.path)
                else:
                    os.unlink(each.path)

    def _put_marker(self, text: bytes) -> None:
        temporary = self.part / f"{MARKER}.tmp"
        with temporary.open("wb") as file:
            file.write(text)
            file.flush()
            if self._durable:
                os.fsync(file.fileno())
        os.rename(temporary, self.part / MARKER)
        self._sync(self.part)

    def _put_in_place(self) -> Iterator[Path]:
        """Rename the directory to its final name; yield what can be removed."""
        old = old_of(self.target)
        try:
            os.rename(self.part, self.target)
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
            if exchange(self.part, self.target):
                yield from _discarded(self.part)
            else:
                yield from self._replace_by_way_of(old)
        yield from _discarded(old)

    def _replace_by_way_of(self, old: Path) -> Iterator[Path]:
        if _is_moved(self.target):
            shutil.rmtree(self.target)
        else:
            yield from _discarded(old)
            move_directory(self.target, old)
        try:
            os.rename(self.part, self.target)
        except BaseException:
            os.rename(old, self.target)
            raise

    def _sync(self, directory: Path) -> None:
        if self._durable:
            sync_directory(directory)


def _check_free(target: Path) -> None:
    """Refuse a target directory with files that are not part of a checkpoint."""
    with named(target):
        if target.exists() and not target.is_dir():
            raise StorageError(str(target), "it is a file; name a directory")
        if os.path.ismount(target):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))  # as a rename would
        with suppress(FileNotFoundError):
            if any(target.iterdir()) and not (target / MARKER).is_file():
                if _is_moved(target):
                    return
                detail = "it holds files, and no checkpoint; choose a new directory"
                raise StorageError(str(target), detail)


def _is_moved(target: Path) -> bool:
    """Say whether a save has died while it moved the whole directory to ``.old``."""
    old = old_of(target)
    is_old = (old / MARKER).is_file() and not (target / MARKER).exists()
    return is_old and all((old / each.name).exists() for each in target.iterdir())


def _described(path: Path, step: int) -> RankFile:
    """Return the marker's entry for a file, from the start of its header."""
    try:
        with path.open("rb", buffering=0) as file:
            head = os.pread(file.fileno(), _HEAD_BYTES, 0)[LENGTH_BYTES:]
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        detail = "this rank's file is not there; do all ranks see the same directory?"
        raise StorageError(str(path), detail) from None
    said = _SAID.search(head)
    if not head.startswith(PREFIX) or said is None:
        raise StorageError(str(path), "it is not a checkpoint file of this library")
    if int(said[1]) != step:
        raise StorageError(str(path), f"it is of step {int(said[1])}, not {step}")
    if said[2].decode() == ALGORITHM:
        return RankFile(size, head[CHECK_SLICE].decode("ascii", "replace"))
    manifest = read_header(path, limits=FILE_LIMITS)
    assert isinstance(manifest, Manifest)  # it begins as ours do
    return RankFile(size, manifest.snapshot_id)


def _discarded(path: Path) -> Iterator[Path]:
    """Move a directory to the trash; yield its path there, if that succeeds."""
    with suppress(OSError):
        yield trash(path)
