"""The receiving process where the sender is another host's ``aiockpt serve``."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypedDict

import aiohttp

from aiockpt.bench.timed import Cost, timed
from aiockpt.events import Progress
from aiockpt.http.auth import find_credentials
from aiockpt.http.protocol import (
    Resource,
    ResourceKind,
    Source,
    format_metadata,
    format_resource,
    parse_address,
)
from aiockpt.http.transport import HTTPTransport
from aiockpt.runtime.bridge import Bridge

__all__ = ["Guest", "Offer"]

_TIMEOUT = 600.0
_PATIENCE = 5.0
_PIECE = 1 << 20


@asynccontextmanager
async def _receiver() -> AsyncIterator[HTTPTransport[object]]:
    """Give a transport that serves nothing: it is not started."""
    transport = HTTPTransport[object](_TIMEOUT)
    try:
        yield transport
    finally:
        await transport.shutdown()


class Offer(TypedDict):
    """What a peer serves."""

    step: int
    nbytes: int


class Guest:
    """The commands that this process obeys; see `aiockpt.bench.worker`."""

    def __init__(self, _: Bridge) -> None:
        self._source = Source("")
        self._step = 0
        self._template: object = None

    async def find(self, url: str) -> Offer:
        """Look at what is served there, and receive it once, as a template."""
        address = parse_address(url)
        self._source = address.source
        seen: list[Progress] = []
        async with _receiver() as transport:
            if address.step is None:
                steps = transport.steps(self._metadata(), reconnect_timeout=_PATIENCE)
                self._step = await anext(steps)
            else:
                self._step = address.step
            self._template = await transport.recv_checkpoint(
                0, self._metadata(), self._step, progress=seen.append
            )
        return {"step": self._step, "nbytes": seen[-1].bytes_total}

    async def release(self) -> None:
        """Forget the template."""
        self._template = None
        gc.collect()

    async def idle(self, seconds: float) -> Cost:
        """Do nothing for a while."""
        _, cost = await timed(lambda: asyncio.sleep(seconds))
        return cost

    async def receive(self, into: bool) -> Cost:  # noqa: FBT001 - from JSON
        """Receive by this library, into fresh memory or into the template."""
        gc.collect()
        template = self._template if into else None
        async with _receiver() as transport:
            _, cost = await timed(
                lambda: transport.recv_checkpoint(
                    0, self._metadata(), self._step, into=template, direct=into
                )
            )
        return cost

    async def download(self, nbytes: int) -> Cost:
        """Read the same bytes by one plain GET, and forget them unverified."""
        got, cost = await timed(self._get)
        if got < nbytes:
            raise ConnectionError(f"a plain GET brought {got} of {nbytes} bytes")
        return cost

    async def _get(self) -> int:
        path = format_resource(Resource(ResourceKind.FULL, self._step))
        token = (
            self._source.token
            or find_credentials(None, insecure=False, env=os.environ).to_send
        )
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        url, got = self._source.base_url + path, 0
        async with (
            aiohttp.ClientSession(headers=headers, read_bufsize=_PIECE) as session,
            session.get(url, allow_redirects=False, raise_for_status=True) as answer,
        ):
            async for data in answer.content.iter_any():
                got += len(data)
        return got

    def _metadata(self) -> str:
        return format_metadata(self._source.base_url, self._source.token)
