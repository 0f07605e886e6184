"""Memory of a snapshot that another process of this host lends, instead of bytes.

A receiver adds a *probe* to its request for the manifest: it proves that the receiver
knows the host's identity, and tells it to nobody who does not. A sender of that
identity adds an *offer*: where it listens, and a ticket that is good for a while. There
the receiver shows the ticket and gets the memory.

This is what both ends say, and the receiving end, `attach`; the other one is
`aiockpt.local.lender`. What the sender gives is believed only as far as the kernel
vouches for it: the process belongs to the same user, the descriptor is memory that
cannot shrink, and that nobody but the lender can write, and it is as large as the
manifest says. Anything else is a reason to take the bytes over HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import hashlib
import hmac
import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from aiockpt.format.chunks import ChunkHasher, HashedChunk
from aiockpt.format.manifest import Outline
from aiockpt.memory.arena import LENT_SEALS, Borrowed
from aiockpt.runtime.bridge import start_daemon
from aiockpt.runtime.children import close_in_forks
from aiockpt.runtime.ipc import allow_descriptors, arrival, is_ours, receive

if sys.platform == "linux":
    import fcntl

_ANSWER: Final = 5.0  # seconds in which the lender must answer
_PIECE: Final = 1 << 20  # what is copied at once stays in the cache for its digest
_LARGE: Final = 16 << 10  # bytes; a larger copy releases the interpreter lock

PROBE_HEADER: Final = "Aiockpt-Same-Host"
OFFER_HEADER: Final = "Aiockpt-Lends"

MAX_MESSAGE: Final = 4096
RETURNED: Final = b"returned"
"""What a receiver says that has nothing of the memory mapped any more."""

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES: Final = ("net", "user")

_PURPOSE: Final = b"aiockpt same host\n"
_NONCE_BYTES: Final = 16
_MARK_DIGITS: Final = 32
_PROBE: Final = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{64})")
_OFFER: Final = re.compile(r"([0-9a-f]{32})\.([A-Za-z0-9_-]{1,2000})")


class Ask(msgspec.Struct, frozen=True):
    """The receiver's first packet: its ticket, and whether the memory must not change.

    ``keep`` is false if the receiver compares the digests of what it has copied, and
    reads nothing later. Then the lender may reuse the memory after the loan.
    """

    ticket: str
    keep: bool


class Lent(msgspec.Struct, frozen=True):
    """The sender's answer, beside one descriptor of the data segment's memory."""

    snapshot_id: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Where to ask for the memory, and what to show there."""

    name: str
    ticket: str = field(repr=False)

    @property
    def address(self) -> str:
        """The Unix socket, in the abstract namespace: no file, no path to choose."""
        return f"\0aiockpt-{self.name}"


def identity() -> bytes | None:
    """Return an identity of this host, for processes that can share memory.

    Two processes with one identity run on one kernel since its start, see the same
    Unix sockets, and mean the same user by the same number. None if the system does
    not tell. It reads files, so it runs in a thread.
    """
    if sys.platform != "linux":
        return None
    with suppress(OSError):
        words = [_BOOT.read_text().strip()]
        for kind in _NAMESPACES:
            namespace = os.stat(f"/proc/self/ns/{kind}")
            words.append(f"{namespace.st_dev}:{namespace.st_ino}")
        return hashlib.sha256("\n".join(words).encode()).digest()
    return None


def format_probe(identity: bytes, nonce: bytes) -> str:
    """Return the value of `PROBE_HEADER` for a host; ``nonce`` has 16 random bytes."""
    assert len(nonce) == _NONCE_BYTES, "a probe of another form would never match"
    return f"{nonce.hex()}.{_proof(identity, nonce)}"


def is_probe_of(value: str, identity: bytes) -> bool:
    """Tell whether who sent this probe knows that identity."""
    match = _PROBE.fullmatch(value)
    if match is None:
        return False
    return hmac.compare_digest(match[2], _proof(identity, bytes.fromhex(match[1])))


def format_mark(identity: bytes, snapshot_id: str) -> str:
    """Return the mark of a host in the swarm of a snapshot, for `Announcement`."""
    return _proof(identity, b"swarm\n" + snapshot_id.encode())[:_MARK_DIGITS]


def _proof(identity: bytes, nonce: bytes) -> str:
    return hmac.new(identity, _PURPOSE + nonce, hashlib.sha256).hexdigest()


def format_offer(offer: Offer) -> str:
    """Return the value of `OFFER_HEADER`."""
    return f"{offer.name}.{offer.ticket}"


def parse_offer(value: str | None) -> Offer | None:
    """Return the offer; None if absent or of another form."""
    match = _OFFER.fullmatch(value or "")
    return match and Offer(*match.groups())


def encode_ticket(data: bytes) -> str:
    """Return the text of a ticket."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode_ticket(ticket: str) -> bytes:
    """Return the bytes of a ticket; none if it is not the text of one."""
    with suppress(ValueError):
        return base64.urlsafe_b64decode(ticket + "=" * (-len(ticket) % 4))
    return b""


class NotLentError(Exception):
    """There is no memory to be had, for this reason; HTTP still works."""


class LentMemory:
    """The memory of a data segment that another process has lent, mapped here.

    Only pages that are written here are copied. After the loan it stays valid memory,
    but without ``keep`` it may get the bytes of a later checkpoint.

    Attributes:
        arena: The mapping.
    """

    def __init__(self, lender: socket.socket, fd: int, nbytes: int) -> None:
        self._lender = lender
        self.arena = Borrowed(fd, nbytes)

    @property
    def has_ended(self) -> bool:
        """Whether the lender has ended the loan."""
        try:
            return not self._lender.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def take(
        self, views: Sequence[memoryview], start: int, hasher: ChunkHasher
    ) -> list[HashedChunk]:
        """Copy bytes from ``start`` on into ``views``; return the chunks that ended.

        For threads.
        """
        hashed: list[HashedChunk] = []
        for view in views:
            for at in range(0, view.nbytes, _PIECE):
                piece = view[at : at + _PIECE]
                stop = start + piece.nbytes
                for source in self.arena.buffers(start, stop):
                    _copy(piece, source)
                hashed += hasher.update(start, piece)
                start = stop
        return hashed

    def give_back(self) -> None:
        """End the loan, and unmap the memory unless tensors lie in it. For threads."""
        self.arena.close()
        if self.arena.closed:
            with suppress(OSError):
                self._lender.send(RETURNED)
        self.close()

    def close(self) -> None:
        """End the loan, whatever still reads the memory here. Idempotent."""
        self._lender.close()


def _copy(target: memoryview, source: memoryview) -> None:
    nbytes = target.nbytes
    if nbytes < _LARGE:
        target[:] = source
        return
    ctypes.memmove(_address(target), _address(source), nbytes)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


async def attach(offered: str, outline: Outline, *, keep: bool) -> LentMemory:
    """Map the memory that an offer in a reply speaks of; ``keep`` is as of `Ask`.

    Raises:
        NotLentError: it is not to be had, or not what it should be; or the system has
            no addresses, or promises no more memory.

    If cancelled, nothing is left behind.
    """
    offer = parse_offer(offered)
    if offer is None:
        raise NotLentError("the offer is malformed")
    lender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs = False
    try:
        lender.settimeout(0)
        close_in_forks([lender])
        allow_descriptors(lender, allow=False)
        lender.connect(offer.address)
        if theirs := not is_ours(lender):
            raise NotLentError("its process is another user's")
        allow_descriptors(lender, allow=True)
        lender.send(msgspec.json.encode(Ask(offer.ticket, keep)))
        async with asyncio.timeout(_ANSWER):
            await arrival(lender)
        fd = _descriptor(lender, outline)
        try:
            return LentMemory(lender, fd, outline.grid.segment_bytes)
        finally:
            os.close(fd)
    except BaseException as error:
        if theirs:  # what it has sent takes as long to close as it wants
            start_daemon("aiockpt-hang-up", lender.close)
        else:
            lender.close()
        if isinstance(error, TimeoutError):
            raise NotLentError(f"no answer for {_ANSWER:g} s") from None
        if isinstance(error, OSError):
            raise NotLentError(str(error)) from error
        raise


def _descriptor(lender: socket.socket, outline: Outline) -> int:
    """Return the descriptor of what was lent, once it is found to be that."""
    data, fds = receive(lender, MAX_MESSAGE, 1)
    try:
        if not data:
            raise NotLentError("it was refused")
        lent = msgspec.json.decode(data, type=Lent)
        size = outline.grid.segment_bytes
        if (lent.snapshot_id, lent.nbytes) != (outline.snapshot_id, size):
            raise NotLentError("it is another snapshot's")
        if len(fds) != 1:
            raise NotLentError("there is no descriptor")
        _check(fds[0], size)
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, msgspec.MsgspecError):
            raise NotLentError("the answer is malformed") from None
        raise
    return fds[0]


def _check(fd: int, nbytes: int) -> None:
    """Raise unless it is memory of that size, which stays, and others cannot write."""
    if sys.platform != "linux":
        raise NotLentError("not on this system")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # a pipe, a socket, a file of a disk
        raise NotLentError("it is no memory") from None
    if seals & LENT_SEALS != LENT_SEALS:
        raise NotLentError("it is not sealed")
    if os.fstat(fd).st_size < nbytes:
        raise NotLentError("it is too short")
