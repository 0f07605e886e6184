"""Where peers find a transport: its sockets, its server and its URL."""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
from dataclasses import dataclass, field
from functools import partial
from socket import socket
from urllib.parse import urlsplit

import anyio

from aiockpt.errors import ClosedError, LocalProtocolError
from aiockpt.http.forks import close_in_forks
from aiockpt.http.guard import ServerConfig
from aiockpt.http.handlers import CheckpointService, ServerStatistics
from aiockpt.http.lending import Lender
from aiockpt.http.listen import (
    Addresses,
    addresses_of,
    advertised_address,
    check_advertised,
    check_public_path,
    look_up,
    open_sockets,
    url_host,
)
from aiockpt.http.options import require
from aiockpt.http.server import CheckpointServer
from aiockpt.http.store import Store
from aiockpt.runtime.bridge import Bridge

__all__ = ["PREFIX", "Address", "Endpoint", "EndpointConfig"]

PREFIX = "/checkpoint"
_DEFAULT_WAIT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """What the caller says about serving; the fields are the transport's options."""

    host: str | None
    port: int
    advertise: str | None
    interface: str | None
    ssl_context: ssl.SSLContext | None
    token: str | None = field(repr=False)
    timeout: float
    stall_timeout: float
    max_readers: int
    manifest_key: bytes | None = field(default=None, repr=False)
    keep_superseded: int = 1
    incarnation: str = field(default_factory=partial(secrets.token_hex, 16))

    def __post_init__(self) -> None:
        require(at_least=1, max_readers=self.max_readers)
        require(keep_superseded=self.keep_superseded)
        if self.advertise:
            check_advertised(self.advertise)

    def for_server(self, prefix: str) -> ServerConfig:
        """Return what the handlers need to know."""
        check_public_path(self.advertise, prefix)
        return ServerConfig(
            token=self.token,
            insecure=self.token is None,
            stall_timeout=self.stall_timeout,
            default_wait=min(self.timeout, _DEFAULT_WAIT),
            max_wait=max(self.timeout, _DEFAULT_WAIT),
            max_readers=self.max_readers,
            hosts=self._names(),
            prefix=prefix,
            manifest_key=self.manifest_key,
            keep_superseded=self.keep_superseded,
            incarnation=self.incarnation,
        )

    def _names(self) -> frozenset[str]:
        told = self.advertise or ""
        name = urlsplit(told).hostname if "://" in told else told
        return frozenset({name} if name else ())


class Address:
    """Where a transport listens, and its URL; bound when first asked for."""

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self.sockets: list[socket] = []
        self.elsewhere = False
        self._port = config.port
        self._found: Addresses | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Address sockets={len(self.sockets)}>"

    def url(self) -> str:
        """Return the base URL, without the token.

        Raises:
            ClosedError: after :meth:`close`.
            LocalProtocolError: mounted, and not told where; or no such interface; or
                it would have to look up a name, on an event loop.
            OSError: the address cannot be bound.
        """
        self.check()
        told = self.config.advertise
        if told and "://" in told:
            return told.rstrip("/") + "/"
        if self.elsewhere:
            raise LocalProtocolError(
                "mounted in an application, the transport does not know its address: "
                'pass the whole URL, advertise="https://host/prefix/"'
            )
        self.listen()
        scheme = "https" if self.config.ssl_context else "http"
        return f"{scheme}://{url_host(self._host())}:{self._port}{PREFIX}/"

    def check(self) -> None:
        """Raise ``ClosedError`` after :meth:`refuse` or :meth:`close`."""
        if self._closed:
            raise ClosedError("the transport")

    async def look_up(self, bridge: Bridge) -> None:
        """Find out what `listen` needs to know, without blocking the loop.

        Raises:
            OSError: the host's name is unknown.
        """
        host = self.config.host
        if host is None or self.elsewhere or self.sockets or self._found is not None:
            return
        self._found = addresses_of(host)
        if self._found is None:  # not in the bridge's threads: it may take a minute
            self._found = await bridge.run_apart(look_up, host, self._port)

    def listen(self) -> list[socket]:
        """Return the sockets, which listen.

        Raises:
            LocalProtocolError: a name has to be looked up, and this is an event loop.
            OSError: the address cannot be bound.
        """
        if not self.sockets:
            host, found = self.config.host, self._found
            if found is None and addresses_of(host) is None and _in_loop():
                raise LocalProtocolError(
                    f"host={host!r} is a name, and looking it up could block the event "
                    "loop: await the transport's start() first, or pass an address"
                )
            self.sockets = open_sockets(host, self._port, found)
            self._port = self.sockets[0].getsockname()[1]
        return self.sockets

    def reopen(self) -> None:
        """Have the next :meth:`listen` open new sockets, at the same address."""
        self._unlisten()

    def leave(self) -> None:
        """Close the sockets: an application has its own."""
        self.elsewhere = True
        self._unlisten()

    def refuse(self) -> None:
        """Have nobody use it any more; the sockets stay as they are."""
        self._closed = True

    def close(self) -> None:
        """Close the sockets for good. Idempotent."""
        self._closed = True
        self._unlisten()

    def _unlisten(self) -> None:
        sockets, self.sockets = self.sockets, []
        for each in sockets:
            each.close()

    def _host(self) -> str:
        config = self.config
        return advertised_address(
            advertise=config.advertise,
            interface=config.interface,
            host=config.host,
            env=os.environ,
        )


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Endpoint:
    """Serves what is on its ``store`` from :meth:`start` on, in this very loop.

    Mounted in an application it does not, and only knows the public URL. If it
    ``lends``, processes of this host may map what it serves.
    """

    def __init__(self, config: EndpointConfig, bridge: Bridge, *, lends: bool) -> None:
        self._bridge = bridge
        self.store = Store(keep_superseded=config.keep_superseded)
        self._address = Address(config)
        self._lender: Lender | None = None
        if lends:
            self._lender = Lender(self.store, bridge, most=config.max_readers)
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

        If cancelled, nobody is answered, though the address stays ours: whoever
        connects waits for a later start.

        Raises:
            ClosedError: after :meth:`stop`.
            OSError: the address cannot be bound.
        """
        address = self._address
        async with self._turn:
            address.check()
            if address.elsewhere or self._server is not None:
                return
            await address.look_up(self._bridge)
            address.check()
            config = address.config.for_server(PREFIX)
            server = CheckpointServer(self.store, config, self._lender)
            # Duplicates: a server that fails to start closes what it was given.
            mine = [each.dup() for each in address.listen()]
            close_in_forks(mine)
            await server.start(mine, ssl_context=address.config.ssl_context)
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
        self._address.leave()
        config = self._address.config.for_server(prefix)
        service = CheckpointService(self.store, config, self._lender)
        self._services.append(service)
        return service

    def statistics(self) -> ServerStatistics:
        """Return the counters of all that serves or has served the store, summed."""
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
