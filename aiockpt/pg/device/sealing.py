"""Digests of chunks that are on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aiockpt.format.chunks import ChunkGrid
from aiockpt.pg.device.board import Board
from aiockpt.pg.device.segment import Segment
from aiockpt.pg.sealing import OnChunk
from aiockpt.runtime.bridge import Bridge

__all__ = ["DeviceSealing", "Sealed"]


class Sealed:
    """Digests that are known already."""

    def __init__(self, digests: Sequence[str]) -> None:
        self._digests = digests

    def add(self, start: int, data: torch.Tensor) -> None:
        """Do nothing."""

    async def digits(self) -> bytearray:
        """Return all digests, joined."""
        return bytearray("".join(self._digests).encode())


class DeviceSealing:
    """Finds the digests of a segment when all of it has arrived on the device."""

    def __init__(
        self,
        board: Board,
        bridge: Bridge,
        memory: Segment,
        grid: ChunkGrid,
        on_chunk: OnChunk | None,
    ) -> None:
        self._board, self._bridge = board, bridge
        self._memory, self._grid = memory, grid
        self._on_chunk = on_chunk

    def add(self, start: int, data: torch.Tensor) -> None:
        """Do nothing: the device is faster by far than what brings the bytes."""

    async def digits(self) -> bytearray:
        """Return all digests, joined."""
        found = bytearray()
        for chunk in range(len(self._grid)):
            start, stop = self._grid.range(chunk)
            digest = self._board.digest(self._memory, start, stop, self._bridge)
            found += (await digest).encode()
            if self._on_chunk is not None:
                self._on_chunk(stop - start)
        return found
