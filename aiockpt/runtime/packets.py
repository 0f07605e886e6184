"""Packets between processes of one host, with descriptors beside the bytes."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from array import array

__all__ = ["arrival", "is_ours", "owner_of", "receive"]

_UCRED = struct.Struct("3i")  # pid, uid, gid


def owner_of(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, by the kernel's word."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return pid, uid


def is_ours(sock: socket.socket) -> bool:
    """Tell whether the other end is a process of the same user."""
    return owner_of(sock)[1] == os.geteuid()


def receive(sock: socket.socket, nbytes: int, fds: int) -> tuple[bytes, list[int]]:
    """Return the next packet and its descriptors, up to so many; nothing at the end.

    No program that this process starts inherits them.

    Raises:
        BlockingIOError: there is none yet, and the socket does not block.
        OSError: the connection has failed, or the packet is larger than that.
    """
    found = array("i")
    space = socket.CMSG_LEN(fds * found.itemsize)
    data, extras, flags, _ = sock.recvmsg(nbytes, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in extras:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(content[: len(content) // found.itemsize * found.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(found) > fds:
        for fd in found:
            os.close(fd)
        raise OSError("a message was cut short")
    return data, [*found]


async def arrival(sock: socket.socket) -> None:
    """Wait until there is something to receive, or the end."""
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()
    loop.add_reader(sock, _resolve, arrived)
    try:
        await arrived
    finally:
        loop.remove_reader(sock)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
