"""Every exception of the package, in one tree.

The parent class answers *what should I do*. Most classes also inherit the builtin
exception that a caller would guess::

    AiockptError
    ├── TransportError                    try again, it may help
    │   ├── PeerUnreachableError              refused, reset, unresolved
    │   ├── TransferInterruptedError          closed before the last byte
    │   ├── TransferStalledError              no progress for the stall timeout
    │   ├── TransferTimeoutError              the deadline (TimeoutError, RuntimeError)
    │   ├── PeerFailedError                   the peer gave up, and said so
    │   └── ProcessGroupError                 the process group is broken
    ├── UnavailableError                  the peer is well and does not have it
    │   ├── StepNotFoundError                 not published, superseded (LookupError)
    │   └── CheckpointChangedError            replaced while it was being fetched
    ├── ProtocolError                     bytes against the wire format
    │   ├── LocalProtocolError                ours: a bug or misuse
    │   ├── RemoteProtocolError               the peer's, or an unknown version
    │   ├── LimitExceededError                larger than the receiver allows
    │   └── IntegrityError                    a whole chunk with the wrong digest
    │       └── FingerprintMismatchError          tensors differ from another side's
    ├── AuthenticationError               wrong or no token (PermissionError)
    │   └── ForgedManifestError               not of a sender that knows the key
    ├── StateDictError                    what the caller passed (ValueError)
    │   ├── UnsupportedLeafError              and where (TypeError)
    │   ├── TemplateMismatchError             ``into`` does not fit
    │   ├── MissingKeysError                  the checkpoint lacks them (RuntimeError)
    │   ├── RankValuesError                   each rank saved another value
    │   └── DeviceMeshError                   no such process group or rank here
    ├── StagingError                      a copy or an allocation failed here
    ├── StorageError                      not written, or no checkpoint (OSError)
    │   ├── CheckpointNotFoundError           no whole one is there (FileNotFoundError)
    │   └── WorldSizeMismatchError            more or fewer ranks load it than saved it
    ├── WorkerError                       the checkpoint process died (RuntimeError)
    │   └── WorkerTimeoutError            it took too long (TimeoutError)
    ├── SaveInProgressError               two saves are under way (BlockingIOError)
    ├── MissingExtraError                 a library is not installed (ImportError)
    └── ClosedError                       used after close (RuntimeError)

An exception carries its facts as attributes and composes its message from them.
"""

from __future__ import annotations

import enum
import traceback
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, TypeVar, cast

__all__ = [
    "AiockptError",
    "AuthenticationError",
    "CheckpointChangedError",
    "CheckpointNotFoundError",
    "ClosedError",
    "DeviceMeshError",
    "FingerprintMismatchError",
    "ForgedManifestError",
    "IntegrityError",
    "LimitExceededError",
    "LocalProtocolError",
    "MissingExtraError",
    "MissingKeysError",
    "PeerFailedError",
    "PeerUnreachableError",
    "ProcessGroupError",
    "ProtocolError",
    "RankValuesError",
    "RemoteProtocolError",
    "SaveInProgressError",
    "StagingError",
    "StateDictError",
    "StepNotFoundError",
    "StorageError",
    "TemplateMismatchError",
    "TransferInterruptedError",
    "TransferStalledError",
    "TransferTimeoutError",
    "TransportError",
    "UnavailableError",
    "UnsupportedLeafError",
    "WorkerError",
    "WorkerTimeoutError",
    "WorldSizeMismatchError",
]

E = TypeVar("E", bound=BaseException)

_PLAIN: Final = (str, bytes, int, float, complex, type(None), PurePath)
_MAX_FRAME_CHARACTERS: Final = 8 << 10  # of a kept error
_MAX_VALUES: Final = 8 << 10  # of a container that a kept error refers to
_MAX_DEPTH: Final = 16  # of a chain of errors, and of containers in each other


def revive(cls: type[AiockptError], facts: dict[str, Any]) -> AiockptError:
    """Return an error of a class with these attributes, from another process."""
    # Where RuntimeError precedes OSError in the bases, cls.__new__ is the wrong one.
    new = OSError.__new__ if issubclass(cls, OSError) else cls.__new__
    error = new(cls)
    error.__dict__.update(facts)
    return error


def kept(error: E) -> E:
    """Return a copy of an error that may be kept: it refers to no frame and no value.

    A traceback refers to the frames that the error has passed, and these to everything
    in their variables, such as a state dict. The copy has the frames as text, in a
    note. Each raise adds frames, so its keeper raises a copy of the copy.
    """
    return cast("E", _copied(error, {}))


def _copied(error: BaseException, seen: dict[int, BaseException]) -> BaseException:
    copy = seen[id(error)] = _alike(error, seen)
    for name in ("__cause__", "__context__"):
        other = getattr(error, name)
        if other is not None and id(other) in seen:
            setattr(copy, name, seen[id(other)])
        elif other is not None and len(seen) < _MAX_DEPTH:
            setattr(copy, name, _copied(other, seen))
    copy.__suppress_context__ = error.__suppress_context__
    for note in getattr(error, "__notes__", ()):
        copy.add_note(str(note))
    if frames := "".join(traceback.format_tb(error.__traceback__)):
        copy.add_note(
            f"it was raised here:\n{frames[-_MAX_FRAME_CHARACTERS:].rstrip()}"
        )
    return copy


def _alike(error: BaseException, seen: dict[int, BaseException]) -> BaseException:
    """Return a new error of the same class and text, or one that has the text."""
    if isinstance(error, BaseExceptionGroup):
        return error.derive([_copied(each, seen) for each in error.exceptions])
    cls = type(error)
    try:
        copy = _blank(error)
        facts = {name: _plain(value) for name, value in vars(error).items()}
        facts.pop("__notes__", None)
        vars(copy).update(facts)
        if str(copy) == str(error):
            return copy
    except Exception:  # noqa: BLE001, S110 - a caller's class may refuse anything
        pass
    return RuntimeError(f"{cls.__qualname__}: {_text_of(error)}")


def _blank(error: BaseException) -> BaseException:
    """Return a new error with the same arguments, which an own class does not see."""
    cls, args = type(error), tuple(_plain(each) for each in error.args)
    if cls.__module__ == "builtins":
        copy = cls(*args)
    else:
        # Where RuntimeError precedes OSError in the bases, cls.__new__ is wrong.
        new = OSError.__new__ if issubclass(cls, OSError) else cls.__new__
        copy = new(cls, *args)
    if isinstance(copy, OSError):
        for name in ("errno", "strerror", "filename", "filename2"):
            if (value := getattr(error, name)) is not None:
                setattr(copy, name, _plain(value))
    return copy


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - as above
        return "its text cannot be made"


def _plain(value: object, depth: int = 0) -> object:
    """Return a value that refers to nothing of the caller's."""
    if isinstance(value, _PLAIN):
        return value
    items: Any = value
    if depth < _MAX_DEPTH and type(value) in (list, tuple, set, frozenset):
        if len(items) <= _MAX_VALUES:
            return type(items)(_plain(each, depth + 1) for each in items)
    elif depth < _MAX_DEPTH and type(value) is dict and len(items) <= _MAX_VALUES:
        return {_plain(k, depth + 1): _plain(v, depth + 1) for k, v in items.items()}
    return f"<{type(value).__qualname__}>"


class AiockptError(Exception):
    """The root of every exception that the package raises on purpose.

    Attributes:
        may_be_committed: For a save or another write that failed: whether its
            checkpoint may be there nevertheless, because nobody could find out, or the
            disk did not confirm it.
    """

    may_be_committed: bool = False

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail)
        self.detail = detail

    def __str__(self) -> str:
        return self.detail

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling keeps every attribute, whatever arguments __init__ requires.
        return (revive, (type(self), self.__dict__.copy()))


_MAX_OTHERS = 9  # further leaves that an error names
_MAX_SHOWN = 10  # tensors that an error names

_DOING = {
    "stage": "staging",
    "retract": "retracting",
    "serve": "sending",
    "fetch_manifest": "waiting for",
    "fingerprint": "waiting for the fingerprint of",
    "allocate": "allocating memory for",
    "plan": "comparing what is there with",
    "fetch_chunk": "fetching",
    "rebuild": "rebuilding",
    "load": "copying",
    "write": "writing",
    "recv": "receiving",
    "save": "saving",
}
"""The name of a phase -> the verb that stands before its object in a message."""


class TransportError(AiockptError):
    """The transfer failed on its way; trying again may help."""


class PeerUnreachableError(TransportError, ConnectionError):
    """The peer refused or reset the connection, or its name does not resolve."""

    def __init__(self, url: str, detail: str = "") -> None:
        super().__init__(detail)
        self.url = url

    def __str__(self) -> str:
        why = f": {self.detail}" if self.detail else ""
        return f"cannot reach {self.url}{why}; is the sender running there?"


class TransferInterruptedError(TransportError, ConnectionError):
    """The connection closed before the last byte of ``chunk`` (None: the manifest)."""

    def __init__(
        self, url: str, *, received: int, expected: int, chunk: int | None = None
    ) -> None:
        super().__init__()
        self.url = url
        self.chunk = chunk
        self.received = received
        self.expected = expected

    def __str__(self) -> str:
        what = "the manifest" if self.chunk is None else f"chunk {self.chunk}"
        return (
            f"{self.url} closed the connection after {self.received} of "
            f"{self.expected} bytes of {what}"
        )


class TransferStalledError(TransportError):
    """The peer is connected but sent nothing for the stall timeout of ``idle`` s."""

    def __init__(self, url: str, *, idle: float, chunk: int | None = None) -> None:
        super().__init__()
        self.url = url
        self.chunk = chunk
        self.idle = idle

    def __str__(self) -> str:
        what = "" if self.chunk is None else f" in chunk {self.chunk}"
        return f"{self.url} sent nothing for {self.idle:.3g} s{what}"


class TransferTimeoutError(TransportError, TimeoutError, RuntimeError):
    """The deadline of the whole call passed.

    It is a ``RuntimeError`` too, since torch raises one when a process group times out.

    Attributes:
        stop: The phase of the call, such as ``fetch_chunk``.
        timeout: The call's timeout in seconds.
        what: The step and the peer, where they are known.
        last_error: The last failure that was retried, if any.
    """

    def __init__(
        self, stop: str, timeout: float, *, what: str = "", last_error: str = ""
    ) -> None:
        super().__init__()
        self.stop = stop
        self.timeout = timeout
        self.what = what
        self.last_error = last_error

    def __str__(self) -> str:
        where = f"in {self.stop}"
        if self.stop in _DOING:
            where = f"while {_DOING[self.stop]} {self.what or 'the checkpoint'}"
        last = f"; last error: {self.last_error}" if self.last_error else ""
        return f"timed out after {self.timeout:.3g} s {where}{last}"


class PeerFailedError(TransportError):
    """The peer at ``rank`` or ``url`` gave up and said why."""

    def __init__(self, rank: int | None, reason: str, *, url: str = "") -> None:
        super().__init__()
        self.rank = rank
        self.reason = reason
        self.url = url

    def __str__(self) -> str:
        who = self.url or "the sender"
        if self.rank is not None:
            who = f"rank {self.rank}"
        return f"{who} gave up: {self.reason}"


class ProcessGroupError(TransportError):
    """A process-group operation failed; the group cannot be used any more."""

    def __init__(self, detail: str, *, rank: int | None = None) -> None:
        super().__init__(detail)
        self.rank = rank

    def __str__(self) -> str:
        whom = "" if self.rank is None else f" with rank {self.rank}"
        return f"process group operation{whom} failed: {self.detail}; make a new group"


class UnavailableError(AiockptError):
    """The peer is well but does not have what was asked for."""


class StepNotFoundError(UnavailableError, LookupError):
    """The step is not published yet, or a newer step has replaced it.

    Attributes:
        step: The step that was asked for; None for the latest.
        serving: The step that the peer serves instead, if any.
        url: The peer.
    """

    def __init__(
        self, step: int | None, *, serving: int | None = None, url: str = ""
    ) -> None:
        super().__init__()
        self.step = step
        self.serving = serving
        self.url = url

    def __str__(self) -> str:
        where = f" at {self.url}" if self.url else ""
        now = "nothing" if self.serving is None else f"step {self.serving}"
        what = "no checkpoint" if self.step is None else f"step {self.step} is not"
        return f"{what} published{where}; being served is {now}"


class CheckpointChangedError(UnavailableError):
    """The checkpoint was replaced or retracted while it was being fetched.

    Attributes:
        expected: The snapshot id that the receive began with.
        actual: The id that is served now; None if the checkpoint is gone.
        url: The peer.
    """

    def __init__(
        self, *, expected: str, actual: str | None = None, url: str = ""
    ) -> None:
        super().__init__()
        self.expected = expected
        self.actual = actual
        self.url = url

    def __str__(self) -> str:
        where = f" at {self.url}" if self.url else ""
        now = "is gone" if self.actual is None else f"is now {self.actual}"
        return f"snapshot {self.expected}{where} {now}; receive again"


class ProtocolError(AiockptError):
    """Bytes that contradict the wire format."""


class LocalProtocolError(ProtocolError):
    """This side broke the wire format: a bug, or an argument that cannot travel."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the wire format, or speaks another version or protocol."""


class LimitExceededError(ProtocolError):
    """The peer offers more than the receiver's limits allow.

    ``option`` is the field of ``Limits`` that sets the limit, if there is one.
    ``detail`` says what to do, if that is not to raise the limit.
    """

    def __init__(
        self, what: str, *, limit: int, actual: int, option: str = "", detail: str = ""
    ) -> None:
        super().__init__(detail)
        self.what = what
        self.limit = limit
        self.actual = actual
        self.option = option

    def __str__(self) -> str:
        where = f"Limits({self.option}=...)" if self.option else "it in Limits"
        remedy = self.detail or f"raise {where} if you trust its source"
        return (
            f"{self.what} is {self.actual}, more than the limit of {self.limit}; "
            f"{remedy}"
        )


class IntegrityError(ProtocolError):
    """A whole ``chunk`` (None: the header) arrived with the wrong digest."""

    def __init__(
        self, *, expected: str, actual: str, chunk: int | None = None, url: str = ""
    ) -> None:
        super().__init__()
        self.chunk = chunk
        self.expected = expected
        self.actual = actual
        self.url = url

    def __str__(self) -> str:
        what = "the header" if self.chunk is None else f"chunk {self.chunk}"
        where = f" from {self.url}" if self.url else ""
        return f"{what}{where} has digest {self.actual}, expected {self.expected}"


class FingerprintMismatchError(IntegrityError):
    """Two fingerprints do not show that the tensors are the same.

    ``faults`` says by path what is wrong: the tensor differs, is not there, or is only
    there in part.
    """

    def __init__(self, faults: Mapping[str, str]) -> None:
        super().__init__(expected="", actual="")
        self.faults = {**faults}

    def __str__(self) -> str:
        shown = "; ".join([*self.faults.values()][:_MAX_SHOWN])
        more = len(self.faults) - _MAX_SHOWN
        return f"{shown}; and {more} more" if more > 0 else shown


class AuthenticationError(AiockptError, PermissionError):
    """The peer requires a token and got none, or refused the one it got.

    ``by_sender`` is False if the answer is not a sender's: an application or a proxy in
    front of it refused the request, and the token may be right.
    """

    def __init__(self, url: str, detail: str = "", *, by_sender: bool = True) -> None:
        super().__init__(detail)
        self.url = url
        self.by_sender = by_sender

    def __str__(self) -> str:
        why = f": {self.detail}" if self.detail else ""
        if not self.by_sender:
            return (
                f"{self.url} refused the request{why}, and not as a sender does: an "
                "application or a proxy has rules or a login of its own; let it pass "
                "the requests that aiockpt.http.serves() knows"
            )
        return (
            f"{self.url} refused the token{why}; pass the sender's metadata() "
            "whole, or the same token on both sides"
        )


class ForgedManifestError(AuthenticationError):
    """The manifest has no MAC (``missing``), or its MAC does not match this key."""

    def __init__(self, url: str, *, missing: bool) -> None:
        super().__init__(url)
        self.missing = missing

    def __str__(self) -> str:
        fault = "no MAC" if self.missing else "a MAC of another key or manifest"
        return (
            f"the manifest of {self.url} has {fault}; is it the sender that you mean, "
            "and were both ends given the same manifest_key?"
        )


class StateDictError(AiockptError, ValueError):
    """The state dict that the caller passed cannot be used."""


class UnsupportedLeafError(StateDictError, TypeError):
    """The leaf at ``path`` has a type without an encoding.

    Attributes:
        path: The path of the first such leaf.
        type_name: Its type.
        others: Path and type of further such leaves, at most nine.
        more: How many there are beyond these.
    """

    def __init__(self, path: str, type_name: str, detail: str = "") -> None:
        super().__init__(detail)
        self.path = path
        self.type_name = type_name
        self.others: list[tuple[str, str]] = []
        self.more = 0

    def __str__(self) -> str:
        register = "convert it, or call aiockpt.register_leaf for its type on both ends"
        remedy = self.detail or register
        text = f"{self.path or 'the state dict'} is a {self.type_name}: {remedy}"
        if self.others:
            listed = ", ".join(f"{path} (a {kind})" for path, kind in self.others)
            text += f"; these cannot travel either: {listed}"
        return f"{text} and {self.more} more" if self.more else text

    def add(self, path: str, type_name: str) -> None:
        """Mention another such leaf."""
        if len(self.others) < _MAX_OTHERS:
            self.others.append((path, type_name))
        else:
            self.more += 1


class TemplateMismatchError(StateDictError):
    """The template's value at ``path`` does not fit; nothing was received.

    ``detail`` says what to do, where that is known.
    """

    def __init__(
        self, path: str, *, expected: str, actual: str, detail: str = ""
    ) -> None:
        super().__init__(detail)
        self.path = path
        self.expected = expected
        self.actual = actual

    def __str__(self) -> str:
        if self.actual == "empty":
            where = self.path or "the template"
            return (
                f"{where} is empty here and has {self.expected} in the checkpoint: "
                f"{self.detail}"
            )
        where = f"template {self.path}" if self.path else "template"
        return (
            f"{where}: the checkpoint has {self.expected}, "
            f"the template has {self.actual}{self.detail and '; '}{self.detail}"
        )


class MissingKeysError(StateDictError, RuntimeError):
    """A load did not find these ``keys`` of the template in the checkpoint.

    A load that is not strict raises it, too, if the checkpoint has ``none`` of the
    template's keys. ``detail`` says how the keys differ, where that is known.
    """

    def __init__(
        self, path: str, keys: list[str], *, none: bool = False, detail: str = ""
    ) -> None:
        super().__init__(detail)
        self.path = path
        self.keys = keys
        self.none = none

    def __str__(self) -> str:
        shown = ", ".join(self.keys[:10])
        more = f" and {len(self.keys) - 10} more" if len(self.keys) > 10 else ""
        lacks = "has no key of the template" if self.none else "is missing keys"
        return f"{self.path} {lacks}: {shown}{more}{self.detail and '; '}{self.detail}"


class RankValuesError(StateDictError):
    """Ranks saved different values at these ``paths``, and other ranks load them.

    None of several values may be chosen silently. That of one rank may be wrong for
    all others, such as the state of a random number generator. ``kept`` says that the
    load was to keep the template's values, and that this cannot be: the template has
    none there, or the value is a part of one that is made anew, such as a tuple.
    """

    def __init__(self, name: str, paths: Sequence[str], *, kept: bool = False) -> None:
        super().__init__()
        self.name = name
        self.paths = [*paths]
        self.path = self.paths[0] if self.paths else ""
        self.kept = kept

    def __str__(self) -> str:
        shown = ", ".join(path or "the state dict" for path in self.paths[:10])
        more = f" and {len(self.paths) - 10} more" if len(self.paths) > 10 else ""
        why, keep = "", ', rank_values="keep" for those of the template,'
        if self.kept:
            why, keep = ", and those of the template cannot be kept,", ""
        return (
            f"{self.name}: its ranks saved different values{why} at {shown}{more}: "
            f"pass rank_values=0 for those of rank 0{keep} or leave them out by select="
        )


class DeviceMeshError(StateDictError):
    """A distributed tensor does not fit the process groups of this process."""

    def __init__(self, what: str, detail: str, *, path: str = "") -> None:
        super().__init__(detail)
        self.what = what
        self.path = path

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{where}{self.what} has no place here: {self.detail}"


class StagingError(AiockptError):
    """This host could not copy, allocate or compute what the call needed."""


class StorageError(AiockptError, OSError):
    """A checkpoint file was not written, or is not a checkpoint."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(detail)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"


class CheckpointNotFoundError(StorageError, FileNotFoundError):
    """There is no whole checkpoint at ``path``; ``detail`` says what is there."""


class WorldSizeMismatchError(StorageError):
    """The world sizes differ: ``saved`` ranks wrote it, ``loading`` ranks load it.

    The files are those of torch's experimental checkpointer, which do not say how the
    parts of the ranks belong together.
    """

    def __init__(self, path: str, *, saved: int, loading: int) -> None:
        super().__init__(path, "")
        self.saved = saved
        self.loading = loading

    def __str__(self) -> str:
        return (
            f"{self.path}: {_ranks(self.saved)} wrote it, each its own part, and "
            f"{_ranks(self.loading)} would load it; say rank= for one of these parts"
        )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


class WorkerError(AiockptError, RuntimeError):
    """The checkpoint process died, or raised ``remote_traceback``."""

    def __init__(
        self, detail: str, *, exitcode: int | None = None, remote_traceback: str = ""
    ) -> None:
        super().__init__(detail)
        self.exitcode = exitcode
        self.remote_traceback = remote_traceback


class WorkerTimeoutError(WorkerError, TimeoutError):
    """The checkpoint process did not start, write or end in time, and was killed."""


class SaveInProgressError(AiockptError, BlockingIOError):
    """The policy refused a save, since ``under_way`` saves are not written yet."""

    def __init__(self, path: str, *, under_way: int) -> None:
        super().__init__()
        self.path = path
        self.under_way = under_way

    def __str__(self) -> str:
        return f"{self.path}: {self.under_way} saves before it are not written yet"


class MissingExtraError(AiockptError, ImportError):
    """An optional ``library`` is not installed; the extra ``extra`` brings it."""

    def __init__(self, library: str, *, extra: str) -> None:
        super().__init__()
        self.library = library
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.library} is not installed: pip install 'aiockpt[{self.extra}]'"


class ClosedError(AiockptError, RuntimeError):
    """The object was used after it was closed."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is closed; make a new one")
        self.what = what


class Advice(enum.Flag):
    """What an error means to a caller that may try again; the table is `_ADVICE`.

    Attributes:
        NONE: No attempt of any kind can help.
        LATER: The same attempt may succeed later.
        AGAIN: It fails for reasons that normally pass within seconds, so that a receive
            that must not fail is begun again.
        ONWARD: A follower of a sender goes on, perhaps with a later step.
        REPLACED: The sender has another step instead of this one.
        LOST: The receiver does not tell the sender of it, or cannot.
        WRONG: The peer sent wrong bytes, or broke the protocol.
        OURS: It is this process or host that failed, so no other peer could do better.
        MISUSE: The caller or this package is wrong.
    """

    NONE = 0
    LATER = enum.auto()
    AGAIN = enum.auto()
    ONWARD = enum.auto()
    REPLACED = enum.auto()
    LOST = enum.auto()
    WRONG = enum.auto()
    OURS = enum.auto()
    MISUSE = enum.auto()


_AWAY: Final = Advice.LATER | Advice.ONWARD | Advice.LOST
_PASSING: Final = _AWAY | Advice.AGAIN
_REPLACED: Final = Advice.ONWARD | Advice.REPLACED | Advice.LOST

_ADVICE: Final[dict[type[BaseException], Advice]] = {
    TransportError: _AWAY,
    PeerUnreachableError: _PASSING,
    TransferInterruptedError: _PASSING,
    TransferStalledError: _PASSING,
    PeerFailedError: Advice.ONWARD | Advice.LOST,
    UnavailableError: _REPLACED,
    CheckpointChangedError: _REPLACED | Advice.AGAIN,
    LocalProtocolError: Advice.MISUSE,
    RemoteProtocolError: Advice.WRONG,
    IntegrityError: Advice.WRONG,
    StagingError: Advice.LATER | Advice.OURS,
    StorageError: Advice.LATER | Advice.OURS,
    ClosedError: Advice.OURS | Advice.LOST,
}
"""A class has the row of its nearest parent that has one."""


def advice(error: BaseException) -> Advice:
    """Return what the table says of an error."""
    rows = (_ADVICE[cls] for cls in type(error).__mro__ if cls in _ADVICE)
    return next(rows, Advice.NONE)
