"""What the trainer and the checkpoint process say to each other: plain data.

See `Channel` for how they travel. Paths are bytes: not all are text that JSON can hold.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from aiockpt.checkpointers.failures import Failure

__all__ = [
    "Alive",
    "Begun",
    "Close",
    "Drop",
    "Dropped",
    "Ended",
    "Forsake",
    "FromWorker",
    "Progressed",
    "Ready",
    "Setup",
    "ToWorker",
    "Write",
    "decode_from_worker",
    "decode_to_worker",
]


class Setup(msgspec.Struct, tag=True, frozen=True):
    """The first one. Its parcel holds the init functions.

    ``trainer`` is the process to outlive. The other fields are the config's.
    """

    trainer: int
    nice: int
    io_idle: bool
    write_timeout: float
    keep_last: float
    runtime_dir: str
    rank: int


class Write(msgspec.Struct, tag=True, frozen=True):
    """Write a snapshot: its parcel, then its arena.

    The parcel holds ``header_bytes`` of a header without digests, then the keywords.
    """

    number: int
    path: bytes
    header_bytes: int
    segment_bytes: int


class Forsake(msgspec.Struct, tag=True, frozen=True):
    """Tell the other ranks that this one has nothing to write.

    ``begun``: another process had begun to write it, and has died.
    """

    path: bytes
    step: int
    reason: str
    begun: bool = False


class Drop(msgspec.Struct, tag=True, frozen=True):
    """Forget a write that has not begun."""

    number: int


class Close(msgspec.Struct, tag=True, frozen=True):
    """Finish what was handed over, then end; ``keep``: as if the trainer had died."""

    keep: bool = False


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The init functions have returned."""


class Begun(msgspec.Struct, tag=True, frozen=True):
    """A write is under way, and cannot be dropped any more."""

    number: int


class Progressed(msgspec.Struct, tag=True, frozen=True):
    """So many bytes of the segment have been taken by the writer."""

    number: int
    nbytes: int


class Dropped(msgspec.Struct, tag=True, frozen=True):
    """A write was forgotten before it began."""

    number: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A write has ended (0: the setup), well or with a failure.

    ``warning`` and ``content`` are those of `writer.Written`.
    """

    number: int
    seconds: float = 0.0
    failure: Failure | None = None
    warning: str = ""
    content: str = ""


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Nothing new, and nothing hangs."""


ToWorker: TypeAlias = Setup | Write | Forsake | Drop | Close
FromWorker: TypeAlias = Ready | Begun | Progressed | Dropped | Ended | Alive

decode_to_worker = msgspec.json.Decoder(ToWorker).decode
decode_from_worker = msgspec.json.Decoder(FromWorker).decode
