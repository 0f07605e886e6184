"""Digests of chunks, computed by the threads that move the bytes.

A message has just been gathered, or has just arrived, so its bytes are in the cache:
that costs half of what reading them later would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from xxhash import xxh3_128

from aiockpt.errors import IntegrityError
from aiockpt.wire.chunks import DIGEST_DIGITS, ChunkGrid

__all__ = ["Sealing"]


class Sealing:
    """The digests of a data segment whose bytes come in order.

    Several threads may bring the same bytes, each in order: the first one counts.
    ``on_chunk`` is told in such a thread how many bytes each chunk has.
    """

    def __init__(
        self, grid: ChunkGrid, on_chunk: Callable[[int], object] | None = None
    ) -> None:
        self._grid = grid
        self._on_chunk = on_chunk
        self._lock = threading.Lock()
        self._state = xxh3_128()
        self._digests: list[str] = []
        self._reached = 0

    def __repr__(self) -> str:
        return f"<Sealing chunks={len(self._digests)} of {len(self._grid)}>"

    def add(self, start: int, data: memoryview) -> None:
        """Take the bytes from ``start`` on, which is where an earlier call ended."""
        with self._lock:
            if start < self._reached:
                return
            assert start == self._reached
            while data:
                first, stop = self._grid.range(len(self._digests))
                piece = data[: stop - self._reached]
                self._state.update(piece)
                self._reached += len(piece)
                data = data[len(piece) :]
                if self._reached == stop:
                    self._end_chunk(stop - first)

    def _end_chunk(self, nbytes: int) -> None:
        self._digests.append(self._state.hexdigest())
        self._state = xxh3_128()
        if self._on_chunk is not None:
            self._on_chunk(nbytes)

    def digits(self) -> bytearray:
        """Return all digests, joined."""
        assert len(self._digests) == len(self._grid)
        return bytearray("".join(self._digests).encode())

    def damage(self, digits: Sequence[int]) -> IntegrityError | None:
        """Return the first chunk that is not what a peer's ``digits`` say."""
        sent = bytes(digits).decode("ascii", "replace")
        for chunk, actual in enumerate(self._digests):
            expected = sent[chunk * DIGEST_DIGITS :][:DIGEST_DIGITS]
            if actual != expected:
                return IntegrityError(expected=expected, actual=actual, chunk=chunk)
        return None
