"""Attach memory that another process of this host lends, instead of receiving bytes.

A receiver adds a probe to its request for the manifest: ``Aiockpt-Same-Host:
NONCE.PROOF``. The nonce is 16 random bytes, and the proof is HMAC-SHA256 over the line
``aiockpt same host`` (with its line feed) and these bytes, both in hexadecimal. The key
is the SHA-256 of three lines, without a line feed at their end: the kernel's boot id,
and ``st_dev:st_ino`` of the network and of the user namespace.

A sender of the same host may add an *offer* to its answer: ``Aiockpt-Lends:
NAME.TICKET``, of 32 hexadecimal digits, and at most 2,000 letters, digits, ``-`` and
``_``. The receiver sends the packet ``{"ticket": "TICKET", "keep": true}`` to the Unix
socket ``aiockpt-NAME`` of the abstract namespace (``SOCK_SEQPACKET``). The answer is
``{"snapshot_id": "...", "nbytes": N}`` and a descriptor of memory with the data segment
at its start. The memory is lent until one side closes the connection. With ``keep``, it
never changes afterwards, unless the receiver sends ``returned`` when it no longer maps
it. Without ``keep``, it may get other bytes: the receiver compares digests after it has
copied a chunk. The owner's end is `aiockpt.local.lender`.

The receiver believes the sender only as far as the kernel vouches for it. The process
belongs to the same user. The descriptor is memory that cannot shrink, that only the
lender can write, and that is as large as the manifest says. Anything else is a reason
to take the bytes over HTTP.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from aiockpt.errors import StagingError
from aiockpt.format.chunks import ChunkHasher, HashedChunk
from aiockpt.format.manifest import Outline
from aiockpt.memory.arena import LEND_SEALS, AttachedArena
from aiockpt.runtime.bridge import start_daemon
from aiockpt.runtime.children import close_in_forks
from aiockpt.runtime.ipc import allow_descriptors, arrival, close_all, is_ours, receive

if sys.platform == "linux":
    import fcntl

MAX_MESSAGE: Final = 4096
RETURNED: Final = b"returned"
"""A receiver says this when it has unmapped all of the memory."""

_OFFER: Final = re.compile(r"([0-9a-f]{32})\.([A-Za-z0-9_-]{1,2000})")

_ANSWER_TIMEOUT_S: Final = 5.0  # in which the lender must answer
_PIECE_BYTES: Final = 1 << 20  # copied at once, so that the digest finds them cached
_UNLOCKED_BYTES: Final = 16 << 10  # a copy of so many releases the interpreter lock


class AttachRequest(msgspec.Struct, frozen=True):
    """The receiver's first packet: its ticket, and whether the memory must not change.

    ``keep`` is false if the receiver compares the digests of what it has copied, and
    reads nothing later. Then the lender may reuse the memory after the receive.
    """

    ticket: str
    keep: bool


class AttachReply(msgspec.Struct, frozen=True):
    """The sender's answer, beside one descriptor of the data segment's memory."""

    snapshot_id: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """The name of the lender's socket, and a ticket to show there."""

    name: str
    ticket: str = field(repr=False)

    @property
    def address(self) -> str:
        """The Unix socket, in the abstract namespace: no file, no path to choose."""
        return f"\0aiockpt-{self.name}"


def format_offer(offer: Offer) -> str:
    """Return the text of an offer, for a header."""
    return f"{offer.name}.{offer.ticket}"


def parse_offer(value: str | None) -> Offer | None:
    """Return the offer; None if absent or of another form."""
    match = _OFFER.fullmatch(value or "")
    return match and Offer(*match.groups())


class AttachedMemory:
    """The memory of a data segment that another process lends, mapped here.

    Only pages that are written here are copied. After the receive it stays valid
    memory, but without ``keep`` it may get the bytes of a later checkpoint.

    Attributes:
        arena: The mapping.
    """

    def __init__(self, lender: socket.socket, fd: int, nbytes: int) -> None:
        self.arena = AttachedArena(fd, nbytes)
        self._lender = lender

    @property
    def has_ended(self) -> bool:
        """Whether the lender has taken the memory back."""
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
            for at in range(0, view.nbytes, _PIECE_BYTES):
                piece = view[at : at + _PIECE_BYTES]
                (source,) = self.arena.buffers(start, start + piece.nbytes)
                if piece.nbytes < _UNLOCKED_BYTES:
                    piece[:] = source
                else:
                    ctypes.memmove(_address(piece), _address(source), piece.nbytes)
                hashed += hasher.update(start, piece)
                start += piece.nbytes
        return hashed

    def give_back(self) -> None:
        """Unmap the memory unless tensors lie in it; then `close`. For threads."""
        self.arena.close()
        if self.arena.closed:
            with suppress(OSError):
                self._lender.send(RETURNED)
        self.close()

    def close(self) -> None:
        """Tell the lender that the receive has ended. Idempotent."""
        self._lender.close()


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


async def attach(offered: str, outline: Outline, *, keep: bool) -> AttachedMemory | str:
    """Map the memory of an offer, or return why that fails; see `AttachRequest`.

    If cancelled, nothing is left behind.
    """
    offer = parse_offer(offered)
    if offer is None:
        return "the offer is malformed"
    try:
        with ExitStack() as unless_attached:
            lender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            unless_attached.callback(lender.close)
            lender.settimeout(0)
            close_in_forks([lender])
            allow_descriptors(lender, allow=False)
            lender.connect(offer.address)
            if not is_ours(lender):
                # What it has sent takes as long to close as it wants.
                with suppress(StagingError):  # no thread
                    start_daemon("aiockpt-hang-up", lender.close)
                    unless_attached.pop_all()
                return "its process is another user's"
            allow_descriptors(lender, allow=True)
            lender.send(msgspec.json.encode(AttachRequest(offer.ticket, keep)))
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await arrival(lender)
            data, fds = receive(lender, MAX_MESSAGE, 1)
            try:
                if fault := _fault(data, fds, outline):
                    return fault
                memory = AttachedMemory(lender, fds[0], outline.grid.segment_bytes)
            finally:
                close_all(fds)
            unless_attached.pop_all()
        return memory
    except TimeoutError:
        return f"no answer for {_ANSWER_TIMEOUT_S:g} s"
    except OSError as error:  # also if the system has no addresses, or no memory
        return str(error)


_REPLY: Final = msgspec.json.Decoder(AttachReply)


def _fault(data: bytes, fds: Sequence[int], outline: Outline) -> str:
    """Return what is wrong with an answer and its descriptors; "" if nothing is."""
    if not data:
        return "it was refused"
    size = outline.grid.segment_bytes
    try:
        reply = _REPLY.decode(data)
    except msgspec.MsgspecError:
        return "the answer is malformed"
    if (reply.snapshot_id, reply.nbytes) != (outline.snapshot_id, size):
        return "it is another snapshot's"
    if len(fds) != 1:
        return "there is no descriptor"
    return _fault_of_memory(fds[0], size)


def _fault_of_memory(fd: int, nbytes: int) -> str:
    """Return why a descriptor is no sealed memory of that size; "" if it is."""
    if sys.platform != "linux":
        return "not on this system"
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # a pipe, a socket, a file of a disk
        return "it is no memory"
    if seals & LEND_SEALS != LEND_SEALS:
        return "it is not sealed"
    return "it is too short" if os.fstat(fd).st_size < nbytes else ""
