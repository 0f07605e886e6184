"""A step that does not come, because whoever would send it has failed."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Self

from aiockpt.errors import PeerFailedError

__all__ = ["Failure"]

_MAX_REASON = 300
_LATE = 10.0  # seconds; a replica that has died takes longer to come back


@dataclass(slots=True)
class Failure:
    """Why there is no ``step``, for those who wait for it.

    It outlives a retraction, for a receiver may come late. But a receiver of the next
    attempt at the same step may be early: so only as many are told as there were
    receivers (None: any number), and for a while only, for one of them may have died
    and never come. The others wait.
    """

    step: int
    reason: str
    left: int | None
    until: float = math.inf

    @classmethod
    def of(cls, error: BaseException, *, step: int, receivers: int) -> Self:
        """Return what is to be told about an error that ended a send."""
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, asyncio.CancelledError):
            why = "the send was cut short by a cancel or a deadline"
        until = asyncio.get_running_loop().time() + _LATE
        return cls(step, why[:_MAX_REASON], receivers or None, until)

    def concerns(self, step: int | None) -> bool:
        """Whether somebody who waits for ``step`` is to be told."""
        if step != self.step or self.left == 0:
            return False
        return asyncio.get_running_loop().time() < self.until

    def told(self, receivers: int) -> None:
        """Note that so many receivers know already."""
        if self.left is not None:
            self.left = max(self.left - receivers, 0)

    def tell(self) -> PeerFailedError:
        """Return the error for one receiver."""
        self.told(1)
        return PeerFailedError(None, self.reason)
