"""Digests of chunks, computed by the threads that move the bytes.

A message has just been gathered, or has just arrived, so its bytes are in the cache:
that costs half of what reading them later would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from aiockpt.errors import IntegrityError
from aiockpt.format.chunks import DIGEST_DIGITS, UNSEALED, ChunkGrid, ChunkHasher
from aiockpt.memory.arena import view_of_address

__all__ = ["HostSealing", "OnChunk", "Sealing", "damage"]

OnChunk = Callable[[int], object]
"""Told how many bytes a chunk has that has arrived; in any thread."""


class Sealing(Protocol):
    """Finds the digests of a segment that moves."""

    def add(self, start: int, data: torch.Tensor) -> None:
        """Take the bytes from ``start`` on, which is where an earlier call ended."""

    async def digits(self) -> bytearray:
        """Return all digests, joined, when everything has moved."""


class HostSealing:
    """Finds the digests of a segment in host memory.

    Several threads may bring the same bytes, each in order: the first one counts.
    ``torn`` says at the end whether they have changed since the first one was taken;
    if so, there are no digests that match them.
    """

    def __init__(
        self,
        grid: ChunkGrid,
        on_chunk: OnChunk | None = None,
        torn: Callable[[], bool] | None = None,
    ) -> None:
        self._grid = grid
        self._torn = torn
        self._on_chunk = on_chunk
        self._lock = threading.Lock()
        self._hasher = ChunkHasher(grid)
        self._digests: list[str] = []

    def __repr__(self) -> str:
        return f"<HostSealing chunks={len(self._digests)} of {len(self._grid)}>"

    def add(self, start: int, data: torch.Tensor) -> None:
        """Take the bytes from ``start`` on, which is where an earlier call ended."""
        with self._lock:
            if start < self._hasher.position:
                return
            assert start == self._hasher.position
            view = view_of_address(data.data_ptr(), data.nbytes, data)
            hashed = self._hasher.update(start, view)
            self._digests += [each.digest for each in hashed]
            if len(self._digests) == len(self._grid) and self._torn and self._torn():
                self._digests = [UNSEALED] * len(self._grid)
            if self._on_chunk is not None:
                for each in hashed:
                    first, stop = self._grid.range(each.chunk)
                    self._on_chunk(stop - first)

    async def digits(self) -> bytearray:
        """Return all digests, joined."""
        assert len(self._digests) == len(self._grid)
        return bytearray("".join(self._digests).encode())


def damage(sent: bytearray, found: bytearray) -> IntegrityError | None:
    """Return what is wrong with the first chunk that is not what was sent."""
    if sent == found:
        return None
    for chunk, at in enumerate(range(0, len(found), DIGEST_DIGITS)):
        digests = (digits[at : at + DIGEST_DIGITS] for digits in (sent, found))
        expected, actual = (each.decode("ascii", "replace") for each in digests)
        if expected != actual:
            return IntegrityError(expected=expected, actual=actual, chunk=chunk)
    return None
