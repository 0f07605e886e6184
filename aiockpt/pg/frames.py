"""What the two ends of a transfer say to each other beside the bytes.

A conversation, in the order in which it is held; only the receiver may end it early,
and the sender before it has offered anything::

    sender                                receiver
    OFFER step, bytes of the header   →
                                      ←   ACCEPT: it is the step that I wait for
    header                            →
                                      ←   ACCEPT: it fits, and I have the memory
    data segment, message by message  →
    digests of its chunks             →
                                      ←   DONE: every digest matched
    FAILED why                        →   (in place of the OFFER)
                                      ←   FAILED why (in place of ACCEPT or DONE)

The digests in the header do not count: those of host memory are zeros there, for it is
sent before they are computed.

So whoever fails tells the other, and nothing is under way when a conversation ends.
There is one exception: a sender in host memory that has nothing to offer leaves FAILED
and BYE for a receiver that is not there, and goes on. A receiver skips such a
conversation if it is about an earlier step than its own.
Beside it each end sends one frame more, which the other one waits for all the time: BYE
at the end, or FAILED if it gives up in the middle of something, and with it the group.

A frame is 1 KiB, little endian: magic, version, kind, step, bytes, length of the text,
text; zeros up to the end.
"""

from __future__ import annotations

import enum
import re
import struct
from dataclasses import dataclass
from typing import Final

from aiockpt.errors import RemoteProtocolError

__all__ = ["FRAME_BYTES", "Frame", "Kind"]

FRAME_BYTES: Final = 1024

_MAGIC: Final = b"aiockpt\n"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sHHqqI")
_TEXT_BYTES: Final = FRAME_BYTES - _HEAD.size
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_MAX_STEP: Final = 2**63 - 1


class Kind(enum.IntEnum):
    """What a frame says."""

    OFFER = 1
    ACCEPT = 2
    DONE = 3
    FAILED = 4
    BYE = 5


_KINDS: Final = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Frame:
    """One thing said. ``nbytes`` is the length of the header that an OFFER is of."""

    kind: Kind
    step: int
    nbytes: int = 0
    text: str = ""

    def encode(self) -> bytearray:
        """Return the frame's bytes; a text that is too long is cut."""
        text = self.text.encode("utf-8", "replace")[:_TEXT_BYTES]
        step = self.step if 0 <= self.step <= _MAX_STEP else -1
        frame = bytearray(FRAME_BYTES)
        head = (_MAGIC, _VERSION, self.kind, step, self.nbytes, len(text))
        _HEAD.pack_into(frame, 0, *head)
        frame[_HEAD.size : _HEAD.size + len(text)] = text
        return frame

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Frame:
        """Return what a peer said.

        Raises:
            RemoteProtocolError: it is no frame, or of another version.
        """
        magic, version, kind, step, nbytes, length = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise RemoteProtocolError("the peer is no aiockpt.PGTransport")
        if version != _VERSION:
            raise RemoteProtocolError(
                f"the peer speaks version {version}; this side knows {_VERSION}"
            )
        if kind not in _KINDS or length > _TEXT_BYTES or nbytes < 0:
            raise RemoteProtocolError("malformed frame")
        text = data[_HEAD.size : _HEAD.size + length].decode("utf-8", "replace")
        return cls(Kind(kind), step, nbytes, _CONTROL.sub(" ", text))
