"""Tokens for single receivers, and the MAC of a manifest: HMAC-SHA256 over plain text.

A receiver's token says who may read which step until when. Its MAC proves that somebody
who knows the sender's token made it. A sender checks it without a list of tokens, and
the holder of one token cannot make another from it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from aiockpt.errors import AuthenticationError, ForgedManifestError
from aiockpt.format.manifest import Manifest
from aiockpt.runtime.secrets import Token, discreet

CLOCK_SKEW: Final = 30.0
"""Seconds for which a token is accepted after it has expired: clocks differ."""

MAC_HEADER: Final = "Aiockpt-Manifest-Mac"

_KIND: Final = "aiockpt1"
_TOKEN: Final = re.compile(
    rf"({_KIND}\.([A-Za-z0-9_-]{{2,140}})\.(any|0|[1-9][0-9]{{0,18}})"
    r"\.([1-9][0-9]{0,11}))\.([A-Za-z0-9_-]{43})"
)
_RECEIVER: Final = re.compile(r"[\x21-\x7e]{1,100}")
_ALGORITHM: Final = "hmac-sha256"
# The MAC also covers its purpose, so one MAC cannot stand for the other.
_OF_TOKEN: Final = b"aiockpt receiver token\n"
_OF_MANIFEST: Final = b"aiockpt manifest\n"
_OF_SWARM: Final = b"aiockpt swarm\n"
_BYTES_PER_ROUND: Final = 256 << 10  # of the loop: a fraction of a millisecond
_KEPT_MACS: Final = 4


@dataclass(frozen=True, slots=True)
class Grant:
    """Who may read which step (None: all), and until when (seconds since 1970)."""

    receiver: str
    step: int | None
    expires: int

    @property
    def lapses(self) -> float:
        """The time, in seconds since 1970, after which it is not accepted any more."""
        return self.expires + CLOCK_SKEW

    def check(self, step: str | None, *, now: float) -> None:
        """Raise `AuthenticationError` unless the grant is valid for this step now."""
        if now > self.lapses:
            late = f"{now - self.expires:.0f} s ago"
            raise AuthenticationError("the server", f"the token expired {late}")
        if self.step is not None and step != str(self.step):
            raise AuthenticationError("the server", f"it is for step {self.step} only")


@discreet
def make_token(
    token: str, receiver: str, *, expires: float, step: int | None = None
) -> str:
    """Return a token for one receiver, valid at every sender that uses ``token``.

    This is for an orchestrator that knows the senders' token. At a sender, use
    :meth:`.HTTPTransport.grant`. The receiver passes the result as ``token=``, or as
    the fragment of a sender's metadata. To revoke it, change the senders' token.

    Args:
        token: The senders' token, with at least 128 random bits: the holder of a
            receiver's token can test guesses of it offline.
        receiver: The receiver's name in the audit log, 1 to 100 printable characters.
        expires: The end in seconds since 1970. Senders accept the token for 30 seconds
            more, because clocks differ. A transfer must send its last request by then.
        step: The only step that the receiver may fetch. None: all steps.

    Raises:
        ValueError: ``receiver``, ``expires`` or ``step`` has a value that a token
            cannot hold.
    """
    if _RECEIVER.fullmatch(receiver) is None:
        raise ValueError(
            f"receiver must be 1 to 100 printable characters: {receiver!r}"
        )
    if not 1 <= expires < 1e12 or (step is not None and not 0 <= step < 1 << 63):
        raise ValueError(f"no such time or step: expires={expires!r}, step={step!r}")
    name = _text(receiver.encode())
    payload = f"{_KIND}.{name}.{'any' if step is None else step}.{math.ceil(expires)}"
    return f"{payload}.{_token_mac(token, payload)}"


def read_token(text: str, token: str) -> Grant | None:
    """Return the grant of a receiver's token, or None if the token is not valid."""
    found = _TOKEN.fullmatch(text)
    if found is None:
        return None
    payload, name, step, expires, mac = found.groups()
    if not hmac.compare_digest(mac, _token_mac(token, payload)):
        return None
    # The MAC is right, so this side has written the text.
    receiver = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
    return Grant(receiver, None if step == "any" else int(step), int(expires))


def _token_mac(token: str, payload: str) -> str:
    key = token.encode("utf-8", "surrogateescape")
    return _text(hmac.digest(key, _OF_TOKEN + payload.encode(), "sha256"))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@discreet
def swarm_token(token: str | None, snapshot_id: str, generation: int = 0) -> Token:
    """Return the token with which members of a swarm read one snapshot of each other.

    It opens nothing at the source. Where the source asks for no token (None), everybody
    can make it. After the grant of a receiver has lapsed, there is another generation.
    """
    key = (token or "").encode("utf-8", "surrogateescape")
    text = snapshot_id if not generation else f"{snapshot_id}\n{generation}"
    return Token(_text(hmac.digest(key, _OF_SWARM + text.encode(), "sha256")))


def manifest_mac(key: bytes) -> hmac.HMAC:
    """Return a MAC to update with a whole header; see `format_mac`."""
    return hmac.new(key, _OF_MANIFEST, hashlib.sha256)


def format_mac(mac: hmac.HMAC) -> str:
    """Return the value of `MAC_HEADER`."""
    return f"{_ALGORITHM}={mac.hexdigest()}"


@discreet
def check_manifest_mac(
    key: bytes, header: bytes | bytearray | memoryview, value: str | None, *, url: str
) -> None:
    """Raise `ForgedManifestError` unless ``value`` is the MAC of a whole header."""
    mac = manifest_mac(key)
    mac.update(header)
    offered = (value or "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(offered, format_mac(mac).encode()):
        raise ForgedManifestError(url, missing=value is None)


class ManifestMacs:
    """Caches the MACs of the last few manifests."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._known: dict[str, str] = {}

    async def headers_of(self, manifest: Manifest) -> Mapping[str, str]:
        """Return the header that authenticates a manifest; none without a key."""
        if self._key is None:
            return {}
        name, header = manifest.snapshot_id, memoryview(manifest.header)
        if name not in self._known:
            mac = manifest_mac(self._key)
            for start in range(0, len(header), _BYTES_PER_ROUND):
                mac.update(header[start : start + _BYTES_PER_ROUND])
                await asyncio.sleep(0)
            self._known[name] = format_mac(mac)
            while len(self._known) > _KEPT_MACS:
                del self._known[next(iter(self._known))]
        return {MAC_HEADER: self._known[name]}
