"""How far a process of this host has read what was sent to it.

The kernel tells by ``sock_diag(7)`` what lies in the queue of any socket of one network
namespace, and by ``tcp(7)`` what the peer has acknowledged: that has come into its
queue. What it has acknowledged and does not have there, it has read.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from typing import Final, NamedTuple

from aiockpt.http import sockets

__all__ = ["Link", "Mark"]

_SOCK_DIAG: Final = 4  # of the families of netlink
_BY_FAMILY: Final = 20
_REQUEST: Final = 1
_MAX_ANSWER: Final = 4096

# struct nlmsghdr: length, type, flags, sequence, port
_HEADER: Final = struct.Struct("=IHHII")
# struct inet_diag_req_v2: family, protocol, extensions, states; then its sockid: ports,
# addresses, interface, cookie
_QUESTION: Final = struct.Struct("=BBBxI4s16s16sIQ")
# struct inet_diag_msg: state, ports of the sockid, rqueue
_ANSWER: Final = struct.Struct("=xBxx4s32x4x8x4xI12x")
# struct nlattr: length, type
_ATTRIBUTE: Final = struct.Struct("=HH")
_PORTS: Final = struct.Struct("!HH")
_INFO: Final = 1 << 1  # asks for struct tcp_info, and with it for what is above TCP
_ABOVE: Final = 19
_ANY_STATE: Final = 0xFFFFFFFF
_ANY_COOKIE: Final = (1 << 64) - 1
_TIME_WAIT: Final = 6

_ACKNOWLEDGED: Final = struct.Struct("=120xQ")  # struct tcp_info: bytes_acked


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
        """Return how many bytes the peer has received and not read.

        None if that is not to be known: the peer is elsewhere, or the connection is no
        more, in which case its process may still read; or something moves what it has
        received on without reading it, such as MPTCP; or this is not Linux, or there is
        no descriptor to ask with.
        """
        if sys.platform != "linux":
            return None
        try:
            return _unread(self.peer, self.own)
        except (OSError, ValueError, struct.error):
            return None


class Mark(NamedTuple):
    """A place in what is sent over a connection: what comes before it, and the peer.

    ``position`` counts the bytes of the whole connection.
    """

    sock: socket.socket
    link: Link
    position: int

    @classmethod
    def here(cls, sock: socket.socket) -> Mark | None:
        """Return the place behind what was sent until now; nobody may be sending.

        None if nobody could tell when it is passed.
        """
        link = Link.of(sock)
        if link is None or link.unread() is None:
            return None
        try:
            while True:
                before = _acknowledged(sock)
                position = before + sockets.outgoing(sock)
                if _acknowledged(sock) == before:
                    return cls(sock, link, position)
        except (OSError, struct.error):
            return None

    @property
    def passed(self) -> bool:
        """Whether the peer has certainly read all that comes before it."""
        try:
            # First: what is acknowledged now, is in the peer's queue then, or read.
            acknowledged = _acknowledged(self.sock)
        except (OSError, struct.error):
            return False
        unread = self.link.unread()
        return unread is not None and acknowledged - unread >= self.position


def _acknowledged(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED.size)
    return int(_ACKNOWLEDGED.unpack(info)[0])


def _unread(end: tuple[str, int], other: tuple[str, int]) -> int | None:
    """Return what the socket at ``end`` that is connected to ``other`` has to read.

    None if there is no such socket, or it does not have all of that.
    """
    (family, source), (_, destination) = _packed(end[0]), _packed(other[0])
    ports = _PORTS.pack(end[1], other[1])
    question = _QUESTION.pack(
        family,
        socket.IPPROTO_TCP,
        _INFO,
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
    state, found, unread = _ANSWER.unpack_from(answer, _HEADER.size)
    if found != ports:  # a socket that listens there
        return None
    if state == _TIME_WAIT:  # its process may read what the kernel no longer tells of
        return None
    return None if _ABOVE in _attributes(answer) else int(unread)


def _attributes(answer: bytes) -> set[int]:
    """Return which attributes an answer has."""
    found, at = set[int](), _HEADER.size + _ANSWER.size
    while at + _ATTRIBUTE.size <= len(answer):
        size, kind = _ATTRIBUTE.unpack_from(answer, at)
        found.add(kind)
        at += max(size + -size % 4, _ATTRIBUTE.size)
    return found


def _packed(address: str) -> tuple[int, bytes]:
    """Return an address's family, and its bytes as the kernel wants them."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    if mapped is not None:
        parsed = mapped
    family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
    return family, parsed.packed.ljust(16, b"\0")
