"""Checkpoints that are read while they are being staged, as two ends speak of them.

A receiver that can do so says `ACCEPT` in `UNSEALED_HEADER` when it asks for a
manifest. The header that it gets of a checkpoint in the making has zeros for digests
(`relabel.UNSEALED`), and the answer's `UNSEALED_HEADER` has a *tag*. Requests that have
it there, too, get ranges as soon as they are staged, and the sealed header, which is
the same but for the digests and the snapshot id, as soon as there is one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from mmap import mmap
from typing import Final

from aiockpt.errors import IntegrityError, RemoteProtocolError
from aiockpt.wire.chunks import DIGEST_DIGITS
from aiockpt.wire.layout import ID_SLICE, LENGTH_BYTES, snapshot_id_of
from aiockpt.wire.manifest import Manifest, Outline
from aiockpt.wire.relabel import UNSEALED, digests_at

__all__ = [
    "ACCEPT",
    "UNSEALED_HEADER",
    "Promise",
    "accepts",
    "make_tag",
    "parse_tag",
    "wanted_tag",
]

UNSEALED_HEADER: Final = "Aiockpt-Unsealed"
ACCEPT: Final = "accept"

_TAG = re.compile(r"unsealed-[0-9a-f]{32}")


def accepts(value: str | None) -> bool:
    """Whether a request's `UNSEALED_HEADER` says that an unsealed manifest will do."""
    return value is not None and value.strip() == ACCEPT


def make_tag(nonce: bytes) -> str:
    """Return the tag that 16 random bytes make; no snapshot id is like it."""
    return f"unsealed-{nonce.hex()}"


def wanted_tag(value: str | None) -> str | None:
    """Return the tag in the `UNSEALED_HEADER` of a request; None if there is none."""
    match = _TAG.fullmatch((value or "").strip())
    return match and match[0]


def parse_tag(value: str) -> str:
    """Return the tag in the `UNSEALED_HEADER` of an answer.

    Raises:
        RemoteProtocolError: it is none.
    """
    if _TAG.fullmatch(value) is None:
        raise RemoteProtocolError(f"bad {UNSEALED_HEADER} {value[:60]!r}")
    return value


@dataclass(frozen=True, slots=True)
class Promise:
    """What an unsealed header says of the one that follows it.

    Attributes:
        tag: Names the checkpoint until then.
        snapshot_id: That of the unsealed header.
    """

    tag: str
    snapshot_id: str
    header_bytes: int
    _digests_at: slice = field(repr=False)

    @classmethod
    def of(cls, manifest: Manifest, tag: str) -> Promise:
        """Return that of a manifest as it came, with its header.

        Raises:
            RemoteProtocolError: it has digests.
        """
        if manifest.digests != (UNSEALED,) * len(manifest.digests):
            raise RemoteProtocolError("a header is called unsealed and has digests")
        at = digests_at(manifest)
        return cls(tag, manifest.snapshot_id, manifest.header_bytes, at)

    def outline(self, unsealed: Outline) -> Outline:
        """Return the outline by which ranges are asked for until then."""
        return replace(unsealed, snapshot_id=self.tag)

    def kept(self, header: bytes | bytearray | mmap, unsealed: Outline) -> Outline:
        """Return the outline that ``header``, complete and sealed, makes of it.

        Nothing else of the header has to be looked at: it is what was promised.

        Raises:
            IntegrityError: the snapshot id is not the header's digest.
            RemoteProtocolError: it is the header of something else.
        """
        if len(header) != self.header_bytes:
            raise _other()
        text = bytearray(header)
        json = memoryview(text)[LENGTH_BYTES:]
        claimed = bytes(json[ID_SLICE]).decode("latin-1")
        if (actual := snapshot_id_of(json)) != claimed:
            raise IntegrityError(expected=claimed, actual=actual)
        digits = bytes(text[self._digests_at]).decode("latin-1")
        text[self._digests_at] = b"0" * len(digits)
        if snapshot_id_of(json) != self.snapshot_id:
            raise _other()
        starts = range(0, len(digits), DIGEST_DIGITS)
        digests = tuple(digits[start : start + DIGEST_DIGITS] for start in starts)
        return replace(unsealed, snapshot_id=claimed, digests=digests)


def _other() -> RemoteProtocolError:
    return RemoteProtocolError("the sealed header describes another checkpoint")
