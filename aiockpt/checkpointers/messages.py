"""The messages between the trainer and its checkpoint process, as plain data.

The trainer sends `WorkerSetup` first, then a `Write` for each save. The process answers
the setup with one `Ended`. It answers each write with `Progressed` while it works, with
`Kept` once the file is complete, and with one `Ended`. `runtime.ipc` carries the
messages. Paths are bytes, because not every path is valid text.

Exceptions and keyword arguments become data here, too.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec

from aiockpt import errors
from aiockpt.checkpointers.base import Written
from aiockpt.checkpointers.config import CheckpointProcessConfig, SaveRanks
from aiockpt.errors import AiockptError, WorkerError
from aiockpt.format.registry import REGISTRY
from aiockpt.format.tree import decode_tree, encode_tree
from aiockpt.memory.snapshot import TRUSTED

MAX_TEXT_CHARACTERS: Final = 4096
"""The length of a reason or a warning at most: a message must fit one packet."""

_MAX_FAILURE_CHARACTERS: Final = 8 << 10  # of each text of a failure
_MAX_FLOAT: Final = 10**308


# ------------------------------------------------------------------- to the process


class WorkerSetup(msgspec.Struct, tag=True, frozen=True):
    """The first message. Its parcel holds the init functions: see `spawning`.

    The config names a ``runtime_dir``. ``ranks`` are those of the first save, as far as
    they are known already; its writer is made before the save.
    """

    config: CheckpointProcessConfig
    ranks: SaveRanks | None


class Write(msgspec.Struct, tag=True, frozen=True):
    """Write a snapshot as one of ``ranks``. Its parcel comes with it, then its arena.

    The parcel holds ``header_bytes`` of a header without digests, then the keywords.
    """

    number: int
    path: bytes
    ranks: SaveRanks
    header_bytes: int
    segment_bytes: int


class Forsake(msgspec.Struct, tag=True, frozen=True):
    """Tell the other ranks that this one has nothing to write.

    ``begun``: another process had begun to write it, and has died.
    """

    path: bytes
    step: int
    ranks: SaveRanks
    reason: str
    begun: bool = False


class DropWrite(msgspec.Struct, tag=True, frozen=True):
    """Drop a write, unless it has begun. The process sends `Ended` in either case."""

    number: int


class Close(msgspec.Struct, tag=True, frozen=True):
    """Finish all writes, then exit; with ``keep``, as if the trainer had died."""

    keep: bool = False


# ----------------------------------------------------------------- from the process


class Progressed(msgspec.Struct, tag=True, frozen=True):
    """The process is alive, and its writer has consumed so many bytes of a write.

    The first message about a write says that it has begun and cannot be dropped any
    more. ``number`` is 0 in a mere sign of life.
    """

    number: int = 0
    nbytes: int = 0


class Kept(msgspec.Struct, tag=True, frozen=True):
    """A write's file is complete, and nothing is committed yet.

    With the file's device and inode, the trainer can find out whether the write was
    committed if the process dies.
    """

    number: int
    device: int
    inode: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The setup (0) or a write has ended: successfully, with a failure, or dropped.

    ``warning`` and ``content`` are the fields of `base.Written`.
    """

    number: int
    failure: RemoteFailure | None = None
    dropped: bool = False
    warning: str = ""
    content: str = ""


# ----------------------------------------------------------------------- exceptions

Fact: TypeAlias = str | int | float | bool | None


class RemoteFailure(msgspec.Struct, frozen=True):
    """An exception of another process.

    Attributes:
        kind: The name of its class.
        text: Its message.
        traceback: Its traceback, as Python prints it.
        facts: The attributes of an error of this package.
    """

    kind: str
    text: str
    traceback: str
    facts: dict[str, Fact] = {}


def failure_of(error: BaseException) -> RemoteFailure:
    """Return an exception as data that fits a message."""
    lines = "".join(traceback.format_exception(error))
    facts: dict[str, Fact] = {}
    if isinstance(error, AiockptError):
        facts = {
            name: _short(value)
            for name, value in vars(error).items()
            if not name.startswith("_")
        }
    text = plain(str(error) or repr(error))[:_MAX_FAILURE_CHARACTERS]
    return RemoteFailure(
        type(error).__name__, text, plain(lines)[-_MAX_FAILURE_CHARACTERS:], facts
    )


def error_of(failure: RemoteFailure, doing: str) -> AiockptError:
    """Return the exception to raise here: of its own class, if that is the package's.

    Any other class becomes a ``WorkerError``. Python prints the remote traceback with
    either, and a ``WorkerError`` has it as an attribute.
    """
    cls = getattr(errors, failure.kind, None)
    if isinstance(cls, type) and issubclass(cls, AiockptError) and failure.facts:
        error = errors.revive(cls, dict(failure.facts))
        if isinstance(error, WorkerError):
            error.remote_traceback = failure.traceback
    else:
        text = f"{doing} raised {failure.kind}: {failure.text}"
        error = WorkerError(text, remote_traceback=failure.traceback)
    error.add_note(f"in the checkpoint process:\n{failure.traceback.rstrip()}")
    return error


def ended(number: int, outcome: Written | BaseException) -> Ended:
    """Return the message about the end of a write."""
    if isinstance(outcome, BaseException):
        return Ended(number, failure=failure_of(outcome))
    warning = plain(outcome.warning)[:MAX_TEXT_CHARACTERS]
    return Ended(number, warning=warning, content=outcome.content)


def outcome_of(
    message: Ended, doing: str
) -> Written | AiockptError | Literal["replaced"]:
    """Return the end of a write that a message tells."""
    if message.failure is not None:
        return error_of(message.failure, doing)
    return "replaced" if message.dropped else Written(message.warning, message.content)


def plain(text: str) -> str:
    """Return text that can be sent: a path may hold bytes that are not text."""
    return text.encode("utf-8", "backslashreplace").decode()


def _short(value: object) -> Fact:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        # MessagePack has no such number, and an error shows it as it shows others.
        return float(max(-_MAX_FLOAT, min(value, _MAX_FLOAT)))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return plain(str(value))[:_MAX_FAILURE_CHARACTERS]


# ------------------------------------------------------------------------- keywords


def encode_keywords(keywords: Mapping[str, object]) -> bytes:
    """Return keyword arguments as data.

    Raises:
        UnsupportedLeafError: a keyword is not data; ``path`` says which.
    """
    tree = encode_tree(
        dict(keywords), registry=REGISTRY, leaf=lambda _, __: None, limits=TRUSTED
    )
    return msgspec.json.encode(tree)


def decode_keywords(text: bytes) -> dict[str, Any]:
    """Return what `encode_keywords` encoded."""
    node = msgspec.json.decode(text)
    found = decode_tree(node, registry=REGISTRY, tensors=(), limits=TRUSTED)
    return cast("dict[str, Any]", found)


ToWorker: TypeAlias = WorkerSetup | Write | Forsake | DropWrite | Close
FromWorker: TypeAlias = Progressed | Kept | Ended

decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
