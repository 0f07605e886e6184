"""Waits for each next step of a sender, or of several, and receives it.

`chase` receives what a sender serves now. A `Follower` waits for something newer, of
one sender or of several that each serve their own shards.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import anyio

from aiockpt.errors import (
    Advice,
    AiockptError,
    LocalProtocolError,
    StepNotFoundError,
    advice,
)
from aiockpt.events import LogLimit, TransferEvent, emit
from aiockpt.format.entries import INT64_MAX
from aiockpt.http.client import CheckpointClient
from aiockpt.http.manifests import LatestInfo, ask_latest, has_restarted
from aiockpt.http.protocol import Origin
from aiockpt.http.retry import Liveness, Pause, Retries, backoff, poll
from aiockpt.runtime.lifetime import Lifetime
from aiockpt.runtime.tasks import run_all

V = TypeVar("V")

CURRENT_STEP_WAIT_S = 0.5
"""Seconds for which a receive of what is served now waits for that step.

The step was served a moment ago. A sender that has it no more has started again,
perhaps from a lower step, or serves another one soon.
"""

_NEWS_WAIT_S = 30.0  # seconds for which a peer is asked to wait for a newer step
_OTHERS_PUBLISH_S = 0.05  # in which the ranks of a job publish the same step
_OTHERS_ANSWER_S = 0.5  # in which other senders say whether they serve a newer step


async def chase(
    find: Callable[[], Awaitable[int]],
    receive: Callable[[int], Awaitable[V]],
    *,
    pause: Pause,
    survives: Advice = Advice.REPLACED,
) -> tuple[int, V]:
    """Receive the step that ``find`` returns; return it and what ``receive`` returned.

    After an error that ``survives`` names, such as that the step was replaced, ``find``
    is asked again, ever more slowly. If cancelled, so is what is under way.
    """
    failures, log_limit = 0, LogLimit()
    while True:
        step = await find()
        try:
            return step, await receive(step)
        except AiockptError as error:
            means, level = advice(error), logging.INFO
            if not means & survives:
                raise
            if Advice.REPLACED not in means and log_limit.passes(type(error)):
                level = logging.WARNING
            emit(TransferEvent(stop="retry", step=step, detail=str(error), level=level))
        await pause(backoff(failures))
        failures += 1


@dataclass(eq=False, slots=True)
class FollowedSender:
    """One sender that a `Follower` asks.

    Attributes:
        origin: Its address and token.
        incarnation: Which start of it served what the follower knows, if known.
        was_asked: Whether it has been asked for that.
    """

    origin: Origin
    incarnation: str | None = None
    was_asked: bool = False


class Follower:
    """Gives the newest step of a sender whenever there is one after the last given.

    Of several senders, each of which serves its own shards, it gives the highest step
    that any of them serves. The others are then about to publish it.

    Between two steps nothing is held or under way, so it may be dropped at any time.

    Args:
        client: Asks the senders.
        origins: Which senders.
        lifetime: Ends the waiting.
        after: The last step that is known.
        reconnect_timeout: Seconds for which a silent sender is asked again.
    """

    def __init__(
        self,
        client: CheckpointClient,
        origins: Sequence[Origin],
        lifetime: Lifetime,
        *,
        after: int | None,
        reconnect_timeout: float = math.inf,
    ) -> None:
        self._client = client
        self._senders = [*map(FollowedSender, origins)]
        self._lifetime = lifetime
        self._after = after
        self._after_if_failed = after  # the same before the step that is received
        # None: no sender serves a lower step. Otherwise it counts once all others serve
        # one, too, or at this time, which is infinity while one has not gone back.
        self._back_until: float | None = None
        self._asks = False
        self._reconnect_timeout = reconnect_timeout
        self._liveness: dict[FollowedSender, Liveness] = {}

    def __repr__(self) -> str:
        first, *others = self._senders
        more = f" and {len(others)} more" if others else ""
        return f"<Steps of {first.origin.base_url}{more} after={self._after}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        """Wait for the next step. If cancelled, or if it fails, none is lost.

        Raises:
            LocalProtocolError: another task waits already.
        """

        async def ask() -> int | None:
            self._after_if_failed = self._after
            news = await self._first_news()
            if len(self._senders) > 1 and (news or self._back_until is not None):
                news |= await self._news_of_others(news)
            # Until here nothing is noted, so that a cancelled call loses nothing.
            return self._chosen(news) if news else None

        with self._lifetime.call(), self._alone():
            self._liveness.clear()
            step = await poll(ask, pause=self._client.pause)
        self._after = step
        return step

    async def receive(self, receive: Callable[[int], Awaitable[V]]) -> tuple[int, V]:
        """Wait for the next step, and receive it; return it and what came of it.

        After an error that a later attempt may survive, ``receive`` gets the step that
        is the newest then, which may be the same one. If cancelled, so is what is under
        way.
        """

        async def attempt(step: int) -> V:
            try:
                return await receive(step)
            except AiockptError as error:
                if Advice.ONWARD in advice(error):
                    self._after = self._after_if_failed  # the step is given again
                raise

        return await chase(
            self.__anext__, attempt, pause=self._client.pause, survives=Advice.ONWARD
        )

    async def _first_news(self) -> dict[FollowedSender, LatestInfo]:
        """Ask all senders at once; return the first news, or none after a while.

        What the others say a moment later is returned, too.
        """
        news: dict[FollowedSender, LatestInfo] = {}
        until = self._back_until
        deadline = math.inf if until is None or until <= _now() else until

        async def hear(sender: FollowedSender) -> None:
            if self._after is not None and not sender.was_asked:
                # Only a follower who knows who served the last step notices a restart.
                # Nothing is newer than this step, or waited for.
                first = partial(self._ask, sender, INT64_MAX, wait=0.0)
                with suppress(StepNotFoundError):  # of an older sender without a step
                    await self._retries(sender).run(first)
                sender.was_asked = True
            # Any step tells which start of a sender serves it.
            is_unknown = until is not None and sender.incarnation is None
            after = None if is_unknown else self._after
            attempt = partial(self._ask, sender, after, wait=_NEWS_WAIT_S)
            with suppress(StepNotFoundError):
                found = await self._retries(sender).run(attempt)
                del self._liveness[sender]  # it has answered
                # The others usually publish at the same time, and answer by then. If
                # there is nothing new, one that is away must not delay the next round.
                more = _OTHERS_ANSWER_S if found is None else _OTHERS_PUBLISH_S
                scope.deadline = min(scope.deadline, _now() + more)
                if found is not None:
                    news[sender] = found

        with anyio.CancelScope(deadline=deadline) as scope:
            await run_all([partial(hear, sender) for sender in self._senders])
        return news

    def _retries(self, sender: FollowedSender) -> Retries:
        # One for all rounds, because a sender may be silent for longer than one.
        if sender not in self._liveness:
            self._liveness[sender] = self._client.liveness(self._reconnect_timeout)
        liveness = self._liveness[sender]
        return self._client.retries(sender.origin, None, liveness=liveness)

    async def _news_of_others(
        self, known: Mapping[FollowedSender, LatestInfo]
    ) -> dict[FollowedSender, LatestInfo]:
        """Return what the other senders serve now, as far as they answer at once.

        That is a newer step, or any step if a sender has gone back.
        """
        news: dict[FollowedSender, LatestInfo] = {}
        steps = [found.step for found in known.values()]
        after = self._after
        is_back = self._back_until is not None
        if is_back or (after is not None and max(steps) <= after):
            after = None

        async def look(sender: FollowedSender) -> None:
            try:
                found = await self._ask(sender, after, wait=0.0)
            except AiockptError as error:
                if Advice.OURS in advice(error):
                    raise
            else:
                if found is not None:
                    news[sender] = found

        others = [each for each in self._senders if each not in known]
        with anyio.move_on_after(_OTHERS_ANSWER_S):
            await run_all([partial(look, sender) for sender in others])
        return news

    async def _ask(
        self, sender: FollowedSender, after: int | None, *, wait: float
    ) -> LatestInfo | None:
        """Return what a sender serves if it is newer, or of a new start."""
        known = sender.incarnation
        found, incarnation = await ask_latest(
            self._client, sender.origin, after, known=known, wait=wait
        )
        if found is None and known is None:
            sender.incarnation = incarnation
        return found

    def _chosen(self, news: Mapping[FollowedSender, LatestInfo]) -> int | None:
        """Return the highest step of the news if all senders may get to serve it.

        If some have gone back to a lower step, the others cannot serve that unless they
        have gone back, too. So it counts once all serve such a step. After a reconnect
        timeout, a sender that still serves nothing does not count.
        """
        steps, now = [found.step for found in news.values()], _now()
        step, after, until = max(steps), self._after, self._back_until
        goes_back = after is not None and step < after
        if not goes_back:
            until = math.inf
        elif until is None or until == math.inf:
            until = now + self._client.options.reconnect_timeout
        is_lacking = goes_back and len(news) < len(self._senders) and now < until
        some_lower = after is not None and min(steps) < after
        waits = some_lower and (is_lacking or step == after)
        self._back_until = until if waits else None
        if goes_back:
            self._after_if_failed = None
        for sender, found in news.items():
            if has_restarted(sender.incarnation, found.incarnation):
                self._tell_of_restart(sender.origin, found.step)
                self._after_if_failed = None
            sender.incarnation, sender.was_asked = found.incarnation, True
        # One address may be that of several senders, who answer in turn.
        return None if waits or step == after else step

    def _tell_of_restart(self, origin: Origin, step: int) -> None:
        last = self._after
        was = "before its first step" if last is None else f"after step {last}"
        then = f"goes on from step {step}"
        if self._back_until is not None:
            then = (
                f"serves step {step}, which other senders cannot serve yet: waiting "
                f"for them to go back, too, or for a step after {last}"
            )
        emit(
            TransferEvent(
                stop="restart",
                step=step,
                peer=origin.base_url,
                detail=f"the sender has gone back or started again {was}, and {then}",
                level=logging.WARNING,
            )
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # Two would be given the same step, or an older one after a newer.
        if self._asks:
            raise LocalProtocolError(
                "two tasks iterate over the same steps: call steps() for each"
            )
        self._asks = True
        try:
            yield
        finally:
            self._asks = False


def _now() -> float:
    return asyncio.get_running_loop().time()
