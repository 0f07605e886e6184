"""One end of a Unix socket between two processes, on an event loop.

Packets, not a stream: a message arrives whole with its descriptors, or not at all, and
what the trainer has sent is read even if the trainer is killed right after. A message
is JSON. What may be large lies in memory that a descriptor beside it stands for: a
*parcel*, or an arena.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Final

import msgspec

from aiockpt.runtime import packets as _packets
from aiockpt.runtime.secrets import Token

__all__ = ["MAX_MESSAGE", "Channel", "encode", "pack", "pair", "receive", "unpack"]

MAX_MESSAGE: Final = 192 << 10  # a packet must fit the socket's buffer

_MAX_FDS: Final = 8
_BUFFER: Final = 1 << 20


def _plain(value: object) -> str:
    if isinstance(value, Token):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no part of a message")


encode = msgspec.json.Encoder(enc_hook=_plain).encode


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two ends that are connected."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return ends


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next packet and its descriptors; nothing at the end.

    Raises:
        BlockingIOError: there is none yet, and the socket does not block.
        OSError: the connection has failed.
    """
    return _packets.receive(sock, MAX_MESSAGE, _MAX_FDS)


def pack(*parts: bytes | memoryview | mmap) -> int:
    """Return the descriptor of a parcel; it is the caller's."""
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
    """Return what a parcel holds, and close it."""
    with open(fd, "rb", buffering=0) as file:
        # Its offset is shared with who wrote it.
        return os.pread(file.fileno(), os.fstat(fd).st_size, 0)


class Channel:
    """Sends without waiting, and calls back with what arrives.

    Args:
        sock: The end; the channel owns it.
        on_message: Called on the loop with each packet and its descriptors, which are
            then its own.
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
        """Send as soon as the socket takes it; the descriptors stay the caller's.

        To an end that is gone nothing is sent: ``on_end`` tells.
        """
        data = encode(message)
        if self._ended:
            return
        if self._queue:
            self._enqueue(data, fds)
            return
        try:
            socket.send_fds(self._sock, [data], list(fds))
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
            self._enqueue(data, fds)
        except OSError:
            pass  # it is gone; what it said before can still be read

    @property
    def full(self) -> bool:
        """Whether what is sent now would wait."""
        return bool(self._queue)

    def read(self) -> None:
        """Call back with everything that has arrived."""
        while not self._ended:
            try:
                data, fds = receive(self._sock)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # said once, before what the dead end has sent
            except OSError:
                data, fds = b"", []
            if data:
                self._on_message(data, fds)
            else:
                self._end()

    def close(self) -> None:
        """Close the end; nothing is called back any more. Idempotent."""
        self._ended = True
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
        for _, fds in self._queue:
            _close_all(fds)
        self._queue.clear()

    def _enqueue(self, data: bytes, fds: Sequence[int]) -> None:
        self._queue.append((data, [os.dup(fd) for fd in fds]))

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
            _close_all(fds)
        self._loop.remove_writer(self._sock)

    def _end(self) -> None:
        self.close()
        self._on_end()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
