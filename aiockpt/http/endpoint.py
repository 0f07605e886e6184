"""Where peers find a transport: its sockets, its server and its URL."""

from __future__ import annotations

import os
import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from socket import socket
from urllib.parse import urlsplit

from aiockpt.errors import ClosedError, LocalProtocolError
from aiockpt.http.guard import ServerConfig
from aiockpt.http.handlers import CheckpointService
from aiockpt.http.listen import advertised_address, open_sockets, url_host
from aiockpt.http.server import CheckpointServer
from aiockpt.http.shelf import Shelf

__all__ = ["PREFIX", "Endpoint", "Listen"]

PREFIX = "/checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """What the caller says about addresses."""

    host: str | None
    port: int
    advertise: str | None
    interface: str | None
    ssl_context: ssl.SSLContext | None

    @property
    def names(self) -> frozenset[str]:
        """The host names that peers may use for us."""
        told = self.advertise or ""
        name = urlsplit(told).hostname if "://" in told else told
        return frozenset({name} if name else ())


class Endpoint:
    """Binds when the address is first asked for, serves from :meth:`start` on.

    Mounted in an application it does neither, and only knows the public URL.
    """

    def __init__(self, shelf: Shelf, listen: Listen, config: ServerConfig) -> None:
        self._shelf = shelf
        self._config = config
        self._address = listen
        self._sockets: list[socket] = []
        self._server: CheckpointServer | None = None
        self._mounted = False
        self._closed = False

    def __repr__(self) -> str:
        how = "mounted" if self._mounted else f"sockets={len(self._sockets)}"
        return f"<Endpoint {how}>"

    def url(self) -> str:
        """Return the base URL, without credentials.

        Raises:
            ClosedError: after :meth:`stop`.
            LocalProtocolError: mounted, and not told where; or no such interface.
            OSError: the address cannot be bound.
        """
        told = self._address.advertise
        if told and "://" in told:
            return told.rstrip("/") + "/"
        if self._mounted:
            raise LocalProtocolError(
                "mounted in an application, the transport does not know its address: "
                'pass advertise="https://host/prefix/"'
            )
        self._listen()
        scheme = "https" if self._address.ssl_context else "http"
        port = self._sockets[0].getsockname()[1]
        return f"{scheme}://{url_host(self._host())}:{port}{PREFIX}/"

    def _host(self) -> str:
        address = self._address
        return advertised_address(
            advertise=address.advertise,
            interface=address.interface,
            host=address.host,
            env=os.environ,
        )

    def _listen(self) -> None:
        if self._closed:
            raise ClosedError("the transport")
        if not self._sockets:
            self._sockets = open_sockets(self._address.host, self._address.port)

    async def start(self) -> None:
        """Serve, unless mounted; idempotent. If cancelled, nothing listens."""
        if self._mounted or self._server is not None:
            return
        self._listen()
        self._server = CheckpointServer(self._shelf, self._config)
        ssl_context = self._address.ssl_context
        await self._server.start(self._sockets, ssl_context=ssl_context)

    def mount(self, prefix: str) -> CheckpointService:
        """Return the handlers for an application; no socket of ours from now on."""
        self._mounted = True
        return CheckpointService(self._shelf, replace(self._config, prefix=prefix))

    async def stop(self) -> None:
        """Close the sockets and every connection; idempotent."""
        self._closed = True
        async with AsyncExitStack() as closing:
            for each in self._sockets:
                closing.callback(each.close)
            if self._server is not None:
                await self._server.stop()
