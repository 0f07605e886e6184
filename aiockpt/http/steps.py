"""The steps that a peer publishes, and the newest of them that can be received."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Self, TypeVar

from aiockpt.errors import (
    AiockptError,
    CheckpointChangedError,
    LocalProtocolError,
    StepNotFoundError,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.http.client import CheckpointClient
from aiockpt.http.latest import LatestInfo
from aiockpt.http.protocol import Source
from aiockpt.http.retrying import Pause, backoff
from aiockpt.http.sources import Sources
from aiockpt.runtime.lifetime import Lifetime

__all__ = ["PATIENCE", "SUPERSEDED", "Steps", "chase", "newest"]

V = TypeVar("V")

SUPERSEDED = (StepNotFoundError, CheckpointChangedError)
"""What a receive raises whose step the sender has replaced."""

PATIENCE = 0.5
"""Seconds for which a receive of what is served now waits for that step.

It was served a moment ago. A sender that has it no more has started again, perhaps from
a lower step, or serves another one soon.
"""

_WAIT = 30.0  # seconds for which a sender is asked to wait for its first step


async def newest(origin: Sources, *, pause: Pause) -> int:
    """Return the step that is served now; wait until there is one."""
    polls = 0
    while True:
        try:
            return (await origin.fetch_latest(wait=_WAIT)).step
        except StepNotFoundError:
            await pause(backoff(polls))
        polls += 1


async def chase(
    find: Callable[[], Awaitable[int]],
    receive: Callable[[int], Awaitable[V]],
    *,
    pause: Pause,
    survives: tuple[type[AiockptError], ...] = SUPERSEDED,
) -> tuple[int, V]:
    """Receive the step that ``find`` returns; return it and what ``receive`` returned.

    When ``receive`` raises one of ``survives``, such as that the step was replaced,
    ``find`` is asked again, ever more slowly. If cancelled, so is what is under way.
    """
    failures = 0
    while True:
        step = await find()
        try:
            return step, await receive(step)
        except survives as error:
            replaced = isinstance(error, SUPERSEDED)
            level = logging.INFO if replaced else logging.WARNING
            emit(TransferEvent(stop="retry", step=step, detail=str(error), level=level))
        await pause(backoff(failures))
        failures += 1


class Steps:
    """Gives the newest step of a peer, whenever there is one after the last given.

    Between two steps nothing is held or under way, so it may be dropped at any time.

    Args:
        client: Asks the peer.
        source: Which peer.
        lifetime: Ends the waiting.
        after: The last step that is known.
        reconnect_timeout: Seconds for which a silent peer is asked again.
    """

    def __init__(
        self,
        client: CheckpointClient,
        source: Source,
        lifetime: Lifetime,
        *,
        after: int | None,
        reconnect_timeout: float,
    ) -> None:
        self._client = client
        self._source = source
        self._lifetime = lifetime
        self._after = self._before = after
        self._incarnation: str | None = None
        self._acquainted = False
        self._asks = False
        self._reconnect_timeout = reconnect_timeout

    def __repr__(self) -> str:
        return f"<Steps of {self._source.base_url} after={self._after}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        """Wait for the next one. If cancelled, or if it fails, none is lost.

        Raises:
            LocalProtocolError: another task waits already.
        """
        with self._lifetime.call(), self._alone():
            if self._after is not None and not self._acquainted:
                # A restart is noticed by whoever knows what was there before it.
                self._incarnation = await self._client.fetch_incarnation(
                    self._source, reconnect_timeout=self._reconnect_timeout
                )
            self._acquainted = True
            restarts = 0
            while True:
                found = await self._client.wait_newer(
                    self._source,
                    self._after,
                    known=self._incarnation,
                    reconnect_timeout=self._reconnect_timeout,
                )
                last, before = self._after, self._after
                if self._has_restarted(found):
                    _tell_of_restart(self._source, last, found.step)
                    before = None
                self._incarnation = found.incarnation
                if found.step != last:
                    break
                # One address may be that of several senders: it answers at once.
                restarts += 1
                await self._client.pause(backoff(restarts))
        self._after, self._before = found.step, before
        return found.step

    def again(self) -> None:
        """Have the last step given again if it still is the newest: it was not used."""
        self._after = self._before

    def _has_restarted(self, found: LatestInfo) -> bool:
        ids = {self._incarnation, found.incarnation}
        return None not in ids and len(ids) > 1

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


def _tell_of_restart(source: Source, last: int | None, step: int) -> None:
    was = "before its first step" if last is None else f"after step {last}"
    emit(
        TransferEvent(
            stop="restart",
            step=step,
            peer=source.base_url,
            detail=f"the sender has started again {was}, and goes on from step {step}",
            level=logging.WARNING,
        )
    )
