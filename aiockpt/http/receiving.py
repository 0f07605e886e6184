"""Moves the body of an answer into memory, by one of two movers.

*direct*: the connection gets another protocol for the length of the body, which
receives straight into the destination. Once bytes have come it pauses, and a thread
receives on a duplicate of the descriptor as long as they keep coming. Afterwards
aiohttp gets its protocol back and is told that the body has ended, so the connection
returns to its pool. *portable*: the stream of aiohttp, copied. It takes over wherever
the direct mover could not be sure: TLS, an aiohttp that lacks what it needs, a body
that has arrived already.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeGuard

import aiohttp
from aiohttp import ClientResponse, StreamReader

from aiockpt.http.filler import Filler
from aiockpt.http.plain import duplicate
from aiockpt.http.pumps import WORTH, Pumps, Turn

__all__ = ["receive"]

# Both names are undocumented: another major version may mean something else by them.
_KNOWN_AIOHTTP = aiohttp.__version__.startswith("3.") and all(
    hasattr(StreamReader, name) for name in ("feed_eof", "read_nowait", "is_eof")
)
# Windows' loop receives in the background, into memory that may be gone by then.
_KNOWN_SYSTEM = sys.platform != "win32"
_NEWS = 0.02  # seconds between two wakings of the loop, which cost what a mebibyte does
_NEEDED = ("set_protocol", "get_protocol", "pause_reading", "resume_reading", "abort")


class _Line(NamedTuple):
    """A connection's transport and the protocol that aiohttp gave it."""

    transport: asyncio.Transport
    protocol: asyncio.Protocol


async def receive(answer: ClientResponse, filler: Filler, pumps: Pumps | None) -> None:
    """Receive the body, which must be exactly as long as what remains of ``filler``.

    The filler is closed, and nothing refers to its buffers, once this has returned or
    raised. If cancelled, or if the body breaks off, the connection is closed; what had
    arrived is in its place and counted. Without ``pumps`` it comes the portable way.

    Raises:
        ConnectionError: the connection ended before the body did.
        aiohttp.ClientError: as aiohttp found it.
    """
    line = _line_of(answer) if _KNOWN_AIOHTTP and _KNOWN_SYSTEM else None
    try:
        if line is None or pumps is None:
            await _receive_portable(answer.content, filler)
        else:
            await _receive_direct(answer.content, filler, line, pumps)
    except BaseException:
        answer.close()  # never to the pool: nobody knows what is still to come
        raise
    finally:
        filler.close()


def _line_of(answer: ClientResponse) -> _Line | None:
    connection = answer.connection
    if connection is None:  # the body is complete, the connection back in the pool
        return None
    line = (connection.transport, connection.protocol)
    return _Line(*line) if _is_plain(line) else None


def _is_plain(
    line: tuple[asyncio.Transport | None, asyncio.Protocol | None],
) -> TypeGuard[tuple[asyncio.Transport, asyncio.Protocol]]:
    transport, protocol = line
    return (
        transport is not None
        and all(hasattr(transport, name) for name in _NEEDED)
        and transport.get_extra_info("sslcontext") is None
        and transport.get_protocol() is protocol
        and not transport.is_closing()
    )


async def _receive_portable(content: StreamReader, filler: Filler) -> None:
    while filler.remaining:
        data = await content.readany()
        if not data:
            raise ConnectionResetError("the body ended early")
        filler.write(data)


async def _receive_direct(
    content: StreamReader, filler: Filler, line: _Line, pumps: Pumps
) -> None:
    _take_buffered(content, filler)
    if content.is_eof() or line.transport.is_closing():
        await _receive_portable(content, filler)  # what is left to say is an error
        return
    await _Sink(filler, line, pumps).run()
    content.feed_eof()  # aiohttp takes the connection back


def _take_buffered(content: StreamReader, filler: Filler) -> None:
    # Reading may make the parser give out more, and the transport resume; nothing
    # arrives in between, because nothing here awaits.
    while data := content.read_nowait():
        filler.write(data)


class _Sink(asyncio.BufferedProtocol):
    """Stands in for aiohttp's protocol while a body arrives."""

    def __init__(self, filler: Filler, line: _Line, pumps: Pumps) -> None:
        self._filler = filler
        self._line = line
        self._pumps = pumps
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._failed: Exception | None = None

    async def run(self) -> None:
        """Receive until the filler is full, then give the protocol back."""
        transport = self._line.transport
        if self._filler.remaining >= WORTH:
            self._sock = duplicate(transport)
        self._install(self)
        try:
            await self._receive()
        except BaseException:
            transport.abort()  # from here on no byte is received
            raise
        finally:
            self._install(self._line.protocol)
            if self._sock is not None:
                self._sock.close()

    async def _receive(self) -> None:
        """Have a thread receive whenever bytes have come."""
        filler, sock = self._filler, self._sock
        await self._pause()
        while filler.remaining:
            if sock is not None and self._pumps.free:  # others were asked as well
                await self._pumps.turn(partial(_pump, sock, filler, self._tell_soon))
                self._tell()
                self._check()
            if filler.remaining:
                self._line.transport.resume_reading()  # for more, or why there is none
                await self._pause()

    def _tell_soon(self) -> None:
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        try:
            self._filler.tell()
        except Exception as error:  # noqa: BLE001 - belongs to the caller, not the loop
            self._failed = error

    async def _pause(self) -> None:
        """Receive until all is there, or a thread could go on; reading is paused."""
        self._waiter = self._loop.create_future()
        if self._error is not None:
            self._wake()
        await self._waiter
        self._check()

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._error is not None and self._filler.remaining:
            raise self._error

    def _install(self, protocol: asyncio.BaseProtocol) -> None:
        # uvloop chooses between the kinds of protocol when reading starts.
        transport = self._line.transport
        transport.pause_reading()
        transport.set_protocol(protocol)
        transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._filler.next_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._filler.advance(nbytes)
        self._tell()
        if self._failed or not self._filler.remaining or self._is_worth_a_turn():
            self._line.transport.pause_reading()
            self._wake()

    def _is_worth_a_turn(self) -> bool:
        worth = self._sock is not None and self._filler.remaining >= WORTH
        return worth and self._pumps.free

    def connection_lost(self, exc: Exception | None) -> None:
        self._line.protocol.connection_lost(exc)
        self._error = exc or ConnectionResetError("the body ended early")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _pump(
    sock: socket.socket, filler: Filler, tell: Callable[[], None], turn: Turn
) -> None:
    """Receive for a turn; for a thread."""
    news, due = False, 0.0
    while filler.remaining and not turn.over:
        try:
            count, *_ = sock.recvmsg_into(filler.next_buffers())
        except BlockingIOError:
            if turn.wait(sock, select.POLLIN):
                continue
            return
        except OSError:
            return  # the connection's transport finds out, too
        if not count:
            return
        news |= filler.advance(count)
        if news and (now := time.monotonic()) >= due:
            tell()
            news, due = False, now + _NEWS
