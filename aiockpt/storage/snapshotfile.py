"""A snapshot, or whatever has a header and a data segment, into one open file.

Large blocks, straight from where the bytes lie; the header comes last, since it holds
the digests, which may be computed while the blocks are written. Everything here blocks
and releases the interpreter lock meanwhile; nothing needs tensors.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from aiockpt.errors import StorageError
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.storage.checkpoint_file import after, named

__all__ = ["BLOCK", "Sealed", "Source", "Viewed", "write_source"]

BLOCK: Final = 4 << 20
"""Bytes that are asked for, digested and written at once: they stay in the cache."""

_WRITEBACK: Final = 32 << 20
_SYNC_FILE_RANGE_WRITE: Final = 2
_MAX_VIEWS: Final = 1024  # of one call, by the kernel
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}

_libc = ctypes.CDLL(None, use_errno=True)


class Viewed(Protocol):
    """A snapshot, as far as a file needs it."""

    @property
    def manifest(self) -> Manifest:
        """The sealed manifest."""

    def views(self, start: int, stop: int) -> Sequence[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment, in order."""


class Source(Protocol):
    """What can be written: a header of a known length, and the data segment."""

    @property
    def header_bytes(self) -> int:
        """The length of the header."""

    @property
    def segment_bytes(self) -> int:
        """The length of the data segment."""

    def views(self, start: int, stop: int) -> Sequence[memoryview]:
        """Return ``[start, stop)``; asked for once each, in order, before the rest."""

    def seal(self) -> Manifest | ForeignHeader:
        """Return the header; asked for when all bytes were."""


class Sealed:
    """A snapshot as a source."""

    def __init__(self, snapshot: Viewed) -> None:
        self._snapshot = snapshot
        self.header_bytes = snapshot.manifest.header_bytes
        self.segment_bytes = snapshot.manifest.segment_bytes

    def views(self, start: int, stop: int) -> Sequence[memoryview]:
        """Return ``[start, stop)``."""
        return self._snapshot.views(start, stop)

    def seal(self) -> Manifest:
        """Return the manifest."""
        return self._snapshot.manifest


def write_source(
    path: Path, fd: int, source: Source, *, durable: bool
) -> Manifest | ForeignHeader:
    """Fill an empty file, of which ``path`` is only the name; return its header.

    With ``durable``, everything is on the disk afterwards.

    Raises:
        StorageError: the disk is full, or failed; the file is to be thrown away.
    """
    base, size = source.header_bytes, source.segment_bytes
    with named(path), _saying_what_is_free(path, fd, base + size):
        _reserve(fd, base + size)
        started = 0
        for start, stop in _blocks(base, size):
            _write(fd, source.views(start, stop), base + start)
            if durable and (stop - started >= _WRITEBACK or stop == size):
                _start_writeback(fd, base + started, stop - started)
                started = stop
        sealed = source.seal()
        assert sealed.header_bytes == base, "the header would run into the segment"
        _write(fd, [memoryview(sealed.header)], 0)
        if durable:
            os.fsync(fd)
    return sealed


def _blocks(base: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut a segment where the file is at a multiple of a block, so at whole pages."""
    start = 0
    while start < size:
        stop = min(start + BLOCK - (base + start) % BLOCK, size)
        yield start, stop
        start = stop


def _write(fd: int, views: Sequence[memoryview], at: int) -> None:
    for first in range(0, len(views), _MAX_VIEWS):
        left = [*views[first : first + _MAX_VIEWS]]
        while left:
            written = os.pwritev(fd, left, at)
            at += written
            left = after(left, written)


@contextmanager
def _saying_what_is_free(path: Path, fd: int, size: int) -> Iterator[None]:
    """Turn a full disk into an error with numbers in it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, StorageError):
            raise
        os.ftruncate(fd, 0)  # or what was written counts as used
        system = os.fstatvfs(fd)
        free = system.f_bavail * system.f_frsize
        detail = (
            f"{os.strerror(error.errno)}: {size / 1e6:.1f} MB are needed and "
            f"{free / 1e6:.1f} MB are free"
        )
        raise StorageError(str(path), detail) from error


def _reserve(fd: int, size: int) -> None:
    """Have the blocks of the file allocated at once, where the system knows how.

    It writes faster then, and a full disk is noticed before a byte is written. (The C
    library's ``posix_fallocate`` would write zeros where the file system cannot.)
    """
    if not size or not hasattr(_libc, "fallocate64"):
        return
    offset = ctypes.c_int64
    if _libc.fallocate64(fd, 0, offset(0), offset(size)):
        code = ctypes.get_errno()
        if code in _FULL:
            raise OSError(code, os.strerror(code))


def _start_writeback(fd: int, start: int, nbytes: int) -> None:
    """Let the disk begin now with what the later fsync waits for."""
    if hasattr(_libc, "sync_file_range"):
        offset = ctypes.c_int64
        _libc.sync_file_range(fd, offset(start), offset(nbytes), _SYNC_FILE_RANGE_WRITE)
