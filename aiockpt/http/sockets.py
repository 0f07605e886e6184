"""Sockets: duplicate, tune and cut connections, notice stalls; I/O threads.

Everything here works on the socket under an asyncio transport, and everything that
the system may lack is optional.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import select
import socket
import struct
import sys
import time
from typing import Any, Final

from aiockpt.runtime.children import close_in_forks

if sys.platform != "win32":
    import fcntl
    import termios

_INTERNET: Final = (socket.AF_INET, socket.AF_INET6)
_STREAMS: Final = (*_INTERNET, getattr(socket, "AF_UNIX", -1))
_LINGER_0: Final = struct.pack("ii", 1, 0)  # struct linger: on, 0 seconds
_MAX_OPTION: Final = 2**31 - 1  # milliseconds, bytes, or bytes per second
_RENO: Final = b"reno"  # every process may choose it
_NAME_BYTES: Final = 16  # of a congestion control, at most
_SO_MAX_PACING_RATE: Final = 47  # of Linux; Python does not name it
_UNLIMITED: Final = -1  # the system's own default

MIN_TURN_BYTES: Final = 2 << 20
"""Fewest bytes for which a thread's turn saves more than it costs."""

_MAX_TURN_S: Final = 0.5  # after which another connection may get the thread
_POLL_MS: Final = 10  # for which a thread waits for a peer

_MAX_LOOK_PERIOD_S: Final = 0.25  # between two looks at a connection
_LOOKS_PER_TIMEOUT: Final = 8  # at least


class IdleClock:
    """Counts the time in which nothing moves on a connection.

    The clock counts in periods, and a look that comes late counts as two of them at
    most: while the loop was busy elsewhere, bytes may have moved that nobody saw.

    Args:
        timeout: Seconds without progress after which the connection has stalled.
        now: The time on any steady clock.
        allowance: Seconds that do not count before the first progress.

    Attributes:
        period: Seconds between two looks.
        idle: Seconds since the last progress.
    """

    def __init__(self, timeout: float, now: float, *, allowance: float = 0.0) -> None:
        self.period = min(timeout / _LOOKS_PER_TIMEOUT, _MAX_LOOK_PERIOD_S)
        self.idle = -allowance
        self._timeout = timeout
        self._last = now
        self._progress = 0

    def has_stalled(self, progress: int, now: float) -> bool:
        """Look at the connection: return whether it has stalled.

        Args:
            progress: A count that changes with each progress.
            now: The time.
        """
        passed, self._last = now - self._last, now
        if progress != self._progress:
            self._progress, self.idle = progress, 0.0
        else:
            self.idle += min(passed, 2 * self.period)
        return self.idle >= self._timeout


# ------------------------------------------------------- a transport's socket


def duplicate(transport: asyncio.BaseTransport) -> socket.socket | None:
    """Return another socket for the transport's connection, or None.

    None if the connection is encrypted, if it has no stream socket, or if this process
    has no descriptor left.
    """
    sock = _socket_of(transport)
    if sock is None or transport.get_extra_info("sslcontext") is not None:
        return None
    if sock.family not in _STREAMS or sock.type != socket.SOCK_STREAM:
        return None
    try:
        copy = socket.socket(fileno=os.dup(sock.fileno()))
    except OSError:
        return None
    copy.settimeout(0)
    close_in_forks([copy])
    return copy


def unacknowledged(transport: asyncio.WriteTransport) -> int:
    """Return how many written bytes the peer has not acknowledged yet."""
    waiting = transport.get_write_buffer_size()
    sock = _socket_of(transport)
    if sock is not None and sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError):
            raw = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
            waiting += struct.unpack("i", raw)[0]
    return waiting


def reset_on_close(transport: asyncio.BaseTransport) -> None:
    """Drop what the kernel still holds for the peer when the connection closes.

    The peer learns at once that the body will not be finished, and a stalled peer
    does not hold the kernel's memory.
    """
    sock = _socket_of(transport)
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)


def cut(sock: socket.socket) -> None:
    """End a connection, even if a forked child still has its descriptor."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def is_same_host(transport: asyncio.BaseTransport) -> bool:
    """Return whether the peer's address is loopback, or our own end's address."""
    peer, own = (_address(transport, end) for end in ("peername", "sockname"))
    if peer is None or own is None:
        return False
    mapped = getattr(peer, "ipv4_mapped", None)
    return peer == own or (mapped or peer).is_loopback


def _address(
    transport: asyncio.BaseTransport, end: str
) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    name = transport.get_extra_info(end)
    with contextlib.suppress(ValueError, TypeError, IndexError):
        return ipaddress.ip_address(str(name[0]).partition("%")[0])
    return None


def _socket_of(transport: asyncio.BaseTransport) -> Any:
    # The socket of a closing uvloop transport remembers a descriptor's number that
    # may belong to another connection by now.
    return None if transport.is_closing() else transport.get_extra_info("socket")


# ------------------------------------------------------------------- tuning


def begin_classic(listening: socket.socket) -> None:
    """Let accepted connections begin with the congestion control for the same host.

    Loopback loses nothing, and Reno is two to four times faster there than BBR. A
    connection that began with BBR and changed is still paced by a timer, and slower
    by a third when all cores are busy. `tune` gives connections to other hosts the
    system's own congestion control before anything is sent.
    """
    if hasattr(socket, "TCP_CONGESTION"):
        _try_set(listening, socket.TCP_CONGESTION, _RENO)


def tune(
    transport: asyncio.BaseTransport, *, dead_after: float, began_classic: bool
) -> None:
    """Set what helps a bulk transfer, wherever the system has it.

    The kernel gives up a peer that acknowledges nothing for ``dead_after`` seconds.
    ``began_classic`` says that `begin_classic` was called for the listening socket.
    """
    sock = _socket_of(transport)
    if sock is None or sock.family not in _INTERNET:
        return
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(max(1, min(dead_after * 1000, _MAX_OPTION)))
        _try_set(sock, socket.TCP_USER_TIMEOUT, milliseconds)
    if hasattr(socket, "TCP_CONGESTION"):
        if is_same_host(transport):
            _try_set(sock, socket.TCP_CONGESTION, _RENO)
        elif began_classic and _congestion_control(sock) == _RENO:
            # If no descriptor is left to ask with, the connection stays as it began.
            with (
                contextlib.suppress(OSError),
                socket.socket(sock.family, socket.SOCK_STREAM) as fresh,
            ):
                _try_set(sock, socket.TCP_CONGESTION, _congestion_control(fresh))


def limit_rate(transport: asyncio.BaseTransport, rate: int | None) -> None:
    """Have the kernel send at most ``rate`` bytes per second, where it can.

    None removes the limit.
    """
    sock = _socket_of(transport)
    if sock is not None and sys.platform == "linux":
        limit = _UNLIMITED if rate is None or rate > _MAX_OPTION else rate
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, limit)


def limit_unsent(transport: asyncio.BaseTransport, nbytes: int) -> None:
    """Have the kernel take no more than about ``nbytes`` ahead of what it can send.

    It would take a whole chunk otherwise, and the sender could not know that the line
    is still busy with it. Zero restores the system's own limit. Systems other than
    Linux may only wake a writer later, and still take more.
    """
    sock = _socket_of(transport)
    if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        _try_set(sock, socket.TCP_NOTSENT_LOWAT, min(nbytes, _MAX_OPTION))


def _congestion_control(sock: Any) -> bytes:
    with contextlib.suppress(OSError):
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
        return bytes(name).rstrip(b"\0")
    return b""


def _try_set(sock: Any, option: int, value: int | bytes) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


# --------------------------------------------------------------- I/O threads


IO_THREADS: Final = 4
"""How many threads move bytes between sockets and memory, at each end.

An event loop that moves the bytes of two connections keeps one core busy and wakes for
each mebibyte. Threads that wait in the kernel move half as many bytes again. But the
way back from a thread costs the loop a millisecond or more when all cores are busy. So
a turn is long, as long as the peer keeps up and nobody cancels. The loop waits for a
slow peer, and does the work when no thread is free.
"""


class Turn:
    """The time for which the current task lets a thread use a non-blocking socket.

    A turn begins when it is made. It is over when the task is cancelled, so that the
    thread ends soon.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a turn belongs to a task"
        self._task, self._cancels = task, task.cancelling()
        self._end = time.monotonic() + _MAX_TURN_S
        self._poll = select.poll()

    @property
    def over(self) -> bool:
        """Whether the turn was long enough, or the task has been cancelled since."""
        return self._task.cancelling() > self._cancels or time.monotonic() >= self._end

    def wait(self, sock: socket.socket, event: int) -> bool:
        """Wait 10 ms for ``event``, a flag of ``select``; return whether it came."""
        self._poll.register(sock, event)
        return bool(self._poll.poll(_POLL_MS))
