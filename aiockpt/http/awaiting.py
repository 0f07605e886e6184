"""Requests that wait for a step: how long, and whether anybody still does.

A waiting request costs its handler and nothing else. It looks now and then whether its
client is still there, since an application around us may not tell it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from aiohttp import web

from aiockpt.errors import ClosedError, StepNotFoundError
from aiockpt.http.guard import ServerConfig
from aiockpt.http.protocol import Lease, parse_prefer_wait
from aiockpt.http.published import Published
from aiockpt.http.shelf import Shelf

__all__ = ["Awaiting", "transport_of"]

_GLANCE = 0.25  # seconds between two looks at the client
_RARE_GLANCE = 0.5  # who waits for news waits nearly always; a server ends in a second


class Awaiting:
    """Finds on a shelf what requests ask for; ``count`` of them are waiting now."""

    def __init__(self, shelf: Shelf, config: ServerConfig) -> None:
        self.count = 0
        self.closed = False
        self._shelf = shelf
        self._config = config

    def __repr__(self) -> str:
        return f"<Awaiting count={self.count}>"

    async def any(self, request: web.Request) -> Published:
        """Return what is served; wait for something only if the request says so."""
        look = partial(self._shelf.wait_for, None)
        return await self._find(request, look, default_wait=0.0, glance=_GLANCE)

    async def step(
        self, request: web.Request, step: int, lease: Lease | None
    ) -> Published:
        """Return this step, waiting as long as the request may; an old one: at once."""
        look = partial(self._shelf.wait_for, step, lease=lease)
        default_wait = self._config.default_wait
        return await self._find(
            request, look, _is_past, default_wait=default_wait, glance=_GLANCE
        )

    async def newer(self, request: web.Request, after: int) -> Published:
        """Return a step after this one, waiting as long as the request may.

        The wait is over, too, when what is served is retracted.
        """
        before = self._shelf.withdrawals
        return await self._find(
            request,
            partial(self._shelf.wait_past, after),
            lambda _: self._shelf.withdrawals != before,
            default_wait=self._config.default_wait,
            glance=_RARE_GLANCE,
        )

    async def _find(
        self,
        request: web.Request,
        look: Callable[..., Awaitable[Published]],
        is_final: Callable[[StepNotFoundError], bool] = lambda _: False,
        *,
        default_wait: float,
        glance: float,
    ) -> Published:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_of(request, default_wait)
        with self._counted():
            while True:
                left = deadline - loop.time()
                try:
                    return await look(wait=min(left, glance))
                except StepNotFoundError as error:
                    if left <= glance or is_final(error):
                        raise
                self._still_wanted(request)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1

    def _wait_of(self, request: web.Request, default: float) -> float:
        asked = parse_prefer_wait(request.headers.get("Prefer"))
        return min(default if asked is None else asked, self._config.max_wait)

    def _still_wanted(self, request: web.Request) -> None:
        transport_of(request)
        if self.closed:
            raise ClosedError("the server")


def transport_of(request: web.Request) -> asyncio.Transport:
    """Return a request's connection.

    Raises:
        ConnectionResetError: its client has left.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client has left")
    return transport


def _is_past(error: StepNotFoundError) -> bool:
    wanted, serving = error.step, error.serving
    return wanted is not None and serving is not None and wanted < serving
