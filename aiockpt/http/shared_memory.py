"""Memory of a snapshot that another process of this host lends, instead of bytes.

A receiver adds a *probe* to its request for the manifest: it proves that the receiver
knows the host's identity, and tells it to nobody who does not. A sender of that
identity adds an *offer*: where it listens, and a ticket that is good once. There the
receiver shows the ticket and gets the memory.

This is what both ends say, and the receiving end, `attach`; the other one is
`aiockpt.http.lender`. What the sender gives is believed only as far as the kernel
vouches for it: the process belongs to the same user, the descriptor is memory that
cannot shrink, and that nobody but the lender can write, and it is as large as the
manifest says. Anything else is a reason to take the bytes over HTTP.
"""

from __future__ import annotations

import asyncio
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
from aiockpt.memory.arena import LENT_SEALS, Arena, Borrowed
from aiockpt.runtime.children import close_in_forks
from aiockpt.runtime.ipc import arrival, is_ours, receive

if sys.platform == "linux":
    import fcntl

__all__ = [
    "MAX_MESSAGE",
    "OFFER_HEADER",
    "PROBE_HEADER",
    "RETURNED",
    "Ask",
    "Lent",
    "LentMemory",
    "NotLentError",
    "Offer",
    "attach",
    "format_offer",
    "format_probe",
    "identity",
    "is_probe_of",
    "parse_offer",
]

_ANSWER: Final = 5.0  # seconds in which the lender must answer
_PIECE: Final = 1 << 20  # what is read at once stays in the cache for its digest
_MOST_VIEWS: Final = 1000  # of one call: IOV_MAX is 1024

PROBE_HEADER: Final = "Aiockpt-Same-Host"
OFFER_HEADER: Final = "Aiockpt-Lends"

MAX_MESSAGE: Final = 4096
RETURNED: Final = b"returned"
"""What a receiver says that has read everything, and has the memory no more."""

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES: Final = ("net", "user")

_PURPOSE: Final = b"aiockpt same host\n"
_NONCE_BYTES: Final = 16
_PROBE: Final = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{64})")
_OFFER: Final = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})")


class Ask(msgspec.Struct, frozen=True):
    """The receiver's first packet: its ticket, and whether it keeps the memory.

    What is kept must never change again; else the receiver gives it back.
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


def _proof(identity: bytes, nonce: bytes) -> str:
    return hmac.new(identity, _PURPOSE + nonce, hashlib.sha256).hexdigest()


def format_offer(offer: Offer) -> str:
    """Return the value of `OFFER_HEADER`."""
    return f"{offer.name}.{offer.ticket}"


def parse_offer(value: str | None) -> Offer | None:
    """Return the offer; None if absent or of another form."""
    match = _OFFER.fullmatch(value or "")
    return match and Offer(*match.groups())


class NotLentError(Exception):
    """There is no memory to be had, for this reason; HTTP still works."""


class LentMemory:
    """The memory of a data segment that another process has lent.

    It is given back by :meth:`give_back`, once nothing of it is mapped or read here.
    After :meth:`close` alone the lender does not use the memory again, since tensors
    may lie in it.
    """

    def __init__(self, lender: socket.socket, fd: int, nbytes: int) -> None:
        self._lender = lender
        self._fd = fd
        self._nbytes = nbytes
        self._arena: Arena | None = None

    def __repr__(self) -> str:
        how = "read" if self._arena is None else "mapped"
        return f"<LentMemory bytes={self._nbytes} {how}>"

    def map(self) -> Arena:
        """Return it as memory of which only what is written here is copied.

        Raises:
            OSError: the system has no addresses, or promises no more memory.
        """
        self._arena = Borrowed(self._fd, self._nbytes)
        return self._arena

    def take(
        self, views: Sequence[memoryview], start: int, hasher: ChunkHasher
    ) -> list[HashedChunk]:
        """Read bytes from ``start`` on into ``views``; return the chunks that ended.

        For threads.

        Raises:
            OSError: it cannot be read.
        """
        hashed: list[HashedChunk] = []
        for batch in _batches(views):
            nbytes = sum(view.nbytes for view in batch)
            if os.preadv(self._fd, batch, start) != nbytes:
                raise OSError(f"{nbytes} bytes at {start} were not read whole")
            hashed += hasher.update(start, *batch)
            start += nbytes
        return hashed

    def give_back(self) -> None:
        """Return it, if no page of it is mapped; else close it only. For threads."""
        arena, fd = self._arena, self._fd
        if arena is not None:
            arena.close()
        if fd >= 0 and (arena is None or arena.closed):
            with suppress(OSError):
                self._lender.send(RETURNED)
        self.close()

    def close(self) -> None:
        """Let go of it, whatever is still mapped. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self._lender.close()


async def attach(offered: str, outline: Outline, *, keep: bool) -> LentMemory:
    """Return the memory that an offer in a reply speaks of.

    ``keep``: it will not be given back, so the lender never writes to it again.

    Raises:
        NotLentError: it is not to be had, or not what it should be.

    If cancelled, nothing is left behind.
    """
    offer = parse_offer(offered)
    if offer is None:
        raise NotLentError("the offer is malformed")
    lender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        lender.settimeout(0)
        close_in_forks([lender])
        lender.connect(offer.address)
        if not is_ours(lender):
            raise NotLentError("its process is another user's")
        lender.send(msgspec.json.encode(Ask(offer.ticket, keep)))
        async with asyncio.timeout(_ANSWER):
            await arrival(lender)
        fd = _descriptor(lender, outline)
    except BaseException as error:
        lender.close()
        if isinstance(error, TimeoutError):
            raise NotLentError(f"no answer for {_ANSWER:g} s") from None
        if isinstance(error, OSError):
            raise NotLentError(str(error)) from error
        raise
    return LentMemory(lender, fd, outline.grid.segment_bytes)


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


def _batches(views: Sequence[memoryview]) -> list[list[memoryview]]:
    """Return the views cut and grouped into what one call reads."""
    batches: list[list[memoryview]] = [[]]
    room = _PIECE
    for view in views:
        rest = view
        while rest:
            if not room or len(batches[-1]) == _MOST_VIEWS:
                batches.append([])
                room = _PIECE
            piece, rest = rest[:room], rest[room:]
            batches[-1].append(piece)
            room -= piece.nbytes
    return batches
