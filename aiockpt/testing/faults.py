"""A TCP proxy that injects faults into connections, and the faults that it injects.

Put `FaultProxy` between a receiver and a sender, and give each connection a fault::

    async with FaultProxy("127.0.0.1", port, faults=[CutAfter(100)]) as proxy:
        ...  # the first connection ends after 100 bytes, the others work

A fault affects the bytes that the server sends. Derive your own faults from `Fault`.
Positions count the server's bytes on that connection, from byte 0.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, NoReturn

_HOST = "127.0.0.1"
_READ = 1 << 18
_ROUNDS = 5  # of the loop
_LINGER_ZERO = struct.pack("ii", 1, 0)  # close() then sends RST


@dataclass(slots=True)
class _Counts:
    """Connections so far, bytes to clients, bytes from clients."""

    connections: int = 0
    down: int = 0
    up: int = 0


class Pipe:
    """The client's side of one connection, for use by a fault."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        counts: _Counts,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._counts = counts

    async def hear(self) -> bytes:
        """Return the client's next bytes, which then do not reach the server."""
        data = await self._reader.read(_READ)
        self._counts.up += len(data)
        return data

    async def send(self, data: bytes) -> None:
        """Send bytes to the client, as fast as it reads them."""
        if data:
            self._writer.write(data)
            self._counts.down += len(data)
            await self._writer.drain()

    def cut(self, *, reset: bool) -> NoReturn:
        """End the connection, with FIN after the sent bytes, or with RST."""
        if reset:
            sock: socket.socket = self._writer.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            self._writer.transport.abort()
        self._writer.close()
        raise ConnectionAbortedError("cut on purpose")

    async def stall(self) -> None:
        """Send nothing more; wait until the connection is closed from outside."""
        await asyncio.Event().wait()


class Fault:
    """The base of all faults; by itself it passes every byte on."""

    async def connected(self, pipe: Pipe) -> None:
        """Called when a client has connected, before the server is contacted."""

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Handle ``data`` of the server, whose first byte is at position ``at``."""
        await pipe.send(data)


@dataclass(frozen=True, slots=True)
class Refuse(Fault):
    """The connection is reset as soon as it is accepted."""

    async def connected(self, pipe: Pipe) -> None:
        """Reset it."""
        pipe.cut(reset=True)


@dataclass(frozen=True, slots=True)
class Answer(Fault):
    """Another server answers: it sends ``data`` to any request, and closes."""

    data: bytes

    async def connected(self, pipe: Pipe) -> None:
        """Read first, because closing with unread bytes would send a reset."""
        await pipe.hear()
        await pipe.send(self.data)
        pipe.cut(reset=False)


@dataclass(frozen=True, slots=True)
class CutAfter(Fault):
    """The connection ends after ``count`` bytes, with FIN or with RST."""

    count: int
    reset: bool = False

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Send what comes before the cut."""
        await pipe.send(data[: self.count - at])
        if at + len(data) >= self.count:
            pipe.cut(reset=self.reset)


@dataclass(frozen=True, slots=True)
class StallAfter(Fault):
    """Nothing more arrives after ``count`` bytes; the connection stays open."""

    count: int

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Send what comes before the stall."""
        await pipe.send(data[: self.count - at])
        if at + len(data) >= self.count:
            await pipe.stall()


@dataclass(frozen=True, slots=True)
class FlipBit(Fault):
    """One bit of byte ``at`` arrives inverted."""

    at: int
    bit: int = 0

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Send all of it, with the bit inverted."""
        index = self.at - at
        if 0 <= index < len(data):
            wrong = bytes([data[index] ^ (1 << self.bit)])
            data = data[:index] + wrong + data[index + 1 :]
        await pipe.send(data)


@dataclass(frozen=True, slots=True)
class Drop(Fault):
    """``count`` bytes from byte ``at`` on are lost; the later ones arrive."""

    at: int
    count: int

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Send what comes before and what comes after."""
        start, stop = max(self.at - at, 0), max(self.at + self.count - at, 0)
        await pipe.send(data[:start] + data[stop:])


@dataclass(frozen=True, slots=True)
class BlackHole(Fault):
    """The connection accepts every byte, forwards none, and never answers."""

    async def connected(self, pipe: Pipe) -> None:
        """Read and drop the client's bytes until it disconnects."""
        while await pipe.hear():
            pass
        pipe.cut(reset=False)


@dataclass(frozen=True, slots=True)
class Delay(Fault):
    """The server's bytes arrive ``seconds`` late, at most 256 KiB at a time."""

    seconds: float

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Wait, then send."""
        await asyncio.sleep(self.seconds)
        await pipe.send(data)


@dataclass(frozen=True, slots=True)
class Drip(Fault):
    """Bytes arrive at ``rate`` per second, ``burst`` at a time."""

    rate: float
    burst: int = 1

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Send in bursts."""
        for start in range(0, len(data), self.burst):
            piece = data[start : start + self.burst]
            await asyncio.sleep(len(piece) / self.rate)
            await pipe.send(piece)


class FaultProxyStatistics(NamedTuple):
    """A proxy's counts: connections in total and now, bytes to and from clients."""

    connections: int
    open: int
    bytes_down: int
    bytes_up: int


class FaultProxy:
    """Listens on a port of 127.0.0.1 and passes connections on to a server.

    Args:
        host: The server's host. The server may start, stop and move while the proxy
            runs.
        port: The server's port.
        faults: The faults of the first connection, the second, and so on.
        otherwise: The fault of all later connections; none by default.
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
        self._held: socket.socket | None = None  # keeps the port while nothing listens
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts = _Counts()

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
        self._free_port()

    def refuse(self) -> None:
        """Refuse new connections, as if nothing listened there; keep the port."""
        if self._server is not None:
            self._stop_listening()
            # Or a connection of anybody might get the port before the next listen().
            self._held = socket.socket()
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind((_HOST, self.port))

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _free_port(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    async def cut_all(self) -> None:
        """End all connections that are open now, with RST."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def aclose(self) -> None:
        """Stop listening and end all connections."""
        self._stop_listening()
        self._free_port()
        await self.cut_all()
        # A connection that was accepted a moment ago is dropped, and its transport
        # closed, a few rounds of the loop later; the loop may end before.
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)

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
        if self._server is None or not self._server.is_serving():
            writer.transport.abort()  # it was accepted while the proxy was closed
            return
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
        # Each end of a connection is an exception: a cut, or a peer that disconnected.
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
    while data := await from_server.read(_READ):
        await fault.forward(pipe, data, at)
        at += len(data)
