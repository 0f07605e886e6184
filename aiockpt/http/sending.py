"""Moves the bytes of a response body to one peer, in bounded slices.

``resp.write`` neither suspends while a fast peer drains, which starves the loop, nor
promises that the transport keeps no reference to what it was given, which tears data
when the memory changes after the response. So there are two ways:

* **On the socket** (plain TCP): the headers are flushed through aiohttp, then slices go
  from the checkpoint's memory to the kernel, on a duplicate of the descriptor, because
  a loop refuses callbacks on the descriptor of a transport. A thread sends as long as
  the peer keeps up; where none is free, the loop does, at most one slice per readiness
  callback. The kernel has copied what ``sendmsg`` returns, so nothing refers to the
  memory between two of them, nor after the last one.
* **Portably** (TLS, or no socket that we know): copies of slices go through
  ``resp.write`` with an empty write buffer between them. The copy costs little beside
  the encryption, and again nothing refers to the memory once ``write`` was called.

A watch ends a sending that makes no progress for the stall timeout. Progress is what
the peer has acknowledged, since a socket reports room only after a third of its buffer
has drained, which a slow peer need not manage within any timeout. The watch counts its
own ticks, so a loop that was blocked does not pass for a stalled peer.

A response that cannot be finished ends with an abort of the connection, whatever the
reason, so that the peer never takes a truncated body for a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import select
import socket
from functools import partial

from aiohttp import web

from aiockpt.errors import ClosedError
from aiockpt.http import sockets
from aiockpt.http.bodies import Body
from aiockpt.http.plain import duplicate
from aiockpt.http.pumps import WORTH, Pumps, Turn

__all__ = ["Outcome", "Sending"]

SLICE_BYTES = 64 << 10
"""Most bytes that the loop sends at a time: each of many readers may be ready."""

THREAD_SLICE_BYTES = 4 << 20
"""Most bytes per system call of a thread, which takes what the kernel has room for."""

_MAX_BUFFERS = 512  # of one sendmsg; Linux takes 1024
_FIRST_SLICE = 64 << 10  # grows while the views are large
_MAX_TICK = 0.25
_TICKS = 8  # per stall timeout, where that is short
_BUFFER_PAUSE = 0.005


class Outcome(enum.Enum):
    """How a sending ended."""

    SENT = "sent"
    GONE = "gone"
    STALLED = "stalled"
    EVICTED = "evicted"


class Sending:
    """One body on its way to the peer at the other end of ``transport``.

    Without ``pumps`` no thread takes part.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        stall_timeout: float,
        pumps: Pumps | None = None,
    ) -> None:
        self._transport = transport
        self._pumps = pumps
        self._patience = stall_timeout
        self._tick = min(_MAX_TICK, stall_timeout / _TICKS)
        self._loop = asyncio.get_running_loop()
        self._outcome: Outcome | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle = 0.0
        self._acknowledged = 0
        self._slice = _FIRST_SLICE
        self.sent = 0

    def __repr__(self) -> str:
        how = self._outcome.value if self._outcome else "running"
        return f"<Sending {how} bytes={self.sent}>"

    def evict(self) -> None:
        """End the sending: abort the connection, read no more memory."""
        self._end(Outcome.EVICTED)

    @property
    def outcome(self) -> Outcome | None:
        """How it ended, once it has; ways to end early are no errors."""
        return self._outcome

    async def run(
        self, request: web.BaseRequest, response: web.StreamResponse, body: Body
    ) -> None:
        """Send the headers of ``response`` and the whole of ``body``.

        The length of ``body`` must be the response's ``Content-Length``. Once this has
        returned or raised, :attr:`outcome` is set, and nothing reads the body's memory.
        If cancelled, the connection is aborted.
        """
        self._watch()
        try:
            with contextlib.suppress(ConnectionError):
                await self._deliver(request, response, body)
        finally:
            self._end(Outcome.SENT if self.sent == body.nbytes else Outcome.GONE)
            if self._timer is not None:
                self._timer.cancel()

    async def _deliver(
        self, request: web.BaseRequest, response: web.StreamResponse, body: Body
    ) -> None:
        writer = await response.prepare(request)
        await response.write(b"")  # aiohttp may hold the headers back for the body
        # Bytes on the socket must come after the headers and must be the body as it
        # is; an aiohttp or a host application that does otherwise gets the other way.
        plain = not (response.chunked or response.compression)
        flushed = getattr(writer, "output_size", 0) > 0
        sock = duplicate(self._transport) if plain and flushed else None
        if sock is None:
            await self._send_portably(response, body)
            return
        with contextlib.closing(sock):
            try:
                await self._buffer_empty()
                await self._send_on(sock, body)
            finally:
                if self.sent < body.nbytes:
                    sockets.cut(sock)
        if self.sent == body.nbytes:
            await response.write_eof()

    async def _buffer_empty(self) -> None:
        # It is, or (uvloop) will be after one iteration, unless the peer pipelines and
        # does not read; then the watch counts.
        pause = 0.0
        while self._outcome is None and self._transport.get_write_buffer_size():
            await asyncio.sleep(pause)
            pause = _BUFFER_PAUSE

    async def _send_on(self, sock: socket.socket, body: Body) -> None:
        while self._outcome is None:
            waiting = True
            if self._pumps is not None and self._is_worth_a_turn(body):
                waiting = await self._send_in_thread(self._pumps, sock, body)
            if waiting:
                await self._send_on_loop(sock, body)

    async def _send_in_thread(
        self, pumps: Pumps, sock: socket.socket, body: Body
    ) -> bool:
        """Send for a turn; say whether the peer has to be waited for."""
        try:
            return await pumps.turn(partial(self._pump, sock, body))
        except OSError:
            self._end(Outcome.GONE)
        except ClosedError:  # so is the service, which ends all sendings
            self._end(Outcome.EVICTED)
        finally:
            if self.sent == body.nbytes:
                self._end(Outcome.SENT)
        return False

    def _pump(self, sock: socket.socket, body: Body, turn: Turn) -> bool:
        while self._outcome is None and self.sent < body.nbytes and not turn.over:
            try:
                self.sent += self._send_slice(sock, body, THREAD_SLICE_BYTES)
            except BlockingIOError:
                if not turn.wait(sock, select.POLLOUT):
                    return True
        return False

    async def _send_on_loop(self, sock: socket.socket, body: Body) -> None:
        """Send to the end, or until a thread could go on."""
        if self._outcome is not None:
            return
        self._waiter = self._loop.create_future()
        self._loop.add_writer(sock.fileno(), self._on_writable, sock, body)
        try:
            await self._waiter
        finally:
            # Before the descriptor closes: its number may be another file's at once.
            self._loop.remove_writer(sock.fileno())

    def _is_worth_a_turn(self, body: Body) -> bool:
        free = self._pumps is not None and self._pumps.free
        return free and body.nbytes - self.sent >= WORTH

    def _on_writable(self, sock: socket.socket, body: Body) -> None:
        if self._outcome is not None:
            return
        if self._transport.is_closing():
            self._end(Outcome.GONE)
            return
        try:
            self.sent += self._send_slice(sock, body, SLICE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(Outcome.GONE)
        except Exception as error:  # noqa: BLE001 - belongs to the caller, not the loop
            self._wake(error)
        if self.sent == body.nbytes:
            self._end(Outcome.SENT)
        elif self._is_worth_a_turn(body):
            self._wake(None)

    def _send_slice(self, sock: socket.socket, body: Body, most: int) -> int:
        count = sock.sendmsg(self._next_views(body, most))
        # Zero would call us again at once, and for ever.
        assert count > 0, f"{body!r} has no bytes at {self.sent}"
        return count

    def _next_views(self, body: Body, most: int) -> list[memoryview]:
        """Return what to send next; of many small views only a bounded number."""
        stop = min(self.sent + min(self._slice, most), body.nbytes)
        views = body.views(self.sent, stop)
        if len(views) > _MAX_BUFFERS:
            self._slice = max(self._slice // 2, _MAX_BUFFERS)
        elif len(views) <= _MAX_BUFFERS // 2:
            self._slice = min(self._slice * 2, THREAD_SLICE_BYTES)
        return views[:_MAX_BUFFERS]

    async def _send_portably(self, response: web.StreamResponse, body: Body) -> None:
        # So that each write awaits its bytes; at 0 asyncio's TLS would wait for ever.
        self._transport.set_write_buffer_limits(high=1)
        try:
            while self._outcome is None:
                piece = b"".join(self._next_views(body, SLICE_BYTES))
                last = self.sent + len(piece) == body.nbytes
                # write_eof drains however short the piece is, and write does not.
                await (response.write_eof(piece) if last else response.write(piece))
                self.sent += len(piece)
                if last:
                    break
                await asyncio.sleep(0)
        finally:
            if not self._transport.is_closing():
                self._transport.set_write_buffer_limits()

    def _watch(self) -> None:
        if self._transport.is_closing():
            self._end(Outcome.GONE)
            return
        acknowledged = self.sent - sockets.unacknowledged(self._transport)
        moved, self._acknowledged = acknowledged != self._acknowledged, acknowledged
        self._idle = 0.0 if moved else self._idle + self._tick
        if self._idle >= self._patience:
            self._end(Outcome.STALLED)
        else:
            self._timer = self._loop.call_later(self._tick, self._watch)

    def _end(self, outcome: Outcome) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        if outcome is not Outcome.SENT:
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
