"""The chunk grid of a data segment, and the digests of its chunks.

A chunk is the unit of verification, of retry, and of blame. Bytes are digested while
they pass, since a digest costs half as much while its bytes are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, get_args

from xxhash import xxh3_128

from aiockpt.errors import IntegrityError, LocalProtocolError, MissingExtraError

Algorithm: TypeAlias = Literal["xxh3-128", "sha256", "blake3"]
"""A digest algorithm that a sender may choose, and that every receiver accepts."""

ALGORITHMS: Final[tuple[str, ...]] = get_args(Algorithm)
ALGORITHM: Final[Algorithm] = "xxh3-128"
DEVICE_ALGORITHM: Final = "multilinear-xxh3-128"  # aiockpt.pg.device computes it
CHUNK_ALIGNMENT: Final = 64
MIN_CHUNK_BYTES: Final = 64 * 1024
BLOCK: Final = 4 << 20
"""Bytes that are digested and written at once; they fit into the cache."""


class _Hasher(Protocol):
    """The state of a digest, as in `hashlib`; `update` releases the GIL."""

    def update(self, data: memoryview | bytes | bytearray, /) -> object: ...

    def hexdigest(self) -> str: ...


def _blake3() -> _Hasher:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise MissingExtraError("blake3", extra="blake3") from error
    return blake3()


_HASHES: Final[dict[str, tuple[int, Callable[[], _Hasher]]]] = {
    "xxh3-128": (32, xxh3_128),
    DEVICE_ALGORITHM: (32, xxh3_128),  # of what the device has folded
    "sha256": (64, sha256),
    "blake3": (64, _blake3),
}
"""How many hexadecimal digits a digest has, and what computes it."""


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """Equal slices of ``segment_bytes`` bytes; the last one may be shorter.

    ``algorithm`` is the algorithm of the chunks' digests.
    """

    segment_bytes: int
    chunk_bytes: int
    algorithm: str = ALGORITHM

    @property
    def unsealed(self) -> str:
        """The zeros that stand for a digest that is not known yet."""
        return "0" * digits_of(self.algorithm)

    def __len__(self) -> int:
        return (self.segment_bytes + self.chunk_bytes - 1) // self.chunk_bytes

    def range(self, index: int) -> tuple[int, int]:
        """Return the ``[start, stop)`` of a chunk, or raise IndexError."""
        start = index * self.chunk_bytes
        if index < 0 or start >= self.segment_bytes:
            raise IndexError(f"chunk {index} of {len(self)}")
        return start, min(start + self.chunk_bytes, self.segment_bytes)

    def size(self, index: int) -> int:
        """Return the bytes of a chunk, or raise IndexError."""
        start, stop = self.range(index)
        return stop - start

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


def check_algorithm(algorithm: str) -> None:
    """Check that this process can compute digests of the algorithm.

    Raises:
        ValueError: no sender may choose it.
        MissingExtraError: its library is not installed.
    """
    if algorithm not in ALGORITHMS:
        known = ", ".join(map(repr, ALGORITHMS))
        raise ValueError(f"digest must be one of {known}, got {algorithm!r}")
    _HASHES[algorithm][1]()


def digits_of(algorithm: str) -> int:
    """Return how many hexadecimal digits a digest of a known algorithm has."""
    return _HASHES[algorithm][0]


def chunks_over(grid: ChunkGrid, ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the chunks that hold bytes of these ranges, ascending."""
    found = {
        chunk
        for start, stop in ranges
        if start < stop
        for chunk in range(grid.index_of(start), grid.index_of(stop - 1) + 1)
    }
    return sorted(found)


def digest(
    views: Iterable[memoryview | bytes | bytearray], algorithm: str = ALGORITHM
) -> str:
    """Return the hex digest of the concatenated views (the GIL is released).

    Raises:
        MissingExtraError: the algorithm's library is not installed.
    """
    state = _HASHES[algorithm][1]()
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
        grid: The chunks of the data segment, and the algorithm of their digests.
        expected: The digest of every chunk, where a manifest says it.

    Attributes:
        position: The byte at which the last update ended.

    Raises:
        MissingExtraError: the algorithm's library is not installed.
    """

    def __init__(self, grid: ChunkGrid, expected: Sequence[str] | None = None) -> None:
        self.position = 0
        self._grid = grid
        self._expected = expected
        self._new = _HASHES[grid.algorithm][1]
        self._state = self._new()

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
            self._state = self._new()
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
                    self._state = self._new()
        return hashed
