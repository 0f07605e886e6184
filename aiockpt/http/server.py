"""Our own server: the handlers in an application that nobody else configures."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from socket import socket
from typing import Any

from aiohttp import http_parser, web
from aiohttp.http import HttpProcessingError

from aiockpt.errors import ClosedError
from aiockpt.http.embed import routes
from aiockpt.http.forks import cut_off_in_forks
from aiockpt.http.guard import ServerConfig
from aiockpt.http.handlers import CheckpointService, ServerStatistics
from aiockpt.http.lending import Lender
from aiockpt.http.replies import COMMON_HEADERS
from aiockpt.http.sockets import descriptor_of
from aiockpt.http.store import Store

__all__ = ["CheckpointServer", "ServerConfig"]

_KEEPALIVE = 75.0  # longer than the 60 s for which proxies keep idle connections
_LINGERING = 1.0  # for the rest of a body, which no request here has any use for
_SHUTDOWN = 1.0  # aiohttp may wait twice as long; handlers end at once when told


class CheckpointServer:
    """Serves a store on sockets that listen already.

    The store belongs to the caller, the sockets to the server once it has started.
    """

    def __init__(
        self, store: Store, config: ServerConfig, lender: Lender | None = None
    ) -> None:
        config = replace(config, own_sockets=True)
        self.service = CheckpointService(store, config, lender)
        self._runner: web.AppRunner | None = None
        self._stopped = False
        cut_off_in_forks(self)

    def __repr__(self) -> str:
        step = self.service.store.statistics().step
        readers = self.statistics().readers
        return f"<CheckpointServer step={step} readers={readers}>"

    def statistics(self) -> ServerStatistics:
        """Return the counters as one immutable record."""
        return self.service.statistics()

    def descriptors(self) -> list[int]:
        """Return the descriptors of the connections."""
        if self._runner is None:
            return []
        found = map(descriptor_of, _transports(self._runner))
        return [descriptor for descriptor in found if descriptor is not None]

    async def start(
        self, sockets: Sequence[socket], *, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        """Serve on ``sockets``. If cancelled, the server is stopped.

        Raises:
            ClosedError: it was started before; a server starts once.
        """
        if self._stopped or self._runner is not None:
            raise ClosedError("the server")
        try:
            await self._serve(sockets, ssl_context)
        except BaseException:
            await self.stop()
            for each in sockets:
                each.close()
            raise

    async def _serve(
        self, sockets: Sequence[socket], ssl_context: ssl.SSLContext | None
    ) -> None:
        if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
            logger.warning(
                "aiohttp has no C parser here; the other one reads more than "
                "HTTP allows, which matters behind a proxy"
            )
        app = web.Application()
        app.add_routes(routes(self.service, self.service.config.prefix))
        app.router.add_get("/healthz", _healthz)
        app.on_response_prepare.append(_hide_versions)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=logger,
            handler_cancellation=True,
            keepalive_timeout=_KEEPALIVE,
            lingering_time=_LINGERING,
            shutdown_timeout=_SHUTDOWN,
        )
        await self._runner.setup()
        for each in sockets:
            site = web.SockSite(self._runner, each, ssl_context=ssl_context)
            await _wholly(site.start())

    async def stop(self) -> None:
        """Stop listening, abort what is being sent, close every connection.

        Takes at most about two seconds; idempotent. If cancelled, the server is
        stopped all the same, though connections may close later.
        """
        self._stopped = True
        runner, self._runner = self._runner, None
        self.service.close()
        if runner is None:
            return
        transports = _transports(runner)
        try:
            await runner.cleanup()
        finally:
            # A transport that closes waits for a peer to read what is left of a
            # response, and nobody bounds that wait.
            for transport in transports:
                transport.abort()
        for _ in range(3):  # the loops close descriptors one to two iterations later
            await asyncio.sleep(0)


def _transports(runner: web.AppRunner) -> list[asyncio.Transport]:
    connections = runner.server.connections if runner.server else []
    transports = [each.transport for each in connections]
    return [transport for transport in transports if transport is not None]


async def _wholly(coroutine: Coroutine[Any, Any, None]) -> None:
    """Await what takes a turn or two of the loop; a cancel is raised after its end.

    ``loop.create_server`` that is cancelled leaves a socket behind on which the loop
    accepts, and which nobody can find any more.
    """
    task = asyncio.ensure_future(coroutine)
    cancel = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as again:
            cancel = again
    if cancel is not None:
        raise cancel
    task.result()


def _is_ours(record: logging.LogRecord) -> bool:
    # aiohttp logs whatever a port scanner sends, and clients that leave before they
    # were answered, as errors with a traceback.
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, ConnectionError))


logger = logging.getLogger("aiockpt.http")
logger.addFilter(_is_ours)


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok\n", headers=COMMON_HEADERS)


async def _hide_versions(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(COMMON_HEADERS)
