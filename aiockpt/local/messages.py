"""The messages between a trainer and its server process, as plain data.

Large data travels beside a message, as a descriptor of memory that both can map.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from aiockpt.events import TransferEvent
from aiockpt.http.audit import Access
from aiockpt.http.handlers import ServerConfig
from aiockpt.http.store import Failure, Statistics


class Setup(msgspec.Struct, tag=True, frozen=True):
    """The first message; the listening sockets travel with it.

    Attributes:
        levels: The levels of the trainer's loggers.
        config: What the server needs to know.
    """

    levels: dict[str, int]
    config: ServerConfig


class _Numbered(msgspec.Struct, frozen=True):
    """A message about a snapshot or a request, which the trainer has numbered."""

    number: int


class Prepare(_Numbered, tag=True, frozen=True):
    """Prepare to serve a snapshot; its header and its arena travel with the message."""


class Publish(_Numbered, tag=True, frozen=True):
    """Serve a prepared snapshot at once, instead of the last one."""


class Forget(_Numbered, tag=True, frozen=True):
    """Release a snapshot that was to be prepared."""


class Retract(_Numbered, tag=True, frozen=True):
    """Serve nothing; readers get ``grace`` seconds."""

    grace: float


class Fail(msgspec.Struct, tag=True, frozen=True):
    """Tell the receives that wait for a step that its send failed; None forgets it."""

    failure: Failure | None


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The server accepts connections."""


class AskFingerprint(_Numbered, tag=True, frozen=True):
    """Compute the fingerprint of a snapshot, and answer with `Fingerprinted`."""


class Fingerprinted(_Numbered, tag=True, frozen=True):
    """The fingerprint of a snapshot travels with the message.

    If it could not be computed, ``error`` says why, and nothing travels with it. Then
    ``passes`` says whether another attempt may succeed.
    """

    error: str = ""
    passes: bool = False


class Obeyed(_Numbered, tag=True, frozen=True):
    """The server has done what a `Prepare` or a `Retract` asked for."""


class Released(_Numbered, tag=True, frozen=True):
    """The server neither reads the memory of a snapshot any more, nor will."""


class Spent(_Numbered, tag=True, frozen=True):
    """Another process keeps the memory of a snapshot: never stage into it again."""


class Emit(msgspec.Struct, tag=True, frozen=True):
    """An event for the trainer's hooks and its log."""

    event: TransferEvent


class LogLine(msgspec.Struct, tag=True, frozen=True):
    """A record for the trainer's log; ``access`` is the argument of an audit record."""

    name: str
    level: int
    text: str
    access: Access | None = None


ToServer: TypeAlias = (
    Setup | Prepare | Publish | Forget | Retract | Fail | Fingerprinted
)
FromServer: TypeAlias = (
    Ready | Obeyed | Released | Spent | Statistics | Emit | LogLine | AskFingerprint
)

decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_from_server = msgspec.msgpack.Decoder(FromServer).decode
