"""The interface of every transport: torchft's methods, as coroutines."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import timedelta
from difflib import get_close_matches
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias

from aiockpt.format.entries import INT64_MAX

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=dict[str, Any])
else:
    from typing import TypeVar

    T = TypeVar("T")

F = TypeVar("F", bound=Callable[..., Any])

Timeout: TypeAlias = float | timedelta
"""Seconds, or a ``timedelta``; one deadline for the whole call."""


class _Required:
    """The default of a required argument that follows an optional one."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()


def require_given(verb: str, **arguments: object) -> None:
    """Raise ``TypeError`` with the name of the first missing argument."""
    for name, value in arguments.items():
        if value is REQUIRED:
            raise TypeError(f"{verb}() needs {name}=")


_OTHER_WORDS = {
    "device": "default_map_location",
    "template": "into",
    "target": "into",
    "model": "into",
}
"""Words that users try first -> our option, which is spelled differently."""


def names_its_options(function: F) -> F:
    """Hide ``**unknown``, which `refuse_unknown` refuses, from the signature."""
    signature = inspect.signature(function)
    shown = [
        each
        for each in signature.parameters.values()
        if each.kind is not each.VAR_KEYWORD
    ]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def refuse_unknown(
    verb: Callable[..., object],
    unknown: Mapping[str, object],
    *own: Callable[..., object],
    elsewhere: Mapping[str, str] | None = None,
    also: Iterable[str] = (),
) -> None:
    """Raise ``TypeError`` for the first keyword that nobody takes.

    Args:
        verb: The public function or class that was called.
        unknown: The keywords that it does not name.
        own: Functions of the caller, such as those of a hook, that get the keywords,
            too.
        elsewhere: Where other options are set, by name; for the message.
        also: Options that the signature does not show one by one; for the message.
    """
    for name in unknown:
        if not any(_takes(each, name) for each in own):
            options = [
                each.name
                for each in inspect.signature(verb).parameters.values()
                if each.name != "self" and each.kind is not each.VAR_KEYWORD
            ]
            options += also
            where = (elsewhere or {}).get(name)
            hint = f"say {where}" if where else _nearest(name, options)
            raise TypeError(f"{verb.__name__}() has no option {name!r}: {hint}")


def _takes(function: Callable[..., object], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it tells nobody
        return True
    return any(
        each.name == name or each.kind is each.VAR_KEYWORD for each in parameters
    )


def _nearest(name: str, options: list[str]) -> str:
    word = _OTHER_WORDS.get(name, name)
    near = get_close_matches(word, options, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"its options are {', '.join(options)}"


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def require(*, at_least: float = 0, **options: float) -> None:
    """Raise ``ValueError`` that names the first option below ``at_least``.

    NaN counts as below every number. What is no number raises ``TypeError``; a ``bool``
    is a number to Python, but not here.
    """
    for name, value in options.items():
        if not _is_number(value):
            got = type(value).__name__
            raise TypeError(f"{name} must be a number, got {got}")
        if not value >= at_least:
            raise ValueError(f"{name} must be at least {at_least:g}, got {value!r}")


def require_type(
    kind: type[object] | tuple[type[object], ...], **options: object
) -> None:
    """Raise ``TypeError`` that names the first option that is not a ``kind``.

    A ``bool`` counts as an ``int`` to Python, but not here.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    wanted = " or ".join(each.__name__ for each in kinds)
    for name, value in options.items():
        is_bool = isinstance(value, bool) and bool not in kinds
        if is_bool or not isinstance(value, kinds):
            got = type(value).__name__  # not the value, which may be a token
            raise TypeError(f"{name} must be of type {wanted}, got {got}")


_KINDS: dict[str, type[object]] = {"bool": bool, "int": int, "str": str}


def check_fields(record: Any) -> None:
    """Check the numbers, flags and texts of a record of options.

    Raises:
        TypeError: a field has another type than its annotation says.
        ValueError: a number is negative or not a number.
    """
    for each in fields(record):
        value = getattr(record, each.name)
        kind, _, other = str(each.type).partition(" | ")
        if value is None and other == "None":
            continue
        if kind in _KINDS and other in ("", "None"):
            require_type(_KINDS[kind], **{each.name: value})
        if kind in ("int", "float"):
            require(**{each.name: value})


def seconds(timeout: Timeout, name: str = "timeout") -> float:
    """Return a timeout in seconds; ``name`` is what messages call it.

    Raises:
        TypeError: the timeout is neither a number nor a ``timedelta``.
        ValueError: the timeout is negative or not a number.
    """
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not _is_number(value):
        kind = type(value).__name__
        raise TypeError(
            f"{name} must be a number of seconds or a timedelta, got {value!r} ({kind})"
        )
    if not value >= 0:
        raise ValueError(f"{name} must not be negative or NaN, got {timeout!r}")
    return float(value)


def whole_number(value: object, name: str) -> int:
    """Return a number of any integer type as an ``int``.

    Raises:
        TypeError: it is not an integer, or a ``bool``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return int(index(value))  # type: ignore[arg-type]
    except TypeError:
        kind = type(value).__name__
        what = f"{name} must be an integer, got {value!r} ({kind})"
        raise TypeError(f"{what}; pass int({name})") from None


def exact_step(step: object) -> int:
    """Return a step of any integer type as an ``int``.

    Raises:
        TypeError: the step is not an integer.
        ValueError: the step is negative or has more than 63 bits.
    """
    number = whole_number(int(step) if isinstance(step, bool) else step, "step")
    if not 0 <= number <= INT64_MAX:
        raise ValueError(f"step must be from 0 to 2**63 - 1, got {number}")
    return number


class CheckpointTransport(ABC, Generic[T]):
    """Moves a live checkpoint of type ``T`` between processes.

    Methods, arguments and their order are those of torchft's ``CheckpointTransport``;
    its blocking methods are coroutines here. Every ``timeout`` is one deadline for the
    whole call. As an async context manager, a transport shuts down at the end of the
    block. If an exception ends the block, receivers get no grace period.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.shutdown(wait=error is None)

    @abstractmethod
    def metadata(self) -> str:
        """Return the string that a peer's :meth:`recv_checkpoint` needs.

        The string is valid until :meth:`shutdown`; the call never blocks. The string
        may contain a token that allows its holder to read: keep it out of logs.
        """

    @abstractmethod
    async def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: Timeout
    ) -> None:
        """Make ``state_dict`` available to ``dst_ranks`` as checkpoint ``step``.

        You may change the state dict as soon as the call returns. A later call
        replaces the checkpoint. If cancelled, the earlier checkpoint stays.
        """

    @abstractmethod
    async def disallow_checkpoint(self) -> None:
        """Retract the checkpoint. After the call nothing reads the state dict.

        Receivers get a grace period, then their connections are cut. Idempotent, and
        cheap if nothing is published. If cancelled, the checkpoint is retracted, and a
        later call waits for the remaining receivers.
        """

    @abstractmethod
    async def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: Timeout
    ) -> T:
        """Return checkpoint ``step`` of the transport that ``metadata`` names.

        The call waits if the peer has not called :meth:`send_checkpoint` yet. If
        cancelled, nothing of what was received is kept.
        """

    @abstractmethod
    async def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """Close everything. Idempotent.

        Args:
            wait: Give receivers that still read the grace period.
        """
