"""Asks a peer for a manifest, and believes it only once everything was checked."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Protocol, TypeAlias, TypeVar

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.header import LENGTH_BYTES, decode_header
from aiockpt.format.limits import enforce
from aiockpt.format.manifest import Manifest
from aiockpt.http.exchange import ClientConfig, Port, length_of, room_for
from aiockpt.http.filler import Filler
from aiockpt.http.latest import check_step
from aiockpt.http.memory_protocol import OFFER_HEADER, PROBE_HEADER
from aiockpt.http.protocol import (
    Resource,
    ResourceKind,
    Source,
    format_prefer_wait,
    format_resource,
)
from aiockpt.http.retrying import Retrier
from aiockpt.http.tokens import MAC_HEADER, check_manifest_mac
from aiockpt.http.translating import Exchange, naming
from aiockpt.runtime.gc import collector_paused

__all__ = [
    "NOTHING",
    "Lending",
    "ManifestRequest",
    "Memory",
    "Run",
    "Wishes",
]

T = TypeVar("T")

_RETURN = 0.5  # seconds that the answer to a request may take once it is decided
Memory: TypeAlias = bytearray | mmap.mmap


class Run(Protocol):
    """Calls a function in a thread and ends when the thread has, as `Bridge.run`."""

    def __call__(self, fn: Callable[[], T], /) -> Awaitable[T]:
        """Return what the function returns."""


@dataclass(slots=True)
class Lending:
    """Asks, together with a manifest, for the memory itself: see `wire.lending`."""

    probe: str
    offer: str | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is asked for beside a manifest.

    Attributes:
        lending: Has the peer's offer afterwards, if it made one.
    """

    lending: Lending | None = None

    def headers(self) -> dict[str, str]:
        """Return what the request has to say."""
        return {} if self.lending is None else {PROBE_HEADER: self.lending.probe}


NOTHING = Wishes()


class ManifestRequest:
    """One request for a manifest, which may be sent again and again.

    Args:
        port: What it is sent by.
        config: The stall timeout, the limits, and the key of manifests.
        run: Where the manifest is decoded.
        wishes: What else is wanted.
    """

    def __init__(
        self, port: Port, config: ClientConfig, run: Run, wishes: Wishes
    ) -> None:
        self._port, self._config, self._run = port, config, run
        self._wishes = wishes

    def __repr__(self) -> str:
        return f"<ManifestRequest {self._port.state}>"

    async def send(
        self, source: Source, step: int, deadline: float, retrier: Retrier
    ) -> Manifest:
        """Return the manifest of ``step``; see `CheckpointClient.fetch_manifest`."""
        # Longer waits are asked for in pieces: a connection that is dead meanwhile
        # goes unnoticed for the wait and the stall timeout.
        left = max(deadline - asyncio.get_running_loop().time(), 0.0)
        # The answer is to be here before the deadline: it says what is served instead.
        wait = min(left - min(left / 4, _RETURN), self._config.stall_timeout)
        wishes = self._wishes
        exchange = Exchange(
            source=source,
            path=format_resource(Resource(ResourceKind.METADATA, step)),
            headers={"Prefer": format_prefer_wait(wait), **wishes.headers()},
            status=HTTPStatus.OK,
            step=step,
            allowance=wait,
        )
        header = await self._download(exchange, retrier)
        if wishes.lending is not None:
            wishes.lending.offer = exchange.offer
        return await self._decode(header, exchange, step)

    async def _decode(self, header: Memory, exchange: Exchange, step: int) -> Manifest:
        with naming(exchange):
            manifest = await self._run(partial(self._believe, header, exchange))
        if manifest.step != step:
            raise RemoteProtocolError(f"{exchange.url} describes step {manifest.step}")
        return manifest

    async def _download(self, exchange: Exchange, retrier: Retrier) -> Memory:
        def heard(_: int) -> None:
            retrier.patience.heard(asyncio.get_running_loop().time())

        port = self._port
        limit = self._config.limits.max_header_bytes + LENGTH_BYTES
        async with port.open(exchange, heard) as (answer, watch):
            check_step(answer, exchange)
            exchange.mac = answer.headers.get(MAC_HEADER)
            exchange.offer = answer.headers.get(OFFER_HEADER)
            exchange.expected = length_of(answer, exchange.url)
            enforce("the size of the header", exchange.expected, limit)
            memory = room_for(exchange.expected)
            view = memoryview(memory)
            filler = Filler(lambda a, b: [view[a:b]], 0, exchange.expected)
            await port.receive(exchange, answer, watch, filler)
        return memory

    def _believe(self, header: Memory, exchange: Exchange) -> Manifest:
        """Check who has written a header before anything is made of it; decode it."""
        key = self._config.security.key
        if key is not None:
            check_manifest_mac(key, memoryview(header), exchange.mac, url=exchange.url)
        with collector_paused():
            found = decode_header(header, limits=self._config.limits, ours=True)
        assert isinstance(found, Manifest)  # ours
        return found
