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
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_MAX_RETRY_AFTER_S = 30.0  # a peer advises, it does not command
_LONG_POLL_S = 0.5  # a peer that took so long to answer has waited for news


class HostLimitError(StagingError):
    """This host has no descriptor or memory for a request now, but may have one soon.

    A request that is under way gives its connection to the next one when it ends.
    """


def backoff(failures: int) -> float:
    """Return a random delay in seconds whose bound doubles with every failure.

    The delay is random so that receivers that lost the same peer at the same time do
    not all come back at once.
    """
    bound = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(failures, 16))
    return random.uniform(0, bound)  # noqa: S311 - spreads load, guards nothing


@dataclass(slots=True)
class Liveness:
    """Whether one peer is alive, by all requests of one call.

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
        """Return whether a byte came since ``started``, within the stall timeout."""
        if not self.has_spoken or self.last_byte <= now - self.stall_timeout:
            return False
        # Equal counts: uvloop's clock goes by the millisecond, and an attempt that
        # brings bytes may begin and end within one.
        return self.last_byte >= started

    def is_fetching(self, now: float) -> bool:
        """Return whether any request got a byte within the stall timeout."""
        known = self.has_spoken or self.connected
        return known and self.last_byte > now - self.stall_timeout

    def seconds_left(self, now: float) -> float:
        """Return for how long the peer may still be silent; at most 0.0 if it is over.

        The first call of a silence starts the count.
        """
        if self.silent_since is None:
            self.silent_since = now
        return self.silent_since + self.reconnect_timeout - now


@dataclass(slots=True)
class Retries:
    """The attempts at one request.

    Attributes:
        liveness: What is known of the peer's silence.
        on_retry: Called with each error that is followed by another attempt.
        pause: Sleeps between two attempts; what it raises is final.
    """

    liveness: Liveness
    on_retry: OnRetry
    pause: Pause = asyncio.sleep
    failures: int = field(default=0, init=False)
    bad_answers: int = field(default=0, init=False)

    def delay_after(
        self, error: AiockptError, *, started: float, now: float
    ) -> float | None:
        """Return the seconds to wait before another attempt; None means give up.

        ``on_retry`` is called unless the attempts are given up.
        """
        delay = self._delay_after(error, started, now)
        if delay is not None:
            self.on_retry(error)
        return delay

    def _delay_after(
        self, error: AiockptError, started: float, now: float
    ) -> float | None:
        means, liveness = advice(error), self.liveness
        if Advice.WRONG in means:
            self.bad_answers += 1
            most = MAX_BAD_ANSWERS if liveness.alone else 1
            return None if self.bad_answers >= most else backoff(0)
        if isinstance(error, PeerBusy):
            return self._delay_of_busy(error, started, now)
        if Advice.LATER not in means:
            return None
        if Advice.OURS in means:
            is_brief = isinstance(error, HostLimitError)
            if not (is_brief and liveness.is_fetching(now)):
                return None
        elif liveness.is_alive(started, now):
            self.failures = 0
            return backoff(0)
        elif liveness.seconds_left(now) <= 0:
            return None
        self.failures += 1
        return backoff(self.failures)

    def _delay_of_busy(
        self, error: PeerBusy, started: float, now: float
    ) -> float | None:
        delay = min(error.retry_after or 0, _MAX_RETRY_AFTER_S)
        if error.proxy is None:
            self.liveness.heard(now)
        elif not self.liveness.is_alive(started, now):
            if (left := self.liveness.seconds_left(now)) <= 0:
                return None
            delay = min(delay, left)
        self.failures += 1
        return delay + backoff(self.failures)

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
                delay = self.delay_after(error, started=started, now=loop.time())
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
        quick = 0 if loop.time() - asked > _LONG_POLL_S else quick + 1
        await pause(backoff(quick) if quick else 0)
