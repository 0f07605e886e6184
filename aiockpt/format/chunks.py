"""The chunk grid of a data segment, its digests, and HTTP's range headers.

Inside the package a range is half-open, ``[start, stop)``. The inclusive form of
RFC 9110 section 14 exists in the parsers and formatters below and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from xxhash import xxh3_128

from aiockpt.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "ALGORITHM",
    "CHUNK_ALIGNMENT",
    "DEVICE_ALGORITHM",
    "DIGEST_DIGITS",
    "MIN_CHUNK_BYTES",
    "ChunkGrid",
    "Digester",
    "RangeNotSatisfiable",
    "check_chunk_bytes",
    "chunks_over",
    "digest",
    "format_content_range",
    "format_range",
    "format_unsatisfied_range",
    "parse_content_range",
    "parse_range",
]

ALGORITHM = "xxh3-128"
DEVICE_ALGORITHM = "multilinear-xxh3-128"  # aiockpt.pg.device computes it
DIGEST_DIGITS = 32
CHUNK_ALIGNMENT = 64
MIN_CHUNK_BYTES = 64 * 1024

Views: TypeAlias = Callable[[int, int], Sequence[memoryview]]

# 19 digits hold every int64; longer ones only cost time.
_RANGE = re.compile(r"([0-9]{0,19})-([0-9]{0,19})")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")


class RangeNotSatisfiable(LocalProtocolError):  # noqa: N818 (HTTP's own name for 416)
    """A well-formed ``Range`` asks for nothing that exists (HTTP 416)."""

    def __init__(self, value: str, size: int) -> None:
        super().__init__(f"range {value!r} lies outside the {size} bytes that exist")
        self.value = value
        self.size = size


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


def parse_range(value: str | None, size: int) -> tuple[int, int] | None:
    """Return the bytes that a ``Range`` header asks for, clamped to ``size``.

    None means *ignore it and send everything* (RFC 9110 section 14.2): absent,
    malformed, another unit, or several ranges.

    Raises:
        RangeNotSatisfiable: the range is well formed and holds no byte.
    """
    match = _RANGE.fullmatch(_only_spec(value))
    if value is None or match is None or match[0] == "-":
        return None
    first, last = match.groups()
    if not first:
        return _suffix(value, int(last), size)
    start, stop = int(first), int(last) + 1 if last else size
    if last and stop <= start:
        return None
    if start >= size:
        raise RangeNotSatisfiable(value, size)
    return start, min(stop, size)


def _only_spec(value: str | None) -> str:
    unit, _, specs = (value or "").partition("=")
    # RFC 9110 5.6.1: a list may hold blanks and empty elements.
    given = [spec for each in specs.split(",") if (spec := each.strip(" \t"))]
    return given[0] if unit.lower() == "bytes" and len(given) == 1 else ""


def _suffix(value: str, length: int, size: int) -> tuple[int, int] | None:
    if length == 0:
        raise RangeNotSatisfiable(value, size)
    # The last n bytes of nothing are satisfiable, and have no Content-Range.
    return (max(size - length, 0), size) if size else None


def format_range(start: int, stop: int) -> str:
    """Return the ``Range`` value of a non-empty ``[start, stop)``."""
    _require_bytes(start, stop)
    return f"bytes={start}-{stop - 1}"


def format_content_range(start: int, stop: int, size: int) -> str:
    """Return the ``Content-Range`` value of a 206."""
    _require_bytes(start, stop)
    return f"bytes {start}-{stop - 1}/{size}"


def format_unsatisfied_range(size: int) -> str:
    """Return the ``Content-Range`` value of a 416."""
    return f"bytes */{size}"


def _require_bytes(start: int, stop: int) -> None:
    if not 0 <= start < stop:
        raise LocalProtocolError(f"[{start}, {stop}) is no range of bytes")


def parse_content_range(value: str | None) -> tuple[int, int, int]:
    """Return ``(start, stop, size)`` of a 206's ``Content-Range``.

    Raises:
        RemoteProtocolError: absent, malformed, contradictory, or of unknown size.
    """
    match = _CONTENT_RANGE.fullmatch(value or "")
    if match is not None:
        start, last, size = map(int, match.groups())
        if start <= last < size:
            return start, last + 1, size
    raise RemoteProtocolError(f"bad Content-Range {(value or '')[:100]!r}")


def chunks_over(grid: ChunkGrid, ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the chunks that hold bytes of these ranges, ascending."""
    found = {
        chunk
        for start, stop in ranges
        if start < stop
        for chunk in range(grid.index_of(start), grid.index_of(stop - 1) + 1)
    }
    return sorted(found)
