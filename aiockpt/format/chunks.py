"""The chunk grid of a data segment, and the digests of its chunks.

A chunk is the unit of verification, of retry, and of blame. Bytes are digested while
they pass, since a digest costs half as much while its bytes are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from xxhash import xxh3_128

from aiockpt.errors import IntegrityError, LocalProtocolError

__all__ = [
    "ALGORITHM",
    "CHUNK_ALIGNMENT",
    "DEVICE_ALGORITHM",
    "DIGEST_DIGITS",
    "MIN_CHUNK_BYTES",
    "UNSEALED",
    "ChunkGrid",
    "ChunkHasher",
    "HashedChunk",
    "check_chunk_bytes",
    "chunks_over",
    "digest",
]

ALGORITHM: Final = "xxh3-128"
DEVICE_ALGORITHM: Final = "multilinear-xxh3-128"  # aiockpt.pg.device computes it
DIGEST_DIGITS: Final = 32
CHUNK_ALIGNMENT: Final = 64
MIN_CHUNK_BYTES: Final = 64 * 1024

UNSEALED: Final = "0" * DIGEST_DIGITS
"""Stands for a digest that is not known yet."""


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """Equal slices of ``segment_bytes`` bytes; the last one may be shorter."""

    segment_bytes: int
    chunk_bytes: int

    def __len__(self) -> int:
        return (self.segment_bytes + self.chunk_bytes - 1) // self.chunk_bytes

    def range(self, index: int) -> tuple[int, int]:
        """Return the ``[start, stop)`` of a chunk, or raise IndexError."""
        start = index * self.chunk_bytes
        if index < 0 or start >= self.segment_bytes:
            raise IndexError(f"chunk {index} of {len(self)}")
        return start, min(start + self.chunk_bytes, self.segment_bytes)

    def index_of(self, offset: int) -> int:
        """Return the chunk that holds the byte at ``offset``, or raise IndexError."""
        if not 0 <= offset < self.segment_bytes:
            raise IndexError(f"byte {offset} of {self.segment_bytes}")
        return offset // self.chunk_bytes


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Raise ValueError unless a checkpoint may have chunks of this size."""
    if chunk_bytes < MIN_CHUNK_BYTES or chunk_bytes % CHUNK_ALIGNMENT:
        raise ValueError(
            f"chunk_bytes must be a multiple of {CHUNK_ALIGNMENT}, at least "
            f"{MIN_CHUNK_BYTES}, got {chunk_bytes}"
        )


def chunks_over(grid: ChunkGrid, ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the chunks that hold bytes of these ranges, ascending."""
    found = {
        chunk
        for start, stop in ranges
        if start < stop
        for chunk in range(grid.index_of(start), grid.index_of(stop - 1) + 1)
    }
    return sorted(found)


def digest(views: Iterable[memoryview | bytes | bytearray]) -> str:
    """Return the hex digest of the concatenated views (the GIL is released)."""
    state = xxh3_128()
    for view in views:
        state.update(view)
    return state.hexdigest()


class HashedChunk(NamedTuple):
    """A chunk whose last byte has passed a `ChunkHasher`.

    Attributes:
        chunk: The chunk's number in the grid.
        digest: The digest of the bytes that passed.
        expected: The digest that the manifest has; None if there was no manifest.
    """

    chunk: int
    digest: str
    expected: str | None

    @property
    def matches(self) -> bool:
        """Whether these are the right bytes, as far as anybody can say."""
        return self.expected is None or self.digest == self.expected

    def error(self, url: str = "") -> IntegrityError:
        """Return the error that says what came from ``url`` instead."""
        expected = self.expected or ""
        return IntegrityError(
            chunk=self.chunk, expected=expected, actual=self.digest, url=url
        )


class ChunkHasher:
    """Digests a data segment while its bytes pass, chunk by chunk.

    A run of bytes begins at the first byte of any chunk, and each update goes on where
    the last one ended. An update at the first byte of a chunk may begin another run,
    or the same chunk again; the digest of an unfinished chunk is dropped then. One
    thread may use a hasher at a time.

    Args:
        grid: The chunks of the data segment.
        expected: The digest of every chunk, where a manifest says it.

    Attributes:
        position: The byte at which the last update ended.
    """

    def __init__(self, grid: ChunkGrid, expected: Sequence[str] | None = None) -> None:
        self.position = 0
        self._grid = grid
        self._expected = expected
        self._state = xxh3_128()

    def __repr__(self) -> str:
        return f"<ChunkHasher position={self.position} of {self._grid.segment_bytes}>"

    def update(
        self, start: int, *views: memoryview | bytes | bytearray
    ) -> list[HashedChunk]:
        """Digest the bytes from ``start`` on; return the chunks that ended in them.

        Raises:
            LocalProtocolError: ``start`` neither continues the run nor begins a chunk.
            IndexError: there are more bytes than the data segment has.
        """
        if start != self.position:
            if start % self._grid.chunk_bytes:
                raise LocalProtocolError(
                    f"byte {start} neither follows byte {self.position} nor begins a "
                    f"chunk of {self._grid.chunk_bytes} bytes"
                )
            self._state.reset()
            self.position = start
        hashed: list[HashedChunk] = []
        for view in views:
            rest = memoryview(view)
            while rest:
                index = self._grid.index_of(self.position)
                stop = self._grid.range(index)[1]
                piece = rest[: stop - self.position]
                self._state.update(piece)
                self.position += len(piece)
                rest = rest[len(piece) :]
                if self.position == stop:
                    expected = self._expected[index] if self._expected else None
                    hashed.append(HashedChunk(index, self._state.hexdigest(), expected))
                    self._state.reset()
        return hashed
