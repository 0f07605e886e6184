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
from http import HTTPStatus
from typing import Final

import anyio

from aiockpt.format.manifest import Manifest
from aiockpt.http import protocol as http
from aiockpt.http.extension import Asked
from aiockpt.http.responses import Reply
from aiockpt.http.store import Publication, Store
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.system import usable_cores
from aiockpt.runtime.tasks import run_all
from aiockpt.transfer.deltas import RAW, SAME, encode, head

_MAX_RANGE_BYTES: Final = 64 << 20  # of several chunks
_THREADS_PER_ANSWER: Final = 2
_MAX_PART: Final = 0.5  # of the range, which is sent itself instead of longer deltas


@dataclass(frozen=True, slots=True)
class DeltaBody:
    """The body of an answer: deltas from the snapshot ``base``, in pieces."""

    base: str
    pieces: Sequence[bytes | memoryview]

    @property
    def nbytes(self) -> int:
        """The length of the body in bytes."""
        return sum(map(len, self.pieces))

    def describe(self, reply: Reply) -> None:
        """Change the reply to the range so that it announces this body."""
        reply.status = HTTPStatus.IM_USED
        reply.headers["IM"] = http.DELTA
        reply.headers[http.DELTA_BASE_HEADER] = http.format_etag(self.base)
        reply.headers["Content-Length"] = str(self.nbytes)

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
    """Encodes each delta of a publication once.

    Args:
        store: Holds the publications and their bases.
        threads: Runs the encoder.
    """

    def __init__(self, store: Store, threads: Bridge) -> None:
        self._store, self._threads = store, threads
        # More threads than cores would only compete for the caches.
        self._cores = asyncio.Semaphore(max(2, usable_cores()))
        self._turns: dict[tuple[Publication, int], asyncio.Future[None]] = {}

    async def answer(self, asked: Asked, reply: Reply) -> DeltaBody | None:
        """Return the deltas of a planned range.

        If the store needs the memory of a snapshot, this ends after the chunks that are
        being encoded, and returns None.

        Returns:
            The body of the answer. None: the request does not permit deltas, or the
            range itself is better.
        """
        publication = asked.publication
        base = self._store.base_of(publication)
        if base is None or reply.status != HTTPStatus.PARTIAL_CONTENT:
            return None
        # A long range would keep both snapshots for as long as it is encoded.
        chunks = _whole_chunks(reply, publication.servable.manifest)
        is_long = reply.stop - reply.start > _MAX_RANGE_BYTES
        if not chunks or (len(chunks) > 1 and is_long):
            return None
        if not http.asks_for_delta(asked.request.headers, base.snapshot_id):
            return None
        reading = self._store.reading
        with anyio.CancelScope() as scope:
            async with (
                reading(publication, evict=scope.cancel, lease=asked.lease),
                reading(base, evict=scope.cancel),
            ):
                return await self._body(publication, base, chunks)
        return None

    async def _body(
        self, target: Publication, base: Publication, chunks: range
    ) -> DeltaBody | None:
        """Return the deltas of chunks, if they are short. The caller reads both."""
        known, waiting = target.deltas, iter(chunks)

        async def work() -> None:
            for chunk in waiting:
                await self._encode(target, base, chunk)

        await run_all([work] * min(_THREADS_PER_ANSWER, len(chunks)))
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
        body = DeltaBody(base.snapshot_id, pieces)
        return body if body.nbytes <= _MAX_PART * whole else None

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


def _whole_chunks(reply: Reply, manifest: Manifest) -> range:
    """Return the chunks of a range; none if the range is not made of whole chunks."""
    start = reply.start - manifest.header_bytes
    stop = reply.stop - manifest.header_bytes
    size, whole = manifest.chunk_bytes, manifest.segment_bytes
    if start < 0 or start % size or (stop % size and stop != whole):
        return range(0)
    return range(start // size, -(-stop // size))


def _encoded(target: Publication, base: Publication, chunk: int) -> bytes | None:
    manifest = target.servable.manifest
    if base.servable.manifest.digests[chunk] == manifest.digests[chunk]:
        return head(SAME, 0)
    start, stop = manifest.grid.range(chunk)
    old, new = (_whole(each.servable.views(start, stop)) for each in (base, target))
    return encode(old, new)


def _whole(views: Sequence[memoryview]) -> memoryview:
    return views[0] if len(views) == 1 else memoryview(b"".join(views))
