"""The chunk grid of a data segment, and the digests of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from xxhash import xxh3_128

__all__ = [
    "ALGORITHM",
    "CHUNK_ALIGNMENT",
    "DEVICE_ALGORITHM",
    "DIGEST_DIGITS",
    "MIN_CHUNK_BYTES",
    "UNSEALED",
    "ChunkGrid",
    "Digester",
    "check_chunk_bytes",
    "chunks_over",
    "digest",
]

ALGORITHM = "xxh3-128"
DEVICE_ALGORITHM = "multilinear-xxh3-128"  # aiockpt.pg.device computes it
DIGEST_DIGITS = 32
CHUNK_ALIGNMENT = 64
MIN_CHUNK_BYTES = 64 * 1024

Views: TypeAlias = Callable[[int, int], Sequence[memoryview]]


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
    """Raise ValueError for a chunk grid that no checkpoint has."""
    if chunk_bytes < MIN_CHUNK_BYTES or chunk_bytes % CHUNK_ALIGNMENT:
        raise ValueError(
            f"chunk_bytes must be a multiple of {CHUNK_ALIGNMENT}, at least "
            f"{MIN_CHUNK_BYTES}, got {chunk_bytes}"
        )


class Digester:
    """Computes the digests of a data segment that passes by in order.

    Attributes:
        digests: Those of the chunks that have passed; ``unknown`` for the others.
    """

    def __init__(self, grid: ChunkGrid, *, unknown: str) -> None:
        self.digests = [unknown] * len(grid)
        self._grid = grid
        self._state = xxh3_128()

    def __repr__(self) -> str:
        return f"<Digester chunks={len(self.digests)}>"

    def views(self, start: int, stop: int, of: Views) -> list[memoryview]:
        """Return the views ``of`` a range that follows on the last one, digested."""
        found: list[memoryview] = []
        while start < stop:
            chunk = self._grid.index_of(start)
            end = self._grid.range(chunk)[1]
            piece = of(start, min(stop, end))
            for view in piece:
                self._state.update(view)
            if end <= stop:
                self.digests[chunk] = self._state.hexdigest()
                self._state.reset()
            found += piece
            start = end
        return found


def digest(views: Iterable[memoryview | bytes | bytearray]) -> str:
    """Return the hex digest of the concatenated views (the GIL is released)."""
    state = xxh3_128()
    for view in views:
        state.update(view)
    return state.hexdigest()


def chunks_over(grid: ChunkGrid, ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the chunks that hold bytes of these ranges, ascending."""
    found = {
        chunk
        for start, stop in ranges
        if start < stop
        for chunk in range(grid.index_of(start), grid.index_of(stop - 1) + 1)
    }
    return sorted(found)


UNSEALED: Final = "0" * DIGEST_DIGITS
"""What stands for a digest that is not known yet."""
