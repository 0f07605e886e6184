"""Reads the body of a response into memory, in one of two ways.

*Direct*: the connection gets another protocol for the length of the body, which
receives straight into the destination. Once bytes have come the loop stops reading, and
a thread receives on a duplicate of the descriptor as long as bytes keep coming.
Afterwards aiohttp gets its protocol back and is told that the body has ended, so the
connection returns to its pool. *Portable*: aiohttp's stream, copied. It takes over
wherever the direct way could not be sure: with TLS, with an aiohttp that lacks what is
needed, and for a body that has arrived already.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import aiohttp
from aiohttp import ClientResponse, StreamReader

from aiockpt.errors import LocalProtocolError
from aiockpt.http.chunk_run import Arrived, ChunkRun
from aiockpt.http.sockets import MIN_TURN_BYTES, Turn, duplicate
from aiockpt.runtime.bridge import Bridge

Buffers: TypeAlias = Callable[[int, int], Sequence[memoryview]]

# One receive, and so one callback, moves at most this much: the loop stays live.
MAX_PIECE = 1 << 20
# Memory is asked for in steps: views of thousands of small tensors take their time.
WINDOW = 4 << 20
# Below this a system call costs more than copying the bytes once more.
SMALL = 64 << 10
# A copy into many small buffers costs per buffer: this many take well under 1 ms.
MAX_SCATTER = 1024
# Seconds between two wakings of the loop, which cost as much as receiving a mebibyte.
_REPORT = 0.02

# Both names are undocumented: another major version may mean something else by them.
_KNOWN_AIOHTTP = aiohttp.__version__.startswith("3.") and all(
    hasattr(StreamReader, name) for name in ("feed_eof", "read_nowait", "is_eof")
)
# Windows' loop receives in the background, into memory that may be gone by then.
_KNOWN_SYSTEM = sys.platform != "win32"
_NEEDED = ("set_protocol", "get_protocol", "pause_reading", "resume_reading", "abort")


class BodySink:
    """Writes the bytes of a body into memory, in order, as they arrive.

    Either the bytes are received straight into `next_buffers` and announced by
    `advance`, which a thread may do; or they are handed to `write`, on the loop.
    Small buffers are received through a scratch of at most 1 MiB, so `close` must be
    called before anybody reads them.

    Args:
        buffers: Returns the memory of ``[start, stop)`` as contiguous views of format
            ``B``, in order.
        start: The first byte to write.
        stop: The byte after the last one.
        run: Digests the bytes as they come, while they are in the processor's cache.
        check: Raises if the memory of ``[start, stop)`` is not there any more. It is
            called right before each write.

    Attributes:
        size: How many bytes there are to write.
        filled: How many have come.
        place: How much has come of the chunk that the run has reached, or of all; as
            of the last `report`.
    """

    __slots__ = (
        "_ask",
        "_asked",
        "_buffers",
        "_check_memory",
        "_index",
        "_offset",
        "_run",
        "_scratch",
        "_staged",
        "_stop",
        "filled",
        "place",
        "size",
    )

    def __init__(
        self,
        buffers: Buffers,
        start: int,
        stop: int,
        run: ChunkRun | None = None,
        *,
        check: Callable[[int, int], object] = lambda _, __: None,
    ) -> None:
        self.size = stop - start
        self.filled = 0
        self._ask, self._check_memory = buffers, check
        self._run = run
        self._asked, self._stop = start, stop
        self._buffers: Sequence[memoryview] = ()
        self._index = self._offset = 0
        self._scratch: memoryview | None = None
        self._staged = 0
        self.place = self._reached()
        self._next_window()

    @property
    def remaining(self) -> int:
        """How many bytes are still to come."""
        return self.size - self.filled

    def next_buffer(self) -> memoryview:
        """Return where the next bytes go: 1 byte to 1 MiB, while some remain."""
        return self._next_scratch() or self._still([self._next_whole()[:MAX_PIECE]])[0]

    def next_buffers(self) -> list[memoryview]:
        """Return where the next bytes go: 1 byte to 4 MiB, for a thread."""
        scratch = self._next_scratch()
        if scratch:
            return [scratch]
        buffers = [self._next_whole()]
        for buffer in self._buffers[self._index + 1 :]:
            if len(buffer) < SMALL:
                break
            buffers.append(buffer)
        return self._still(buffers)

    def advance(self, count: int) -> bool:
        """Note that ``count`` bytes are in what was returned.

        Returns:
            Whether a chunk has ended, so that there is something to `report`.
        """
        self.filled += count
        wanted = self._staged_more(count) if self._scratch else self._came(count)
        if wanted and self._run is not None:
            self._run.placed()
        return wanted

    def report(self) -> None:
        """Have the run make known, on the loop, which chunks were placed."""
        if self._run is not None:
            self._run.note()
        self.place = self._reached()

    def write(self, data: bytes | memoryview) -> None:
        """Copy ``data``, which is no longer than what remains."""
        self._flush()
        view = memoryview(data)
        self._check(len(view))
        self._scatter(view)
        self.filled += len(data)
        if self._run is not None and self._run.take(view):
            self._run.placed()
        self.report()

    def close(self) -> None:
        """Bring all bytes to their place and let go of the memory; idempotent.

        The traceback of an error may keep this writer. It must not keep the memory,
        too, which its owner may want to unmap.
        """
        if self._ask is _no_buffers:
            return
        try:
            self._flush()
            self.report()
        finally:
            self._buffers, self._ask, self._run = (), _no_buffers, None
            self._check_memory = _no_buffers

    def _reached(self) -> Arrived:
        if self._run is None:
            return Arrived(None, self.filled, self.size)
        return self._run.place()

    def _flush(self) -> None:
        if self._scratch is not None:
            scratch, self._scratch = self._scratch[: self._staged], None
            self._check(len(scratch))
            self._staged = 0
            self._scatter(scratch)

    def _next_scratch(self) -> memoryview | None:
        if self._scratch is None:
            nbytes = self._small_ahead()
            if not nbytes:
                return None
            self._scratch = memoryview(bytearray(nbytes))
        return self._scratch[self._staged :]

    def _still(self, buffers: list[memoryview]) -> list[memoryview]:
        """Return buffers for the next bytes, whose memory is still there."""
        self._check(sum(map(len, buffers)))
        return buffers

    def _check(self, count: int) -> None:
        """Check that the memory of the next ``count`` bytes is still there."""
        at = self._stop - self.remaining - self._staged
        self._check_memory(at, at + count)

    def _next_whole(self) -> memoryview:
        return self._buffers[self._index][self._offset :]

    def _staged_more(self, count: int) -> bool:
        assert self._scratch is not None
        start, self._staged = self._staged, self._staged + count
        wanted = self._digest(self._scratch[start : self._staged])
        if wanted or self._staged == len(self._scratch):
            self._flush()
        return wanted

    def _came(self, count: int) -> bool:
        # The caller's thread may have freed the memory since; a digest would read it.
        at = self._stop - self.remaining - count
        self._check_memory(at, at + count)
        wanted = False
        while count:
            piece = self._next_whole()[:count]
            self._offset += len(piece)
            count -= len(piece)
            wanted |= self._digest(piece)
            self._next_window()
        return wanted

    def _digest(self, data: memoryview) -> bool:
        return self._run is not None and self._run.take(data)

    def _small_ahead(self) -> int:
        """Return the bytes of the small buffers ahead; 0 if there is at most one."""
        total, offset, stop = 0, self._offset, self._index
        for buffer in self._buffers[self._index : self._index + MAX_SCATTER]:
            if len(buffer) - offset >= SMALL or total >= MAX_PIECE:
                break
            total += len(buffer) - offset
            offset, stop = 0, stop + 1
        return min(total, MAX_PIECE) if stop > self._index + 1 else 0

    def _scatter(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            at += self._scatter_in_window(data[at:])
            self._next_window()

    def _scatter_in_window(self, data: memoryview) -> int:
        """Copy what fits into the buffers at hand; return how much that is."""
        buffers, index, offset = self._buffers, self._index, self._offset
        at, stop, last = 0, len(data), len(self._buffers)
        while at < stop and index < last:
            size = len(buffers[index])
            count = min(size - offset, stop - at)
            buffers[index][offset : offset + count] = data[at : at + count]
            at += count
            offset += count
            if offset == size:
                index, offset = index + 1, 0
        self._index, self._offset = index, offset
        return at

    def _next_window(self) -> None:
        """Go to the next byte to write, in the next window if this one is full."""
        while True:
            buffers = self._buffers
            while self._index < len(buffers):
                if self._offset < len(buffers[self._index]):
                    return
                self._index, self._offset = self._index + 1, 0
            if self._asked == self._stop:
                return
            stop = min(self._asked + WINDOW, self._stop)
            self._buffers = self._ask(self._asked, stop)
            self._index = self._offset = 0
            if sum(map(len, self._buffers)) != stop - self._asked:
                raise LocalProtocolError("the destination gave memory of another size")
            self._asked = stop


def _no_buffers(start: int, stop: int) -> Sequence[memoryview]:
    return ()


async def read_body(
    response: ClientResponse, writer: BodySink, threads: Bridge | None
) -> None:
    """Read a body, which must be exactly as long as what remains of ``writer``.

    The writer is closed, and nothing refers to its buffers, once this has returned or
    raised. If cancelled, or if the body breaks off, the connection is closed; what had
    arrived is in its place and counted. Without ``threads`` the portable way is taken.

    Raises:
        ConnectionError: the connection ended before the body did.
        aiohttp.ClientError: as aiohttp found it.
    """
    content, direct = response.content, None
    try:
        connection = _plain_connection(response) if threads is not None else None
        if connection is not None:
            # Reading may make the parser give out more, and the transport resume.
            # Nothing arrives in between, because nothing here awaits.
            while data := content.read_nowait():
                writer.write(data)
            # Once the body has ended, what is left to come is an error.
            if not (content.is_eof() or connection.transport.is_closing()):
                direct = _DirectReader(writer, connection, threads)
        if direct is None or threads is None:
            while writer.remaining:
                data = await content.readany()
                if not data:
                    raise ConnectionResetError("the body ended early")
                writer.write(data)
            return
        with direct as sock:
            await direct.read_on_loop()
            while writer.remaining:
                # Other requests may have taken the last free thread meanwhile.
                if sock is not None and threads.free:
                    await threads.run(
                        _receive, sock, writer, direct.report_soon, Turn()
                    )
                    direct.report()
                    direct.check()
                if writer.remaining:
                    direct.resume()  # for more, or for why there is none
                    await direct.read_on_loop()
        content.feed_eof()  # aiohttp takes the connection back
    except BaseException:
        response.close()  # never to the pool: nobody knows what is still to come
        raise
    finally:
        writer.close()


class _TakenConnection(NamedTuple):
    """A connection's transport and the protocol that aiohttp gave it."""

    transport: asyncio.Transport
    protocol: asyncio.Protocol


def _plain_connection(response: ClientResponse) -> _TakenConnection | None:
    """Return a response's connection; None if it is over, encrypted or unknown."""
    connection = response.connection
    if not (_KNOWN_AIOHTTP and _KNOWN_SYSTEM) or connection is None:
        return None
    transport, protocol = connection.transport, connection.protocol
    if transport is None or protocol is None or transport.is_closing():
        return None
    if not all(hasattr(transport, name) for name in _NEEDED):
        return None
    if transport.get_extra_info("sslcontext") is not None:
        return None
    if transport.get_protocol() is not protocol:
        return None
    return _TakenConnection(transport, protocol)


class _DirectReader(asyncio.BufferedProtocol):
    """Takes the place of aiohttp's protocol for a block, while a body arrives."""

    def __init__(
        self, writer: BodySink, connection: _TakenConnection, threads: Bridge | None
    ) -> None:
        self._writer = writer
        self._transport, self._protocol = connection
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._lost: Exception | None = None
        self._failed: Exception | None = None

    def __enter__(self) -> socket.socket | None:
        """Take over; return a socket for threads, where that is worth a descriptor."""
        if self._writer.remaining >= MIN_TURN_BYTES:
            self._sock = duplicate(self._transport)
        self._install(self)
        return self._sock

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the connection back; after a failure, no byte is received any more."""
        if kind is not None:
            self._transport.abort()
        self._install(self._protocol)
        if self._sock is not None:
            self._sock.close()

    def resume(self) -> None:
        """Have the loop receive again."""
        self._transport.resume_reading()

    async def read_on_loop(self) -> None:
        """Receive until all has come, or a thread could go on; then reading pauses."""
        self._waiter = self._loop.create_future()
        if self._lost is not None:
            self._wake()
        await self._waiter
        self.check()

    def report_soon(self) -> None:
        """Have the loop `report`; for a thread."""
        self._loop.call_soon_threadsafe(self.report)

    def report(self) -> None:
        """Make known what came; an error is for `check` to raise."""
        try:
            self._writer.report()
        except Exception as error:  # noqa: BLE001 - belongs to the caller, not the loop
            self._failed = error

    def check(self) -> None:
        """Raise what has gone wrong, if the body is not whole."""
        if self._failed is not None:
            raise self._failed
        if self._lost is not None and self._writer.remaining:
            raise self._lost

    def _install(self, protocol: asyncio.BaseProtocol) -> None:
        # uvloop chooses between the kinds of protocol when reading starts.
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        try:
            return self._writer.next_buffer()
        except Exception as error:  # noqa: BLE001 - belongs to the caller, not the loop
            self._failed = error
            return memoryview(bytearray(1))  # dropped, as the connection will be

    def buffer_updated(self, nbytes: int) -> None:
        if self._failed is None:
            self._advance(nbytes)
        if self._failed or not self._writer.remaining or self._is_worth_a_turn():
            self._transport.pause_reading()
            self._wake()

    def _advance(self, nbytes: int) -> None:
        try:
            self._writer.advance(nbytes)
        except Exception as error:  # noqa: BLE001 - belongs to the caller, not the loop
            self._failed = error
        else:
            self.report()

    def _is_worth_a_turn(self) -> bool:
        worth = self._sock is not None and self._writer.remaining >= MIN_TURN_BYTES
        return worth and self._threads is not None and self._threads.free

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)
        self._lost = exc or ConnectionResetError("the body ended early")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _receive(
    sock: socket.socket, writer: BodySink, report: Callable[[], None], turn: Turn
) -> None:
    """Receive for a turn; for a thread."""
    unreported, due = False, 0.0
    while writer.remaining and not turn.over:
        try:
            count, *_ = sock.recvmsg_into(writer.next_buffers())
        except BlockingIOError:
            if turn.wait(sock, select.POLLIN):
                continue
            return
        except OSError:
            return  # the connection's transport finds out, too
        if not count:
            return
        unreported |= writer.advance(count)
        if unreported and (now := time.monotonic()) >= due:
            report()
            unreported, due = False, now + _REPORT
