"""Commits a checkpoint directory: builds it under another name, then renames it.

Every rank opens a `Draft` and fills its file. The file is locked until the draft is
closed. So a sweep can tell a file that is being written from one that a dead process
left behind. Rank 0 has the lock of the path, too, from opening to rename. When all
files are written, rank 0 commits.

Where locks do not work, or do not reach another host, a draft can lose its files to
another saver. So it never writes into a file that it did not make, and rank 0 commits
under a name that nobody else knows. There it compares each file with what its rank has
written.

Everything here blocks, and needs no tensors.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

from aiockpt.errors import StorageError
from aiockpt.format.chunks import ALGORITHM
from aiockpt.format.header import CHECK_SLICE, LENGTH_BYTES, PREFIX
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import Manifest
from aiockpt.storage.checkpoint_file import read_header
from aiockpt.storage.directory import (
    MARKER,
    RankFile,
    complete_at,
    encode_commit,
    identity,
    next_serial,
    old_of,
    part_of,
    rank_file,
)
from aiockpt.storage.files import (
    exchange,
    in_place,
    is_at,
    lock,
    move_directory,
    named,
    regular_file,
    rename_to_new,
    set_aside,
    sync_directory,
    unlock,
)
from aiockpt.storage.lock import SaveLock
from aiockpt.storage.ours import (
    begins_as_ours,
    is_ours,
    move_along,
    others_in,
    remove_ours,
)
from aiockpt.storage.write import Writable, write_file

logger = logging.getLogger("aiockpt")

_OCCUPIED: Final = {errno.ENOTEMPTY, errno.EEXIST}

_HEAD_BYTES: Final = 4096  # the first bytes of a header, with step and algorithm
_SAID = re.compile(
    rb'\\"step\\":([0-9]{1,19}),\\"chunk_bytes\\":[0-9]{1,19},'
    rb'\\"algorithm\\":\\"([a-z0-9-]{1,40})\\"'
)

_LOCK_WAIT_S: Final = 1.0  # a sweep locks a file just long enough to remove it
_LOCK_PAUSE_S: Final = 0.05
_MAX_TRIES: Final = 10  # while others remove or replace what is there

_MOVE: Final = "move it away, or save to another path"
_BUSY: Final = (
    "another process is writing it; wait until it has finished, or save to another path"
)


class Draft(AbstractContextManager["Draft"]):
    """One rank's file in a checkpoint that is being built.

    Args:
        destination: The checkpoint's final path; see `directory.resolve_target`.
        rank: The rank whose file this is.
        durable: Whether to sync each step to the disk before the next one.

    Attributes:
        destination: The checkpoint's final path.
        part: The directory in which the checkpoint is built.
        path: The file's path in ``part`` once it is complete.
        temporary: The file's path in ``part`` while it is being filled.
        fd: The file, locked; -1 once the draft is closed.

    Raises:
        StorageError: no checkpoint can be built there. Existing files are untouched.
    """

    fd = -1
    _lock: SaveLock | None = None

    def __init__(self, destination: Path, rank: int, *, durable: bool) -> None:
        self.destination = destination
        self.part = part_of(destination)
        self.path = self.part / rank_file(rank)
        self._durable = durable
        self.temporary = self.part / f"{self.path.name}.tmp"
        _check_free(destination)
        with named(destination):
            self._make_parents()
            self._lock = None if rank else SaveLock(destination, wait=_LOCK_WAIT_S)
            try:
                self._check_part(every_file=not rank)
                self.fd = self._open_locked()
            except BaseException:
                with suppress(OSError):
                    self.part.rmdir()  # if this call made it
                self.close()
                raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # If a signal handler raises right after `__init__`, no `with` block closes it.
        self.close()

    @property
    def identity(self) -> tuple[int, int]:
        """The device and inode of this rank's file; see `is_committed`."""
        found = os.fstat(self.fd)
        return found.st_dev, found.st_ino

    def write(self, writable: Writable) -> Manifest:
        """Fill the file, and give it its final name; return its header.

        Raises:
            StorageError: the disk is full or has failed, or another saver has replaced
                the file. The caller must discard the draft.
        """
        header = write_file(self.temporary, self.fd, writable, durable=self._durable)
        self.keep_file()
        return header

    def arrival(self, header: Manifest) -> str:
        """Return what `commit` needs: what the file must be."""
        return header.snapshot_id

    def keep_file(self) -> None:
        """Give the file its final name; if durable, sync the directory entry."""
        with named(self.path):
            if not self._durable:
                # A network file system reports late errors when a file is closed.
                os.close(os.dup(self.fd))
            self._check_own(self.temporary)
            with suppress(FileNotFoundError):
                os.rename(self.temporary, self.path)
            self._check_own(self.path)
            try:
                self._sync(self.part)
            except FileNotFoundError:
                raise self._overtaken(self.path.name) from None

    def commit(self, step: int, arrivals: Mapping[int, str]) -> list[Path]:
        """Write the marker, then move the whole directory to its name; for rank 0.

        Other files beside the old checkpoint move to the new one.

        Args:
            step: The checkpoint's step.
            arrivals: The `arrival` of each rank.

        Returns:
            Directories that can be removed at leisure.

        Raises:
            StorageError: a rank's file is missing or is of another step, another saver
                has replaced one, or the disk failed. The final name still has its
                previous contents, or ``may_be_committed`` is true.
        """
        with named(self.destination):
            # From here on, nobody else can change what is in the directory.
            try:
                private = set_aside(self.part, "part", like=self.destination)
            except FileNotFoundError:
                self._check_own(self.path)
                raise
            try:
                files = {}
                for rank, snapshot in sorted(arrivals.items()):
                    name = rank_file(rank)
                    files[name] = _described(private / name, step)
                    if files[name].snapshot != snapshot:
                        raise self._overtaken(name)
                _remove_others(private, files)
                serial = next_serial(self.destination.parent)
                self._put_marker(private, encode_commit(step, files, serial))
                unused = [*self._put_in_place(private)]
            except BaseException:
                if not self.is_committed():
                    self._restore(private)
                raise
            with in_place(self.destination):
                self._sync(self.destination.parent)
        return unused

    def is_committed(self) -> bool:
        """Say whether this rank's file is at its final path, with the marker."""
        # The directory is moved as a whole, with the marker in it.
        with suppress(OSError):
            return is_at(self.destination / self.path.name, self.fd)
        return False

    def discard(self, *, agreed: bool = False) -> None:
        """Remove what this rank has written. Never raises."""
        del agreed  # rank 0 has taken it away before it commits
        for path in (self.temporary, self.path):
            with suppress(OSError):
                if is_at(path, self.fd):
                    path.unlink()
        with suppress(OSError):
            self.part.rmdir()  # the last rank succeeds

    def close(self) -> None:
        """Unlock and close the file, and unlock the path. Idempotent. Never raises."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            unlock(fd)
        if self._lock is not None:
            self._lock.release()

    def _make_parents(self) -> None:
        parent = self.destination.parent
        missing = [parent, *parent.parents]
        missing = [each for each in missing if not each.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        for each in missing:
            self._sync(each.parent)

    def _check_part(self, *, every_file: bool) -> None:
        """Refuse to build in a directory that holds something else.

        Raises:
            StorageError: it is no directory, or holds what no checkpointer wrote.
        """
        try:
            kind = os.lstat(self.part).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISLNK(kind):
            # The files would go to the link's target, and replace the files there.
            raise StorageError(str(self.part), "it is a symbolic link: remove it")
        if not stat.S_ISDIR(kind):
            detail = f"the checkpoint would be built there, and it is a file; {_MOVE}"
            raise StorageError(str(self.part), detail)
        with suppress(FileNotFoundError):
            if every_file and (others := others_in(self.part)):
                name = others[0].name
                detail = f"no checkpointer wrote {name!r} in it; {_MOVE}"
                raise StorageError(str(self.part), detail)

    def _open_locked(self) -> int:
        """Make this rank's file and lock it, unless another process has it."""
        until = time.monotonic() + _LOCK_WAIT_S
        while True:
            self.part.mkdir(exist_ok=True)
            self._check_part(every_file=False)
            # A sweep may remove the directory at the same time.
            with suppress(FileNotFoundError):
                if _is_free(self.path) and _is_free(self.temporary):
                    fd = self._create()
                    if fd >= 0:
                        return fd
            if time.monotonic() >= until:
                raise StorageError(str(self.destination), _BUSY)
            time.sleep(_LOCK_PAUSE_S)

    def _create(self) -> int:
        """Return a new locked file; -1 if another process was faster."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(self.temporary, flags, 0o666)
        except FileExistsError:
            return -1
        try:
            # Another saver may have given its file the final name meanwhile.
            if lock(fd) and is_at(self.temporary, fd) and _is_free(self.path):
                ours, fd = fd, -1
                return ours
            if is_at(self.temporary, fd):
                self.temporary.unlink()
        finally:
            if fd >= 0:
                unlock(fd)
        return -1

    def _check_own(self, path: Path) -> None:
        """Raise an error if another saver has replaced this rank's file."""
        if not is_at(path, self.fd):
            raise self._overtaken(path.name)

    def _overtaken(self, name: str) -> StorageError:
        detail = (
            f"another process is saving to it, and has replaced or removed {name}: "
            "nothing of this save is there; save to another path"
        )
        return StorageError(str(self.destination), detail)

    def _restore(self, private: Path) -> None:
        """Give the directory its shared name again, where the ranks clean up."""
        with suppress(OSError):
            _remove_others(private, (), markers_only=True)
            rename_to_new(private, self.part)
        remove_ours(private)  # if another saver has taken the shared name

    def _put_marker(self, private: Path, text: bytes) -> None:
        temporary = private / f"{MARKER}.tmp"
        with temporary.open("wb") as file:
            file.write(text)
            file.flush()
            if self._durable:
                os.fsync(file.fileno())
        os.rename(temporary, private / MARKER)
        self._sync(private)

    def _put_in_place(self, private: Path) -> Iterator[Path]:
        """Rename the directory to its final name; yield what can be removed."""
        # Another program may have put files there meanwhile.
        _check_free(self.destination)
        old = old_of(self.destination)
        for left in reversed(range(_MAX_TRIES)):
            try:
                yield from self._replace(private, old)
                break
            except FileNotFoundError:
                # Where locks do not work, the old checkpoint may be removed just now.
                if not left or not private.exists():
                    raise
        yield from self._replaced(old)

    def _replace(self, private: Path, old: Path) -> Iterator[Path]:
        try:
            os.rename(private, self.destination)
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
            if exchange(private, self.destination):
                yield from self._replaced(private)
            else:
                yield from self._replace_by_way_of(private, old)

    def _replaced(self, old: Path) -> Iterator[Path]:
        """Keep what is not ours of an older checkpoint, and yield the rest."""
        with suppress(OSError):
            if not old.is_symlink() and is_ours(old / MARKER):
                move_along(old, self.destination)
                yield set_aside(old, "trash")

    def _replace_by_way_of(self, private: Path, old: Path) -> Iterator[Path]:
        if _is_moved(self.destination):
            shutil.rmtree(self.destination)
        else:
            yield from self._replaced(old)  # what a dead save has left
            if os.path.lexists(old):
                detail = f"no checkpointer wrote it; {_MOVE}"
                raise StorageError(str(old), detail)
            move_directory(self.destination, old, first=MARKER)
        try:
            os.rename(private, self.destination)
        except BaseException:
            os.rename(old, self.destination)
            raise

    def _sync(self, directory: Path) -> None:
        if self._durable:
            sync_directory(directory)


def _check_free(destination: Path) -> None:
    """Refuse a destination directory with files that are not part of a checkpoint."""
    with named(destination):
        for _ in range(_MAX_TRIES):
            before = identity(destination)
            if not (detail := _what_occupies(destination)):
                return
            if identity(destination) == before:
                break  # else it was removed or replaced meanwhile
        raise StorageError(str(destination), detail)


def _what_occupies(destination: Path) -> str:
    """Return why no checkpoint can be saved there, or ""."""
    if destination.exists() and not destination.is_dir():
        return "it is a file; name a directory"
    if os.path.ismount(destination):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))  # as a rename would
    with suppress(FileNotFoundError):
        marker = destination / MARKER
        is_checkpoint = marker.is_file() and is_ours(marker)
        if any(destination.iterdir()) and not (is_checkpoint or _is_moved(destination)):
            return "it holds files, and no checkpoint; choose a new directory"
    return ""


def _is_moved(destination: Path) -> bool:
    """Say whether a save has died while it moved the whole directory to ``.old``."""
    old = old_of(destination)
    is_old = (old / MARKER).is_file() and not (destination / MARKER).exists()
    return is_old and all((old / each.name).exists() for each in destination.iterdir())


def _is_free(path: Path) -> bool:
    """Remove what a dead save has left; return False if a process has it locked.

    Raises:
        StorageError: no checkpointer wrote what is there.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        raise StorageError(str(path), f"no checkpointer wrote it; {_MOVE}") from None
    try:
        if not lock(fd):
            return False
        if not begins_as_ours(fd):
            raise StorageError(str(path), f"no checkpointer wrote it; {_MOVE}")
        if is_at(path, fd):
            path.unlink()
        return True
    finally:
        unlock(fd)


def _described(path: Path, step: int) -> RankFile:
    """Return the marker's entry for a file, from the start of its header."""
    try:
        with regular_file(path) as file:
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


def _remove_others(
    directory: Path, files: Collection[str], *, markers_only: bool = False
) -> None:
    """Remove files of a failed save, or of a save by more ranks.

    Files that no checkpointer wrote stay.
    """
    for each in [*directory.iterdir()]:
        is_marker = each.name.startswith(MARKER)
        unwanted = is_marker or (not markers_only and each.name not in files)
        if unwanted and is_ours(each):
            each.unlink()


def is_committed(destination: Path, rank: int, identity: tuple[int, int]) -> bool:
    """Say whether the checkpoint at a path has this file of a rank.

    Args:
        destination: The checkpoint's final path.
        rank: The rank.
        identity: The `Draft.identity` of the save.
    """
    with suppress(OSError):
        if (found := complete_at(destination)) is not None:
            state = os.stat(found.path / rank_file(rank))
            return (state.st_dev, state.st_ino) == identity
    return False
