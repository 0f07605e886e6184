"""Networks of our own: namespaces that vanish with the last of their descriptors.

Linux only, and as root: whoever may not gets `FaultUnavailableError`, which says so.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from aiockpt.testing.processes import FaultUnavailableError

__all__ = ["Namespace", "configure", "few_ports"]

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

    def __repr__(self) -> str:
        return f"<Namespace {'closed' if self._fd < 0 else self._fd}>"

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
