"""Encodes and caches the deltas that a sender answers with.

A receiver with an earlier step asks for a range of whole chunks, and names the snapshot
that it may hold. If the sender keeps that snapshot, it answers with one delta for each
chunk (`aiockpt.transfer.deltas`). The sender encodes a chunk at the first request for
it. The cache lives as long as the snapshot, so a second receiver costs no computation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aiockpt.http.store import Publication
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.system import usable_cores
from aiockpt.runtime.tasks import run_all
from aiockpt.transfer.deltas import RAW, SAME, encode, head

_THREADS: Final = 2  # per answer
_MOST: Final = 0.5  # of the range; the range itself is sent instead of longer deltas


@dataclass(frozen=True, slots=True)
class DeltaBody:
    """The body of an answer with deltas, in pieces."""

    pieces: Sequence[bytes | memoryview]

    @property
    def nbytes(self) -> int:
        """The length of the body in bytes."""
        return sum(map(len, self.pieces))

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)``."""
        found = []
        at = 0
        for piece in self.pieces:
            first, last = max(start - at, 0), min(stop - at, len(piece))
            if first < last:
                found.append(memoryview(piece)[first:last])
            at += len(piece)
        return found


class Deltas:
    """Encodes the deltas of publications, each once.

    Args:
        threads: The threads that encode.
    """

    def __init__(self, threads: Bridge) -> None:
        self._threads = threads
        # More threads than cores would only compete for the caches.
        self._cores = asyncio.Semaphore(max(2, usable_cores()))
        self._turns: dict[tuple[Publication, int], asyncio.Future[None]] = {}

    async def body(
        self, target: Publication, base: Publication, chunks: range
    ) -> DeltaBody | None:
        """Return the deltas of some chunks.

        The caller keeps both snapshots until this returns, and ``target`` for as long
        as it uses the body.

        Returns:
            The body of an answer, or None if the range itself should be sent.
        """
        known, waiting = target.deltas, iter(chunks)

        async def work() -> None:
            for chunk in waiting:
                await self._encode(target, base, chunk)

        await run_all([work] * min(_THREADS, len(chunks)))
        grid = target.servable.manifest.grid
        pieces: list[bytes | memoryview] = []
        for chunk in chunks:
            delta = known[chunk]
            if delta is not None:
                pieces.append(delta)
                continue
            start, stop = grid.range(chunk)
            pieces += [head(RAW, stop - start), *target.servable.views(start, stop)]
        whole = grid.range(chunks[-1])[1] - grid.range(chunks[0])[0]
        body = DeltaBody(pieces)
        return body if body.nbytes <= _MOST * whole else None

    async def _encode(self, target: Publication, base: Publication, chunk: int) -> None:
        """Encode a chunk, or wait for the request that is encoding it."""
        key = target, chunk
        while chunk not in target.deltas:
            if (turn := self._turns.get(key)) is not None:
                await asyncio.wait({turn})
                continue
            self._turns[key] = turn = asyncio.get_running_loop().create_future()
            try:
                run = self._threads.run
                async with self._cores:
                    target.deltas[chunk] = await run(_encoded, target, base, chunk)
            finally:
                del self._turns[key]
                turn.set_result(None)


def _encoded(target: Publication, base: Publication, chunk: int) -> bytes | None:
    manifest = target.servable.manifest
    if base.servable.manifest.digests[chunk] == manifest.digests[chunk]:
        return head(SAME, 0)
    start, stop = manifest.grid.range(chunk)
    old, new = (_whole(each.servable.views(start, stop)) for each in (base, target))
    return encode(old, new)


def _whole(views: Sequence[memoryview]) -> memoryview:
    return views[0] if len(views) == 1 else memoryview(b"".join(views))
