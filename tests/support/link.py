"""A link whose packets are late, lost or damaged, between two networks of its own.

`Link` carries packets between two namespaces through TUN devices, in the loop that
made it::

    async with Link(delay=0.05, jitter=0.01, loss=0.01) as link:
        with link.far.entered():
            ...  # open what listens, on link.far_address
        with link.near.entered():
            ...  # connect to it, or start a process that does

It needs Linux, root and ``/dev/net/tun``.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import random
import struct
from contextlib import ExitStack, suppress
from heapq import heappop, heappush
from types import TracebackType
from typing import Final, NamedTuple, Self

from aiockpt.testing.processes import FaultUnavailableError
from tests.support.namespaces import Namespace, configure

__all__ = ["Link", "LinkStatistics"]

_TUN: Final = "/dev/net/tun"
_ATTACH: Final = 0x400454CA  # TUNSETIFF
_PLAIN_PACKETS: Final = 0x1001  # IFF_TUN | IFF_NO_PI
_NEAR, _FAR = "198.18.0.1", "198.18.0.2"  # a network for benchmarks (RFC 2544)
_LARGEST = 1 << 16
_TURN = 128  # packets that are read before the loop has its turn
_HEADER = 20  # bytes of IPv4; damage there would be seen by the first router


class LinkStatistics(NamedTuple):
    """Packets that came in, both ways; how many of them were lost, and damaged."""

    packets: int
    lost: int
    damaged: int


class Link:
    """Two namespaces, and a link between them.

    Args:
        delay: Seconds that a packet takes, one way.
        jitter: Seconds that it may take less or more; packets overtake each other.
        loss: Share of packets that never arrive.
        corruption: Share of packets that arrive with one bit inverted.
        seed: Of the chance.
        mtu: Bytes of a packet at most; smaller ones cost the loop more.

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
        corruption: float = 0.0,
        seed: int = 0,
        mtu: int = 9000,
    ) -> None:
        self.delay, self.jitter = delay, jitter
        self.loss, self.corruption = loss, corruption
        self._random = random.Random(seed)
        self._mtu = mtu
        self._cut = False
        self._stack = ExitStack()
        self._ways: list[_Way] = []
        self._lost = self._damaged = 0

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

    def __repr__(self) -> str:
        how = "cut" if self._cut else "whole"
        return f"<Link {how} packets={self.statistics().packets}>"

    def statistics(self) -> LinkStatistics:
        """Count packets."""
        packets = sum(way.packets for way in self._ways)
        return LinkStatistics(packets, self._lost, self._damaged)

    def cut(self) -> None:
        """Lose every packet from now on, without a word to either end."""
        self._cut = True

    def mend(self) -> None:
        """Carry packets again."""
        self._cut = False

    def fate(self, packet: bytes) -> bytes | None:
        """Return what arrives of a packet, if anything does."""
        if self._cut or (self.loss and self._random.random() < self.loss):
            self._lost += 1
            return None
        if self.corruption and self._random.random() < self.corruption:
            self._damaged += 1
            return self._with_a_bit_inverted(packet)
        return packet

    def lateness(self) -> float:
        """Return for how long a packet is under way."""
        if not self.jitter:
            return self.delay
        return max(0.0, self.delay + self._random.uniform(-self.jitter, self.jitter))

    def _with_a_bit_inverted(self, packet: bytes) -> bytes:
        damaged = bytearray(packet)
        at = self._random.randrange(min(_HEADER, len(packet) - 1), len(packet))
        damaged[at] ^= 1 << self._random.randrange(8)
        return bytes(damaged)

    def _end(self, stack: ExitStack, address: str, peer: str) -> tuple[Namespace, int]:
        namespace = stack.enter_context(Namespace())
        with namespace.entered():
            device = _open_device()
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
                arriving = self._link.fate(packet)
                if arriving is not None:
                    self._send(arriving)

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
        with suppress(OSError):  # a damaged packet may be none to the kernel
            os.write(self._target, packet)


def _open_device() -> int:
    try:
        device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FaultUnavailableError("link", f"{_TUN} cannot be opened") from error
    try:
        fcntl.ioctl(device, _ATTACH, struct.pack("16sH22x", b"tun0", _PLAIN_PACKETS))
    except OSError as error:
        os.close(device)
        reason = f"the system makes no TUN device ({error.strerror}); that needs root"
        raise FaultUnavailableError("link", reason) from error
    return device
