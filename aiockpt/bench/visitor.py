"""A process that asks an application for something small, again and again."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import aiohttp

from aiockpt.runtime.bridge import Bridge

__all__ = ["PERIOD", "Visit", "Visitor"]

PERIOD = 0.005

Visit = tuple[float, float]
"""When a request was sent, on the clock of the system, and how long its answer took."""


class Visitor:
    """The commands that the visiting process obeys; see `aiockpt.bench.worker`.

    A request is sent every 5 ms, whether or not those before it have been answered: an
    application that answers late does not make its visitors come later.
    """

    def __init__(self, _: Bridge) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._coming: asyncio.Task[None] | None = None
        self._visits: list[Visit] = []

    async def visit(self, url: str) -> None:
        """Come from now on, after a first time that is not counted."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector)
        await self._ask(self._session, url)
        self._visits = []
        self._coming = asyncio.create_task(self._come(self._session, url))

    async def visited(self) -> list[Visit]:
        """Come no more; return all visits once each has been answered."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.cancel()
            with suppress(asyncio.CancelledError):
                await coming
        return self._visits

    async def release(self) -> None:
        """Close the connections."""
        await self.visited()
        if self._session is not None:
            await self._session.close()

    async def _come(self, session: aiohttp.ClientSession, url: str) -> None:
        asking: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        try:
            while True:
                asking.add(asyncio.create_task(self._ask(session, url)))
                due += PERIOD
                await asyncio.sleep(max(due - time.monotonic(), 0))
        finally:
            await asyncio.gather(*asking)

    async def _ask(self, session: aiohttp.ClientSession, url: str) -> None:
        sent = time.monotonic()
        async with session.get(url, raise_for_status=True) as answer:
            await answer.read()
        self._visits.append((sent, time.monotonic() - sent))
