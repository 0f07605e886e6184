"""When a request is made again after an error; `advice` says after which errors.

A connection that brought bytes is replaced at once, because the peer is alive.
Attempts that bring nothing are repeated, ever more slowly, until the peer has been
silent for the reconnect timeout. An answer that violates the protocol, or a chunk with
a wrong digest, is asked for three times in all.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from aiockpt.errors import Advice, AiockptError, StagingError, advice
from aiockpt.http.problems import PeerBusy

T = TypeVar("T")
OnRetry = Callable[[AiockptError], None]
Pause = Callable[[float], Awaitable[None]]

MAX_BAD_ANSWERS = 3
_FIRST_DELAY = 0.05
_MAX_DELAY = 2.0
_MAX_RETRY_AFTER = 30.0  # a peer advises, it does not command
_WAITED = 0.5  # a peer that took so many seconds to answer has waited for news


class HostLimitError(StagingError):
    """This host has no descriptor or memory for a request now, but may have one soon.

    A request that is under way gives its connection to the next one when it ends.
    """


def backoff(failures: int) -> float:
    """Return a random delay in seconds whose bound doubles with every failure.

    The delay is random so that receivers that lost the same peer at the same time do
    not all come back at once.
    """
    bound = min(_MAX_DELAY, _FIRST_DELAY * 2 ** min(failures, 16))
    return random.uniform(0, bound)  # noqa: S311 - spreads load, guards nothing


@dataclass(slots=True)
class Patience:
    """How long one peer has been silent, across all requests of one call.

    Attributes:
        reconnect_timeout: Seconds of silence after which the peer is given up.
        stall_timeout: Seconds without a byte after which one connection is given up.
        last_byte: When the peer last sent something, in loop time.
        silent_since: When the silence was noticed; None while there is none.
        has_spoken: Whether the peer has sent anything.
        connected: Whether an earlier request left a connection that may be reused.
        alone: Whether no other peer could be asked instead.
    """

    reconnect_timeout: float
    stall_timeout: float
    last_byte: float
    silent_since: float | None = None
    has_spoken: bool = False
    connected: bool = False
    alone: bool = True

    def heard(self, now: float) -> None:
        """Note that the peer has sent something."""
        self.has_spoken = True
        self.last_byte = now
        self.silent_since = None

    def is_alive(self, started: float, now: float) -> bool:
        """Say whether a byte came since ``started``, within the stall timeout."""
        if not self.has_spoken or self.last_byte <= now - self.stall_timeout:
            return False
        # Equal counts: uvloop's clock goes by the millisecond, and an attempt that
        # brings bytes may begin and end within one.
        return self.last_byte >= started

    def is_fetching(self, now: float) -> bool:
        """Say whether any request got a byte within the stall timeout."""
        known = self.has_spoken or self.connected
        return known and self.last_byte > now - self.stall_timeout

    def is_over(self, now: float) -> bool:
        """Say whether the silence has lasted for the reconnect timeout.

        The first call of a silence starts the count.
        """
        if self.silent_since is None:
            self.silent_since = now
        return now - self.silent_since >= self.reconnect_timeout

    def left(self, now: float) -> float:
        """Return the seconds until the silence has lasted too long."""
        since = now if self.silent_since is None else self.silent_since
        return max(since + self.reconnect_timeout - now, 0.0)


@dataclass(slots=True)
class Retries:
    """The attempts at one request.

    Attributes:
        patience: What is known of the peer's silence.
        on_retry: Called with each error that is followed by another attempt.
        pause: Sleeps between two attempts; what it raises is final.
        due: When the next attempt begins, in loop time; 0.0 before the first retry.
    """

    patience: Patience
    on_retry: OnRetry
    pause: Pause = asyncio.sleep
    failures: int = field(default=0, init=False)
    bad_answers: int = field(default=0, init=False)
    due: float = field(default=0.0, init=False)

    def delay_after(
        self, error: AiockptError, *, started: float, now: float
    ) -> float | None:
        """Return the seconds to wait before another attempt; None means give up."""
        means = advice(error)
        if Advice.WRONG in means:
            self.bad_answers += 1
            most = MAX_BAD_ANSWERS if self.patience.alone else 1
            return None if self.bad_answers >= most else backoff(0)
        if isinstance(error, PeerBusy):
            return self._delay_of_busy(error, started=started, now=now)
        if Advice.LATER not in means:
            return None
        if Advice.OURS in means:
            is_brief = isinstance(error, HostLimitError)
            if not (is_brief and self.patience.is_fetching(now)):
                return None
        elif self.patience.is_alive(started, now):
            self.failures = 0
            return backoff(0)
        elif self.patience.is_over(now):
            return None
        self.failures += 1
        return backoff(self.failures)

    def _delay_of_busy(
        self, error: PeerBusy, *, started: float, now: float
    ) -> float | None:
        advice = min(error.retry_after or 0, _MAX_RETRY_AFTER)
        if error.proxy is None:
            self.patience.heard(now)
        elif not self.patience.is_alive(started, now):
            if self.patience.is_over(now):
                return None
            advice = min(advice, self.patience.left(now))
        self.failures += 1
        return advice + backoff(self.failures)

    def decide(self, error: AiockptError, *, started: float) -> float | None:
        """Return the seconds to wait after a failed attempt; None means give up.

        What comes next is told to ``on_retry``, and noted in ``due``.
        """
        now = asyncio.get_running_loop().time()
        delay = self.delay_after(error, started=started, now=now)
        if delay is not None:
            self.on_retry(error)
            self.due = now + delay
        return delay

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Await ``attempt()`` until it succeeds or its error is final.

        If cancelled, the attempt is cancelled.
        """
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                return await attempt()
            except AiockptError as error:
                delay = self.decide(error, started=started)
                if delay is None:
                    raise
            await self.pause(delay)


async def poll(ask: Callable[[], Awaitable[T | None]], *, pause: Pause) -> T:
    """Await ``ask()`` until it returns something; return that.

    A peer that waited before it answered is asked again at once, any other one ever
    more slowly. If cancelled, nothing is left behind.
    """
    loop, quick = asyncio.get_running_loop(), 0
    while True:
        asked = loop.time()
        if (found := await ask()) is not None:
            return found
        quick = 0 if loop.time() - asked > _WAITED else quick + 1
        await pause(backoff(quick) if quick else 0)
