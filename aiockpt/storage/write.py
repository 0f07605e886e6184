"""Writes a header and a data segment into one open file.

`write_file` writes any `Writable`. It writes the segment in large blocks, directly from
the memory that holds it. The header comes last, because it holds the digests, which may
be computed while the blocks are written. `WritableSnapshot` writes a snapshot,
`transfer.live.LiveState` a live state dict.

Everything here blocks, and releases the interpreter lock meanwhile. Nothing needs
tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from aiockpt.format.chunks import BLOCK, ChunkHasher
from aiockpt.format.entries import Entries, encode_entries
from aiockpt.format.header import LENGTH_BYTES, with_digests
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.memory.snapshot import MappedSnapshot, Snapshot
from aiockpt.runtime.switching import switching_often
from aiockpt.storage.files import (
    named,
    reserve,
    saying_what_is_free,
    start_writeback,
    write_at,
)

_WRITEBACK_BYTES: Final = 32 << 20  # written to the disk while more are digested


class Writable(Protocol):
    """A source for `write_file`: a header of a known length, and a data segment."""

    @property
    def header_bytes(self) -> int:
        """The length of the header."""

    @property
    def segment_bytes(self) -> int:
        """The length of the data segment."""

    def views(self, start: int, stop: int) -> Sequence[memoryview]:
        """Return ``[start, stop)``; called for each byte in ascending order.

        If `seal` is called first, `views` may return all bytes once more.
        """

    def seal(self) -> Manifest:
        """Return the header; bytes that `views` has not returned are read for it."""


class WritableSnapshot:
    """A snapshot to be written; its chunks are digested as they are read if needed.

    Args:
        snapshot: The snapshot.
        on_seal: Called once with the manifest, as soon as it has its digests.
    """

    def __init__(
        self,
        snapshot: Snapshot | MappedSnapshot,
        *,
        on_seal: Callable[[Manifest], object] | None = None,
    ) -> None:
        manifest = snapshot.manifest
        self.header_bytes = manifest.header_bytes
        self.segment_bytes = manifest.segment_bytes
        self._snapshot, self._manifest = snapshot, manifest
        self._on_seal = on_seal
        self._is_sealed = manifest.grid.unsealed not in manifest.digests
        self._hasher = ChunkHasher(manifest.grid)
        self._digests: list[str] = []

    def views(self, start: int, stop: int) -> Sequence[memoryview]:
        """Return ``[start, stop)``."""
        views = self._snapshot.views(start, stop)
        if not self._is_sealed:
            self._digest(start, views)
        return views

    def seal(self) -> Manifest:
        """Return the manifest with its digests; may be called at any time.

        Chunks that `views` has not returned yet are read for their digests.
        """
        if not self._is_sealed:
            for start in range(self._hasher.position, self.segment_bytes, BLOCK):
                stop = min(start + BLOCK, self.segment_bytes)
                self._digest(start, self._snapshot.views(start, stop))
            self._manifest = with_digests(self._manifest, self._digests)
            self._is_sealed = True
        if self._on_seal is not None:
            self._on_seal(self._manifest)
            self._on_seal = None
        return self._manifest

    def _digest(self, start: int, views: Sequence[memoryview]) -> None:
        self._digests += [each.digest for each in self._hasher.update(start, *views)]


def plain_header(entries: Entries) -> ForeignHeader:
    """Return the header of a safetensors file without our metadata."""
    text = b'{"__metadata__":{"format":"pt"}'
    text += b"".join(encode_entries(entries)) + b"}"
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return ForeignHeader(entries, {"format": "pt"}, header)


def write_file(path: Path, fd: int, writable: Writable, *, durable: bool) -> Manifest:
    """Fill an empty open file; return its header.

    ``path`` is only for error messages. With ``durable``, everything is on the disk
    when this returns.

    Raises:
        StorageError: the disk is full or has failed. The caller must discard the file.
    """
    base, size = writable.header_bytes, writable.segment_bytes
    full = saying_what_is_free(path, fd, base + size)
    with named(path), full, switching_often():
        reserve(fd, base + size)
        started = 0
        for start, stop in _blocks(base, size):
            write_at(fd, writable.views(start, stop), base + start)
            if durable and (stop - started >= _WRITEBACK_BYTES or stop == size):
                start_writeback(fd, base + started, stop - started)
                started = stop
        header = writable.seal()
        assert header.header_bytes == base, "the header would overlap the segment"
        write_at(fd, [memoryview(header.header)], 0)
        if durable:
            os.fsync(fd)
    return header


def _blocks(base: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut a segment at multiples of the block size in the file, so at whole pages."""
    start = 0
    while start < size:
        stop = min(start + BLOCK - (base + start) % BLOCK, size)
        yield start, stop
        start = stop
