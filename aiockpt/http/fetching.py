"""Fetches chunks: bounded parallel ranges, resumed, verified, straight into memory.

``fetch_chunk`` and ``verify_chunk`` of a receive happen here. A chunk is done when its
digest is that of the manifest; bytes of another snapshot never meet those of this one,
because every request says ``If-Match``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from aiohttp import hdrs

from aiockpt._tasks import together
from aiockpt.errors import (
    CheckpointChangedError,
    IntegrityError,
    LocalProtocolError,
    RemoteProtocolError,
)
from aiockpt.http.exchange import Port, length_of
from aiockpt.http.filler import Filler
from aiockpt.http.retrying import OnRetry, Patience, Retrier, persist
from aiockpt.http.translating import Exchange, naming
from aiockpt.wire.chunks import format_range, parse_content_range
from aiockpt.wire.http import (
    Resource,
    ResourceKind,
    Source,
    format_etag,
    format_prefer_wait,
    format_resource,
    parse_etag,
)
from aiockpt.wire.manifest import Manifest

__all__ = ["ChunkFetch", "OnProgress", "Part", "Target", "Verify", "check_part", "plan"]

Verify = Callable[[list[memoryview]], Awaitable[str]]
OnProgress = Callable[[int, int], None]


class Target(Protocol):
    """Memory that chunks are received into."""

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return writable views of bytes for ``[start, stop)`` of the data segment."""


@dataclass(frozen=True, slots=True)
class Part:
    """One chunk to fetch: where it lies in the data segment, and its digest."""

    chunk: int
    start: int
    stop: int
    digest: str


def plan(manifest: Manifest, chunks: Sequence[int]) -> list[Part]:
    """Return what to fetch, each chunk once, in the order given."""
    grid = manifest.grid
    try:
        return [
            Part(chunk, *grid.range(chunk), manifest.digests[chunk])
            for chunk in dict.fromkeys(chunks)
        ]
    except IndexError as error:
        raise LocalProtocolError(f"no such chunk: {error}") from None


def check_part(
    headers: Mapping[str, str], wanted: tuple[int, int, int], exchange: Exchange
) -> None:
    """Raise unless a 206 holds exactly the wanted ``(start, stop, size)``."""
    tag = parse_etag(headers.get(hdrs.ETAG))
    if tag is not None and tag != exchange.snapshot_id:
        raise CheckpointChangedError(
            expected=exchange.snapshot_id or "", actual=tag, url=exchange.url
        )
    with naming(exchange):
        given = parse_content_range(headers.get(hdrs.CONTENT_RANGE))
    if given != wanted:
        raise RemoteProtocolError(
            f"{exchange.url} sent bytes {given[0]} to {given[1]} of {given[2]} "
            f"where {wanted[0]} to {wanted[1]} of {wanted[2]} were asked for"
        )


@dataclass(slots=True)
class _Pending:
    """A part on its way; ``received`` bytes of it are in their place."""

    part: Part
    received: int = 0
    attempts: int = 0

    @property
    def start(self) -> int:
        return self.part.start + self.received


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFetch:
    """One call of ``fetch_chunks``: what its requests have in common."""

    port: Port
    source: Source
    manifest: Manifest
    target: Target
    verify: Verify
    on_progress: OnProgress
    on_retry: OnRetry
    patience: Patience

    async def run(self, parts: Sequence[Part], *, workers: int) -> None:
        """Fetch all parts, at most ``workers`` at a time.

        The first part that fails for good cancels the others.
        """
        queue = iter(parts)
        work = partial(self._work, queue)
        await together([work] * min(workers, len(parts)))
        assert next(queue, None) is None, "a chunk was left out"

    async def _work(self, queue: Iterator[Part]) -> None:
        for part in queue:
            attempt = partial(self._attempt, _Pending(part))
            await persist(attempt, Retrier(self.patience), self.on_retry)
            self.on_progress(0, 1)

    async def _attempt(self, pending: _Pending) -> None:
        pending.attempts += 1
        if pending.start < pending.part.stop:
            await self._receive(pending)
        await self._verify(pending)

    async def _receive(self, pending: _Pending) -> None:
        exchange = self._exchange(pending)
        head = self.manifest.header_bytes
        start, stop = pending.start, pending.part.stop
        wanted = (head + start, head + stop, self.manifest.total_bytes)
        try:
            async with self.port.open(exchange, self._count) as (answer, watch):
                check_part(answer.headers, wanted, exchange)
                if length_of(answer, exchange.url) != stop - start:
                    raise RemoteProtocolError(f"{exchange.url} contradicts itself")
                filler = Filler(self.target.buffers, start, stop)
                await self.port.receive(exchange, answer, watch, filler)
        finally:
            pending.received = exchange.received

    def _exchange(self, pending: _Pending) -> Exchange:
        part, head = pending.part, self.manifest.header_bytes
        step, snapshot_id = self.manifest.step, self.manifest.snapshot_id
        return Exchange(
            source=self.source,
            path=format_resource(Resource(ResourceKind.FULL, step)),
            headers={
                hdrs.RANGE: format_range(head + pending.start, head + part.stop),
                hdrs.IF_MATCH: format_etag(snapshot_id),
                "Prefer": format_prefer_wait(self._wait(pending)),
            },
            status=206,
            step=step,
            snapshot_id=snapshot_id,
            chunk=part.chunk,
            received=pending.received,
            expected=part.stop - part.start,
        )

    def _wait(self, pending: _Pending) -> float:
        # A peer that has just come back may not have published again yet.
        patience = self.patience
        patient = min(patience.reconnect_timeout, patience.stall_timeout / 2)
        return patient if pending.attempts > 1 else 0.0

    def _count(self, new: int) -> None:
        self.patience.heard(asyncio.get_running_loop().time())
        self.on_progress(new, 0)

    async def _verify(self, pending: _Pending) -> None:
        part = pending.part
        actual = await self.verify(self.target.buffers(part.start, part.stop))
        if actual == part.digest:
            return
        self.on_progress(-pending.received, 0)
        pending.received = 0  # nobody knows which of its bytes are wrong
        raise IntegrityError(
            chunk=part.chunk,
            expected=part.digest,
            actual=actual,
            url=self.source.base_url,
        )
