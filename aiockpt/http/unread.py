"""How much of what was sent to a process of this host it has not read yet.

The kernel tells by ``sock_diag(7)``, of any two sockets of one network namespace.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from typing import Final, NamedTuple

__all__ = ["Link", "is_reset"]

_SOCK_DIAG: Final = 4  # of the families of netlink
_BY_FAMILY: Final = 20
_REQUEST: Final = 1
_MAX_ANSWER: Final = 4096

# struct nlmsghdr: length, type, flags, sequence, port
_HEADER: Final = struct.Struct("=IHHII")
# struct inet_diag_req_v2: family, protocol, extensions, states; then its sockid: ports,
# addresses, interface, cookie
_QUESTION: Final = struct.Struct("=BBBxI4s16s16sIQ")
# struct inet_diag_msg up to both queues: state; ports of the sockid; rqueue, wqueue
_ANSWER: Final = struct.Struct("=xBxx4s32x4x8x4xII")
_PORTS: Final = struct.Struct("!HH")
_ANY_STATE: Final = 0xFFFFFFFF
_ANY_COOKIE: Final = (1 << 64) - 1
_LISTENS: Final = 10
_CLOSED: Final = 7


class _Queues(NamedTuple):
    """What a socket has: received and not read, sent and not acknowledged."""

    unread: int
    unacknowledged: int


class Link(NamedTuple):
    """The two ends of a TCP connection, each an address and a port."""

    own: tuple[str, int]
    peer: tuple[str, int]

    @classmethod
    def of(cls, sock: socket.socket) -> Link | None:
        """Return that of a connected socket, or None if it has none of this kind."""
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            own, peer = sock.getsockname(), sock.getpeername()
        except OSError:
            return None
        return cls(own[:2], peer[:2])

    def unread(self) -> int | None:
        """Return how many bytes sent from the own end the peer has not read, at most.

        Some may count twice until they are acknowledged; where it is 0, it is exact.
        None if that is not to be known: the peer is elsewhere, or was cut off, or this
        is not Linux, or there is no descriptor to ask with.
        """
        if sys.platform != "linux":
            return None
        try:
            # In this order: what is acknowledged now, is in the peer's queue, or read.
            own = _queues(self.own, self.peer)
            peer = _queues(self.peer, self.own)
        except (OSError, ValueError, struct.error):
            return None
        if peer is None:
            return None
        # An own end that has gone has sent everything, or has dropped it.
        return peer.unread + (own.unacknowledged if own else 0)


def is_reset(sock: socket.socket) -> bool:
    """Whether the peer has cut the connection, and dropped what it had not read."""
    with suppress(OSError):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return info[0] == _CLOSED
    return False


def _queues(end: tuple[str, int], other: tuple[str, int]) -> _Queues | None:
    """Return what the socket at ``end`` that is connected to ``other`` has in them.

    None if there is no such socket.
    """
    (family, source), (_, destination) = _packed(end[0]), _packed(other[0])
    ports = _PORTS.pack(end[1], other[1])
    question = _QUESTION.pack(
        family,
        socket.IPPROTO_TCP,
        0,
        _ANY_STATE,
        ports,
        source,
        destination,
        0,
        _ANY_COOKIE,
    )
    head = _HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, _REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(0)  # the answer is there when the question was sent
        kernel.send(head + question)
        answer = kernel.recv(_MAX_ANSWER)
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    state, found, *queues = _ANSWER.unpack_from(answer, _HEADER.size)
    if state == _LISTENS or found != ports:
        return None
    return _Queues(*queues)


def _packed(address: str) -> tuple[int, bytes]:
    """Return an address's family, and its bytes as the kernel wants them."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    if mapped is not None:
        parsed = mapped
    family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
    return family, parsed.packed.ljust(16, b"\0")
