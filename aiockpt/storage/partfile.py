"""A checkpoint that is received into a file, and replaces it in one step.

A checkpoint is received into ``FILE.part``. When every chunk has been verified and is
on the disk, one rename makes it ``FILE``. So ``FILE`` is always wholly the old
checkpoint or wholly the new one. ``FILE.part`` stays after a failed receive, and the
next receive keeps each chunk in it whose digest matches the manifest. A replaced file
passes its permissions on. The umask decides those of a new file.

Locks may not reach another host, which may still write into ``FILE.part``. So only a
receive of the same checkpoint goes on in it. Another one takes its place, and copies.

Everything here blocks.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from aiockpt.errors import StorageError
from aiockpt.format.manifest import Manifest
from aiockpt.storage.checkpoint_file import LocalFile
from aiockpt.storage.files import (
    in_place,
    is_at,
    named,
    open_locked,
    read_at,
    rename_to_new,
    reserve,
    saying_what_is_free,
    sync_directory,
    unlock,
)
from aiockpt.storage.ours import begins_as_ours

TAKEN: Final = "it is there already; choose another name, or replace it by --overwrite"
"""The detail of the error for a file that a command may not replace."""

_BUSY: Final = (
    "another process is receiving into it; wait until it has finished, or choose "
    "another file"
)
_FOREIGN: Final = "it is no part of a checkpoint; remove it or choose another file"

_PERMISSIONS = 0o777
_OURS = stat.S_IRUSR | stat.S_IWUSR


def check_target(path: Path, *, replace: bool = True) -> Path:
    """Return the file that a checkpoint may be written to; links are followed.

    Raises:
        StorageError: the directory does not exist, or the path is not a regular file,
            or, without ``replace``, a file exists already.
    """
    with named(path):
        try:
            target = path.resolve()
        except RuntimeError:  # Python 3.11 and 3.12, for a loop of links
            target = path
        if target.is_symlink():  # a loop of links, since Python 3.13
            raise StorageError(str(path), "it is a link to itself")
        if not target.parent.is_dir():
            detail = f"there is no directory {target.parent}; make it first"
            raise StorageError(str(path), detail)
        if target.is_dir():
            raise StorageError(str(path), "it is a directory; name a file in it")
        if target.exists() and not target.is_file():
            raise StorageError(str(path), "it is not a regular file")
        if not replace and os.path.lexists(path):
            raise StorageError(str(path), TAKEN)
    return target


class PartFile:
    """The file ``FILE.part``, mapped into memory and filled in any order.

    It is locked against other processes until it is closed. Its space is reserved, so
    a full disk is an error of :meth:`open` and never of a later write.

    Attributes:
        path: ``FILE.part``.
        candidates: The chunks that may be complete already; :meth:`holds` checks one.
    """

    def __init__(
        self, target: Path, path: Path, fd: int, manifest: Manifest, earlier: int
    ) -> None:
        self.path = path
        self.candidates = range(0)
        self._target = target
        self._manifest = manifest
        self._fd, self._earlier = fd, earlier
        self._map = mmap.mmap(fd, manifest.total_bytes)
        self._map[: manifest.header_bytes] = manifest.header

    @classmethod
    def open(cls, target: Path, manifest: Manifest) -> PartFile:
        """Open the part file of ``target``; create, resize and lock it as needed.

        Raises:
            StorageError: the file cannot be written, is in use, is not part of a
                checkpoint, or the disk is full. What it had of this checkpoint stays;
                if it had nothing, it is removed.
        """
        target = check_target(target)
        path = target.with_name(f"{target.name}.part")
        earlier = -1
        with named(path):
            fd, known = open_locked(path, busy=_BUSY), None
            try:
                known = os.fstat(fd).st_size
                if not begins_as_ours(fd):
                    raise StorageError(str(path), _FOREIGN)
                size = manifest.total_bytes
                start = os.pread(fd, manifest.header_bytes, 0)
                other = known > 0 and start != manifest.header
                if other and _only_one_fits(fd, size):
                    path.unlink()
                    os.close(fd)
                    fd, known, other = -1, 0, False
                    fd = open_locked(path, busy=_BUSY)
                if other:
                    earlier, fd = fd, -1
                    fd = _successor(path, target, size)
                else:
                    # Set before the first byte, which only its readers may see.
                    _permit(fd, _permissions(target), added=_OURS)
                    _reserve(path, fd, size)
                made = cls(target, path, fd, manifest, earlier)
                made.candidates = range(_chunks_within(manifest, known))
                return made
            except BaseException:
                if earlier < 0 <= fd:
                    _restore(path, fd, known)
                for each in {fd, earlier} - {-1}:
                    unlock(each)
                raise

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the writable bytes ``[start, stop)`` of the data segment."""
        base = self._manifest.header_bytes
        return [memoryview(self._map)[base + start : base + stop]]

    def check(self, start: int, stop: int) -> None:
        """Do nothing: a view keeps the mapping."""

    def holds(self, chunk: int) -> bool:
        """Say whether the file has a chunk with the right digest."""
        start, stop = self._manifest.grid.range(chunk)
        with named(self.path):
            if self._earlier >= 0:
                at = self._manifest.header_bytes + start
                with suppress(StorageError):  # it ends in the middle of the chunk
                    read_at(self.path, self._earlier, self.buffers(start, stop), at)
            actual = LocalFile(self.path, self._fd).digest(self._manifest, chunk)
        return actual == self._manifest.digests[chunk]

    def commit(self, *, replace: bool = True) -> None:
        """Sync the part file to the disk and rename it to the file.

        Raises:
            StorageError: the disk failed, or, without ``replace``, a file exists by
                now. The old file is unchanged, or ``may_be_committed`` is true.
        """
        with named(self.path):
            try:
                self._map.flush()
                os.fsync(self._fd)
            except OSError:
                # The next receive may read pages that the kernel failed to write.
                self.discard()
                raise
            if not is_at(self.path, self._fd):
                detail = "another process has replaced or removed it; fetch again"
                raise StorageError(str(self.path), detail)
            permissions = _permissions(self._target)
            _permit(self._fd, permissions, added=_OURS)
            if replace:
                os.replace(self.path, self._target)
            else:
                rename_to_new(self.path, self._target)
            with in_place(self._target):
                # Only now: the next receive must be able to write to a part file.
                _permit(self._fd, permissions, added=0)
                sync_directory(self._target.parent)

    def discard(self) -> None:
        """Remove the part file, if it is still this one."""
        with suppress(OSError):
            if is_at(self.path, self._fd):
                self.path.unlink()

    def close(self) -> None:
        """Unmap and unlock; the part file stays for the next receive. Idempotent."""
        with suppress(BufferError):  # a view that is still in use keeps its pages
            self._map.close()
        found = {self._fd, self._earlier} - {-1}
        self._fd = self._earlier = -1
        for fd in found:
            # The mapping has a duplicate, which would keep the lock while it lives.
            unlock(fd)


def _chunks_within(manifest: Manifest, size: int) -> int:
    """Return how many chunks a file of ``size`` bytes may hold, the last cut short."""
    present = min(size - manifest.header_bytes, manifest.segment_bytes)
    return -(-present // manifest.chunk_bytes) if present > 0 else 0


def _permissions(target: Path) -> int | None:
    """Return the permissions of the file to be replaced, or None."""
    with suppress(FileNotFoundError):
        return target.stat().st_mode & _PERMISSIONS
    return None


def _permit(fd: int, permissions: int | None, *, added: int) -> None:
    """Set permissions, where they differ: not every file system has them."""
    now = os.fstat(fd).st_mode & _PERMISSIONS
    if permissions is not None and permissions | added != now:
        os.fchmod(fd, permissions | added)


def _only_one_fits(earlier: int, size: int) -> bool:
    """Say whether the disk has room for a file only without an earlier one."""
    system, blocks = os.fstatvfs(earlier), os.fstat(earlier).st_blocks
    free = system.f_bavail * system.f_frsize
    return free < size <= free + blocks * 512


def _successor(path: Path, target: Path, size: int) -> int:
    """Put a new file in the place of a part file of another checkpoint, and lock it."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    fd = open_locked(new, busy=_BUSY)
    try:
        _permit(fd, _permissions(target), added=_OURS)
        _reserve(path, fd, size)
        os.rename(new, path)
    except BaseException:
        os.close(fd)
        new.unlink(missing_ok=True)
        raise
    return fd


def _reserve(path: Path, fd: int, size: int) -> None:
    """Allocate ``size`` bytes for the file."""
    with saying_what_is_free(path, fd, size, keep=os.fstat(fd).st_size):
        reserve(fd, size, always=True)
    os.ftruncate(fd, size)


def _restore(path: Path, fd: int, known: int | None) -> None:
    """Give the file the size that it had, or remove it if that was 0. Never raises."""
    with suppress(OSError):
        if not (os.fstat(fd).st_size if known is None else known):
            if is_at(path, fd):
                path.unlink()
        elif known is not None and os.fstat(fd).st_size > known:
            os.ftruncate(fd, known)
