"""Serve a store: on sockets of its own, and in applications of the caller."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from socket import socket
from typing import Any, Final

import anyio
from aiohttp import http_parser, web
from aiohttp.http import HttpProcessingError

from aiockpt.errors import ClosedError, LocalProtocolError
from aiockpt.http.acceptor import Acceptor
from aiockpt.http.extension import Lends, ServiceExtension
from aiockpt.http.fingerprint_tasks import ComputeFingerprint, FingerprintTasks
from aiockpt.http.handlers import CheckpointService, ServerConfig, routes
from aiockpt.http.listen import PREFIX
from aiockpt.http.responses import COMMON_HEADERS
from aiockpt.http.store import Statistics, Store

_KEEPALIVE_S: Final = 75.0  # proxies keep idle connections for 60 s
_UNREAD_BODY_S: Final = 1.0  # for the rest of a body, which no handler here reads
_SHUTDOWN_S: Final = 1.0  # aiohttp may wait twice as long; handlers end when told


def _is_ours(record: logging.LogRecord) -> bool:
    # aiohttp logs whatever a port scanner sends, and clients that leave before they
    # were answered, as errors with a traceback.
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, ConnectionError))


logger = logging.getLogger("aiockpt.http")
logger.addFilter(_is_ours)


class CheckpointServer:
    """Serves a store on sockets that listen, and in applications.

    Args:
        config: How to serve.
        store: Holds the checkpoint that is published.
        extension: Serves what belongs to no plain checkpoint.
        lender: Lends the store's memory to processes of this host. None: nothing does.
        compute: Returns the fingerprint of a checkpoint; None: it is not served.
        ssl_context: The sockets speak TLS with it. None: they speak no TLS.

    Attributes:
        store, extension: As given.
    """

    def __init__(
        self,
        config: ServerConfig,
        store: Store,
        extension: ServiceExtension,
        lender: Lends | None = None,
        compute: ComputeFingerprint | None = None,
        *,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.store, self.extension = store, extension
        self._config, self._lender = config, lender
        self._fingerprints = compute and FingerprintTasks(store, compute)
        self._ssl_context = ssl_context
        self._services: list[CheckpointService] = []
        self._runner: web.AppRunner | None = None
        self._acceptor: Acceptor | None = None
        self._turn = anyio.Lock()
        self._closed = False

    def statistics(self) -> Statistics:
        """Return the figures of the store, the lender and all services."""
        lent = Statistics(lent=self._lender.count if self._lender else 0)
        services = (service.statistics() for service in self._services)
        return sum(services, self.store.statistics() + lent)

    def mount(self) -> CheckpointService:
        """Return the handlers for an application, instead of sockets.

        Raises:
            LocalProtocolError: it serves on sockets already.
        """
        if self._runner is not None or self._turn.locked():
            raise LocalProtocolError(
                "the transport serves on its own already: mount it before it is used"
            )
        return self._service()

    async def start(self, sockets: Sequence[socket]) -> None:
        """Serve on ``sockets``, which stay the caller's; idempotent.

        If this fails or is cancelled, nothing is served, and it may be called again.

        Raises:
            ClosedError: after :meth:`stop`.
        """
        async with self._turn:
            if self._closed:
                raise ClosedError("the server")
            if self._runner is None:
                self._runner, self._acceptor = await self._serve(sockets)

    async def _serve(self, sockets: Sequence[socket]) -> tuple[web.AppRunner, Acceptor]:
        if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
            logger.warning(
                "aiohttp has no C parser here; the other one reads more than "
                "HTTP allows, which matters behind a proxy"
            )
        service = self._service()
        app = web.Application()
        app.add_routes(routes(service, PREFIX))
        app.router.add_get("/healthz", _healthz)
        app.on_response_prepare.append(_hide_versions)
        options: dict[str, Any] = {
            "access_log": None,
            "logger": logger,
            "keepalive_timeout": _KEEPALIVE_S,
            "lingering_time": _UNREAD_BODY_S,
        }
        runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S, **options
        )
        try:
            await runner.setup()
            assert runner.server is not None, "it is set up"
            acceptor = Acceptor(
                [each.dup() for each in sockets],
                runner.server,
                ssl_context=self._ssl_context,
                options=options,
            )
        except BaseException:
            self._services.remove(service)
            service.close()
            await _clean_up(runner)
            raise
        return runner, acceptor

    def _service(self) -> CheckpointService:
        service = CheckpointService(
            self.store,
            self._config,
            self.extension,
            self._lender,
            self._fingerprints,
        )
        self._services.append(service)
        return service

    async def stop(self) -> None:
        """Serve nothing for good, stop listening, close every connection. Idempotent.

        Takes at most about two seconds. If cancelled, the server is stopped all the
        same, though connections may close later.
        """
        self._closed = True
        await self.store.close()
        if self._lender is not None:
            await self._lender.aclose()
        for service in self._services:  # that of an application, too
            service.close()
        async with self._turn:  # a start that is under way ends first
            runner, self._runner = self._runner, None
            acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            await acceptor.aclose()
        if runner is not None:
            await _clean_up(runner)


async def _clean_up(runner: web.AppRunner) -> None:
    connections = runner.server.connections if runner.server else []
    transports = [each.transport for each in connections if each.transport is not None]
    try:
        await runner.cleanup()
    finally:
        # A transport that closes waits for a peer to read what is left of a
        # response, and nobody bounds that wait.
        for transport in transports:
            transport.abort()
    for _ in range(3):  # the loops close descriptors one to two iterations later
        await asyncio.sleep(0)


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok\n", headers=COMMON_HEADERS)


async def _hide_versions(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(COMMON_HEADERS)
