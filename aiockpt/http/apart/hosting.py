"""A server in a process that somebody else keeps, as the trainer sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from socket import socket
from typing import Final, Protocol, runtime_checkable

from aiockpt._bridge import Bridge
from aiockpt._channel import Channel, pair
from aiockpt.http.apart.hosted import ENDING
from aiockpt.http.apart.messages import End
from aiockpt.http.forks import close_in_forks

__all__ = ["Guest", "HostProcess", "ServerHost"]

_DYING: Final = 1.0
"""Seconds in which one hears of the end of a process whose sockets are closed."""


class HostProcess(Protocol):
    """The process in which a server was started."""

    @property
    def pid(self) -> int | None:
        """Its id."""

    def kill(self) -> None:
        """End it at once, if it is still there."""

    async def died(self) -> None:
        """Wait for its end."""


@runtime_checkable
class ServerHost(Protocol):
    """Something with a child process that can serve beside what it does."""

    async def host_server(self, sock: socket) -> HostProcess:
        """Have its process serve for who has the other end of ``sock``; say which.

        The socket stays the caller's.

        Raises:
            WorkerError: there is no such process now; another try may help.
            ClosedError, LocalProtocolError: nor will there be.

        If cancelled, it may serve nevertheless, until the other end is closed.
        """


class Guest:
    """One server, from its start to its end; as `Child`, but for its process.

    Args:
        host: Where it runs.
        on_message: Called with each message and its descriptors.
    """

    def __init__(
        self, host: ServerHost, on_message: Callable[[bytes, list[int]], None]
    ) -> None:
        self._host = host
        self._ended = asyncio.Event()
        ours, self._theirs = pair()
        close_in_forks([ours, self._theirs])
        self.channel = Channel(ours, on_message, self._ended.set)
        self._placing: asyncio.Task[HostProcess] | None = None
        self._process: HostProcess | None = None
        self._patience: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Guest pid={self.pid}>"

    @property
    def pid(self) -> int | None:
        """The process id of its host, once it was started."""
        return self._process.pid if self._process else None

    async def launch(self, _: Bridge) -> None:
        """Start it; returns at once when it is told to end meanwhile.

        Raises:
            AiockptError: see `ServerHost`.
        """
        loop = asyncio.get_running_loop()
        self._placing = loop.create_task(self._placed())
        try:
            await asyncio.wait({self._placing})
            if not self._placing.cancelled():
                self._process = self._placing.result()
        finally:
            self._placing.cancel()
            self._theirs.close()  # or its end would not be noticed

    async def _placed(self) -> HostProcess:
        return await self._host.host_server(self._theirs)

    async def gone(self) -> None:
        """Wait until it says nothing more."""
        await self._ended.wait()

    def kill(self) -> None:
        """End it at once, which takes its process: what hangs can only be killed."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Have it end, and its process go on."""
        if self._placing is not None:
            self._placing.cancel()
        self.channel.send(End())
        if self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(ENDING, self._ended.set)

    async def reaped(self) -> str:
        """Wait for its end, which is near; return how it has ended."""
        self.channel.close()
        self._theirs.close()
        if self._patience is not None:
            self._patience.cancel()
        elif self._process is not None:
            # The next one is not to be started in a process that is about to end.
            with suppress(TimeoutError):
                async with asyncio.timeout(_DYING):
                    await self._process.died()
                    return "its host has, too"
        return "its host goes on"
