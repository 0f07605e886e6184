"""What a receiver is willing to accept, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from mmap import mmap
from typing import Final

from aiockpt.errors import LimitExceededError

__all__ = [
    "CALLED_OFF",
    "FILE_LIMITS",
    "CalledOffError",
    "Limits",
    "enforce",
    "enforce_values",
    "look",
]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds of a received checkpoint.

    A peer that offers more is refused with `LimitExceededError` before memory is
    allocated for it. ``max_bytes`` bounds the data segment; None leaves that to the
    receiver, which knows its memory.
    """

    max_header_bytes: int = 64 * MIB
    max_depth: int = 64
    max_nodes: int = 500_000
    max_tensors: int = 100_000
    max_bytes: int | None = None


FILE_LIMITS = Limits(
    max_header_bytes=256 * MIB, max_nodes=5_000_000, max_tensors=1_000_000
)
"""For what is saved and loaded by default: there nobody keeps others waiting."""


def enforce(what: str, actual: int, limit: int | None) -> None:
    """Raise `LimitExceededError` if ``actual`` is above ``limit`` (None: no limit)."""
    if limit is not None and actual > limit:
        raise LimitExceededError(what, limit=limit, actual=actual)


def enforce_values(what: str, text: bytes | memoryview | mmap, limit: int) -> None:
    """Refuse JSON that may hold more than ``limit`` values, without decoding it.

    Counts what separates or opens values, also inside of strings: an upper bound.
    """
    if len(text) // 2 < limit:  # a value takes two bytes: itself and a separator
        return
    count = 1
    for start in range(0, len(text), MIB):  # each call keeps the interpreter lock
        piece = bytes(text[start : start + MIB])
        count += len(piece) - len(piece.translate(None, b",[{"))
    enforce(what, count, limit)


CALLED_OFF: Final[ContextVar[Callable[[], bool] | None]] = ContextVar(
    "CALLED_OFF", default=None
)
"""Says whether the caller of this thread's work was cancelled; None: nobody can be."""


class CalledOffError(Exception):
    """Ends work that nobody waits for; it becomes the cause of the cancellation."""


def look() -> None:
    """Raise if nobody waits any more for what this thread does.

    Only for work that may end anywhere, such as decoding.

    Raises:
        CalledOffError: the caller was cancelled.
    """
    called_off = CALLED_OFF.get()
    if called_off is not None and called_off():
        raise CalledOffError("the caller was cancelled")
