"""Messages between processes of one host, with file descriptors beside the bytes.

The socket carries packets, not a stream. A message arrives whole with its descriptors,
or not at all. A packet that the trainer has sent can be read even if the trainer is
killed right after. A message is MessagePack, which supports bytes and infinity.
Large data is in shared memory, whose descriptor travels with the message. It is an
arena, or a *parcel*: a memory file with bytes (see `pack`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from mmap import mmap
from typing import Final

import msgspec

from aiockpt.runtime.secrets import Token

__all__ = [
    "MAX_MESSAGE",
    "Channel",
    "arrival",
    "close_all",
    "encode",
    "is_ours",
    "owner_of",
    "pack",
    "pair",
    "receive",
    "send",
    "unpack",
]

MAX_MESSAGE: Final = 192 << 10  # a packet must fit into the socket's buffer

_MAX_FDS: Final = 8
_BUFFER: Final = 1 << 20
_UCRED: Final = struct.Struct("3i")  # pid, uid, gid


def _plain(value: object) -> str:
    if isinstance(value, Token):
        return str(value)
    raise TypeError(f"a message cannot contain a {type(value).__name__}")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new connection."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return ends


def owner_of(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of the other end, as the kernel reports them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return pid, uid


def is_ours(sock: socket.socket) -> bool:
    """Say whether a process of the same user has the other end."""
    return owner_of(sock)[1] == os.geteuid()


def receive(
    sock: socket.socket, nbytes: int = MAX_MESSAGE, fds: int = _MAX_FDS
) -> tuple[bytes, list[int]]:
    """Return the next packet and its descriptors; empty ones at the end.

    A program that this process starts does not inherit the descriptors.

    Args:
        sock: The end to read from.
        nbytes: The largest packet that is accepted.
        fds: The largest number of descriptors that is accepted.

    Raises:
        BlockingIOError: no packet has arrived yet, and the socket does not block.
        OSError: the connection has failed, or the packet exceeds a limit.
    """
    found = array("i")
    space = socket.CMSG_LEN(fds * found.itemsize)
    data, extras, flags, _ = sock.recvmsg(nbytes, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in extras:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(content[: len(content) // found.itemsize * found.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(found) > fds:
        close_all(found)
        raise OSError("a message was cut short")
    return data, [*found]


def send(sock: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    """Send a message with descriptors, which stay the caller's.

    Raises:
        BlockingIOError: the socket is full, and does not block.
        OSError: the other end is gone.
    """
    socket.send_fds(sock, [encode(message)], list(fds))


async def arrival(sock: socket.socket) -> None:
    """Wait until the socket has a packet to receive, or was closed by its peer."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(sock)


def pack(*parts: bytes | memoryview | mmap) -> int:
    """Return the descriptor of a new parcel; the caller owns it."""
    fd = os.memfd_create("aiockpt-parcel", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", buffering=0, closefd=False) as file:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def unpack(fd: int) -> bytes:
    """Return the bytes of a parcel, and close its descriptor."""
    with open(fd, "rb", buffering=0) as file:
        # pread, since the offset is shared with the process that wrote the parcel.
        return os.pread(file.fileno(), os.fstat(fd).st_size, 0)


class Channel:
    """Sends messages without blocking, and calls back for each that arrives.

    Args:
        sock: The end of the connection; the channel owns it.
        on_message: Called on the loop with each packet and its descriptors. The
            callback owns the descriptors.
        on_end: Called once when the other end is gone, after the last message.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[bytes, list[int]], None],
        on_end: Callable[[], None],
    ) -> None:
        sock.settimeout(0)
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._ended = False
        self._loop.add_reader(sock, self.read)

    def __repr__(self) -> str:
        return f"<Channel queued={len(self._queue)}>"

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send a message as soon as the socket accepts it. The caller keeps ``fds``.

        A message to an end that is gone is dropped; ``on_end`` reports that end.

        Raises:
            OSError: the message has to wait, and no descriptor is left for copies of
                its own. Then nothing is sent.
        """
        if self._ended:
            return
        if not self._queue:
            try:
                send(self._sock, message, fds)
            except BlockingIOError:
                pass
            except OSError:
                return  # the end is gone; what it sent before can still be read
            else:
                return
        self._queue.append((encode(message), _duplicates(fds)))
        self._loop.add_writer(self._sock, self._flush)

    @property
    def full(self) -> bool:
        """Whether the next message would have to wait."""
        return bool(self._queue)

    def read(self) -> None:
        """Call back with everything that has arrived."""
        while not self._ended:
            try:
                data, fds = receive(self._sock)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # reported once, before the packets of the dead end
            except OSError:
                data, fds = b"", []
            if data:
                self._on_message(data, fds)
            else:
                self._end()

    def close(self) -> None:
        """Close this end; the channel makes no more callbacks. Idempotent."""
        self._ended = True
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
        for _, fds in self._queue:
            close_all(fds)
        self._queue.clear()

    def _flush(self) -> None:
        while self._queue:
            data, fds = self._queue[0]
            try:
                socket.send_fds(self._sock, [data], fds)
            except BlockingIOError:
                return
            except OSError:
                pass
            self._queue.popleft()
            close_all(fds)
        self._loop.remove_writer(self._sock)

    def _end(self) -> None:
        self.close()
        self._on_end()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def _duplicates(fds: Sequence[int]) -> list[int]:
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))  # noqa: PERF401 - what was made is closed again
    except OSError:
        close_all(made)
        raise
    return made
