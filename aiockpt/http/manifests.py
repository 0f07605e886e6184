"""Asks a peer for a manifest, for what it serves now, or for something newer.

The receiver uses a manifest only after every check. One loop, `poll`, waits for what a
peer does not serve yet. A `Follower` waits for each next step of one sender, or of
several that each serve their own shards, and receives it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import re
from collections.abc import (
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import NamedTuple, Self, TypeAlias, TypeVar

import anyio
from aiohttp import hdrs

from aiockpt.errors import (
    Advice,
    AiockptError,
    LocalProtocolError,
    RemoteProtocolError,
    StepNotFoundError,
    advice,
)
from aiockpt.events import LogLimit, TransferEvent, emit
from aiockpt.format.entries import INT64_MAX
from aiockpt.format.header import LENGTH_BYTES, decode_header
from aiockpt.format.limits import enforce
from aiockpt.format.manifest import Manifest
from aiockpt.http import protocol as http
from aiockpt.http.body_reader import BodySink
from aiockpt.http.client import CheckedResponse, CheckpointClient, Line, Request
from aiockpt.http.protocol import Origin
from aiockpt.http.retry import Liveness, OnRetry, Pause, Retries, backoff, poll
from aiockpt.http.tokens import MAC_HEADER, check_manifest_mac
from aiockpt.runtime.lifetime import Lifetime
from aiockpt.runtime.secrets import Token
from aiockpt.runtime.system import collector_paused
from aiockpt.runtime.tasks import run_all

V = TypeVar("V")

OnAnswer: TypeAlias = Callable[[Mapping[str, str]], None]
"""A function that gets the headers of an answer before its manifest has come."""

CURRENT_STEP_WAIT_S = 0.5
"""Seconds for which a receive of what is served now waits for that step.

The step was served a moment ago. A sender that has it no more has started again,
perhaps from a lower step, or serves another one soon.
"""

_ANSWER_S = 0.5  # seconds that the answer to a request may take once it is decided
_NEWS_WAIT_S = 30.0  # seconds for which a peer is asked to wait for a newer step
_OTHERS_PUBLISH_S = 0.05  # in which the ranks of a job publish the same step
_OTHERS_ANSWER_S = 0.5  # in which other senders say whether they serve a newer step
_SMALL_HEADER_BYTES = 1 << 20


class ManifestAnswer(NamedTuple):
    """A manifest, and the memory of this host that came with it.

    Attributes:
        offer: Where the sender lends the memory of the checkpoint; None if nowhere.
        delta_base: The snapshot that the sender keeps as the base of deltas, or None.
        invitation: The token for the members of the sender's swarm, if there are some.
        line: The connection that brought it, if known.
        headers: What authenticates the manifest, if anything.
    """

    manifest: Manifest
    offer: str | None
    delta_base: str | None
    invitation: Token | None
    line: Line | None
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LatestInfo:
    """What a peer serves now.

    ``incarnation`` is the id of the sender's current start; None from a peer that has
    none. It says nothing about the content, so it does not count in a comparison.
    """

    step: int
    snapshot_id: str
    incarnation: str | None = field(default=None, compare=False)


async def fetch_manifest(
    client: CheckpointClient,
    origin: Origin,
    step: int,
    *,
    deadline: float,
    on_retry: OnRetry | None = None,
    probe: str | None = None,
    on_answer: OnAnswer | None = None,
) -> ManifestAnswer:
    """Return the manifest of ``step``, waiting until the peer publishes it.

    It waits for ``origin.step_wait`` seconds. If cancelled, nothing is left behind.

    Args:
        deadline: In loop time; the peer is told how long the receiver can wait.
        on_retry: Called with each error that is followed by another attempt.
        probe: Asks the sender to lend its memory, if it is on this host.
        on_answer: See `OnAnswer`.

    Raises:
        StepNotFoundError: a newer step has taken its place, or it did not come.
        PeerUnreachableError, TransferStalledError, TransferInterruptedError: the
            peer was silent for the reconnect timeout.
        AuthenticationError, RemoteProtocolError, LimitExceededError,
            IntegrityError, ForgedManifestError: what the peer answered.
    """
    ask = partial(_ask_manifest, client, origin, step, probe, on_answer)
    asking = until_served(
        client, origin, step, ask, deadline=deadline, on_retry=on_retry
    )
    return await poll(asking, pause=client.pause)


def until_served(
    client: CheckpointClient,
    origin: Origin,
    step: int,
    ask: Callable[[float, Liveness], Awaitable[V | None]],
    *,
    deadline: float,
    on_retry: OnRetry | None,
) -> Callable[[], Awaitable[V | None]]:
    """Return the function with which `poll` waits until a peer serves ``step``.

    The function returns None if the peer does not serve the step yet. It raises
    `StepNotFoundError` if a newer step has taken its place, or once
    ``origin.step_wait`` seconds are over.

    Args:
        ask: Sends one request. It gets the seconds for which the peer may wait, and
            what is known of the peer's silence.
        deadline: In loop time; the peer is told how long this side can wait.
        on_retry: Called with each error that is followed by another attempt.
    """
    until = _now() + origin.step_wait
    last = min(deadline, until)

    async def asking() -> V | None:
        retries = client.retries(origin, step, on_retry)

        def attempt() -> Awaitable[V | None]:
            # Longer waits are asked for in pieces: a connection that is dead meanwhile
            # goes unnoticed for the wait and the stall timeout. The answer should be
            # here before the deadline, because it says what is served instead.
            left = max(last - _now(), 0.0)
            wait = min(left - min(left / 4, _ANSWER_S), client.stall_timeout)
            return ask(wait, retries.liveness)

        try:
            return await retries.run(attempt)
        except StepNotFoundError as error:
            is_past = error.serving is not None and error.serving > step
            if is_past or _now() >= until:
                raise
            retries.on_retry(error)
            return None

    return asking


async def _ask_manifest(
    client: CheckpointClient,
    origin: Origin,
    step: int,
    probe: str | None,
    on_answer: OnAnswer | None,
    wait: float,
    liveness: Liveness,
) -> ManifestAnswer:
    request = Request(
        origin=origin,
        path=http.format_resource(http.Resource(http.ResourceKind.METADATA, step)),
        headers={"Prefer": http.format_prefer_wait(wait)}
        | ({} if probe is None else {http.PROBE_HEADER: probe}),
        step=step,
        wait=wait,
    )
    async with client.request(request, lambda _: liveness.heard(_now())) as answer:
        if (given := _step_of(answer)) != step:
            raise RemoteProtocolError(f"{request.url} sends step {given}")
        if on_answer is not None:
            on_answer(answer.headers)
        size, limits = answer.length(), client.options.limits
        most = limits.max_header_bytes + LENGTH_BYTES
        enforce("the size of the header", size, most, "max_header_bytes")
        header = memory_for(size)
        view = memoryview(header)
        await answer.read_into(BodySink(lambda a, b: [view[a:b]], 0, size))

    mac = answer.headers.get(MAC_HEADER)

    def decode() -> Manifest:
        """Check who has written the header before anything is made of it."""
        auth = client.auth  # no frame has its key as a variable
        if auth.key is not None:
            check_manifest_mac(auth.key, memoryview(header), mac, url=request.url)
        with collector_paused():
            found = decode_header(header, limits=limits, ours=True)
        assert isinstance(found, Manifest)  # ours
        return found

    with answer.blamed():
        manifest = await client.bridge.run(decode)
    if manifest.step != step:
        raise RemoteProtocolError(f"{request.url} describes step {manifest.step}")
    return ManifestAnswer(
        manifest,
        offer=answer.headers.get(http.OFFER_HEADER),
        delta_base=http.parse_etag(answer.headers.get(http.DELTA_BASE_HEADER)),
        invitation=http.parse_invitation(answer.headers.get(http.SWARM_HEADER)),
        line=answer.line,
        headers={} if mac is None else {MAC_HEADER: mac},
    )


def memory_for(size: int) -> bytearray | mmap.mmap:
    """Return memory that costs nothing until bytes come: a peer may claim any size."""
    return bytearray(size) if size <= _SMALL_HEADER_BYTES else mmap.mmap(-1, size)


async def fetch_latest(
    client: CheckpointClient,
    origin: Origin,
    *,
    wait: float = 0.0,
    on_retry: OnRetry | None = None,
) -> LatestInfo:
    """Return what the peer serves at this moment, or within ``wait`` seconds.

    Raises:
        StepNotFoundError: nothing is published.
    """
    retries = client.retries(origin, None, on_retry)
    found, _ = await retries.run(partial(_ask_latest, client, origin, wait=wait))
    assert found is not None, "only a request for a newer step may come back empty"
    return found


async def _ask_latest(
    client: CheckpointClient,
    origin: Origin,
    after: int | None = None,
    *,
    known: str | None = None,
    wait: float = 0.0,
) -> tuple[LatestInfo | None, str | None]:
    """Return what a peer serves, if newer than ``after``, else None; and its start."""
    headers = {"Prefer": http.format_prefer_wait(wait)}
    if known is not None:
        headers[http.INCARNATION_HEADER] = known
    request = Request(
        origin=origin,
        path=http.format_latest(after),
        headers=headers,
        wait=wait,
        may_be_empty=after is not None,
    )
    async with client.request(request) as answer:
        incarnation = _incarnation_of(answer)
        if answer.status == HTTPStatus.NO_CONTENT:
            its_headers = http.INCARNATION_HEADER, http.STEP_HEADER
            if not any(name in answer.headers for name in its_headers):
                raise RemoteProtocolError(
                    f"{request.url} answered HTTP {answer.status} without a header of "
                    "a sender; is that an aiockpt server?"
                )
            return None, incarnation
        step = _step_of(answer)
        snapshot_id = http.parse_etag(answer.headers.get(hdrs.ETAG))
    if snapshot_id is None:
        raise RemoteProtocolError(f"{request.url} does not name its snapshot")
    # A server that does not know ``after`` answers with what it has.
    if after is None or step > after or _has_restarted(known, incarnation):
        return LatestInfo(step, snapshot_id, incarnation), incarnation
    return None, incarnation


def _incarnation_of(answer: CheckedResponse) -> str | None:
    return http.check_incarnation(answer.headers.get(http.INCARNATION_HEADER))


def _has_restarted(known: str | None, incarnation: str | None) -> bool:
    return None not in (known, incarnation) and known != incarnation


def _step_of(answer: CheckedResponse) -> int:
    text = answer.headers.get(http.STEP_HEADER, "")
    known = re.fullmatch(r"0|[1-9][0-9]{0,18}", text)
    if known is None or int(text) > INT64_MAX:
        url = answer.request.url
        raise RemoteProtocolError(
            f"{url} names no step in its answer; is that an aiockpt server?"
        )
    return int(text)


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
        acquainted: Whether it has been asked for that.
    """

    origin: Origin
    incarnation: str | None = None
    acquainted: bool = False


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
        self._after = self._before = after
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
            self._before = self._after
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
                    self._after = self._before  # so that the step is given again
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
            if self._after is not None and not sender.acquainted:
                # Only a follower who knows who served the last step notices a restart.
                # Nothing is newer than this step, or waited for.
                unmet = partial(self._ask, sender, INT64_MAX, wait=0.0)
                with suppress(StepNotFoundError):  # of an older sender without a step
                    await self._retries(sender).run(unmet)
                sender.acquainted = True
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
        found, incarnation = await _ask_latest(
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
            self._before = None
        for sender, found in news.items():
            if _has_restarted(sender.incarnation, found.incarnation):
                self._tell_of_restart(sender.origin, found.step)
                self._before = None
            sender.incarnation, sender.acquainted = found.incarnation, True
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
