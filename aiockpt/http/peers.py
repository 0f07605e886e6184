"""The peers of a receive: one, or several that hold the same checkpoint.

Which checkpoint that is, the first manifest decides. A snapshot id is the digest of a
manifest with the digests of all chunks, so peers with the same id hold the same bytes.
A peer with another one is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from math import inf
from typing import Any, TypeVar

import anyio
from aiohttp import hdrs

from aiockpt.errors import (
    Advice,
    AiockptError,
    AuthenticationError,
    CheckpointChangedError,
    LocalProtocolError,
    StepNotFoundError,
    TransportError,
    advice,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.format.manifest import Outline
from aiockpt.http import protocol as http
from aiockpt.http.chunk_run import ChunkRun
from aiockpt.http.client import CheckpointClient, Line, Request
from aiockpt.http.manifests import (
    LatestInfo,
    ManifestAnswer,
    fetch_latest,
    fetch_manifest,
    longest_wait,
)
from aiockpt.http.protocol import Origin
from aiockpt.http.retry import OnRetry, poll
from aiockpt.runtime.secrets import Token, discreet
from aiockpt.runtime.tasks import Notifier, run_all

V = TypeVar("V")

ALL = -1
"""The bitmap of a peer that holds every chunk."""

_MAX_NAMES = 8  # of senders, in a message
_FIRST_STEP_WAIT_S = 30.0  # for which a sender is asked to wait
_NEWER_ANSWER_WAIT_S = 0.5  # for a peer that may name a newer step than the first one
_MIN_RENEWAL_S = 0.05  # between two renewals of a lease
_END_LEASE_S = 1.0  # in which a peer takes note that a receive has ended


class OtherSnapshotError(CheckpointChangedError):
    """A peer serves the step, but not the snapshot that the other peers serve."""

    def __str__(self) -> str:
        return (
            f"{self.url} serves another snapshot of this step, {self.actual}; the "
            f"others serve {self.expected}"
        )


class MemberLeftError(StepNotFoundError):
    """A member of a swarm serves the step no more."""

    def __str__(self) -> str:
        return f"{self.url} has left the swarm"


@dataclass(eq=False, slots=True)
class Peer:
    """One peer of a receive.

    Attributes:
        origin: Its address and token.
        have: The chunks that it holds: bit i is chunk i. All bits stand for all.
        member: What the tracker calls it; empty if it is no member of a swarm.
        next: The chunk that it wants to be asked for next.
        invitation: The token for the members of its swarm, if others are in it.
        line: The connection to it that brought the last answer, as far as known.
        has_checkpoint: Whether it is known to hold this checkpoint.
        given: Verified bytes that came from it, in the last download.
        error: Why it is not asked any more.
        delta_base: The snapshot that it keeps as the base of deltas, or None.
        silence: Seconds without a request that end the lease there, if it says so.
        busy: Why it may be slow, if it says so.
        outline: Its own checkpoint, if that is another one than the receiver's, which
            has the same chunks.
    """

    origin: Origin
    have: int = ALL
    member: str = ""
    next: int | None = None
    invitation: Token | None = None
    line: Line = field(default_factory=Line)
    has_checkpoint: bool = False
    given: int = 0
    error: AiockptError | None = None
    delta_base: str | None = None
    silence: float | None = None
    busy: str = ""
    outline: Outline | None = None

    def has(self, run: ChunkRun) -> bool:
        """Return whether it holds the first chunk of a run."""
        return run.chunk is None or bool(self.have >> run.chunk & 1)

    def require(self, expected: Outline, actual: Outline) -> None:
        """Raise `OtherSnapshotError` unless its snapshot is the expected one."""
        if actual.snapshot_id != expected.snapshot_id:
            raise OtherSnapshotError(
                expected=expected.snapshot_id,
                actual=actual.snapshot_id,
                url=self.origin.base_url,
            )
        self.has_checkpoint = True

    def drop(self, error: AiockptError, step: int) -> None:
        """Note why it is not asked any more. Only the first error counts."""
        if self.error is not None:
            return
        if self.member and isinstance(error, AuthenticationError | StepNotFoundError):
            # A member that has left knows neither the token nor the step.
            error = MemberLeftError(step, url=self.origin.base_url)
        self.error = error
        is_lie = Advice.WRONG in advice(error)
        emit(
            TransferEvent(
                stop="drop",
                step=step,
                peer=self.origin.base_url,
                nbytes=self.given,
                detail=str(error),
                level=logging.INFO if self.member and not is_lie else logging.WARNING,
            )
        )


def verdict(peers: Sequence[Peer]) -> AiockptError:
    """Return the error that says why no peer is left; the others are its notes.

    The answer of one peer says more than the silence of another one.
    """
    failed = [(peer, peer.error) for peer in peers if peer.error is not None]
    answers = [error for _, error in failed if not isinstance(error, TransportError)]
    chosen = [*answers, *(error for _, error in failed)][0]
    for peer, error in failed:
        if error is not chosen:
            chosen.add_note(f"{peer.origin.base_url} failed, too: {error}")
    return chosen


def add_others(error: BaseException, lost: Iterable[AiockptError]) -> None:
    """Add the errors of the other senders that are lost as notes."""
    others = [each for each in lost if each is not error]
    for other in others[:_MAX_NAMES]:
        error.add_note(f"another sender failed, too: {other}")
    if (more := len(others) - _MAX_NAMES) > 0:
        error.add_note(f"{more} more senders failed, too")


@dataclass(eq=False)
class Peers:
    """The peers of one receive, from the manifest to the last chunk.

    A single peer's error is raised as it is. Of several peers, the most specific error
    is raised once no peer is left, with the others as its notes.

    Attributes:
        client: The client that sends the requests.
        all: The peers, in the caller's order.
        on_retry: Called with each error that is followed by another attempt.
        deadline: When the receive ends, in loop time. The peers are told how long the
            receiver can wait, and one that answers late may still take part.
        late: Until when late senders of the step that is served now are waited for, in
            loop time, by the step. All attempts to receive it share this.
    """

    client: CheckpointClient
    all: Sequence[Peer]
    on_retry: OnRetry | None = None
    deadline: float = inf
    late: dict[int, float] = field(default_factory=dict)
    _renewals: dict[Peer, asyncio.Task[None]] = field(default_factory=dict, init=False)

    @classmethod
    def at(
        cls,
        client: CheckpointClient,
        origins: Iterable[Origin],
        on_retry: OnRetry | None = None,
        *,
        deadline: float = inf,
        late: dict[int, float] | None = None,
    ) -> Peers:
        """Return the peers at these addresses."""
        peers = [Peer(origin) for origin in origins]
        return cls(client, peers, on_retry, deadline, {} if late is None else late)

    def beside(self, others: Iterable[tuple[Peers, Outline]]) -> Peers:
        """Return these peers and others, whose checkpoints have the same chunks."""
        more = [
            Peer(peer.origin, has_checkpoint=True, outline=outline)
            for peers, outline in others
            for peer in peers.holders()
        ]
        return replace(self, all=[*self.all, *more])

    @property
    def name(self) -> str:
        """All addresses, without tokens."""
        return " ".join(peer.origin.base_url for peer in self.all)

    def given(self) -> dict[str, int]:
        """Return how many verified bytes each of several gave in the last download."""
        if len(self.all) == 1:
            return {}
        return {peer.origin.base_url: peer.given for peer in self.all}

    def left(self) -> list[Peer]:
        """Return those that have not been dropped."""
        return [peer for peer in self.all if peer.error is None]

    def holders(self) -> list[Peer]:
        """Return those of them that are known to have the checkpoint."""
        return [peer for peer in self.left() if peer.has_checkpoint]

    def late_until(self, step: int | None = None) -> float:
        """Return until when a late sender of shards is waited for, in loop time.

        That is the reconnect timeout from now. If the deadline is near, it is half of
        the remaining time, because the others may suffice. For the ``step`` that is
        served now, it counts from the first attempt to receive that.
        """
        now, usual = _now(), self.client.options.reconnect_timeout
        until = now + min(usual, max(self.deadline - now, 0.0) / 2)
        if step is None or self.all[0].origin.step_wait == inf:
            return until
        if step not in self.late:
            self.late.clear()
        return self.late.setdefault(step, until)

    async def latest(self, *, wait: float = 0.0) -> LatestInfo:
        """Return the newest step that is served at this moment.

        Peers that serve nothing are waited for as long as ``wait`` says, until another
        one answers. At the end of the wait, `on_retry` hears of them.

        Raises:
            StepNotFoundError: nothing is published.
        """
        wait = min(wait, longest_wait(self.deadline))

        async def ask(peer: Peer) -> LatestInfo:
            on_retry = self.on_retry
            try:
                return await fetch_latest(
                    self.client, peer.origin, wait=wait, on_retry=on_retry
                )
            except StepNotFoundError as error:
                if wait and on_retry is not None:
                    on_retry(error)
                raise

        peers = [Peer(peer.origin) for peer in self.all]
        found = await answers(peers, ask, others=_NEWER_ANSWER_WAIT_S)
        return max(found.values(), key=lambda info: info.step)

    async def newest(self) -> int:
        """Return the step that is served now; wait until there is one."""

        async def ask() -> LatestInfo | None:
            with suppress(StepNotFoundError):
                return await self.latest(wait=_FIRST_STEP_WAIT_S)
            return None

        return (await poll(ask, pause=self.client.pause)).step

    async def manifest(
        self, step: int, *, probe: str | None = None, step_wait: float | None = None
    ) -> ManifestAnswer:
        """Return the manifest of ``step`` that comes first, once a peer has it.

        The other peers may take part later. Of several, none lends its memory.

        Args:
            step: The step.
            probe: Asks a single sender to lend its memory, if it is on this host.
            step_wait: Seconds to wait for a step that is not there yet. None: as many
                as ``origin.step_wait`` of each peer.

        Raises:
            AiockptError: nobody is left.
        """
        for peer in self.all:
            peer.error, peer.has_checkpoint, peer.given = None, False, 0
        if len(self.all) > 1:
            probe = None
        ask = partial(self.ask_manifest, step=step, probe=probe, step_wait=step_wait)
        found = await answers(self.all, ask, step=step)
        first = next(iter(found.values()))
        for peer, other in found.items():
            peer.delta_base, peer.invitation = other.delta_base, other.invitation
            peer.line = other.line or peer.line
            try:
                peer.require(first.manifest.outline, other.manifest.outline)
            except OtherSnapshotError as error:
                peer.drop(error, step)
        return first

    async def ask_manifest(
        self,
        peer: Peer,
        step: int,
        *,
        probe: str | None = None,
        step_wait: float | None = None,
    ) -> ManifestAnswer:
        """Return the manifest that one peer has; begin to renew the lease there."""
        origin = peer.origin
        return await fetch_manifest(
            self.client,
            origin if step_wait is None else replace(origin, step_wait=step_wait),
            step,
            deadline=self.deadline,
            on_retry=self.on_retry,
            probe=probe,
            on_answer=partial(self._hear, peer, step),
        )

    async def end_lease(self, step: int) -> None:
        """Tell the peers that have the checkpoint that the receive has ended.

        A peer that does not hear it finds out by itself: the lease ends when nothing is
        asked for during the peer's stall timeout.
        """

        async def tell(origin: Origin) -> None:
            assert origin.lease is not None
            # All bytes are here, so this must not cost much.
            left = max(origin.lease.until - _now(), 0.0)
            request = Request(
                origin=origin,
                method="HEAD",
                path=_metadata_of(step),
                headers={http.LEASE_HEADER: origin.lease.end},
                status=HTTPStatus.NO_CONTENT,
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_END_LEASE_S, left / 4)):
                    await self._tell(request)

        await run_all([partial(tell, peer.origin) for peer in self._leased()])

    def _hear(self, peer: Peer, step: int, headers: Mapping[str, str]) -> None:
        """Learn from the head of a peer's answer, and begin to renew its lease."""
        peer.silence = http.parse_silence(headers.get(http.LEASE_HEADER))
        peer.busy = http.parse_busy(headers.get(http.BUSY_HEADER))
        self._keep(peer, step)

    def keep(self, step: int) -> None:
        """Renew the leases at the peers that have the checkpoint, until `let_go`."""
        for peer in self._leased():
            self._keep(peer, step)

    def _keep(self, peer: Peer, step: int) -> None:
        if peer.origin.lease is not None and peer not in self._renewals:
            own = self.client.stall_timeout
            usual = own if peer.silence is None else peer.silence
            renew = self._renew(peer, step, max(min(usual, own) / 4, _MIN_RENEWAL_S))
            self._renewals[peer] = asyncio.create_task(renew)

    def explain(self, error: BaseException) -> None:
        """Name the peers that may be slow in a note of an error that came too late."""
        is_late = isinstance(error, asyncio.CancelledError | TransportError)
        for peer in self.all if is_late else ():
            if peer.busy:
                error.add_note(f"{peer.origin.base_url} may be slow: {peer.busy}")

    async def let_go(self) -> None:
        """Stop renewing the leases. Idempotent."""
        renewals = [*self._renewals.values()]
        self._renewals.clear()
        for each in renewals:
            each.cancel()
        await asyncio.gather(*renewals, return_exceptions=True)

    async def _renew(self, peer: Peer, step: int, every: float) -> None:
        """Renew a lease while the receiver sends no other request.

        That is so while it plans, allocates or compares digests.
        """
        request = Request(
            origin=peer.origin,
            path=_metadata_of(step),
            headers={hdrs.IF_NONE_MATCH: "*", "Prefer": http.format_prefer_wait(0)},
            status=HTTPStatus.NOT_MODIFIED,
        )
        while peer.error is None:
            await self.client.pause(every)
            await self._tell(request)

    async def _tell(self, request: Request) -> None:
        with suppress(AiockptError):
            async with self.client.request(request):
                pass

    def _leased(self) -> list[Peer]:
        return [
            peer
            for peer in self.all
            if peer.origin.lease is not None
            and (peer.has_checkpoint or len(self.all) == 1)
        ]


def name_of(senders: Sequence[Peers]) -> str:
    """Return the addresses of senders of shards, without tokens; of many, the first."""
    names = " ".join(peers.name for peers in senders[:_MAX_NAMES])
    more = len(senders) - _MAX_NAMES
    return f"{names} and {more} more" if more > 0 else names


async def answers(
    peers: Sequence[Peer],
    ask: Callable[[Peer], Awaitable[V]],
    *,
    step: int | None = None,
    others: float = 0.0,
) -> dict[Peer, V]:
    """Ask all peers at once; return the answers, the first one first.

    The first answer is waited for, and more for another ``others`` seconds. The peers
    that fail by then are dropped.

    Raises:
        AiockptError: all of them failed.
    """
    if len(peers) == 1:
        return {peers[0]: await ask(peers[0])}
    found: dict[Peer, V] = {}
    news = Notifier()

    async def hear(peer: Peer) -> None:
        try:
            found[peer] = await ask(peer)
        except AiockptError as error:
            if Advice.OURS in advice(error):
                raise
            if step is None:
                peer.error = error
            else:
                peer.drop(error, step)
        news.notify()

    async def count() -> None:
        while not found and any(peer.error is None for peer in peers):
            await news.wait(None)
        until = _now() + others
        while any(peer.error is None and peer not in found for peer in peers):
            if (seconds := until - _now()) <= 0:
                break
            await news.wait(seconds)
        scope.cancel()

    with anyio.CancelScope() as scope:
        await run_all([count, *(partial(hear, peer) for peer in peers)])
    if not found:
        raise verdict(peers)
    return found


async def manifests_of(
    senders: Mapping[int, Peers], step: int, *, awaited: Collection[int] = ()
) -> tuple[dict[int, ManifestAnswer], dict[int, AiockptError]]:
    """Return the manifests of the senders that have a step; why the others are lost.

    A sender that causes a `TransportError` is lost. So is a sender that still lacks the
    step at `Peers.late_until`, counted from the moment when the last one got it. For a
    step that is served now, this ends earlier, after ``origin.step_wait``, because all
    senders may have gone on or back. The next attempt goes on waiting.

    Args:
        senders: Some of the senders of shards, by number.
        step: The step.
        awaited: The senders of which one is needed. Until one of them has the step,
            those that lack it are waited for without this limit.

    Raises:
        StepNotFoundError: a sender has a later step instead, or lacks the step, and is
            needed or may still get it.
        AiockptError: what a sender answered.
    """
    found: dict[int, ManifestAnswer] = {}
    lost: dict[int, AiockptError] = {}
    lacking: dict[int, StepNotFoundError] = {}
    scopes: list[anyio.CancelScope] = []
    until = inf

    async def ask(number: int, step_wait: float | None = None) -> None:
        nonlocal until
        peers = senders[number]
        try:
            found[number] = await peers.manifest(step, step_wait=step_wait)
            lacking.pop(number, None)
            if not awaited or number in awaited:
                until = peers.late_until(step)
                for scope in scopes:
                    scope.deadline = until
        except TransportError as error:
            lacking.pop(number, None)
            lost[number] = error
            tell_of_loss(peers, step, error)
        except StepNotFoundError as error:
            if error.serving is not None and error.serving > step:
                raise
            lacking[number] = error

    async def ask_and_wait(number: int) -> None:
        await ask(number, 0.0)
        if number in lacking:
            with anyio.CancelScope(deadline=until) as scope:
                scopes.append(scope)
                await ask(number)

    await run_all(partial(ask_and_wait, number) for number in senders)
    for number, error in lacking.items():
        if until == inf or _now() < until:
            raise error
        lost[number] = error
        tell_of_loss(senders[number], step, error)
    return found, lost


def tell_of_loss(peers: Peers, step: int, error: AiockptError) -> None:
    """Emit the event that a sender of shards is not asked any more."""
    is_late = isinstance(error, StepNotFoundError)
    emit(
        TransferEvent(
            stop="drop",
            step=step,
            peer=peers.name,
            detail=str(error),
            level=logging.INFO if is_late else logging.WARNING,
        )
    )


async def newest_of(senders: Sequence[Peers]) -> int:
    """Return the newest step of several senders of shards; wait until there is one.

    A sender that cannot be reached does not count, nor one that still serves nothing at
    `Peers.late_until`, counted from the first one that does. Others may have its shard.

    Raises:
        AiockptError: none can be reached, or what one answered.
    """
    steps: list[int] = []
    lost: list[TransportError] = []

    async def ask(peers: Peers) -> None:
        try:
            steps.append(await peers.newest())
        except TransportError as error:
            lost.append(error)
        else:
            until = max(peers.late_until(), _now() + _NEWER_ANSWER_WAIT_S)
            scope.deadline = min(scope.deadline, until)

    with anyio.CancelScope() as scope:
        await run_all([partial(ask, peers) for peers in senders])
    if not steps:
        raise lost[0]
    return max(steps)


@discreet
def senders_of(metadata: str | Sequence[str]) -> list[list[Origin]]:
    """Return the senders of each rank that a caller names; several are replicas.

    Raises:
        ValueError: there is none.
        TypeError: neither a string nor strings.
        LocalProtocolError: not what ``metadata()`` or ``join_metadata`` returns, or see
            `by_rank`.
    """
    given: object = metadata  # callers without types pass anything
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    texts: list[Any] = [*metadata] if several else [metadata]
    if not texts:
        raise ValueError("metadata is an empty list: name a sender at least")
    return by_rank([http.parse_joined(text) for text in texts])


def by_rank(replicas: Sequence[Sequence[Origin]]) -> list[list[Origin]]:
    """Return the senders of each rank, each once.

    Args:
        replicas: Of each replica of the job, the senders in the order of their ranks.

    Raises:
        LocalProtocolError: they do not name the same ranks in the same order.
    """
    first = replicas[0]
    for number, replica in enumerate(replicas, start=1):
        if len(replica) != len(first):
            raise LocalProtocolError(
                f"the strings 1 and {number} of the list name {len(first)} and "
                f"{len(replica)} senders: each string must join the metadata of all "
                "ranks of one replica"
            )
    senders = [distinct(origins) for origins in zip(*replicas, strict=True)]
    ranks: dict[tuple[object, ...], int] = {}
    for rank, origins in enumerate(senders):
        for origin in origins:
            if (other := ranks.setdefault(origin.place, rank)) != rank:
                raise LocalProtocolError(
                    f"{origin.base_url} is sender {other + 1} of one string and sender "
                    f"{rank + 1} of another: join the metadata of each replica in the "
                    "order of its ranks"
                )
    return senders


def distinct(origins: Iterable[Origin]) -> list[Origin]:
    """Return each address once, in order."""
    found: dict[tuple[object, ...], Origin] = {}
    for origin in origins:
        found.setdefault(origin.place, origin)
    return [*found.values()]


def _metadata_of(step: int) -> str:
    return http.format_resource(http.Resource(http.ResourceKind.METADATA, step))


def _now() -> float:
    return asyncio.get_running_loop().time()
