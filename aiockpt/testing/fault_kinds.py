"""What can go wrong with a connection: one small class for each fault.

Positions count the bytes that the server has sent on that connection, the first one
being byte 0.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

__all__ = [
    "Answer",
    "BlackHole",
    "Counts",
    "CutAfter",
    "Delay",
    "Drip",
    "Drop",
    "Fault",
    "FlipBit",
    "Pipe",
    "Refuse",
    "StallAfter",
]

READ = 1 << 18
_LINGER_ZERO = struct.pack("ii", 1, 0)  # close() then sends RST


@dataclass(slots=True)
class Counts:
    """Connections so far, bytes to clients, bytes from clients."""

    connections: int = 0
    down: int = 0
    up: int = 0


class Pipe:
    """The way to the client of one connection, as a fault sees it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        counts: Counts,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._counts = counts

    async def hear(self) -> bytes:
        """Return what the client says next; it is not passed on if this takes it."""
        data = await self._reader.read(READ)
        self._counts.up += len(data)
        return data

    async def send(self, data: bytes) -> None:
        """Pass bytes on, as fast as the client takes them."""
        if data:
            self._writer.write(data)
            self._counts.down += len(data)
            await self._writer.drain()

    def cut(self, *, reset: bool) -> NoReturn:
        """End the connection, with FIN after what was sent, or with RST."""
        if reset:
            sock: socket.socket = self._writer.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            self._writer.transport.abort()
        self._writer.close()
        raise ConnectionAbortedError("cut on purpose")

    async def stall(self) -> None:
        """Pass nothing on until the connection is closed from outside."""
        await asyncio.Event().wait()


class Fault:
    """What goes wrong with a connection; this one: nothing."""

    async def connected(self, pipe: Pipe) -> None:
        """Act when a client has connected, before the server knows."""

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Pass on, or not, ``data``, whose first byte is the server's byte ``at``."""
        await pipe.send(data)


@dataclass(frozen=True, slots=True)
class Refuse(Fault):
    """The connection is reset as soon as it is there."""

    async def connected(self, pipe: Pipe) -> None:
        """Reset it."""
        pipe.cut(reset=True)


@dataclass(frozen=True, slots=True)
class Answer(Fault):
    """Another server sits there: whatever it is asked, it says ``data`` and closes."""

    data: bytes

    async def connected(self, pipe: Pipe) -> None:
        """Listen first: to close with a question unread would be a reset."""
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
    """``count`` bytes from byte ``at`` on never arrive; those after them do."""

    at: int
    count: int

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Send what comes before and what comes after."""
        start, stop = max(self.at - at, 0), max(self.at + self.count - at, 0)
        await pipe.send(data[:start] + data[stop:])


@dataclass(frozen=True, slots=True)
class BlackHole(Fault):
    """The connection is there and takes every byte; none goes on, none comes back."""

    async def connected(self, pipe: Pipe) -> None:
        """Swallow what the client says until it leaves."""
        while await pipe.hear():
            pass
        pipe.cut(reset=False)


@dataclass(frozen=True, slots=True)
class Delay(Fault):
    """What the server sends arrives ``seconds`` late, at most 256 KiB at a time."""

    seconds: float

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Hold it back for a while."""
        await asyncio.sleep(self.seconds)
        await pipe.send(data)


@dataclass(frozen=True, slots=True)
class Drip(Fault):
    """Bytes arrive at ``rate`` per second, ``burst`` at a time."""

    rate: float
    burst: int = 1

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Send it bit by bit."""
        for start in range(0, len(data), self.burst):
            piece = data[start : start + self.burst]
            await asyncio.sleep(len(piece) / self.rate)
            await pipe.send(piece)
