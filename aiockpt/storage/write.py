"""Write a header and a data segment into one open file.

The segment goes to the file in large blocks, straight from the memory where it lies.
The header comes last: it holds the digests, which may be computed while the blocks are
written. Everything here blocks, and releases the interpreter lock meanwhile. Nothing
needs tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.storage.files import (
    named,
    reserve,
    saying_what_is_free,
    start_writeback,
    write_at,
)

__all__ = ["BLOCK", "Sealed", "Source", "Viewed", "write_source"]

BLOCK: Final = 4 << 20
"""How many bytes are asked for, digested and written at once: they fit the cache."""

_WRITEBACK: Final = 32 << 20


class Viewed(Protocol):
    """A snapshot, as far as a file needs it."""

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""

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
        """Return ``[start, stop)``. Each byte is asked for once, in ascending order."""

    def seal(self) -> Manifest | ForeignHeader:
        """Return the header; called after all bytes were asked for."""


class Sealed:
    """A snapshot whose manifest has its digests, as a source."""

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
    """Fill an empty open file; return its header. ``path`` is for error messages only.

    With ``durable``, everything is on the disk afterwards.

    Raises:
        StorageError: the disk is full, or has failed; throw the file away.
    """
    base, size = source.header_bytes, source.segment_bytes
    with named(path), saying_what_is_free(path, fd, base + size):
        reserve(fd, base + size)
        started = 0
        for start, stop in _blocks(base, size):
            write_at(fd, source.views(start, stop), base + start)
            if durable and (stop - started >= _WRITEBACK or stop == size):
                start_writeback(fd, base + started, stop - started)
                started = stop
        header = source.seal()
        assert header.header_bytes == base, "the header would overlap the segment"
        write_at(fd, [memoryview(header.header)], 0)
        if durable:
            os.fsync(fd)
    return header


def _blocks(base: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut a segment at multiples of a block in the file, so at whole pages."""
    start = 0
    while start < size:
        stop = min(start + BLOCK - (base + start) % BLOCK, size)
        yield start, stop
        start = stop
