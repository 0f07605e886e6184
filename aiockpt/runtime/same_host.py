"""Prove to another process that both run on one host.

A proof is an HMAC whose key is the identity of the host. It tells the identity to
nobody who does not know it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES: Final = ("net", "user")
_PURPOSE: Final = b"aiockpt same host\n"
_NONCE_BYTES: Final = 16
_MARK_DIGITS: Final = 32
_PROBE: Final = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{64})")


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
    """Return a proof for any process of this host; ``nonce`` has 16 random bytes."""
    assert len(nonce) == _NONCE_BYTES, "a probe of another form would never match"
    return f"{nonce.hex()}.{_proof(identity, nonce)}"


def is_probe_of(value: str, identity: bytes) -> bool:
    """Return whether the process that sent this probe knows that identity."""
    match = _PROBE.fullmatch(value)
    if match is None:
        return False
    return hmac.compare_digest(match[2], _proof(identity, bytes.fromhex(match[1])))


def format_mark(identity: bytes, snapshot_id: str) -> str:
    """Return the mark of a host in the swarm of a snapshot."""
    return _proof(identity, b"swarm\n" + snapshot_id.encode())[:_MARK_DIGITS]


def _proof(identity: bytes, nonce: bytes) -> str:
    return hmac.new(identity, _PURPOSE + nonce, hashlib.sha256).hexdigest()
