"""Whether anybody still waits for the work of this thread.

A call in a thread cannot be interrupted, so a receive that has reached its deadline
would end when a peer's header is decoded. Long loops over what a peer sent look here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

__all__ = ["CALLED_OFF", "CalledOffError", "look"]

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
