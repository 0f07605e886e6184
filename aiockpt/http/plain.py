"""The socket under an asyncio transport, where what is on it is what the peer reads."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from aiockpt.http.forks import close_in_forks

__all__ = ["duplicate", "socket_of"]

_STREAMS = (socket.AF_INET, socket.AF_INET6, getattr(socket, "AF_UNIX", -1))


def duplicate(transport: asyncio.BaseTransport) -> socket.socket | None:
    """Return a socket of our own for the transport's connection, or None.

    None where bytes on the socket would not be what the peer reads (TLS), where there
    is no stream socket, and where the descriptor cannot be duplicated.
    """
    sock = socket_of(transport)
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


def socket_of(transport: asyncio.BaseTransport) -> Any:
    """Return the transport's socket, or None if it closes or has none."""
    # uvloop's socket remembers the number of a descriptor that is closed already, and
    # that may be a stranger's connection by now.
    return None if transport.is_closing() else transport.get_extra_info("socket")
