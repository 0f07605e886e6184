"""Decides whether an error is worth another attempt, and when.

An attempt after which bytes had arrived, on this or on another connection of the same
call, is followed by another at once: the peer lives. Attempts that bring nothing are
repeated, ever more slowly, until the peer has been silent for the reconnect timeout.
An answer that contradicts the format or its digest is asked for three times in all.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from aiockpt.errors import (
    AiockptError,
    IntegrityError,
    PeerFailedError,
    RemoteProtocolError,
    TransportError,
)
from aiockpt.http.protocol import PeerBusy
from aiockpt.http.translating import OutOfHostError

__all__ = [
    "MAX_BAD_ANSWERS",
    "OnRetry",
    "Patience",
    "Pause",
    "Retrier",
    "backoff",
    "persist",
]

T = TypeVar("T")
OnRetry = Callable[[AiockptError], None]
Pause = Callable[[float], Awaitable[None]]

MAX_BAD_ANSWERS = 3
_FIRST_DELAY = 0.05
_MAX_DELAY = 2.0
_MAX_RETRY_AFTER = 30.0  # a peer advises, it does not command


def backoff(failures: int) -> float:
    """Return a random delay in seconds whose bound doubles with every failure.

    Receivers that lost the same peer at the same time come back one by one.
    """
    bound = min(_MAX_DELAY, _FIRST_DELAY * 2 ** min(failures, 16))
    return random.uniform(0, bound)  # noqa: S311 - spreads load, guards nothing


@dataclass(slots=True)
class Patience:
    """How long one peer has been silent, in the eyes of all requests of one call."""

    reconnect_timeout: float
    stall_timeout: float
    last_byte: float
    silent_since: float | None = None
    has_spoken: bool = False
    connected: bool = False  # by an earlier request, whose connection may be reused
    alone: bool = True  # no other peer could be asked instead

    def heard(self, now: float) -> None:
        """Note that the peer gave a sign of life."""
        self.has_spoken = True
        self.last_byte = now
        self.silent_since = None

    def is_alive(self, started: float, now: float) -> bool:
        """Whether a byte came during the attempt, and no stall timeout ago."""
        if not self.has_spoken or self.last_byte <= now - self.stall_timeout:
            return False
        # Not before it: uvloop's clock goes by the millisecond, and an attempt that
        # brings bytes may begin and end within one.
        return self.last_byte >= started

    def is_fetching(self, now: float) -> bool:
        """Whether a byte came no stall timeout ago, by whichever request."""
        known = self.has_spoken or self.connected
        return known and self.last_byte > now - self.stall_timeout

    def is_over(self, now: float) -> bool:
        """Whether the silence, which is noticed now if not before, lasts too long."""
        if self.silent_since is None:
            self.silent_since = now
        return now - self.silent_since >= self.reconnect_timeout


@dataclass(slots=True)
class Retrier:
    """The attempts at one request.

    Attributes:
        due: When the next one begins, in loop time, where there was one.
    """

    patience: Patience
    failures: int = 0
    bad_answers: int = 0
    due: float = 0.0

    def delay_after(
        self, error: AiockptError, *, started: float, now: float
    ) -> float | None:
        """Return the seconds to wait before another attempt; None means give up."""
        match error:
            case IntegrityError() | RemoteProtocolError():
                self.bad_answers += 1
                most = MAX_BAD_ANSWERS if self.patience.alone else 1
                return None if self.bad_answers >= most else backoff(0)
            case PeerBusy():
                return self._after_busy(error, now)
            case PeerFailedError():
                return None
            case TransportError():
                return self._after_failure(started, now)
            case OutOfHostError():
                return self._after_shortage(now)
            case _:
                return None

    def _after_busy(self, error: PeerBusy, now: float) -> float:
        self.patience.heard(now)
        self.failures += 1
        return min(error.retry_after or 0, _MAX_RETRY_AFTER) + backoff(self.failures)

    def _after_shortage(self, now: float) -> float | None:
        # A request that is under way gives its connection to this one when it ends.
        if not self.patience.is_fetching(now):
            return None
        self.failures += 1
        return backoff(self.failures)

    def _after_failure(self, started: float, now: float) -> float | None:
        if self.patience.is_alive(started, now):
            self.failures = 0
            return backoff(0)
        if self.patience.is_over(now):
            return None
        self.failures += 1
        return backoff(self.failures)


async def persist(
    attempt: Callable[[], Awaitable[T]],
    retrier: Retrier,
    on_retry: OnRetry,
    *,
    pause: Pause,
) -> T:
    """Await ``attempt()`` until it succeeds or its error is final.

    What ``pause``, which sleeps between two attempts, raises is final, too. If
    cancelled, the attempt is cancelled.
    """
    loop = asyncio.get_running_loop()
    while True:
        started = loop.time()
        try:
            return await attempt()
        except AiockptError as error:
            delay = retrier.delay_after(error, started=started, now=loop.time())
            if delay is None:
                raise
            on_retry(error)
        retrier.due = loop.time() + delay
        await pause(delay)
