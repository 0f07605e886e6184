"""The interface of every transport: torchft's names and arguments, awaited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from operator import index
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias

from aiockpt.format.entries import INT64_MAX

__all__ = [
    "REQUIRED",
    "CheckpointTransport",
    "T",
    "Timeout",
    "exact_step",
    "require_given",
    "seconds",
]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=dict[str, Any])
else:
    from typing import TypeVar

    T = TypeVar("T")

Timeout: TypeAlias = float | timedelta
"""Seconds, or a ``timedelta``; one deadline for the whole call."""


class _Required:
    """The default of an argument that must be given, behind one with a default."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()


def require_given(verb: str, **arguments: object) -> None:
    """Raise ``TypeError`` that names the first argument that was not given."""
    for name, value in arguments.items():
        if value is REQUIRED:
            raise TypeError(f"{verb}() needs {name}=")


def seconds(timeout: Timeout) -> float:
    """Return a timeout in seconds.

    Raises:
        ValueError: the timeout is negative or not a number.
    """
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not value >= 0:
        raise ValueError(f"timeout must not be negative, got {timeout!r}")
    return float(value)


def exact_step(step: object) -> int:
    """Return a step of any integer type as an ``int``.

    Raises:
        TypeError: the step is no integer.
        ValueError: the step is negative or has more than 63 bits.
    """
    try:
        number = int(index(step))  # type: ignore[arg-type]
    except TypeError as error:
        what = f"step must be an integer, got {step!r} ({type(step).__name__})"
        raise TypeError(f"{what}; pass int(step)") from error
    if not 0 <= number <= INT64_MAX:
        raise ValueError(f"step must be from 0 to 2**63 - 1, got {number}")
    return number


class CheckpointTransport(ABC, Generic[T]):
    """Moves a live checkpoint of type ``T`` between processes.

    Methods, arguments and their order are those of torchft's ``CheckpointTransport``;
    what blocks there is awaited here. Every ``timeout`` is one deadline for the whole
    call. As an async context manager a transport shuts itself down; if an exception
    ends the block, receivers get no grace.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.shutdown(wait=error is None)

    @abstractmethod
    def metadata(self) -> str:
        """Return the string that a peer's :meth:`recv_checkpoint` needs.

        It is valid until :meth:`shutdown`; the call never blocks. The string may
        contain a token, which lets its owner read: keep it out of logs.
        """

    @abstractmethod
    async def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: Timeout
    ) -> None:
        """Make ``state_dict`` available to ``dst_ranks`` as checkpoint ``step``.

        When it returns, the caller may change the state dict. A later call replaces
        the checkpoint of an earlier one. If cancelled, the earlier checkpoint stays.
        """

    @abstractmethod
    async def disallow_checkpoint(self) -> None:
        """Stop offering; once this returns, no byte of the state dict is read.

        Receivers get a grace, then they are evicted. Idempotent, and cheap when
        nothing is offered. If cancelled, nothing new is offered, and a later call
        finishes the work.
        """

    @abstractmethod
    async def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: Timeout
    ) -> T:
        """Return checkpoint ``step`` of the transport that ``metadata`` names.

        It waits if the peer has not called :meth:`send_checkpoint` yet. If cancelled,
        nothing of what was received is kept.
        """

    @abstractmethod
    async def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """Close everything. With ``wait=False`` receivers get no grace. Idempotent."""
