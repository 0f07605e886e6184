"""What the trainer and the process that serves say to each other: plain data."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from aiockpt.events import TransferEvent
from aiockpt.http.audit import Access
from aiockpt.http.guard import ServerConfig
from aiockpt.http.handlers import ServerStatistics
from aiockpt.http.store import Failure, StoreStatistics

__all__ = [
    "Counted",
    "Done",
    "Fail",
    "Forget",
    "FromServer",
    "Happened",
    "Logged",
    "Prepare",
    "Publish",
    "Ready",
    "Released",
    "Retract",
    "Setup",
    "Spent",
    "ToServer",
    "decode_from_server",
    "decode_to_server",
]


class Setup(msgspec.Struct, tag=True, frozen=True):
    """The first one, with the listening sockets.

    ``trainer`` is the process to outlive, by ``keep_last`` seconds after the last
    reader. ``nice`` is added to the niceness. ``lends`` says whether
    processes of this host get the memory itself.
    ``levels`` are those of the trainer's loggers.
    """

    trainer: int
    keep_last: float
    nice: int
    lends: bool
    levels: dict[str, int]
    config: ServerConfig


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Be ready to serve a snapshot: its parcel has the header, then comes its arena."""

    number: int


class Publish(msgspec.Struct, tag=True, frozen=True):
    """Serve a snapshot that was prepared, at once, instead of the last one."""

    number: int


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Let go of a snapshot that was to be prepared."""

    number: int


class Retract(msgspec.Struct, tag=True, frozen=True):
    """Serve nothing; readers get ``grace`` seconds."""

    number: int
    grace: float


class Fail(msgspec.Struct, tag=True, frozen=True):
    """Tell those who wait for a step that it does not come; None forgets it."""

    failure: Failure | None


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The sockets are being served."""


class Done(msgspec.Struct, tag=True, frozen=True):
    """A snapshot is prepared, or a retraction has ended."""

    number: int


class Released(msgspec.Struct, tag=True, frozen=True):
    """Nobody reads the memory of a snapshot any more, nor will."""

    number: int


class Spent(msgspec.Struct, tag=True, frozen=True):
    """Somebody has the memory of a snapshot for good: nothing may be staged there."""

    number: int


class Counted(msgspec.Struct, tag=True, frozen=True):
    """The counters, when they have changed, ten times a second at most."""

    store: StoreStatistics
    server: ServerStatistics
    lent: int


class Happened(msgspec.Struct, tag=True, frozen=True):
    """An event for the trainer's hooks and its log."""

    event: TransferEvent


class Logged(msgspec.Struct, tag=True, frozen=True):
    """A record for the trainer's log; ``access`` is that of an audit's."""

    name: str
    level: int
    text: str
    access: Access | None = None


ToServer: TypeAlias = Setup | Prepare | Publish | Forget | Retract | Fail
FromServer: TypeAlias = Ready | Done | Released | Spent | Counted | Happened | Logged

decode_to_server = msgspec.json.Decoder(ToServer).decode
decode_from_server = msgspec.json.Decoder(FromServer).decode
