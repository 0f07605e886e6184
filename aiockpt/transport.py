"""The interface that every transport shares, in torchft's words and awaited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from operator import index
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias

from aiockpt.format.entries import INT64_MAX

__all__ = ["CheckpointTransport", "T", "Timeout", "exact_step", "seconds"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=dict[str, Any])
else:
    from typing import TypeVar

    T = TypeVar("T")

Timeout: TypeAlias = float | timedelta
"""Seconds, or a ``timedelta``; one deadline for the whole call."""


def seconds(timeout: Timeout) -> float:
    """Return a timeout in seconds.

    Raises:
        ValueError: it is negative or not a number.
    """
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not value >= 0:
        raise ValueError(f"timeout must not be negative, got {timeout!r}")
    return float(value)


def exact_step(step: object) -> int:
    """Return a step, of whatever integer type, as an ``int``.

    Raises:
        TypeError: it is no integer.
        ValueError: it is negative, or has more than 63 bits.
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

    The names, the argument names and their order are torchft's
    ``CheckpointTransport``; what blocked there is awaited here. Every ``timeout`` is
    one deadline for the whole call. Each is an async context manager, which shuts it
    down; readers get no grace when an exception ends the block.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.shutdown(wait=error is None)

    @abstractmethod
    def metadata(self) -> str:
        """Return what a peer's :meth:`recv_checkpoint` needs to find this transport.

        Cheap, never blocks, and valid until :meth:`shutdown`. It may contain a
        token: whoever has it can read, so keep it out of logs.
        """

    @abstractmethod
    async def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: Timeout
    ) -> None:
        """Make ``state_dict`` available to ``dst_ranks`` as checkpoint ``step``.

        When it returns, the state dict may be mutated. A later call replaces what an
        earlier one offered. If cancelled, what was offered before stays offered.
        """

    @abstractmethod
    async def disallow_checkpoint(self) -> None:
        """Stop offering; once this returns no byte of the state dict is read.

        Idempotent, and cheap when nothing is offered. Readers get a grace, then they
        are evicted. If cancelled, nothing new is offered and a later call finishes.
        """

    @abstractmethod
    async def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: Timeout
    ) -> T:
        """Return checkpoint ``step`` of the transport that ``metadata`` names.

        May be called before the peer's :meth:`send_checkpoint`: it waits. If
        cancelled, nothing is kept of what was received.
        """

    @abstractmethod
    async def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """Close everything. With ``wait=False`` readers get no grace. Idempotent."""
