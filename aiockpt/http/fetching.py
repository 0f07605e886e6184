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
from http import HTTPStatus
from typing import Protocol

from aiohttp import hdrs

from aiockpt._tasks import together
from aiockpt.errors import CheckpointChangedError, RemoteProtocolError
from aiockpt.http.exchange import Port, length_of
from aiockpt.http.filler import Filler
from aiockpt.http.retrying import OnRetry, Patience, Retrier, persist
from aiockpt.http.stretch import Part, Stretch
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
from aiockpt.wire.manifest import Outline
from aiockpt.wire.unsealed import UNSEALED_HEADER

__all__ = ["ChunkFetch", "OnProgress", "Prepare", "Target", "check_part"]

_NOT_YET = 0.05  # seconds

OnProgress = Callable[[int, int], None]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFetch:
    """One call of ``fetch_chunks``: what its requests have in common.

    ``held`` is how many seconds the peer may take to have bytes that it is staging;
    the outline then has the tag of what it stages for a snapshot id.
    """

    port: Port
    source: Source
    outline: Outline
    target: Target
    prepare: Prepare | None
    on_progress: OnProgress
    on_retry: OnRetry
    patience: Patience
    held: float = 0.0

    async def run(self, runs: Sequence[Sequence[Part]], *, workers: int) -> None:
        """Fetch all chunks, by at most ``workers`` requests at a time.

        The first chunk that fails for good cancels the others.
        """
        queue = iter(runs)
        work = partial(self._work, queue)
        await together([work] * min(workers, len(runs)))
        assert next(queue, None) is None, "a chunk was left out"

    async def _work(self, queue: Iterator[Sequence[Part]]) -> None:
        for parts in queue:
            stretch = Stretch(parts, on_verified=partial(self.on_progress, 0, 1))
            await self.have_ready(parts)
            await self.fetch(stretch, Retrier(self.patience))

    async def have_ready(self, parts: Sequence[Part]) -> None:
        """Prepare the memory of consecutive chunks."""
        if self.prepare is not None:
            await self.prepare(parts[0].start, parts[-1].stop)

    async def fetch(self, stretch: Stretch, retrier: Retrier) -> None:
        """Fetch what is left of a stretch, however often that takes."""
        attempt = _Attempt(self, stretch)
        await persist(attempt, retrier, self.on_retry, pause=self.port.pause)

    def count(self, new: int) -> None:
        """Note bytes that have arrived."""
        self.patience.heard(asyncio.get_running_loop().time())
        self.on_progress(new, 0)

    async def not_yet(self) -> None:
        """Note that the peer lives, and has not what it was asked for."""
        self.patience.heard(asyncio.get_running_loop().time())
        await self.port.pause(_NOT_YET)  # it should have waited itself, and need not


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
        fetch, stretch = self._fetch, self._stretch
        start, stop = stretch.position, stretch.stop
        exchange = self._exchange(start, stop)
        head = fetch.outline.header_bytes
        wanted = (head + start, head + stop, fetch.outline.total_bytes)
        async with fetch.port.open(exchange, fetch.count) as (answer, watch):
            if answer.status == HTTPStatus.NO_CONTENT:
                await fetch.not_yet()
                return
            check_part(answer.headers, wanted, exchange)
            if length_of(answer, exchange.url) != stop - start:
                raise RemoteProtocolError(f"{exchange.url} contradicts itself")
            filler = Filler(fetch.target.buffers, start, stop, stretch.take)
            try:
                await fetch.port.receive(exchange, answer, watch, filler)
            finally:
                stretch.place(exchange)

    def _exchange(self, start: int, stop: int) -> Exchange:
        outline, held = self._fetch.outline, self._fetch.held
        step, snapshot_id = outline.step, outline.snapshot_id
        head = outline.header_bytes
        headers = {
            hdrs.RANGE: format_range(head + start, head + stop),
            hdrs.IF_MATCH: format_etag(snapshot_id),
            "Prefer": format_prefer_wait(held or self._patience()),
        }
        if held:
            headers[UNSEALED_HEADER] = snapshot_id
        return Exchange(
            source=self._fetch.source,
            path=format_resource(Resource(ResourceKind.FULL, step)),
            headers=headers,
            status=HTTPStatus.PARTIAL_CONTENT,
            step=step,
            snapshot_id=snapshot_id,
            chunk=self._stretch.chunk,
            allowance=held,
            may_be_empty=bool(held),
        )

    def _patience(self) -> float:
        # A peer that has just come back may not have published again yet.
        patience = self._fetch.patience
        return min(patience.reconnect_timeout, patience.stall_timeout / 2)
