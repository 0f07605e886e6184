"""What the server asks of the socket under an asyncio transport; all of it optional."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import struct
import sys
from typing import Any

from aiockpt.http.forks import close_in_forks

if sys.platform != "win32":
    import fcntl
    import termios

__all__ = [
    "cut",
    "descriptor_of",
    "duplicate",
    "is_same_host",
    "reset_on_close",
    "tune",
    "unacknowledged",
]

_STREAMS = (socket.AF_INET, socket.AF_INET6, getattr(socket, "AF_UNIX", -1))
_NOW = struct.pack("ii", 1, 0)  # struct linger: on, 0 seconds


def duplicate(transport: asyncio.BaseTransport) -> socket.socket | None:
    """Return a socket of our own for the transport's connection, or None.

    None where bytes on the socket would not be what the peer reads (TLS), where there
    is no stream socket, and where the descriptor cannot be duplicated.
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


def descriptor_of(transport: asyncio.BaseTransport) -> int | None:
    """Return the descriptor of the transport's socket while it is open."""
    sock = _socket_of(transport)
    return None if sock is None or sock.fileno() < 0 else int(sock.fileno())


def tune(transport: asyncio.BaseTransport, *, dead_after: float) -> None:
    """Set what helps a bulk transfer, wherever the system has it.

    A peer that acknowledges nothing for ``dead_after`` seconds is given up by the
    kernel. On the way to the same host, where nothing is ever lost, the classic
    congestion control is two to four times faster than BBR.
    """
    sock = _socket_of(transport)
    if sock is None or sock.family not in _STREAMS[:2]:
        return
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = max(int(dead_after * 1000), 1)
        _try_set(sock, socket.TCP_USER_TIMEOUT, milliseconds)
    if hasattr(socket, "TCP_CONGESTION") and is_same_host(transport):
        _try_set(sock, socket.TCP_CONGESTION, b"reno")


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
    sock = _socket_of(transport)
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
    sock = _socket_of(transport)
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOW)


def cut(sock: socket.socket) -> None:
    """End a connection, even if a forked child still has its descriptor."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _socket_of(transport: asyncio.BaseTransport) -> Any:
    # uvloop's socket remembers the number of a descriptor that is closed already, and
    # that may be a stranger's connection by now.
    return None if transport.is_closing() else transport.get_extra_info("socket")
