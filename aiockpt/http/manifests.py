"""Asks a peer for a manifest, and believes it only once everything was checked."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from aiockpt.errors import RemoteProtocolError
from aiockpt.http.exchange import ClientConfig, Port, length_of, room_for
from aiockpt.http.filler import Filler
from aiockpt.http.latest import check_step
from aiockpt.http.retrying import Retrier
from aiockpt.http.translating import Exchange, naming
from aiockpt.wire.foretelling import Foretold
from aiockpt.wire.grants import MAC_HEADER, check_manifest_mac
from aiockpt.wire.http import (
    Resource,
    ResourceKind,
    Source,
    format_prefer_wait,
    format_resource,
)
from aiockpt.wire.layout import LENGTH_BYTES
from aiockpt.wire.lending import OFFER_HEADER, PROBE_HEADER
from aiockpt.wire.limits import enforce
from aiockpt.wire.manifest import ForeignHeader, Manifest, decode_header

__all__ = ["Lending", "ManifestRequest", "Run"]

T = TypeVar("T")


class Run(Protocol):
    """Calls a function in a thread and ends when the thread has, as `Bridge.run`."""

    def __call__(self, fn: Callable[[], T], /) -> Awaitable[T]:
        """Return what the function returns."""


@dataclass(slots=True)
class Lending:
    """Asks, together with a manifest, for the memory itself: see `wire.lending`."""

    probe: str
    offer: str | None = None


class ManifestRequest:
    """One request for a manifest, which may be sent again and again.

    Args:
        port: What it is sent by.
        config: The stall timeout, the limits, and the key of manifests.
        run: Where the manifest is decoded.
        foretold: For `decode_header`.
        lending: Has the peer's offer afterwards, if it made one.
    """

    def __init__(
        self,
        port: Port,
        config: ClientConfig,
        run: Run,
        *,
        foretold: Foretold | None,
        lending: Lending | None,
    ) -> None:
        self._port, self._config, self._run = port, config, run
        self._foretold = foretold
        self._lending = lending

    def __repr__(self) -> str:
        return f"<ManifestRequest {self._port.state}>"

    async def send(
        self, source: Source, step: int, deadline: float, retrier: Retrier
    ) -> Manifest:
        """Return the manifest of ``step``; see `CheckpointClient.fetch_manifest`."""
        # Longer waits are asked for in pieces: a connection that is dead meanwhile
        # goes unnoticed for the wait and the stall timeout.
        left = max(deadline - asyncio.get_running_loop().time(), 0.0)
        wait = min(left, self._config.stall_timeout)
        headers = {"Prefer": format_prefer_wait(wait)}
        if self._lending is not None:
            headers[PROBE_HEADER] = self._lending.probe
        exchange = Exchange(
            source=source,
            path=format_resource(Resource(ResourceKind.METADATA, step)),
            headers=headers,
            status=200,
            step=step,
            allowance=wait,
        )
        header = await self._download(exchange, retrier)
        if self._lending is not None:
            self._lending.offer = exchange.offer
        return await self._decode(header, exchange, step)

    async def _download(
        self, exchange: Exchange, retrier: Retrier
    ) -> bytearray | mmap.mmap:
        def heard(_: int) -> None:
            retrier.patience.heard(asyncio.get_running_loop().time())

        limit = self._config.limits.max_header_bytes + LENGTH_BYTES
        async with self._port.open(exchange, heard) as (answer, watch):
            check_step(answer, exchange)
            exchange.mac = answer.headers.get(MAC_HEADER)
            exchange.offer = answer.headers.get(OFFER_HEADER)
            exchange.expected = length_of(answer, exchange.url)
            enforce("the size of the header", exchange.expected, limit)
            memory = room_for(exchange.expected)
            view = memoryview(memory)
            filler = Filler(lambda a, b: [view[a:b]], 0, exchange.expected)
            await self._port.receive(exchange, answer, watch, filler)
        return memory

    async def _decode(
        self, header: bytearray | mmap.mmap, exchange: Exchange, step: int
    ) -> Manifest:
        with naming(exchange):
            manifest = await self._run(partial(self._believe, header, exchange))
        if isinstance(manifest, ForeignHeader):
            raise RemoteProtocolError(f"{exchange.url} has no manifest of aiockpt")
        if manifest.step != step:
            raise RemoteProtocolError(f"{exchange.url} describes step {manifest.step}")
        return manifest

    def _believe(
        self, header: bytearray | mmap.mmap, exchange: Exchange
    ) -> Manifest | ForeignHeader:
        key, limits = self._config.security.key, self._config.limits
        if key is not None:  # before anything is made of it
            view = memoryview(header)
            check_manifest_mac(key, view, exchange.mac, url=exchange.url)
        return decode_header(header, limits=limits, foretold=self._foretold)
