"""Write the body of a response from memory to a peer, in bounded slices.

``resp.write`` has two flaws for live memory. It does not suspend while a fast peer
drains, which starves the loop. And the transport may keep a reference to the bytes,
which tears data when the memory changes after the response. So there are two ways:

* **On the socket** (plain TCP). aiohttp flushes the headers. Then slices go from the
  checkpoint's memory to the kernel, on a duplicate of the descriptor, because a loop
  refuses callbacks on the descriptor of a transport. A thread sends as long as the
  peer keeps up. If no thread is free, the loop sends at most one slice per readiness
  callback. The kernel has copied what ``sendmsg`` returns, so nothing refers to the
  memory between two calls, nor after the last one.
* **Portably** (TLS, or an unknown kind of socket). Copies of slices go through
  ``resp.write``, with an empty write buffer between them. The copy costs little beside
  the encryption, and nothing refers to the memory after ``write`` was called.

An idle clock ends a body that makes no progress for the stall timeout. Progress is
what the peer has acknowledged: a socket reports room only after a third of its buffer
has drained, which a slow peer may not manage in time.

A body that cannot be finished ends with an abort of the connection, whatever the
reason, so that the peer never takes a truncated body for a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import select
import socket
from collections.abc import Callable
from typing import Final, TypeAlias

from aiohttp import web

from aiockpt.errors import ClosedError, PeerFailedError
from aiockpt.http import sockets
from aiockpt.http.sockets import (
    MIN_TURN_BYTES,
    IdleClock,
    Turn,
    duplicate,
)
from aiockpt.runtime.bridge import Bridge

Views: TypeAlias = Callable[[int, int], list[memoryview]]
"""Returns the bytes ``[start, stop)`` of a body, in order."""

SLICE_BYTES: Final = 64 << 10
"""Most bytes that the loop sends at a time: each of many readers may be ready."""

THREAD_SLICE_BYTES: Final = 4 << 20
"""Most bytes per system call of a thread, which sends what the kernel has room for."""

_MAX_BUFFERS: Final = 512  # of one sendmsg; Linux takes 1024
_BUFFER_POLL_S: Final = 0.005


class Outcome(enum.Enum):
    """How the writing of a body ended."""

    SENT = "sent"
    GONE = "gone"
    STALLED = "stalled"
    EVICTED = "evicted"
    INTERRUPTED = "interrupted"


class BodySender:
    """Writes one body to the peer at the other end of ``transport``.

    Args:
        transport: The connection.
        nbytes: The length of the body.
        views: Returns the memory of a part of the body; it is asked slice by slice.
        stall_timeout: Seconds without progress after which the connection is aborted.
        threads: Send large bodies; None: the loop does.

    Attributes:
        sent: How many bytes the kernel has taken.
        arrived: How many of them have arrived, once the writing has ended. After an
            early end, it may be too few.
        outcome: How the writing ended, once it has. To end early is no error.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        nbytes: int,
        views: Views,
        *,
        stall_timeout: float,
        threads: Bridge | None = None,
    ) -> None:
        self.sent = self.arrived = 0
        self._acknowledged = 0  # at the last look
        self.outcome: Outcome | None = None
        self._transport = transport
        self._nbytes = nbytes
        self._views = views
        self._threads = threads
        self._slice = SLICE_BYTES  # grows while the views are large
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._clock = IdleClock(stall_timeout, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None

    def evict(self) -> None:
        """Stop: abort the connection, read no more memory."""
        self._end(Outcome.EVICTED)

    def interrupt(self) -> None:
        """Stop as `evict` does: the receiver should ask again, for less."""
        self._end(Outcome.INTERRUPTED)

    async def run(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Send the headers of ``response`` and the whole body.

        The response's ``Content-Length`` must be the length of the body. Once this has
        returned or raised, :attr:`outcome` is set, and nothing reads the memory. If
        cancelled, the connection is aborted.
        """
        self._look_for_progress()
        try:
            with contextlib.suppress(ConnectionError):
                writer = await response.prepare(request)
                await response.write(b"")  # aiohttp may hold the headers back
                # Bytes on the socket must come after the headers and must be the body
                # as it is. If aiohttp or the application does otherwise, the portable
                # way is right.
                plain = not (response.chunked or response.compression)
                flushed = getattr(writer, "output_size", 0) > 0
                sock = duplicate(self._transport) if plain and flushed else None
                if sock is None:
                    await self._write_portably(response)
                else:
                    await self._write_on_socket(sock)
                    if self._is_complete:
                        await response.write_eof()
        except PeerFailedError:  # the receiver asks again, and is told
            self._end(Outcome.EVICTED)
        finally:
            self._end(Outcome.SENT if self._is_complete else Outcome.GONE)
            if self._timer is not None:
                self._timer.cancel()

    @property
    def acknowledged(self) -> int:
        """How many bytes had arrived at the last look, a fraction of a second ago."""
        return max(self._acknowledged, 0)

    @property
    def left(self) -> int:
        """How many bytes the kernel has not taken."""
        return self._nbytes - self.sent

    @property
    def _is_complete(self) -> bool:
        return self.sent == self._nbytes

    # ------------------------------------------------------- on the socket

    async def _write_on_socket(self, sock: socket.socket) -> None:
        with contextlib.closing(sock):
            try:
                await self._headers_written()
                while self.outcome is None:
                    must_wait = True
                    if self._threads is not None and self._is_worth_a_turn():
                        must_wait = await self._threads.run(
                            self._write_in_thread, sock, Turn()
                        )
                    if self._is_complete:
                        self._end(Outcome.SENT)
                    elif must_wait and self.outcome is None:
                        await self._write_on_loop(sock)
            except OSError:
                self._end(Outcome.GONE)
            except ClosedError:  # of the threads: the service ends all bodies
                self._end(Outcome.EVICTED)
            finally:
                if not self._is_complete:
                    sockets.cut(sock)

    async def _headers_written(self) -> None:
        # They are already, or (uvloop) will be after one iteration, unless the peer
        # pipelines requests and does not read; then the idle clock counts.
        pause = 0.0
        while self.outcome is None and self._transport.get_write_buffer_size():
            await asyncio.sleep(pause)
            pause = _BUFFER_POLL_S

    def _is_worth_a_turn(self) -> bool:
        free = self._threads is not None and self._threads.free
        return free and self._nbytes - self.sent >= MIN_TURN_BYTES

    def _write_in_thread(self, sock: socket.socket, turn: Turn) -> bool:
        """Send for a turn; return whether the peer has to be waited for."""
        while self.outcome is None and not self._is_complete and not turn.over:
            try:
                self._send_slice(sock, THREAD_SLICE_BYTES)
            except BlockingIOError:
                if not turn.wait(sock, select.POLLOUT):
                    return True
        return False

    async def _write_on_loop(self, sock: socket.socket) -> None:
        """Send to the end, or until a thread could go on."""
        self._waiter = self._loop.create_future()
        self._loop.add_writer(sock.fileno(), self._on_writable, sock)
        try:
            await self._waiter
        finally:
            # Before the descriptor closes: its number may be another file's at once.
            self._loop.remove_writer(sock.fileno())

    def _on_writable(self, sock: socket.socket) -> None:
        if self.outcome is not None:
            return
        if self._transport.is_closing():
            self._end(Outcome.GONE)
            return
        try:
            self._send_slice(sock, SLICE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(Outcome.GONE)
        except Exception as error:  # noqa: BLE001 - belongs to the caller, not the loop
            self._wake(error)
        if self._is_complete:
            self._end(Outcome.SENT)
        elif self._is_worth_a_turn():
            self._wake(None)

    def _send_slice(self, sock: socket.socket, most: int) -> None:
        count = sock.sendmsg(self._next_views(most))
        # Zero would call us again at once, and for ever.
        assert count > 0, f"the body has no bytes at {self.sent}"
        self.sent += count

    def _next_views(self, most: int) -> list[memoryview]:
        """Return what to send next; of many small views only a bounded number."""
        stop = min(self.sent + min(self._slice, most), self._nbytes)
        views = self._views(self.sent, stop)
        if len(views) > _MAX_BUFFERS:
            self._slice = max(self._slice // 2, _MAX_BUFFERS)
        elif len(views) <= _MAX_BUFFERS // 2:
            self._slice = min(self._slice * 2, THREAD_SLICE_BYTES)
        return views[:_MAX_BUFFERS]

    # ------------------------------------------------------------ portably

    async def _write_portably(self, response: web.StreamResponse) -> None:
        # So that each write awaits its bytes; at 0 asyncio's TLS would wait for ever.
        self._transport.set_write_buffer_limits(high=1)
        try:
            while self.outcome is None:
                piece = b"".join(self._next_views(SLICE_BYTES))
                last = self.sent + len(piece) == self._nbytes
                # write_eof drains however short the piece is, and write does not.
                await (response.write_eof(piece) if last else response.write(piece))
                self.sent += len(piece)
                if last:
                    break
                await asyncio.sleep(0)
        finally:
            if not self._transport.is_closing():
                self._transport.set_write_buffer_limits()

    # ------------------------------------------------------------- its end

    def _look_for_progress(self) -> None:
        if self._transport.is_closing():
            self._end(Outcome.GONE)
            return
        self._acknowledged = self.sent - sockets.unacknowledged(self._transport)
        if self._clock.has_stalled(self._acknowledged, self._loop.time()):
            self._end(Outcome.STALLED)
        else:
            period = self._clock.period
            self._timer = self._loop.call_later(period, self._look_for_progress)

    def _end(self, outcome: Outcome) -> None:
        if self.outcome is not None:
            return
        self.outcome, self.arrived = outcome, self.sent
        if outcome is not Outcome.SENT:
            if not self._transport.is_closing():
                waiting = sockets.unacknowledged(self._transport)
                self._acknowledged = self.sent - waiting
            self.arrived = max(self._acknowledged, 0)
            sockets.reset_on_close(self._transport)
            self._transport.abort()
        self._wake(None)

    def _wake(self, error: Exception | None) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
