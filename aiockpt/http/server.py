"""Serve a store on sockets of our own: the application, and a transport's endpoint."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from socket import socket
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
from aiohttp import http_parser, web
from aiohttp.http import HttpProcessingError

from aiockpt.errors import ClosedError, LocalProtocolError
from aiockpt.http.handlers import (
    CheckpointService,
    ServerConfig,
    ServerStatistics,
    routes,
)
from aiockpt.http.listen import Address, check_advertised, check_public_path
from aiockpt.http.options import Server
from aiockpt.http.responses import COMMON_HEADERS
from aiockpt.http.shared_memory import Lender
from aiockpt.http.sockets import descriptor_of
from aiockpt.http.store import Store
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.children import close_in_forks, cut_off_in_forks

__all__ = ["PREFIX", "CheckpointServer", "Endpoint", "EndpointConfig"]

PREFIX: Final = "/checkpoint"

_DEFAULT_WAIT: Final = 5.0  # seconds
_KEEPALIVE: Final = 75.0  # longer than the 60 s for which proxies keep idle connections
_LINGERING: Final = 1.0  # for the rest of a body, for which no request here has any use
_SHUTDOWN: Final = 1.0  # aiohttp may wait twice as long; handlers end at once when told


def _is_ours(record: logging.LogRecord) -> bool:
    # aiohttp logs whatever a port scanner sends, and clients that leave before they
    # were answered, as errors with a traceback.
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, ConnectionError))


logger = logging.getLogger("aiockpt.http")
logger.addFilter(_is_ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """What an endpoint needs to know: the options of its transport about serving.

    Attributes:
        options: Where and how to serve.
        advertise: The host to tell the receivers, or the whole URL.
        ssl_context: Serve TLS with it.
        token: The token that receivers must show; None: everybody may read.
        manifest_key: The key that authenticates manifests, if any.
        timeout: The transport's default deadline.
        stall_timeout: Seconds without progress after which a reader is aborted.
        lends: Whether other processes of this host may map what is served.
        incarnation: The id of this start of the sender.
    """

    options: Server
    advertise: str | None
    ssl_context: ssl.SSLContext | None
    token: str | None = field(repr=False)
    manifest_key: bytes | None = field(repr=False)
    timeout: float
    stall_timeout: float
    lends: bool
    incarnation: str = field(default_factory=partial(secrets.token_hex, 16))

    def __post_init__(self) -> None:
        if self.advertise:
            check_advertised(self.advertise)

    def address(self) -> Address:
        """Return where to listen; nothing is bound yet."""
        return Address(
            self.options.host,
            self.options.port,
            advertise=self.advertise,
            interface=self.options.interface,
            scheme="https" if self.ssl_context else "http",
            prefix=PREFIX,
        )

    def for_server(self, prefix: str) -> ServerConfig:
        """Return what the handlers need to know."""
        check_public_path(self.advertise, prefix)
        return ServerConfig(
            token=self.token,
            insecure=self.token is None,
            stall_timeout=self.stall_timeout,
            default_wait=min(self.timeout, _DEFAULT_WAIT),
            max_wait=max(self.timeout, _DEFAULT_WAIT),
            max_readers=self.options.readers,
            hosts=self._names(),
            prefix=prefix,
            manifest_key=self.manifest_key,
            keep_superseded=self.options.keep_superseded,
            incarnation=self.incarnation,
        )

    def _names(self) -> frozenset[str]:
        told = self.advertise or ""
        name = urlsplit(told).hostname if "://" in told else told
        return frozenset({name} if name else ())


class Endpoint:
    """Serves its ``store`` from :meth:`start` on, on this very loop.

    Mounted in an application it opens no socket, and only knows the public URL.

    Args:
        config: What it needs to know.
        bridge: Runs what blocks.
    """

    def __init__(self, config: EndpointConfig, bridge: Bridge) -> None:
        self._bridge = bridge
        self.store = Store(keep_superseded=config.options.keep_superseded)
        self._config = config
        self._address = config.address()
        self._lender: Lender | None = None
        if config.lends:
            self._lender = Lender(self.store, bridge, most=config.options.readers)
        self._server: CheckpointServer | None = None
        self._services: list[CheckpointService] = []
        self._turn = anyio.Lock()

    def __repr__(self) -> str:
        return f"<Endpoint {self._address}>"

    def url(self) -> str:
        """Return the base URL; see :meth:`Address.url`."""
        return self._address.url()

    async def start(self) -> None:
        """Serve, unless mounted; idempotent.

        If cancelled, the address stays ours, and a receiver that connects waits for a
        later start.

        Raises:
            ClosedError: after :meth:`stop`.
            OSError: the address cannot be bound.
        """
        address = self._address
        async with self._turn:
            address.check()
            if address.is_mounted or self._server is not None:
                return
            await address.look_up(self._bridge)
            address.check()
            config = self._config
            server = CheckpointServer(
                self.store, config.for_server(PREFIX), self._lender
            )
            # Duplicates, since a server that fails to start closes its sockets.
            mine = [each.dup() for each in address.listen()]
            close_in_forks(mine)
            await server.start(mine, ssl_context=config.ssl_context)
            self._server = server
            self._services.append(server.service)

    def mount(self, prefix: str) -> CheckpointService:
        """Return the handlers for an application; no socket of ours from now on.

        Raises:
            ClosedError: after :meth:`stop`.
            LocalProtocolError: it serves on a socket of its own already.
        """
        self._address.check()
        if self._server is not None or self._turn.locked():
            raise LocalProtocolError(
                "the transport serves on its own already: mount it before it is used"
            )
        self._address.mount()
        config = self._config.for_server(prefix)
        service = CheckpointService(self.store, config, self._lender)
        self._services.append(service)
        return service

    def statistics(self) -> ServerStatistics:
        """Return the sum of the counters of all services over the store."""
        nothing = (0,) * len(ServerStatistics._fields)
        each = [nothing, *(service.statistics() for service in self._services)]
        return ServerStatistics(*map(sum, zip(*each, strict=True)))

    @property
    def lent(self) -> int:
        """How often a checkpoint was lent to a process of this host."""
        return self._lender.count if self._lender else 0

    async def stop(self) -> None:
        """Serve nothing, close the sockets and every connection; idempotent."""
        self._address.close()
        await self.store.close()
        if self._lender is not None:
            await self._lender.aclose()
        async with self._turn:  # a start that is under way ends first
            server, self._server = self._server, None
        if server is not None:
            await server.stop()
        for service in self._services:  # that of an application, too
            service.close()


class CheckpointServer:
    """Serves a store on sockets that listen already.

    The store belongs to the caller. The sockets belong to the server once it has
    started.
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
    """Await a coroutine of a turn or two of the loop; raise a cancel after its end.

    A cancelled ``loop.create_server`` leaves a socket behind on which the loop
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


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok\n", headers=COMMON_HEADERS)


async def _hide_versions(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(COMMON_HEADERS)
