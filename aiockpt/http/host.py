"""Where a transport or a command serves what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from socket import socket
from typing import Protocol

from aiockpt.http.handlers import CheckpointService
from aiockpt.http.listen import Endpoint
from aiockpt.http.store import Statistics
from aiockpt.runtime.bridge import Bridge


class Serving(Protocol):
    """Serves at sockets: a `CheckpointServer` on this loop, or a server process."""

    async def start(self, sockets: Sequence[socket]) -> None:
        """Serve at ``sockets``, which stay the caller's. Idempotent.

        Raises:
            ClosedError: after :meth:`stop`.
            WorkerError: no server process can be started.
        """

    async def stop(self) -> None:
        """Serve nothing for good. Idempotent."""

    def mount(self) -> CheckpointService:
        """Return the handlers for an application, instead of sockets.

        Raises:
            LocalProtocolError: it cannot serve in an application, or not any more.
        """

    def statistics(self) -> Statistics:
        """Return what is served now, and the counters since the start."""


class Front:
    """An address, and the server that serves there.

    Args:
        endpoint: The address.
        server: Serves there once `start` was called, or an application does.
        bridge: Resolves a host that is a name.
    """

    def __init__(self, endpoint: Endpoint, server: Serving, bridge: Bridge) -> None:
        self._endpoint, self.server, self._bridge = endpoint, server, bridge

    def url(self) -> str:
        """Return the base URL, without the token; see `Endpoint.url`."""
        return self._endpoint.url()

    def mount(self, prefix: str) -> CheckpointService:
        """Return the handlers for an application, which serves them below ``prefix``.

        Raises:
            LocalProtocolError: the server cannot serve in an application.
        """
        service = self.server.mount()
        self._endpoint.mount(prefix)
        return service

    async def start(self) -> None:
        """Serve, unless an application does. Idempotent.

        If cancelled, the address stays reserved: a receiver that connects waits for a
        later start. A server process starts nevertheless.
        """
        self._endpoint.check()
        if not self._endpoint.is_mounted:
            await self._endpoint.prepare(self._bridge)
        self._endpoint.check()
        if not self._endpoint.is_mounted:
            await self.server.start(self._endpoint.listen())

    async def stop(self) -> None:
        """Serve nothing, and listen no more. Idempotent."""
        self._endpoint.refuse()
        try:
            await self.server.stop()
        finally:
            self._endpoint.close()  # a hung process keeps copies of the sockets
