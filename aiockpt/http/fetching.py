"""Fetches chunks: ranges, resumed, verified, straight into memory.

``fetch_chunk`` and ``verify_chunk`` of a receive happen here. A chunk is done when its
digest is that of the manifest; bytes of another snapshot never meet those of this one,
because every request says ``If-Match``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Protocol

from aiohttp import ClientResponse, hdrs

from aiockpt.errors import CheckpointChangedError, RemoteProtocolError
from aiockpt.format.manifest import Outline
from aiockpt.http.exchange import Port, length_of
from aiockpt.http.filler import Filler
from aiockpt.http.protocol import (
    Resource,
    ResourceKind,
    Source,
    format_etag,
    format_prefer_wait,
    format_resource,
    parse_etag,
)
from aiockpt.http.ranges import format_range, parse_content_range
from aiockpt.http.retrying import OnRetry, Patience, Retrier, persist
from aiockpt.http.stretch import Stretch
from aiockpt.http.translating import Exchange, naming
from aiockpt.http.watching import Watch
from aiockpt.runtime.host_limits import failing_here
from aiockpt.runtime.tasks import News, together

__all__ = [
    "Body",
    "ChunkFetch",
    "OnProgress",
    "OnVerified",
    "Prepare",
    "Target",
    "check_part",
]

_AHEAD = 64 << 20  # bytes of memory that all requests together prepare ahead
_STEP = 8 << 20  # bytes that are prepared at a time, by whole strides of the arena
_GLANCE = 0.02  # seconds between two looks at how much has come

OnProgress = Callable[[int, int], None]
OnVerified = Callable[[int], None]
Prepare = Callable[[int, int], Awaitable[None]]


class Target(Protocol):
    """Memory that chunks are received into."""

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return writable views of bytes for ``[start, stop)`` of the data segment."""


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


class _Nowhere:
    """The target of a fetch that has ended."""

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        raise AssertionError(f"bytes {start} to {stop} come after the fetch")


@dataclass(slots=True, kw_only=True, eq=False)
class ChunkFetch:
    """One call of ``fetch_chunks``: what its requests have in common.

    ``lanes`` is how many of them there are at a time. `close` it when the last request
    has ended: whoever keeps it longer, such as the
    traceback of a request that was cancelled, does not keep the memory.
    """

    port: Port
    source: Source
    outline: Outline
    target: Target
    prepare: Prepare | None
    on_progress: OnProgress
    on_retry: OnRetry
    patience: Patience
    lanes: int = 1
    on_verified: OnVerified | None = None

    def close(self) -> None:
        """Let go of the memory; idempotent."""
        self.target, self.prepare, self.on_verified = _Nowhere(), None, None

    async def keep_ready(
        self, prepare: Prepare, filler: Filler, start: int, news: News
    ) -> None:
        """Prepare memory from ``start`` on, a little ahead of what ``filler`` gets.

        No further: a peer that claims gigabytes and sends nothing takes no memory. It
        ends when all is prepared or, which ``news`` tells, when all has come.
        """
        at, stop = start, start + filler.size
        most = max(_AHEAD // self.lanes, _STEP)
        while at < stop and filler.remaining:
            if at - start - filler.filled >= most:
                await news.wait(_GLANCE)
                continue
            end = min(at - at % _STEP + _STEP, stop)
            with failing_here("preparing memory"):  # not the fault of the peer
                await prepare(at, end)
            at = end

    async def fetch(self, stretch: Stretch, retrier: Retrier) -> None:
        """Fetch what is left of a stretch, however often that takes."""
        attempt = _Attempt(self, stretch)
        await persist(attempt, retrier, self.on_retry, pause=self.port.pause)

    @asynccontextmanager
    async def ask(self, stretch: Stretch) -> AsyncIterator[Body]:
        """Ask for as much of a stretch as one request can bring.

        If cancelled, or if the block does not receive the body, the connection is
        closed.
        """
        start, stop = stretch.position, stretch.stop
        exchange = self._exchange(start, stop)
        stretch.place(exchange)
        head = self.outline.header_bytes
        wanted = (head + start, head + stop, self.outline.total_bytes)
        async with self.port.open(exchange, self.count) as (answer, watch):
            check_part(answer.headers, wanted, exchange)
            if length_of(answer, exchange.url) != stop - start:
                raise RemoteProtocolError(f"{exchange.url} contradicts itself")
            yield Body(self, stretch, exchange, answer, watch, start, stop)

    def count(self, new: int) -> None:
        """Note bytes that have arrived."""
        self.patience.heard(asyncio.get_running_loop().time())
        self.on_progress(new, 0)

    def verified(self, chunk: int) -> None:
        """Note that a chunk has the right digest."""
        self.on_progress(0, 1)
        if self.on_verified is not None:
            self.on_verified(chunk)

    def _exchange(self, start: int, stop: int) -> Exchange:
        outline = self.outline
        step, snapshot_id = outline.step, outline.snapshot_id
        head = outline.header_bytes
        headers = {
            hdrs.RANGE: format_range(head + start, head + stop),
            hdrs.IF_MATCH: format_etag(snapshot_id),
            "Prefer": format_prefer_wait(self._wait()),
        }
        return Exchange(
            source=self.source,
            path=format_resource(Resource(ResourceKind.FULL, step)),
            headers=headers,
            status=HTTPStatus.PARTIAL_CONTENT,
            step=step,
            snapshot_id=snapshot_id,
        )

    def _wait(self) -> float:
        # A peer that has just come back may not have published again yet.
        patience = self.patience
        return min(
            patience.reconnect_timeout,
            patience.stall_timeout / 2,
            self.source.patience,
        )


@dataclass(frozen=True, slots=True)
class Body:
    """An answer of which ``[start, stop)`` of the data segment is still to come."""

    fetch: ChunkFetch
    stretch: Stretch
    exchange: Exchange
    answer: ClientResponse
    watch: Watch
    start: int
    stop: int

    @property
    def fits(self) -> bool:
        """Whether it still is what the stretch lacks, or its beginning came since."""
        stretch = self.stretch
        return self.stop == stretch.stop and self.start <= stretch.position

    async def receive(self, ahead: bytes = b"") -> None:
        """Receive what the stretch lacks, of which ``ahead`` has been read already.

        Where that is something, the rest comes the portable way: the other mover
        wants to be the first.
        """
        stretch, fetch = self.stretch, self.fetch
        start = stretch.position
        filler = Filler(fetch.target.buffers, start, self.stop, stretch)
        filler.write(ahead)
        news = News()

        async def receive() -> None:
            await fetch.port.receive(
                self.exchange, self.answer, self.watch, filler, fast=not ahead
            )
            news.tell()

        try:
            if fetch.prepare is None:
                await receive()
            else:
                ready = partial(fetch.keep_ready, fetch.prepare, filler, start, news)
                await together([receive, ready])
        finally:
            stretch.note()
            stretch.place(self.exchange)


class _Attempt:
    """Fetches what is left of a stretch; called again after a failure."""

    def __init__(self, fetch: ChunkFetch, stretch: Stretch) -> None:
        self._fetch = fetch
        self._stretch = stretch

    async def __call__(self) -> None:
        while self._stretch.chunk is not None:
            await self._receive()
        settled = self._stretch.settle()
        if settled is not None:
            lost, error = settled
            error.url = self._fetch.source.base_url
            self._fetch.on_progress(-lost, 0)
            raise error

    async def _receive(self) -> None:
        async with self._fetch.ask(self._stretch) as body:
            await body.receive()
