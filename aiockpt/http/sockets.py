"""What the server asks of the socket under an asyncio transport; all of it optional."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
import sys
from typing import Any

from aiockpt.http.plain import socket_of

if sys.platform != "win32":
    import fcntl
    import termios

__all__ = [
    "begin_classic",
    "cut",
    "descriptor_of",
    "is_same_host",
    "reset_on_close",
    "tune",
    "unacknowledged",
]

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_NOW = struct.pack("ii", 1, 0)  # struct linger: on, 0 seconds
_CLASSIC = b"reno"  # which everybody may choose
_LONGEST_NAME = 16


def descriptor_of(transport: asyncio.BaseTransport) -> int | None:
    """Return the descriptor of the transport's socket while it is open."""
    sock = socket_of(transport)
    return None if sock is None or sock.fileno() < 0 else int(sock.fileno())


def begin_classic(listening: socket.socket) -> None:
    """Have connections begin with the congestion control that suits the same host.

    Nothing is ever lost there, and the classic one is two to four times faster than
    BBR. A connection that began with BBR, and changed, is still paced by a timer, and
    slower by a third where all cores are busy. `tune` gives those to other hosts the
    system's own, before anything is sent.
    """
    if hasattr(socket, "TCP_CONGESTION"):
        _try_set(listening, socket.TCP_CONGESTION, _CLASSIC)


def tune(
    transport: asyncio.BaseTransport, *, dead_after: float, began_classic: bool
) -> None:
    """Set what helps a bulk transfer, wherever the system has it.

    A peer that acknowledges nothing for ``dead_after`` seconds is given up by the
    kernel. ``began_classic`` says that `begin_classic` was called for who listens.
    """
    sock = socket_of(transport)
    if sock is None or sock.family not in _INTERNET:
        return
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = max(int(dead_after * 1000), 1)
        _try_set(sock, socket.TCP_USER_TIMEOUT, milliseconds)
    if hasattr(socket, "TCP_CONGESTION"):
        if is_same_host(transport):
            _try_set(sock, socket.TCP_CONGESTION, _CLASSIC)
        elif began_classic and _congestion_control(sock) == _CLASSIC:
            # Without a descriptor to ask with, it stays as it began.
            with (
                contextlib.suppress(OSError),
                socket.socket(sock.family, socket.SOCK_STREAM) as fresh,
            ):
                _try_set(sock, socket.TCP_CONGESTION, _congestion_control(fresh))


def _congestion_control(sock: Any) -> bytes:
    with contextlib.suppress(OSError):
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LONGEST_NAME)
        return bytes(name).rstrip(b"\0")
    return b""


def _try_set(sock: Any, option: int, value: int | bytes) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def is_same_host(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer's address is loopback, or our own end's address."""
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


def unacknowledged(transport: asyncio.WriteTransport) -> int:
    """Return how many written bytes the peer has not acknowledged yet."""
    waiting = transport.get_write_buffer_size()
    sock = socket_of(transport)
    if sock is not None and sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError):
            raw = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
            waiting += struct.unpack("i", raw)[0]
    return waiting


def reset_on_close(transport: asyncio.BaseTransport) -> None:
    """Drop what the kernel still holds for the peer when the connection closes.

    The peer learns at once that the body will not be finished, and a stalled one does
    not keep the kernel's memory.
    """
    sock = socket_of(transport)
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOW)


def cut(sock: socket.socket) -> None:
    """End a connection, even if a forked child still has its descriptor."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
