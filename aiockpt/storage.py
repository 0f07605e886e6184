"""One checkpoint file: read its header, verify its chunks, receive a new one.

A checkpoint is received into ``FILE.part`` and becomes ``FILE`` by one rename, when
every chunk has been verified and is on the disk: whatever happens, ``FILE`` is wholly
the old checkpoint or wholly the new one. ``FILE.part`` outlives a receive that fails,
and the next one keeps each chunk in it whose digest is that of the manifest.

Everything here blocks.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aiockpt.errors import IntegrityError, ProtocolError, StorageError
from aiockpt.wire.chunks import digest
from aiockpt.wire.layout import LENGTH_BYTES, PREFIX
from aiockpt.wire.limits import Limits
from aiockpt.wire.manifest import ForeignHeader, Manifest, decode_header, header_length

__all__ = ["PartFile", "check_target", "read_header", "verify_chunks"]

_BLOCK = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}


def read_header(path: Path, *, limits: Limits) -> Manifest | ForeignHeader:
    """Return what the header of a safetensors file says, ours or another tool's.

    Raises:
        StorageError: it cannot be read, is no safetensors file, or is truncated.
        IntegrityError: the header of our file is damaged.
    """
    with _named(path), path.open("rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise StorageError(str(path), "it is not a regular file")
        header = _decode(path, file.fileno(), limits)
        _check_size(path, header, os.fstat(file.fileno()).st_size)
    return header


def _decode(path: Path, fd: int, limits: Limits) -> Manifest | ForeignHeader:
    try:
        length = header_length(os.pread(fd, LENGTH_BYTES, 0), limits=limits)
        return decode_header(os.pread(fd, length, 0), limits=limits)
    except IntegrityError as error:
        error.url = str(path)
        raise
    except ProtocolError as error:
        raise StorageError(str(path), f"it cannot be read: {error}") from error


def _check_size(path: Path, header: Manifest | ForeignHeader, actual: int) -> None:
    expected = header.header_bytes + header.segment_bytes
    if actual != expected:
        fault = "truncated" if actual < expected else "too long"
        detail = f"it is {fault}: {actual} bytes where its header says {expected}"
        raise StorageError(str(path), detail)


def verify_chunks(path: Path, manifest: Manifest) -> Iterator[IntegrityError]:
    """Read every chunk of a file; give an error for each whose digest is wrong.

    Raises:
        StorageError: it cannot be read to the end.
    """
    with _named(path), path.open("rb", buffering=0) as file:
        for chunk, expected in enumerate(manifest.digests):
            actual = _digest_of(path, file.fileno(), manifest, chunk)
            if actual != expected:
                yield IntegrityError(
                    chunk=chunk, expected=expected, actual=actual, url=str(path)
                )


def _digest_of(path: Path, fd: int, manifest: Manifest, chunk: int) -> str:
    start, stop = manifest.grid.range(chunk)
    base = manifest.header_bytes
    return digest(_blocks(path, fd, base + start, base + stop))


def _blocks(path: Path, fd: int, start: int, stop: int) -> Iterator[memoryview]:
    # Read, not mapped: a file that shrinks under a mapping kills the process.
    block = memoryview(bytearray(min(_BLOCK, stop - start)))
    while start < stop:
        got = os.preadv(fd, [block[: stop - start]], start)
        if not got:
            raise StorageError(str(path), f"it ends at byte {start}")
        yield block[:got]
        start += got


def check_target(path: Path) -> Path:
    """Return the file that a checkpoint may be written to; links are followed.

    Raises:
        StorageError: its directory does not exist, or it is no regular file, which a
            rename would destroy.
    """
    with _named(path):
        try:
            target = path.resolve()
        except RuntimeError:  # Python 3.11 and 3.12, for a loop of links
            target = path
        if target.is_symlink():  # what is left of a loop, since Python 3.13
            raise StorageError(str(path), "it is a link to itself")
        if not target.parent.is_dir():
            detail = f"there is no directory {target.parent}; make it first"
            raise StorageError(str(path), detail)
        if target.is_dir():
            raise StorageError(str(path), "it is a directory; name a file in it")
        if target.exists() and not target.is_file():
            raise StorageError(str(path), "it is not a regular file")
    return target


class PartFile:
    """A checkpoint on its way to a file: ``FILE.part``, filled in any order.

    It is locked against other processes until it is closed, and its space is
    reserved: a full disk is an error of :meth:`open`, never one of a byte that arrives.

    Attributes:
        path: ``FILE.part``.
        candidates: The chunks that may be there already; ask :meth:`holds`.
    """

    def __init__(
        self, target: Path, path: Path, fd: int, manifest: Manifest, known: int
    ) -> None:
        self.path = path
        self.candidates = range(_chunks_within(manifest, known))
        self._target = target
        self._manifest = manifest
        self._fd = fd
        self._map = mmap.mmap(fd, manifest.total_bytes)
        self._map[: manifest.header_bytes] = manifest.header

    @classmethod
    def open(cls, target: Path, manifest: Manifest) -> PartFile:
        """Open ``target``'s part file, which is made, resized and locked as needed.

        Raises:
            StorageError: it cannot be written, is in use, is something else than a
                part of a checkpoint, or the disk is full; it is then as before.
        """
        target = check_target(target)
        path = target.with_name(f"{target.name}.part")
        with _named(path):
            fd = _open_locked(path)
            try:
                _check_ours(path, fd)
                known = os.fstat(fd).st_size
                _reserve(path, fd, manifest.total_bytes)
                return cls(target, path, fd, manifest, known)
            except BaseException:
                os.close(fd)
                raise

    def __repr__(self) -> str:
        return f"<PartFile {self.path} bytes={self._manifest.total_bytes}>"

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the writable bytes ``[start, stop)`` of the data segment."""
        base = self._manifest.header_bytes
        return [memoryview(self._map)[base + start : base + stop]]

    def holds(self, chunk: int) -> bool:
        """Tell whether a chunk is there with the right digest."""
        with _named(self.path):
            actual = _digest_of(self.path, self._fd, self._manifest, chunk)
        return actual == self._manifest.digests[chunk]

    def commit(self) -> None:
        """Rename the part file to the file, with everything on the disk.

        Raises:
            StorageError: not written; the old file is as it was.
        """
        with _named(self.path):
            try:
                self._map.flush()
                os.fsync(self._fd)
            except OSError:
                # What the kernel failed to write may look written to the next receive.
                self.discard()
                raise
            os.replace(self.path, self._target)
            _sync_directory(self._target.parent)

    def discard(self) -> None:
        """Remove the part file."""
        with suppress(OSError):
            self.path.unlink()

    def close(self) -> None:
        """Unmap and unlock; the part file stays for the next receive. Idempotent."""
        with suppress(BufferError):  # a view that still lives keeps its pages
            self._map.close()
        if self._fd >= 0:
            # The mapping has a duplicate, which would keep the lock while it lives.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


def _chunks_within(manifest: Manifest, size: int) -> int:
    """Return how many chunks a file of ``size`` bytes may hold, the last cut short."""
    present = min(size - manifest.header_bytes, manifest.segment_bytes)
    return -(-present // manifest.chunk_bytes) if present > 0 else 0


def _open_locked(path: Path) -> int:
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, fd):
                return fd
        except BlockingIOError:
            os.close(fd)
            detail = "another process is receiving into it"
            raise StorageError(str(path), detail) from None
        os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    """Tell whether the file was not renamed or removed while we locked it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    return False


def _check_ours(path: Path, fd: int) -> None:
    """Refuse to overwrite what another program left under the same name."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise StorageError(str(path), "it is not a regular file")
    start = os.pread(fd, LENGTH_BYTES + len(PREFIX), 0)
    # Nothing but zeros: reserved, and killed before the header was written.
    known = start[LENGTH_BYTES:]
    if any(start) and not (known and PREFIX.startswith(known)):
        detail = "it is no part of a checkpoint; remove it or choose another file"
        raise StorageError(str(path), detail)


def _reserve(path: Path, fd: int, size: int) -> None:
    """Give the file ``size`` bytes that are really there, or leave it as it was."""
    before = os.fstat(fd).st_size
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.ftruncate(fd, before)
        free = _free_space(fd)
        if not before:
            path.unlink()
        if error.errno not in _FULL:
            raise
        detail = (
            f"{os.strerror(error.errno or 0)}: {size / 1e6:.1f} MB are needed and "
            f"{free / 1e6:.1f} MB are free; make room or choose another file"
        )
        raise StorageError(str(path), detail) from error
    os.ftruncate(fd, size)


def _free_space(fd: int) -> int:
    system = os.fstatvfs(fd)
    return system.f_bavail * system.f_frsize


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise ``StorageError`` with the path for what the system refuses."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(str(path), error.strerror or str(error)) from error
