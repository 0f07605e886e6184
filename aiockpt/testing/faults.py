"""A TCP proxy whose connections go wrong on purpose.

Put `FaultProxy` between a receiver and a sender, and say what goes wrong with which
connection::

    async with FaultProxy("127.0.0.1", port, faults=[CutAfter(100)]) as proxy:
        ...  # the first connection ends after 100 bytes, the others work

A fault concerns what the server sends; `Fault` is the base of your own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

from aiockpt.testing.fault_kinds import (
    READ,
    Answer,
    BlackHole,
    Counts,
    CutAfter,
    Delay,
    Drip,
    Drop,
    Fault,
    FlipBit,
    Pipe,
    Refuse,
    StallAfter,
)

__all__ = [
    "Answer",
    "BlackHole",
    "CutAfter",
    "Delay",
    "Drip",
    "Drop",
    "Fault",
    "FaultProxy",
    "FaultProxyStatistics",
    "FlipBit",
    "Pipe",
    "Refuse",
    "StallAfter",
]

_HOST = "127.0.0.1"


class FaultProxyStatistics(NamedTuple):
    """What a proxy has seen: connections in all and now, bytes to and from clients."""

    connections: int
    open: int
    bytes_down: int
    bytes_up: int


class FaultProxy:
    """Listens on a port of 127.0.0.1 and passes connections on to a server.

    Args:
        host: Where the server is; it may come, go and move while the proxy runs.
        port: Its port.
        faults: What goes wrong with the first connection, the second, and so on.
        otherwise: What goes wrong with all the others; nothing by default.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        faults: Iterable[Fault] = (),
        otherwise: Fault | None = None,
    ) -> None:
        self.target = (host, port)
        self.faults = list(faults)
        self.otherwise = otherwise or Fault()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts = Counts()

    def url(self, path: str = "/") -> str:
        """Return the ``http`` address of the proxy."""
        return f"http://{_HOST}:{self.port}{path}"

    def statistics(self) -> FaultProxyStatistics:
        """Count connections and bytes."""
        counts = self._counts
        return FaultProxyStatistics(
            counts.connections, len(self._tasks), counts.down, counts.up
        )

    async def listen(self) -> None:
        """Accept connections, on the same port as before if there was one."""
        self._server = await asyncio.start_server(
            self._accept, _HOST, self.port, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Refuse new connections, as if nothing listened there."""
        if self._server is not None:
            self._server.close()

    async def cut_all(self) -> None:
        """End all connections that are open now, with RST."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def aclose(self) -> None:
        """Stop listening and end all connections."""
        self.refuse()
        await self.cut_all()

    async def __aenter__(self) -> FaultProxy:
        await self.listen()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<FaultProxy port={self.port} connections={now.connections}>"

    def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        index = self._counts.connections
        self._counts.connections += 1
        fault = self.faults[index] if index < len(self.faults) else self.otherwise
        task = asyncio.create_task(
            self._serve(Pipe(reader, writer, self._counts), fault)
        )
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not writer.is_closing():  # it was cut before it had begun
                writer.transport.abort()

        task.add_done_callback(ended)

    async def _serve(self, pipe: Pipe, fault: Fault) -> None:
        # Everything ends a connection by an exception: the cut, a peer that went.
        with suppress(OSError):
            try:
                await fault.connected(pipe)
                await self._relay(pipe, fault)
            except asyncio.CancelledError:
                pipe.cut(reset=True)

    async def _relay(self, pipe: Pipe, fault: Fault) -> None:
        try:
            from_server, to_server = await asyncio.open_connection(*self.target)
        except OSError:
            pipe.cut(reset=True)
        ways = (
            asyncio.create_task(_send_down(from_server, pipe, fault)),
            asyncio.create_task(_send_up(pipe, to_server)),
        )
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            to_server.transport.abort()
            await asyncio.gather(*ways, return_exceptions=True)
        pipe.cut(reset=False)


async def _send_up(pipe: Pipe, to_server: asyncio.StreamWriter) -> None:
    while data := await pipe.hear():
        to_server.write(data)
        await to_server.drain()


async def _send_down(
    from_server: asyncio.StreamReader, pipe: Pipe, fault: Fault
) -> None:
    at = 0
    while data := await from_server.read(READ):
        await fault.forward(pipe, data, at)
        at += len(data)
