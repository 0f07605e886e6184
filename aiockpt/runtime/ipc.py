"""Messages between processes of one host, with file descriptors beside the bytes.

The socket carries packets, not a stream. A message arrives whole with its descriptors,
or not at all, and may take several packets. A packet that the trainer has sent can be
read even if the trainer is killed right after. A message is MessagePack, which supports
bytes and infinity. Large data is in shared memory, whose descriptor travels with the
message. It is an arena, or a *parcel*: a memory file with bytes (see `pack`).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from mmap import mmap
from typing import Final

import msgspec

from aiockpt.runtime.secrets import Token

logger = logging.getLogger("aiockpt")

_MAX_PACKET_BYTES: Final = (
    192 << 10
)  # bytes; a packet must fit into the socket's buffer
_MORE, _LAST = b"\1", b"\0"  # the first byte of a packet: whether the message goes on

_PACKETS: Final = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
_STANDARD: Final = 2  # the highest number of a standard stream
_MAX_FDS: Final = 8
_BUFFER_BYTES: Final = 1 << 20
_SO_PASSRIGHTS: Final = 83  # Linux 6.16; the socket module does not name it
_UCRED: Final = struct.Struct("3i")  # pid, uid, gid

_CLOSED: Final = {errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN}
"""The errors of a connection whose other end is gone."""

_EXHAUSTED: Final = {errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS}
"""What the kernel lacks for a moment: memory, or descriptors on their way."""

_RETRY_S: Final = 0.05


def _plain(value: object) -> str:
    if isinstance(value, Token):
        return str(value)
    raise TypeError(f"a message cannot contain a {type(value).__name__}")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new connection."""
    one, other = map(_above_standard, socket.socketpair(*_PACKETS))
    for end in (one, other):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return one, other


def _above_standard(sock: socket.socket) -> socket.socket:
    """Move a socket from the number of a closed standard stream, which a child gets."""
    if sock.fileno() > _STANDARD:
        return sock
    with sock:
        fd = fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, _STANDARD + 1)
        return socket.socket(*_PACKETS, fileno=fd)


def owner_of(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of the other end, as the kernel reports them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return pid, uid


def is_ours(sock: socket.socket) -> bool:
    """Say whether a process of the same user has the other end."""
    return owner_of(sock)[1] == os.geteuid()


def allow_descriptors(sock: socket.socket, *, allow: bool) -> None:
    """Allow or forbid the other end to send descriptors, from now on.

    A descriptor that this process never asked for is closed here all the same, and its
    closing may last: that of a TCP connection as long as its sender wants. Connections
    that a listener accepts do as the listener. Kernels before Linux 6.16 cannot forbid.
    """
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, int(allow))


def receive(
    sock: socket.socket, nbytes: int = _MAX_PACKET_BYTES, fds: int = _MAX_FDS
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
    """Send a message for a `Channel`, with descriptors, which stay the caller's.

    Raises:
        BlockingIOError: the socket is full, and does not block.
        OSError: the other end is gone.
    """
    for packet in _packets(message):
        socket.send_fds(sock, [packet], list(fds))
        fds = ()


def _packets(message: object) -> list[bytes]:
    data, most = encode(message), _MAX_PACKET_BYTES - 1
    pieces = [data[at : at + most] for at in range(0, len(data), most)]
    return [*(_MORE + each for each in pieces[:-1]), _LAST + pieces[-1]]


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
        on_message: Called on the loop with each message and its descriptors. The
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
        self._begun, self._its_fds = bytearray(), list[int]()  # the rest is to come
        self._ended = False
        self._is_exhausted = False  # whether the kernel lacks memory or descriptors
        self._retry: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self.read)

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send a message as soon as the socket accepts it. The caller keeps ``fds``.

        A message to an end that is gone is dropped; ``on_end`` reports that end.

        Raises:
            OSError: the system refuses the message. Or it has to wait, and no
                descriptor is left for copies of its own. Then nothing is sent.
        """
        if self._ended:
            return
        first, *rest = _packets(message)
        was_idle = not self._queue
        if self._queue or not self._is_sent(first, fds):
            self._queue.append((first, _duplicates(fds)))
        self._queue += [(packet, []) for packet in rest]
        if was_idle and self._queue:
            self._wait_until_writable()

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
            except OSError as error:
                logger.error("a message of another process is lost: %s", error)
                data, fds = b"", []
            if not data:
                self._end()
                return
            self._begun += memoryview(data)[1:]
            self._its_fds += fds
            if data.startswith(_LAST):
                message, fds = bytes(self._begun), self._its_fds
                self._begun, self._its_fds = bytearray(), []
                self._on_message(message, fds)

    def close(self) -> None:
        """Close this end; the channel makes no more callbacks. Idempotent."""
        self._ended = True
        if self._retry is not None:
            self._retry.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
        for _, fds in (*self._queue, (b"", self._its_fds)):
            close_all(fds)
        self._queue.clear()
        self._its_fds = []

    def _is_sent(self, data: bytes, fds: Sequence[int]) -> bool:
        """Send a packet, or drop it if the other end is gone; False if it must wait."""
        self._is_exhausted = False
        try:
            socket.send_fds(self._sock, [data], fds)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._is_exhausted = True
                return False
            if error.errno not in _CLOSED:
                raise
            # What the other end has sent before can still be read.
        return True

    def _wait_until_writable(self) -> None:
        if self._is_exhausted:  # the socket would be ready at once
            self._loop.remove_writer(self._sock)
            self._retry = self._loop.call_later(_RETRY_S, self._flush)
        else:
            self._loop.add_writer(self._sock, self._flush)

    def _flush(self) -> None:
        while self._queue:
            data, fds = self._queue[0]
            try:
                if not self._is_sent(data, fds):
                    self._wait_until_writable()
                    return
            except OSError as error:
                logger.error("a message to another process is lost: %s", error)
                self._end()  # what follows would make no sense to it
                return
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
