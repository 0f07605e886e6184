"""A step that does not come, because whoever would send it has failed."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Self

from aiockpt.errors import PeerFailedError
from aiockpt.http.protocol import Lease

__all__ = ["Failure"]

_MAX_REASON = 300
_LATE = 10.0  # seconds; a replica that has died takes longer to come back


@dataclass(slots=True)
class Failure:
    """Why there is no ``step``, for those who wait for it.

    It outlives a retraction, for a receiver may come late. But a receiver of the next
    attempt at the same step may be early: so only as many are told as there were
    receivers (None: any number), and for a while only, for one of them may have died
    and never come. The others wait, and so does a later receive of one that was told:
    it is for the next attempt. A receive that was told may repeat its request, since
    the answer may have been lost.

    Attributes:
        told: The receive that was told, for each receiver.
    """

    step: int
    reason: str
    left: int | None
    until: float = math.inf
    told: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException, *, step: int, receivers: int) -> Self:
        """Return what is to be told about an error that ended a send."""
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, asyncio.CancelledError):
            why = "the send was cut short by a cancel or a deadline"
        until = asyncio.get_running_loop().time() + _LATE
        return cls(step, why[:_MAX_REASON], receivers or None, until)

    def concerns(self, step: int | None, lease: Lease | None) -> bool:
        """Whether a receive that waits for ``step`` is to be told."""
        if step != self.step or asyncio.get_running_loop().time() >= self.until:
            return False
        if lease is not None and lease.receiver in self.told:
            return self.told[lease.receiver] == lease.id
        return self.left != 0

    def tell(self, lease: Lease | None) -> PeerFailedError:
        """Return the error for one receive. One without a lease counts each time."""
        if self.left is not None and (lease is None or lease.receiver not in self.told):
            self.left -= 1
            if lease is not None:
                self.told[lease.receiver] = lease.id
        return PeerFailedError(None, self.reason)
