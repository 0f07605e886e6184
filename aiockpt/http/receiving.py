"""Moves the body of an answer into memory, by one of two movers.

*direct*: the connection gets another protocol for the length of the body, which
receives straight into the destination. Measured, that is 0.8 of a bare socket, and
aiohttp's stream half of one. Afterwards aiohttp gets its protocol back and is told
that the body has ended, so the connection returns to its pool. *portable*: the stream
of aiohttp, copied. It takes over wherever the direct mover could not be sure: TLS,
an aiohttp that lacks what it needs, a body that has arrived already.
"""

from __future__ import annotations

import asyncio
import sys
from typing import NamedTuple, TypeGuard

import aiohttp
from aiohttp import ClientResponse, StreamReader

from aiockpt.http.filler import Filler

__all__ = ["receive"]

# Both names are undocumented: another major version may mean something else by them.
_KNOWN_AIOHTTP = aiohttp.__version__.startswith("3.") and all(
    hasattr(StreamReader, name) for name in ("feed_eof", "read_nowait", "is_eof")
)
# Windows' loop receives in the background, into memory that may be gone by then.
_KNOWN_SYSTEM = sys.platform != "win32"
_NEEDED = ("set_protocol", "get_protocol", "pause_reading", "resume_reading", "abort")


class _Line(NamedTuple):
    """A connection's transport and the protocol that aiohttp gave it."""

    transport: asyncio.Transport
    protocol: asyncio.Protocol


async def receive(answer: ClientResponse, filler: Filler, *, direct: bool) -> None:
    """Receive the body, which must be exactly as long as what remains of ``filler``.

    The filler is closed, and nothing refers to its buffers, once this has returned or
    raised. If
    cancelled, or if the body breaks off, the connection is closed; what had arrived
    is in its place and counted.

    Raises:
        ConnectionError: the connection ended before the body did.
        aiohttp.ClientError: as aiohttp found it.
    """
    line = _line_of(answer) if direct and _KNOWN_AIOHTTP and _KNOWN_SYSTEM else None
    try:
        if line is None:
            await _receive_portable(answer.content, filler)
        else:
            await _receive_direct(answer.content, filler, line)
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


async def _receive_direct(content: StreamReader, filler: Filler, line: _Line) -> None:
    _take_buffered(content, filler)
    if content.is_eof() or line.transport.is_closing():
        await _receive_portable(content, filler)  # what is left to say is an error
        return
    await _Sink.run(filler, line)
    content.feed_eof()  # aiohttp takes the connection back


def _take_buffered(content: StreamReader, filler: Filler) -> None:
    # Reading may make the parser give out more, and the transport resume; nothing
    # arrives in between, because nothing here awaits.
    while data := content.read_nowait():
        filler.write(data)


class _Sink(asyncio.BufferedProtocol):
    """Stands in for aiohttp's protocol while a body arrives."""

    def __init__(self, filler: Filler, line: _Line) -> None:
        self._filler = filler
        self._line = line
        self._done = asyncio.get_running_loop().create_future()

    @classmethod
    async def run(cls, filler: Filler, line: _Line) -> None:
        """Receive until the filler is full, then give the protocol back, paused."""
        sink, transport = cls(filler, line), line.transport
        sink._install(sink)
        try:
            await sink._done
        except BaseException:
            transport.abort()  # from here on no byte is received
            raise
        finally:
            sink._install(line.protocol)
            del sink  # or an error would keep it through this frame

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
        if not self._filler.remaining:
            self._line.transport.pause_reading()
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._line.protocol.connection_lost(exc)
        self._finish(exc or ConnectionResetError("the body ended early"))

    def _finish(self, error: Exception | None) -> None:
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
