"""Where a transport or a command serves: what it sends, and what it receives.

What it receives, it serves on to a swarm, always from its own loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from socket import socket
from typing import Protocol

from aiockpt.http.handlers import CheckpointService
from aiockpt.http.listen import Endpoint
from aiockpt.http.membership import Membership
from aiockpt.http.server import CheckpointServer
from aiockpt.http.store import Statistics
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.same_host import format_mark, identity
from aiockpt.swarm.relay import Relay


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
        self._endpoint, self._server, self._bridge = endpoint, server, bridge

    def url(self) -> str:
        """Return the base URL, without the token; see `Endpoint.url`."""
        return self._endpoint.url()

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
            await self._server.start(self._endpoint.listen())

    async def stop(self) -> None:
        """Serve nothing, and listen no more. Idempotent."""
        self._endpoint.refuse()
        try:
            await self._server.stop()
        finally:
            self._endpoint.close()  # a hung process keeps copies of the sockets


class RelayHost(Front):
    """Serves relays, too; a server process has none.

    Args:
        endpoint: The address.
        server: Serves there once `start` was called, or an application does.
        bridge: Resolves a host that is a name.

    Attributes:
        members: The receives that are in a swarm, until their sources know that they
            left it. Some of them have returned.
        has_warned: Whether it is known that others cannot reach this address.
    """

    def __init__(
        self, endpoint: Endpoint, server: CheckpointServer, bridge: Bridge
    ) -> None:
        super().__init__(endpoint, server, bridge)
        self._store = server.store
        self.members: set[Membership] = set()
        self.has_warned = False

    async def enter(self, relay: Relay) -> str:
        """Serve a relay; return the URL under which members reach it.

        Of two relays of one snapshot, the second is read once the first has ended.

        Raises:
            AiockptError, OSError: the server cannot start.
        """
        await self.start()
        self._store.share(relay)
        return self.url()

    async def mark(self, snapshot_id: str) -> str:
        """Return this host's mark in the swarm of a snapshot; empty if unknown.

        Only processes of this host can make it.
        """
        known = await self._bridge.run(identity)
        return "" if known is None else format_mark(known, snapshot_id)

    async def lend(self, relay: Relay) -> None:
        """Serve copies only; once this returns, the memory may be changed."""
        async with self._store.unread(relay):
            relay.lend()

    async def leave(self, relay: Relay) -> None:
        """Serve a relay no more, also if `enter` failed or was cancelled."""
        await self._store.unshare(relay)

    async def end_lingering(self) -> None:
        """Serve no receive that has returned; nothing reads its memory any more."""
        for each in tuple(self.members):
            if each.is_lingering:
                await each.aclose()

    async def say_goodbye(self) -> None:
        """End what lingers; return when the sources of all that left know it."""
        await self.end_lingering()
        for each in tuple(self.members):
            await each.said_goodbye()

    async def aclose(self) -> None:
        """Serve nothing any more, and wait until the sources know it. Idempotent."""
        await self.say_goodbye()
        await self.stop()
