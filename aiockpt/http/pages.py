"""Memory that goes to a process of this host without a copy on the way.

Where others copy into the kernel, it is given the pages themselves, by ``vmsplice(2)``
and ``splice(2)``; the receiver copies out of them. So they are read until the receiver
has read them, which is a moment after the last byte was sent, and what is written to
them meanwhile is received. Therefore

* only who says that it verifies what it receives gets pages, and only over a connection
  of which the kernel can tell how much the peer has not read yet;
* only who may read every step does, by the server's own doors: a peer that means harm
  can keep pages (in a pipe), and look at them when the next step has been staged there;
* the memory is held until the peer has read it. Where that takes too long, or is not
  known, as of a peer that hangs up, the memory is spent: its owner reuses it no more,
  and the pages go with their last reader.

A proxy of this host that splices what it receives into another socket has read it, for
the kernel; who verifies at its other end may then find later steps' bytes, and asks
again.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from aiockpt.http.bodies import FileBody
from aiockpt.http.forks import close_in_forks, cut_off_in_forks
from aiockpt.http.published import Servable
from aiockpt.http.unread import Mark
from aiockpt.memory import Lendable
from aiockpt.wire.http import CHUNKS, VERIFIES_HEADER

if sys.platform == "linux":
    import fcntl

__all__ = ["Holds", "Pages", "no_pages"]

_PIPE_BYTES: Final = 1 << 20  # what every user may have
_FIRST_PAUSE: Final = 0.001
_LAST_PAUSE: Final = 0.1
_PATIENCE: Final = 2.0  # seconds that memory is held for a peer
_SLOW: Final = 0.005  # seconds for a piece, which takes a fiftieth of that
_SLOW_ONES: Final = 3
_FORBIDDEN: Final = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL)

_libc = ctypes.CDLL(None, use_errno=True)
_CAN_SPLICE: Final = hasattr(os, "splice") and hasattr(_libc, "vmsplice")
if _CAN_SPLICE:
    _libc.vmsplice.restype = ctypes.c_ssize_t
    _libc.vmsplice.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_uint,
    )


class Pages:
    """The way of memory to the peer at the other end of a connection.

    Args:
        begin: Where it begins, on a connection that does not block.
        body: What is sent, all of it from the data segment.
        arena: The memory that holds the segment.
        holds: Where it stays until the peer has read it.
    """

    def __init__(
        self, begin: Mark, body: FileBody, arena: Lendable, holds: Holds
    ) -> None:
        self._begin = begin
        self._body, self._arena = body, arena
        self._address = arena.address + body.begin
        self._holds = holds
        self._pipe: _Pipe | None = None
        self._used = self._refused = False
        self._slow = 0

    def __repr__(self) -> str:
        return f"<Pages to={self._begin.link.peer} used={self._used}>"

    def send(self, start: int) -> int:
        """Send some of the body from ``start`` on; return how many bytes.

        0 if the kernel takes no pages, and from when on a busy thread has the lock of
        the interpreter: larger pieces, copied, wait for it less often. For threads.

        Raises:
            BlockingIOError: the peer has to be waited for.
            OSError: it is gone.
        """
        if self._refused:
            return 0
        began = time.monotonic()
        first, nbytes = self._address + start, self._body.nbytes - start
        try:
            self._pipe = self._pipe or _Pipe()
            self._pipe.fill(first, nbytes)
        except OSError:
            self._refused = True
            return 0
        self._used = True
        try:
            count = self._pipe.drain(self._begin.sock)
        except OSError as error:
            self._refused = error.errno in _FORBIDDEN
            if self._refused:
                return 0
            raise
        self._slow = self._slow + 1 if time.monotonic() - began > _SLOW else 0
        self._refused = self._slow >= _SLOW_ONES
        return count

    def close(self, *, sent: int) -> None:
        """Hold the memory, or spend it, if the peer has still to read of it.

        The connection must still be there. ``sent`` is how much of the body has been.
        """
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if not self._used:
            return
        end = self._begin._replace(position=self._begin.position + sent)
        whole, safe = sent == self._body.nbytes, False
        try:
            safe = end.passed or (whole and self._holds.keep(end, self._body))
        finally:
            if not safe:
                self._arena.spent = True


def no_pages(_: socket.socket) -> None:
    """Say that a body goes no such way."""


class Holds:
    """Memory that peers have still to read, after all of it was sent."""

    def __init__(self) -> None:
        self._held: set[_Hold] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Holds {len(self)}>"

    def __len__(self) -> int:
        return len(self._held)

    def way(
        self, body: FileBody, headers: Mapping[str, str]
    ) -> Callable[[socket.socket], Pages | None]:
        """Return what finds the way of a body to who asks with these headers."""
        verifies = headers.get(VERIFIES_HEADER) == CHUNKS
        in_segment = body.begin >= 0
        return partial(self._open, body) if verifies and in_segment else no_pages

    def _open(self, body: FileBody, sock: socket.socket) -> Pages | None:
        arena = body.servable.arena
        if not _CAN_SPLICE or self._closed or arena is None:
            return None
        begin = Mark.here(sock)
        return None if begin is None else Pages(begin, body, arena, self)

    def keep(self, end: Mark, body: FileBody) -> bool:
        """Hold a body's memory until the peer has read it; say whether that is done.

        If it takes too long, the memory is spent.
        """
        if self._closed:
            return False
        loop = asyncio.get_running_loop()
        try:
            copy = end.sock.dup()  # or nobody could ask what is acknowledged
        except OSError:
            return False
        close_in_forks([copy])
        hold = _Hold(end._replace(sock=copy), body.servable, loop.time() + _PATIENCE)
        body.servable.acquire()
        self._held.add(hold)
        loop.call_later(_FIRST_PAUSE, self._look, hold, _FIRST_PAUSE)
        return True

    def close(self) -> None:
        """Hold nothing from now on; what is held is spent. Idempotent."""
        self._closed = True
        for hold in tuple(self._held):
            self._let_go(hold, spent=True)

    def _look(self, hold: _Hold, pause: float) -> None:
        if hold not in self._held:
            return
        loop = asyncio.get_running_loop()
        if hold.end.passed:
            self._let_go(hold, spent=False)
        elif loop.time() >= hold.until:
            self._let_go(hold, spent=True)
        else:
            pause = min(2 * pause, _LAST_PAUSE)
            loop.call_later(pause, self._look, hold, pause)

    def _let_go(self, hold: _Hold, *, spent: bool) -> None:
        self._held.discard(hold)
        arena = hold.servable.arena
        if spent and arena is not None:
            arena.spent = True
        hold.end.sock.close()
        hold.servable.release()


@dataclass(frozen=True, slots=True, eq=False)
class _Hold:
    """Memory, and up to where somebody has still to read of it until when."""

    end: Mark
    servable: Servable
    until: float


class _Vector(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class _Pipe:
    """References to pages on their way to a socket."""

    def __init__(self) -> None:
        self._out, self._into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._ends = [self._out, self._into]
        self._first = self._filled = 0
        cut_off_in_forks(self)  # a child would keep the pages
        try:
            fcntl.fcntl(self._into, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:  # its user has many: through a small one copies are faster
            self.close()
            raise

    def fill(self, first: int, nbytes: int) -> None:
        """Have pages from an address on; those that are left, if they are the first.

        Raises:
            OSError: the kernel gives none.
        """
        if self._filled and self._first != first:  # somebody else sent some
            self._drop()
        if not self._filled:
            vector = _Vector(first, min(nbytes, _PIPE_BYTES))
            taken = _libc.vmsplice(self._into, ctypes.byref(vector), 1, 0)
            if taken <= 0:
                raise OSError(ctypes.get_errno(), "no pages for the kernel")
            self._first, self._filled = first, taken

    def drain(self, sock: socket.socket) -> int:
        """Pass some on; return how many bytes."""
        count = os.splice(self._out, sock.fileno(), self._filled)
        self._first += count
        self._filled -= count
        return count

    def close(self) -> None:
        """Close both ends; what was not passed on is forgotten."""
        ends, self._ends = self._ends, []
        for end in ends:
            os.close(end)

    def descriptors(self) -> list[int]:
        """Return both ends while they are open."""
        return self._ends

    def _drop(self) -> None:
        while self._filled:
            self._filled -= len(os.read(self._out, self._filled))
