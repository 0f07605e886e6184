"""Fetches chunks: ranges, resumed, verified, straight into memory.

``fetch_chunk`` and ``verify_chunk`` of a receive happen here. A chunk is done when its
digest is that of the manifest; bytes of another snapshot never meet those of this one,
because every request says ``If-Match``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Protocol

from aiohttp import hdrs

from aiockpt.errors import CheckpointChangedError, RemoteProtocolError
from aiockpt.format.manifest import Outline
from aiockpt.http.chunk_run import ChunkRun
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
from aiockpt.http.translating import Exchange, naming
from aiockpt.runtime.host_limits import failing_here
from aiockpt.runtime.tasks import News, together

__all__ = [
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

    async def fetch(self, run: ChunkRun, retrier: Retrier) -> None:
        """Fetch what is left of a run, with as many requests as that takes.

        If cancelled, the connection is closed, and the run knows what has come.
        """
        attempt = partial(self._attempt, run)
        await persist(attempt, retrier, self.on_retry, pause=self.port.pause)

    async def _attempt(self, run: ChunkRun) -> None:
        while run.chunk is not None:
            await self._request(run)
        if (settled := run.settle()) is not None:
            lost, error = settled
            error.url = self.source.base_url
            self.on_progress(-lost, 0)
            raise error

    async def _request(self, run: ChunkRun) -> None:
        """Receive what one request can bring straight into the target."""
        start, stop = run.begin_request()
        exchange = self._exchange(start, stop)
        run.place(exchange)
        head = self.outline.header_bytes
        wanted = (head + start, head + stop, self.outline.total_bytes)
        async with self.port.open(exchange, self.count) as (answer, watch):
            check_part(answer.headers, wanted, exchange)
            if (length := length_of(answer, exchange.url)) != stop - start:
                raise RemoteProtocolError(
                    f"{exchange.url} sent Content-Length {length} for a range of "
                    f"{stop - start} bytes"
                )
            filler = Filler(self.target.buffers, start, stop, run)
            news = News()

            async def receive() -> None:
                await self.port.receive(exchange, answer, watch, filler)
                news.tell()

            try:
                if self.prepare is None:
                    await receive()
                else:
                    ready = partial(self.keep_ready, self.prepare, filler, start, news)
                    await together([receive, ready])
            finally:
                run.note()
                run.place(exchange)

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
