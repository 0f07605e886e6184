"""Networks of our own, and a line between two of them with a rate, a delay and losses.

Linux only, and as root: whoever may not gets `FaultUnavailableError`, which says so.

As a program, it moves bytes over plain TCP as fast as they go. ``network.py serve
HOST`` prints its port. ``network.py fetch HOST PORT SIZE N`` prints the seconds that N
streams of SIZE bytes took.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import math
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from heapq import heappop, heappush
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.support.shortages import FaultUnavailableError

_WHAT: Final = "network of its own"
_NEW_NETWORK: Final = 0x40000000  # CLONE_NEWNET of unshare(2)
_HERE = "/proc/thread-self/ns/net"
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 40_000
_UP_AND_RUNNING = 0x41
_SET_FLAGS, _SET_ADDRESS, _SET_PEER = 0x8914, 0x8916, 0x8918
_SET_MTU, _SET_QUEUE = 0x8922, 0x8943
_QUEUE = 1000  # packets of a device


class Namespace:
    """A network namespace with a loopback and nothing else, until it is closed.

    Sockets and processes that are made while a thread is :meth:`entered` belong to it
    for their lifetime, wherever they are used.

    Raises:
        FaultUnavailableError: not on Linux, or not as root.
    """

    def __init__(self) -> None:
        self._fd = -1
        back = _open_current()
        try:
            _call("unshare", _NEW_NETWORK)
            try:
                self._fd = _open_current()
                configure("lo")
            finally:
                _call("setns", back, _NEW_NETWORK)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(back)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put the calling thread into the namespace for the length of the block."""
        back = _open_current()
        try:
            _call("setns", self._fd, _NEW_NETWORK)
            try:
                yield
            finally:
                _call("setns", back, _NEW_NETWORK)
        finally:
            os.close(back)

    def close(self) -> None:
        """Let it vanish once nothing is in it any more; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def few_ports(count: int) -> Iterator[None]:
    """Put the calling thread into a network with ``count`` local ports to connect from.

    Loopback is all that there is. What is listened on has to be opened inside, and may
    take one of the ports. Of an odd number the kernel uses one less.

    Raises:
        FaultUnavailableError: not on Linux, or not as root.
    """
    with Namespace() as namespace, namespace.entered():
        with _explained():  # in a container /proc/sys may be read-only
            _PORTS.write_text(f"{_FIRST_PORT} {_FIRST_PORT + count - 1}")
        yield


def configure(
    interface: str, address: str = "", peer: str = "", *, mtu: int = 0
) -> None:
    """Bring an interface of the current namespace up, with an address if one is given.

    Raises:
        FaultUnavailableError: not as root.
    """
    name = interface.encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, _explained():
        if mtu:
            fcntl.ioctl(sock, _SET_MTU, struct.pack("16si20x", name, mtu))
            fcntl.ioctl(sock, _SET_QUEUE, struct.pack("16si20x", name, _QUEUE))
        if address:
            fcntl.ioctl(sock, _SET_ADDRESS, _address_request(name, address))
            fcntl.ioctl(sock, _SET_PEER, _address_request(name, peer))
        up = struct.pack("16sh22x", name, _UP_AND_RUNNING)
        fcntl.ioctl(sock, _SET_FLAGS, up)


def _address_request(name: bytes, address: str) -> bytes:
    packed = socket.inet_aton(address)
    return struct.pack("16sHH4s16x", name, socket.AF_INET, 0, packed)


def _open_current() -> int:
    if sys.platform != "linux":
        raise FaultUnavailableError(_WHAT, "they exist on Linux only")
    return os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *arguments: int) -> None:
    # Python has these from 3.12 on.
    libc = ctypes.CDLL(None, use_errno=True)
    with _explained():
        if getattr(libc, name)(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"it needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN): {error.strerror}"
        raise FaultUnavailableError(_WHAT, reason) from error


_TUN: Final = "/dev/net/tun"
_ATTACH: Final = 0x400454CA  # TUNSETIFF
_PLAIN_PACKETS: Final = 0x1001  # IFF_TUN | IFF_NO_PI
_WITH_HEADERS: Final = 0x4000  # IFF_VNET_HDR
_OFFLOAD: Final = 0x400454D0  # TUNSETOFFLOAD
_SEGMENTS: Final = 0x03  # TUN_F_CSUM | TUN_F_TSO4
_NEAR, _FAR = "198.18.0.1", "198.18.0.2"  # a network for benchmarks (RFC 2544)
_LARGEST = (1 << 16) + 10  # with a header of virtio
_TURN = 128  # packets that are read before the loop has its turn


class Link:
    """Two namespaces, and a link between them.

    Args:
        delay: Seconds that a packet takes, one way.
        jitter: Seconds that it may take less or more; packets overtake each other.
        loss: Share of packets that never arrive.
        seed: Of the chance.
        mtu: Bytes of a packet at most; smaller ones cost the loop more.
        offload: Whether packets of a connection may come joined, up to 64 KiB, as for a
            network card that cuts them. Their loss is then coarse.

    Attributes:
        near: The one namespace.
        far: The other one.
        near_address: The address of the end in ``near``.
        far_address: The address of the end in ``far``.
    """

    near_address: Final = _NEAR
    far_address: Final = _FAR

    def __init__(
        self,
        *,
        delay: float = 0.0,
        jitter: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
        mtu: int = 9000,
        offload: bool = False,
    ) -> None:
        self.delay, self.jitter = delay, jitter
        self.loss = loss
        self._random = random.Random(seed)
        self._mtu, self._offload = mtu, offload
        self._cut = False
        self._stack = ExitStack()
        self._ways: list[_Way] = []

    async def __aenter__(self) -> Self:
        """Make it.

        Raises:
            FaultUnavailableError: not on Linux, not as root, or without TUN.
        """
        with ExitStack() as stack:
            self.near, near = self._end(stack, _NEAR, _FAR)
            self.far, far = self._end(stack, _FAR, _NEAR)
            self._ways = [_Way(self, near, far), _Way(self, far, near)]
            for way in self._ways:
                stack.callback(way.close)
                way.open()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def cut(self) -> None:
        """Lose every packet from now on, without a word to either end."""
        self._cut = True

    def loses(self) -> bool:
        """Say whether the next packet is lost."""
        return self._cut or self._random.random() < self.loss

    def lateness(self) -> float:
        """Return for how long a packet is under way."""
        if not self.jitter:
            return self.delay
        return max(0.0, self.delay + self._random.uniform(-self.jitter, self.jitter))

    def _end(self, stack: ExitStack, address: str, peer: str) -> tuple[Namespace, int]:
        namespace = stack.enter_context(Namespace())
        with namespace.entered():
            device = _open_device(offload=self._offload)
            stack.callback(os.close, device)
            configure("tun0", address, peer, mtu=self._mtu)
        return namespace, device


class _Way:
    """One direction of a link: reads packets here, writes them there, later."""

    def __init__(self, link: Link, source: int, target: int) -> None:
        self.packets = 0
        self._link = link
        self._source, self._target = source, target
        self._late: list[tuple[float, int, bytes]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._loop = asyncio.get_running_loop()

    def open(self) -> None:
        self._loop.add_reader(self._source, self._on_packets)

    def close(self) -> None:
        self._loop.remove_reader(self._source)
        self._late.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _on_packets(self) -> None:
        with suppress(BlockingIOError):
            for _ in range(_TURN):
                packet = os.read(self._source, _LARGEST)
                self.packets += 1
                if not self._link.loses():
                    self._send(packet)

    def _send(self, packet: bytes) -> None:
        late = self._link.lateness()
        if not late:
            self._write(packet)
            return
        due = self._loop.time() + late
        heappush(self._late, (due, self.packets, packet))
        if due < self._due:
            self._wake_at(due)

    def _wake_at(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._deliver)

    def _deliver(self) -> None:
        self._due = math.inf
        now = self._loop.time()
        while self._late and self._late[0][0] <= now:
            self._write(heappop(self._late)[2])
        if self._late:
            self._wake_at(self._late[0][0])

    def _write(self, packet: bytes) -> None:
        with suppress(OSError):  # its queue may be full
            os.write(self._target, packet)


def _open_device(*, offload: bool) -> int:
    try:
        device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FaultUnavailableError("link", f"{_TUN} cannot be opened") from error
    try:
        flags = _PLAIN_PACKETS | (_WITH_HEADERS if offload else 0)
        fcntl.ioctl(device, _ATTACH, struct.pack("16sH22x", b"tun0", flags))
        if offload:
            fcntl.ioctl(device, _OFFLOAD, _SEGMENTS)
    except OSError as error:
        os.close(device)
        reason = f"the system makes no TUN device ({error.strerror}); that needs root"
        raise FaultUnavailableError("link", reason) from error
    return device


def serve_bytes(host: str) -> None:
    """Send whoever connects as much as it wants."""
    server = socket.create_server((host, 0))
    print(server.getsockname()[1], flush=True)
    while True:
        sock, _ = server.accept()
        threading.Thread(target=send_bytes, args=(sock,), daemon=True).start()


def send_bytes(sock: socket.socket) -> None:
    """Send until the other end has enough."""
    data = bytes(1 << 20)
    try:
        while True:
            sock.sendall(data)
    except OSError:
        sock.close()


def fetch_bytes(host: str, port: str, size: str, streams: str) -> None:
    """Take so much from so many connections at once."""
    threads = [
        threading.Thread(target=take_bytes, args=(host, int(port), int(size)))
        for _ in range(int(streams))
    ]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(time.monotonic() - start, flush=True)


def take_bytes(host: str, port: int, size: int) -> None:
    """Take so much from one connection."""
    buffer = bytearray(1 << 20)
    with socket.create_connection((host, port)) as sock:
        while size > 0:
            size -= sock.recv_into(buffer, min(len(buffer), size))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve_bytes(*sys.argv[2:])
    else:
        fetch_bytes(*sys.argv[2:])
