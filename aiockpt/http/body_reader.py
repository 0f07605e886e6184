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
from typing import TypeAlias

import aiohttp
from aiohttp import ClientResponse, StreamReader

from aiockpt.errors import LocalProtocolError
from aiockpt.http.chunk_run import Arrived, ChunkRun
from aiockpt.http.sockets import MIN_TURN_BYTES, Turn, duplicate
from aiockpt.runtime.bridge import Bridge

Buffers: TypeAlias = Callable[[int, int], Sequence[memoryview]]

MAX_PIECE = 1 << 20
"""Bytes that one receive, and so one callback of the loop, moves at most."""

WINDOW = 4 << 20
"""Bytes for which memory is asked at a time: thousands of views take their time."""

SMALL = 64 << 10
"""Bytes of a buffer below which a system call costs more than another copy."""

MAX_SCATTER = 1024
"""Small buffers that are filled by one copy, which takes well under 1 ms."""

# To wake the loop costs as much as to receive a mebibyte.
_SECONDS_PER_REPORT = 0.02

# Both names are undocumented: another major version may mean something else by them.
_KNOWN_AIOHTTP = aiohttp.__version__.startswith("3.") and all(
    hasattr(StreamReader, name) for name in ("feed_eof", "read_nowait", "is_eof")
)
# Windows' loop receives in the background, into memory that may be gone by then.
_KNOWN_SYSTEM = sys.platform != "win32"
_NEEDED = ("set_protocol", "get_protocol", "pause_reading", "resume_reading", "abort")


class BodySink:
    """Writes the bytes of a body into memory, in order, as they arrive.

    The bytes are received straight into `next_buffers` and announced by `advance`,
    which a thread may do; or `write` copies them there, on the loop. Small buffers are
    filled from a scratch of at most 1 MiB, so `close` must be called before anybody
    reads them.

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
        arrived: How much has come of the chunk that the run has reached, or of all; as
            of the last `report`.
    """

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
        self.arrived = Arrived(None, 0, self.size)
        self._ask, self._check_memory = buffers, check
        self._run = run
        self._asked, self._stop = start, stop
        self._buffers: Sequence[memoryview] = ()
        self._index = self._offset = 0
        self._scratch: memoryview | None = None
        self._staged = 0
        self._next_window()

    @property
    def remaining(self) -> int:
        """How many bytes are still to come."""
        return self.size - self.filled

    def next_buffer(self) -> memoryview:
        """Return where the next bytes go: 1 byte to 1 MiB, while some remain."""
        if (buffer := self._next_scratch()) is None:
            buffer = self._buffers[self._index][self._offset :][:MAX_PIECE]
            self._check(0, len(buffer))
        return buffer

    def next_buffers(self) -> list[memoryview]:
        """Return where the next bytes go: 1 byte to 4 MiB, for a thread."""
        if (scratch := self._next_scratch()) is not None:
            return [scratch]
        buffers = [self._buffers[self._index][self._offset :]]
        for buffer in self._buffers[self._index + 1 :]:
            if len(buffer) < SMALL:
                break
            buffers.append(buffer)
        self._check(0, sum(map(len, buffers)))
        return buffers

    def advance(self, count: int) -> bool:
        """Note that ``count`` bytes are in what was returned.

        Returns:
            Whether a chunk has ended, so that there is something to `report`.
        """
        self.filled += count
        has_ended = False
        if self._scratch is not None:
            start, self._staged = self._staged, self._staged + count
            has_ended = self._digest(self._scratch[start : self._staged])
            if has_ended or self._staged == len(self._scratch):
                self._flush()
        else:
            # Another thread may have freed the memory since; a digest would read it.
            self._check(-count, 0)
            while count:
                piece = self._buffers[self._index][self._offset :][:count]
                self._offset += len(piece)
                count -= len(piece)
                has_ended |= self._digest(piece)
                self._next_window()
        if has_ended and self._run is not None:
            self._run.mark_stored()
        return has_ended

    def write(self, data: bytes | memoryview) -> None:
        """Copy ``data``, which is no longer than what remains, and `report`."""
        rest = memoryview(data)
        while rest:
            buffer = self.next_buffer()[: len(rest)]
            buffer[:] = rest[: len(buffer)]
            self.advance(len(buffer))
            rest = rest[len(buffer) :]
        self.report()

    def report(self) -> None:
        """Have the run make known, on the loop, which chunks were stored."""
        if self._run is None:
            self.arrived = Arrived(None, self.filled, self.size)
        else:
            self._run.verify_stored()
            self.arrived = self._run.arrived()

    def close(self) -> None:
        """Bring all bytes into the destination, and let go of it. Idempotent.

        The traceback of an error may keep this sink. It must not keep the memory, too,
        which its owner may want to unmap.
        """
        if self._ask is _no_buffers:
            return
        try:
            self._flush()
            self.report()
        finally:
            self._buffers, self._ask, self._run = (), _no_buffers, None
            self._check_memory = _no_buffers

    def _digest(self, data: memoryview) -> bool:
        return self._run is not None and self._run.digest(data)

    def _check(self, start: int, stop: int) -> None:
        """Check that memory is still there, by its distance from the next byte."""
        following = self._stop - self.remaining
        self._check_memory(following + start, following + stop)

    def _next_scratch(self) -> memoryview | None:
        """Return the rest of the scratch; None if the next buffer is not small."""
        if self._scratch is None:
            if not (nbytes := self._small_ahead()):
                return None
            self._scratch = memoryview(bytearray(nbytes))
        return self._scratch[self._staged :]

    def _small_ahead(self) -> int:
        """Return the bytes of the small buffers ahead; 0 if there is at most one."""
        total, offset, stop = 0, self._offset, self._index
        for buffer in self._buffers[self._index : self._index + MAX_SCATTER]:
            if len(buffer) - offset >= SMALL or total >= MAX_PIECE:
                break
            total += len(buffer) - offset
            offset, stop = 0, stop + 1
        return min(total, MAX_PIECE) if stop > self._index + 1 else 0

    def _flush(self) -> None:
        """Copy what is in the scratch to the small buffers, and drop the scratch."""
        if self._scratch is None:
            return
        data, self._scratch = self._scratch[: self._staged], None
        self._check(-len(data), 0)
        self._staged = 0
        buffers, index, offset = self._buffers, self._index, self._offset
        start, stop = 0, len(data)
        while start < stop:
            size = len(buffers[index])
            count = min(size - offset, stop - start)
            buffers[index][offset : offset + count] = data[start : start + count]
            start += count
            offset += count
            if offset == size:
                index, offset = index + 1, 0
        self._index, self._offset = index, offset
        self._next_window()

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


async def read_body(response: ClientResponse, sink: BodySink, threads: Bridge) -> None:
    """Read a body, which must be exactly as long as what remains of ``sink``.

    The sink is closed, and nothing refers to its buffers, once this has returned or
    raised. If cancelled, or if the body breaks off, the connection is closed; what had
    arrived is in the destination and counted.

    Raises:
        ConnectionError: the connection ended before the body did.
        aiohttp.ClientError: as aiohttp found it.
    """
    content, direct = response.content, None
    try:
        if connection := _plain_connection(response):
            # Reading may make the parser give out more, and the transport resume.
            # Nothing arrives in between, because nothing here awaits.
            while data := content.read_nowait():
                sink.write(data)
            # Once the body has ended, what is left to come is an error.
            if not (content.is_eof() or connection[0].is_closing()):
                direct = _DirectReader(sink, *connection, threads)
        if direct is None:
            while sink.remaining:
                if not (data := await content.readany()):
                    raise ConnectionResetError("the body ended early")
                sink.write(data)
            return
        with direct as sock:
            await direct.read_on_loop()
            while sink.remaining:
                # Other requests may have taken the last free thread meanwhile.
                if sock is not None and threads.free:
                    await threads.run(_receive, sock, sink, direct.report_soon, Turn())
                    direct.report()
                    direct.check()
                if sink.remaining:
                    direct.resume()  # for more, or for why there is none
                    await direct.read_on_loop()
        content.feed_eof()  # aiohttp takes the connection back
    except BaseException:
        response.close()  # never to the pool: nobody knows what is still to come
        raise
    finally:
        sink.close()


def _plain_connection(
    response: ClientResponse,
) -> tuple[asyncio.Transport, asyncio.Protocol] | None:
    """Return the transport of a response, and the protocol that aiohttp gave it.

    None if the connection is over, encrypted or unknown.
    """
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
    return (transport, protocol) if transport.get_protocol() is protocol else None


class _DirectReader(asyncio.BufferedProtocol):
    """Takes the place of aiohttp's protocol for a block, while a body arrives."""

    def __init__(
        self,
        sink: BodySink,
        transport: asyncio.Transport,
        protocol: asyncio.Protocol,
        threads: Bridge,
    ) -> None:
        self._sink = sink
        self._transport, self._protocol = transport, protocol
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._lost: Exception | None = None
        self._failed: Exception | None = None

    def __enter__(self) -> socket.socket | None:
        """Take over; return a socket for threads, where that is worth a descriptor."""
        if self._sink.remaining >= MIN_TURN_BYTES:
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
        """Report the bytes that came; `check` raises the error of a report."""
        try:
            self._sink.report()
        except Exception as error:  # noqa: BLE001 - belongs to the caller, not the loop
            self._failed = error

    def check(self) -> None:
        """Raise the error that has ended the body early, if there is one."""
        if self._failed is not None:
            raise self._failed
        if self._lost is not None and self._sink.remaining:
            raise self._lost

    def _install(self, protocol: asyncio.BaseProtocol) -> None:
        # uvloop chooses between the kinds of protocol when reading starts.
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        try:
            return self._sink.next_buffer()
        except Exception as error:  # noqa: BLE001 - belongs to the caller, not the loop
            self._failed = error
            return memoryview(bytearray(1))  # dropped, as the connection will be

    def buffer_updated(self, nbytes: int) -> None:
        if self._failed is None:
            try:
                self._sink.advance(nbytes)
            except Exception as error:  # noqa: BLE001 - belongs to the caller
                self._failed = error
            else:
                self.report()
        is_long = self._sock is not None and self._sink.remaining >= MIN_TURN_BYTES
        for_thread = is_long and self._threads.free
        if self._failed or not self._sink.remaining or for_thread:
            self._transport.pause_reading()
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)
        self._lost = exc or ConnectionResetError("the body ended early")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _receive(
    sock: socket.socket, sink: BodySink, report: Callable[[], None], turn: Turn
) -> None:
    """Receive for a turn; for a thread."""
    unreported, due = False, 0.0
    while sink.remaining and not turn.over:
        try:
            count, *_ = sock.recvmsg_into(sink.next_buffers())
        except BlockingIOError:
            if turn.wait(sock, select.POLLIN):
                continue
            return
        except OSError:
            return  # the connection's transport finds out, too
        if not count:
            return
        unreported |= sink.advance(count)
        if unreported and (now := time.monotonic()) >= due:
            report()
            unreported, due = False, now + _SECONDS_PER_REPORT
