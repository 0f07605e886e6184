"""What two processes of one host say to each other to share a snapshot's memory.

A receiver adds a *probe* to its request for the manifest: it proves that the receiver
knows the host's identity, and tells it to nobody who does not. A sender of that
identity adds an *offer*: where it listens, and a ticket that is good once. There the
receiver shows the ticket and gets the memory.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

__all__ = [
    "MAX_MESSAGE",
    "OFFER_HEADER",
    "PROBE_HEADER",
    "RETURNED",
    "Ask",
    "Lent",
    "Offer",
    "format_offer",
    "format_probe",
    "identity",
    "is_probe_of",
    "parse_offer",
]

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
