"""Downloads chunks from one peer, or from several that hold the same checkpoint.

Every connection of every peer takes the next run of wanted chunks. When no chunk is
left, a free connection steals the run of a much slower one: the slow one is stopped,
and its run is given back. The same peer goes on from the last byte that came. Another
peer begins with the first byte of the chunk, so that one peer is to blame for a wrong
chunk. A peer that is wrong or gone is dropped; the download succeeds as long as one is
left.

Members of a swarm are peers that hold some of the chunks, and they come and go. As long
as there are some, every connection takes one chunk at a time, as `next_chunk` decides.

The path of a run: `Download.run` -> `_work` (decide with `choose`) -> `_fetch_run`
(retry) -> `_request` (one range, straight into the target).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from math import inf
from statistics import median
from typing import Any

import anyio
from aiohttp import hdrs
from anyio.abc import TaskGroup

from aiockpt.errors import (
    AiockptError,
    CheckpointChangedError,
    ClosedError,
    LocalProtocolError,
    RemoteProtocolError,
    StagingError,
    TransportError,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.format.manifest import Outline
from aiockpt.http.body_reader import BodySink
from aiockpt.http.chunk_run import ChunkRun, bits_of
from aiockpt.http.client import Answer, Request
from aiockpt.http.manifests import fetch_manifest
from aiockpt.http.membership import Membership
from aiockpt.http.peers import Peer, Peers, verdict
from aiockpt.http.problems import PeerBusy
from aiockpt.http.protocol import (
    DELTA,
    DELTA_BASE_HEADER,
    Origin,
    Resource,
    ResourceKind,
    format_delta,
    format_etag,
    format_prefer_wait,
    format_range,
    format_resource,
    parse_content_range,
    parse_etag,
)
from aiockpt.http.retry import Patience, Retries
from aiockpt.http.swarm import next_chunk, source_chunk
from aiockpt.runtime.system import failing_here, of_caller
from aiockpt.runtime.tasks import Notifier, beside, task_group
from aiockpt.transfer.deltas import HEAD_BYTES, is_available, split
from aiockpt.transfer.source import OnProgress, PlainTarget, Prepare, Target

__all__ = [
    "Assignment",
    "Connection",
    "Download",
    "choose",
]

_MAX_RUN = 1 << 30  # tens of megabytes might come in the time of one request
_TURN = 0.25  # seconds that a run takes where several peers share the work
_MUCH = 2.0  # a connection that needs so many times as long is much slower
_SLACK = 0.25  # seconds; a lost packet, or a loop that was busy, is not slowness
_GLANCE = 0.5  # seconds for which a connection is watched at most, if bytes come
_BUSY = 0.25  # seconds between two looks; if it takes longer, this process is slow
_TICK = 0.05  # seconds after which a free connection looks at the others again
_TELLING = 1 << 20  # bytes from which on a run tells how fast its connection is
_UNKNOWN = 0.5  # seconds for a run, for a peer that never brought one
_VAIN = 3  # steals of one run, from the same peer, between which no byte came
_REST = 0.1  # seconds that a connection rests after a steal; they double each time
_LONGEST_REST = 2.0
_ALL_PEERS = 4  # most connections to all peers, as a multiple of those to a single one
_AHEAD = 64 << 20  # bytes of memory that all requests together prepare ahead
_STEP = 8 << 20  # bytes that are prepared at a time, by whole strides of the arena
_LOOK = 0.02  # seconds between two looks at how much has come
_DELTAS = 64 << 20  # bytes of the longest range for which deltas are requested
_FROM_MEMBERS = 8  # chunks that are requested from members at a time
_FROM_MEMBER = 2  # chunks that are requested from one member at a time
_TRIES = 3  # members that are asked in turn; only the last one may let us wait
_NEWS = 0.1  # of the last request in the average duration of all
_LONG = 5.0  # a chunk from a member takes so many times as long as usual, and
_LONGER = 1.0  # so many seconds more, before its request is stopped
_GATHER = 0.1  # seconds between two looks at which members are known


class _Closed:
    """The memory of a download that has ended."""

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        raise AssertionError(f"bytes {start} to {stop} come after the download")


@dataclass(eq=False, slots=True)
class Connection:
    """One of the connections to a peer.

    Attributes:
        patience: With the peer; its connections share it.
        rate: Bytes per second of its last run; 0.0 before that.
        steals: How often a run was taken from it since its last whole one.
        resting_until: In loop time; it takes no run before.
        is_busy: Whether it is fetching a run.
        waits: Whether a member may let it wait until others are served.
        answered: Whether the peer has begun to send.
        refused: Whether its last run was given up because the member was busy.
    """

    peer: Peer
    patience: Patience
    rate: float = 0.0
    steals: int = 0
    resting_until: float = 0.0
    is_busy: bool = False
    waits: bool = True
    answered: bool = False
    refused: bool = False

    def learn(self, nbytes: int, seconds: float) -> None:
        """Note how long a whole run took; a short one tells little, but something."""
        self.steals = 0
        if nbytes >= _TELLING or not self.rate:
            self.rate = nbytes / max(seconds, 1e-6)

    def rest(self, now: float) -> None:
        """Leave the work to others for a while, longer each time."""
        self.resting_until = now + min(_REST * 2**self.steals, _LONGEST_REST)
        self.steals = min(self.steals + 1, 16)


@dataclass(eq=False, slots=True)
class Assignment:
    """A run that a connection is fetching.

    Attributes:
        retries: Its attempts.
        scope: Ends it when it is stolen.
        stolen: Whether that has happened.
        began: When it was assigned, in loop time.
        ended: Set when nothing is received for it any more.
    """

    connection: Connection
    run: ChunkRun
    retries: Retries
    scope: anyio.CancelScope | None = None
    stolen: bool = False
    began: float = 0.0
    size: int = field(init=False)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _watched: float = -1.0
    _moved: float = 0.0
    _had: int = 0
    _last: int = 0

    def __post_init__(self) -> None:
        self.size = self.run.remaining

    def watch(self, now: float, *, again: bool) -> None:
        """Look how much has come; ``again`` if the last look still counts.

        Only the pace since the first look counts: before it, the connection shared the
        line with others.
        """
        left = self.run.remaining
        if not again or self._watched < 0:
            self._watched = self._moved = now
            self._had = self._last = left
        elif left != self._last:
            self._last, self._moved = left, now

    def seconds_left(self, now: float) -> float:
        """Return the estimated seconds left, at the pace since the first look.

        A connection that is silent will probably be silent for as long again.
        """
        come, elapsed = self._had - self._last, now - self._watched
        pace = elapsed * self._last / come if come else elapsed
        return max(pace, now - self._moved)

    def is_early(self, now: float, seconds: float) -> bool:
        """Say whether a run that needs ``seconds`` was watched too shortly to judge."""
        return now - self._watched <= min(seconds, _GLANCE)


def choose(
    free: Connection,
    queue: Iterable[ChunkRun],
    assignments: Iterable[Assignment],
    *,
    rate: float,
    now: float,
) -> ChunkRun | Assignment | None:
    """Decide what a free connection does next.

    Args:
        free: The connection.
        queue: Runs that nobody is fetching, in order.
        assignments: Runs that are being fetched, and watched.
        rate: Bytes per second of the peer's connections; 0.0 if that is unknown.
        now: Loop time.

    Returns:
        A run of the queue to fetch, an assignment to steal, or None to wait.
    """
    if now < free.resting_until:
        return None
    for run in queue:
        if free.peer.has(run):
            return run
    slowest, longest = None, 0.0
    for each in assignments:
        left, limit = _steal_at(free, each, rate, now)
        if left > max(limit, longest):
            slowest, longest = each, left
    return slowest


def _steal_at(
    free: Connection, victim: Assignment, rate: float, now: float
) -> tuple[float, float]:
    """Return the seconds that a run will take, and above how many it is stolen."""
    run = victim.run
    if run.chunk is None or victim.stolen or not free.peer.has(run):
        return 0.0, inf
    if victim.connection.peer is free.peer:
        vain = run.steals >= _VAIN or victim.retries.due > now
        own = inf if vain or not rate else run.remaining / rate
    elif victim.connection.patience.silent_since is not None:
        return inf, 0.0
    else:
        own = run.unverified / rate if rate else _UNKNOWN
    if victim.is_early(now, own):
        return 0.0, inf
    return victim.seconds_left(now), _MUCH * own + _SLACK * 2**run.steals


class Download:
    """One download of chunks into ``target``; each chunk is verified as it arrives.

    Args:
        peers: Of those that are left, one that has not joined is asked for its manifest
            first.
        outline: Of the checkpoint.
        target: Where the bytes go. Its memory is prepared a little ahead of them.
        chunks: Their numbers.
        on_progress: Gets newly arrived bytes and newly verified chunks.
        swarm: The part of the receive in a swarm; None: it joins none.

    Raises:
        LocalProtocolError: the checkpoint has no such chunk.
    """

    def __init__(
        self,
        peers: Peers,
        outline: Outline,
        target: Target,
        chunks: Iterable[int],
        on_progress: OnProgress,
        swarm: Membership | None = None,
    ) -> None:
        if len(peers.all) == 1:  # nobody gives up the only one
            peers.all[0].error = None
        self._all, self._peers = peers, peers.left()
        self._client, self._outline = peers.client, outline
        self._target, self._on_progress = target, of_caller(on_progress)
        self._most = peers.client.options.connections
        wanted = {*chunks}
        for chunk in (max(wanted, default=0), min(wanted, default=0)):
            if wanted and not 0 <= chunk < len(outline.grid):
                raise LocalProtocolError(
                    f"no such chunk: chunk {chunk} of {len(outline.grid)}"
                )
        self._fresh = bits_of(wanted)  # the chunks that nobody has begun
        self._chunks = self._fresh.bit_count()
        self._begun = deque[ChunkRun]()  # those that were begun and given back
        self._assignments: list[Assignment] = []
        self._swarm = swarm
        self._members: list[Peer] = []
        self._of_members: list[Connection] = []
        self._chance = random.Random()  # noqa: S311 - spreads load, guards nothing
        self._moved = 0.0  # when a chunk was verified last, in loop time
        self._has_failed = False
        self._idle_since = 0.0  # since when no member has had anything that is wanted
        self._got_from_member = 0.0  # when the last one came, in loop time
        self._usual = 0.0  # seconds that a chunk from a member takes on average
        self._usual_of_source = 0.0
        self._patience = {peer: peers.client.patience() for peer in self._peers}
        self._connections = [
            Connection(peer, self._patience[peer])
            for peer in self._peers
            for _ in range(self._most)
        ]
        self._joining: dict[Peer, anyio.CancelScope] = {}
        self._news = Notifier()
        self._looked = 0.0
        self._patched = self._unpatched = 0
        self._plain: set[int] = set()  # chunks whose delta did not fit the held bytes
        for peer, patience in self._patience.items():
            peer.given, patience.connected = 0, True
        self._set_alone()

    def __repr__(self) -> str:
        wanted = self._fresh.bit_count() + len(self._begun)
        state = f"wanted={wanted} assignments={len(self._assignments)}"
        return f"<Download peers={len(self._peers)} {state}>"

    async def run(self) -> None:
        """Download the chunks; once only.

        If cancelled, nothing is written to the target any more, any part of it may
        have been, and no connection is left.

        Raises:
            IntegrityError: a range had three wrong answers; of several peers, one is
                dropped at its first.
            CheckpointChangedError: the peer replaced the snapshot.
            StepNotFoundError: the peer retracted it.
            PeerUnreachableError, TransferStalledError, TransferInterruptedError: the
                peer was silent for the reconnect timeout.
            AuthenticationError, RemoteProtocolError: what the peer answered.
        """
        if not self._chunks:
            return
        if not self._peers:
            raise verdict(self._all.all)
        began = self._moved = self._idle_since = _now()
        if self._swarm is not None:
            for peer in self._peers:
                if peer.invitation is not None:
                    self._swarm.join(peer, peer.invitation)
        try:
            async with task_group() as tasks:
                for number, connection in enumerate(self._connections):
                    tasks.start_soon(self._work, connection, number % self._most)
                if self._swarm is not None:
                    tasks.start_soon(self._gather, self._swarm, tasks)
        finally:
            for run in self._begun:  # it failed: the beginnings of chunks do not count
                self._forget(run.assign(None, _ignore))
            # Tracebacks of requests that were cancelled keep this object, which must
            # not keep the memory.
            self._target, self._swarm = PlainTarget(_Closed()), None
        assert self._is_done, "a chunk was left out"
        given = self._all.given()
        given |= {each.origin.base_url: each.given for each in self._members}
        for url, nbytes in given.items():
            emit(
                TransferEvent(
                    stop="fetch_chunk",
                    step=self._outline.step,
                    peer=url,
                    nbytes=nbytes,
                    seconds=_now() - began,
                    level=logging.INFO,
                )
            )

    @property
    def _is_done(self) -> bool:
        return not self._fresh and not self._begun and not self._assignments

    def _left(self) -> list[Peer]:
        return [peer for peer in self._peers if peer.error is None]

    def _members_left(self) -> list[Peer]:
        """Return the members that have said what they have."""
        return [peer for peer in self._members if peer.joined and peer.error is None]

    @property
    def _shares(self) -> bool:
        """Whether the chunks are shared out one by one, because others need them."""
        active = self._swarm is not None and self._swarm.is_active
        return active and not self._gets_deltas

    def _connections_of_each(self) -> int:
        """Return how many connections each peer that is left may use now."""
        most, members = self._most, len(self._members_left())
        if self._shares and not self._members:
            return 1  # a second one would mostly bring what others fetch, too
        if len(self._left()) == 1 and not members:
            return most
        return max(1, min(most, _ALL_PEERS * most // (len(self._peers) + members)))

    async def _join(self, peer: Peer) -> None:
        """Ask whether a peer holds the checkpoint, until everything has come."""
        client, outline, step = self._client, self._outline, self._outline.step
        # Only peers that have not answered are cancelled when everything has come. The
        # traceback of a cancel is in a cycle with its task: if it passed a request, the
        # memory of the download would stay until the collector runs.
        with anyio.CancelScope() as scope:
            self._joining[peer] = scope
            try:
                found = await fetch_manifest(
                    client,
                    peer.origin,
                    step,
                    deadline=self._all.deadline,
                    on_retry=self._all.on_retry,
                )
                peer.require(outline, found.manifest.outline)
                peer.delta_base = found.delta_base
            except (ClosedError, StagingError):
                raise  # not the peer's fault
            except AiockptError as error:
                self._drop(peer, error)
            finally:
                del self._joining[peer]
                self._news.notify()

    async def _work(self, connection: Connection, number: int) -> None:
        """Fetch and steal runs over one connection of a peer, until all has come.

        The peer's first connection asks for the manifest, where that is needed.
        """
        peer = connection.peer
        if not peer.joined and number == 0:
            await self._join(peer)
        while not self._is_done and peer.error is None:
            if not peer.joined or number >= self._connections_of_each():
                await self._news.wait(None)  # until it joins, or another is dropped
            elif (job := self._job(connection)) is not None:
                await job
            else:
                await self._news.wait(_TICK)

    def _job(self, connection: Connection) -> Coroutine[Any, Any, None] | None:
        """Return what a connection does next: fetch a run, steal one, or nothing."""
        match self._next_for(connection):
            case ChunkRun() as run:
                return self._fetch_run(connection, self._take(connection, run))
            case Assignment() as victim:
                return self._steal(connection, victim)
        return None

    # ------------------------------------------------------------------ members

    async def _gather(self, swarm: Membership, tasks: TaskGroup) -> None:
        """Add the members that the source names, until everything has come."""
        lanes, shared = 0, self._shares
        while not self._is_done:
            if self._shares != shared:  # then other connections may go on
                shared = not shared
                self._news.notify()
            for peer in () if self._gets_deltas else swarm.members:
                if peer not in self._members:
                    self._members.append(peer)
                    peer.given, peer.joined = 0, False
                    patience = self._client.patience(0.0)
                    patience.alone, patience.connected = False, True
                    self._patience[peer] = patience
                    pair = [Connection(peer, patience) for _ in range(_FROM_MEMBER)]
                    self._of_members += pair
                    self._connections += pair
                    tasks.start_soon(self._watch, swarm, peer)
            while self._members and lanes < _FROM_MEMBERS:
                lanes += 1
                tasks.start_soon(self._work_with_members)
            self._check_reachable()
            self._stop_slow_members()
            await self._news.wait(_GATHER)

    @property
    def _gets_deltas(self) -> bool:
        """Whether the sources send less than the members could."""
        vain = self._unpatched > self._patched + _VAIN
        known = [peer.delta_base for peer in self._left()]
        patches = self._target.patch is not None and is_available()
        return patches and not vain and any(known)

    async def _work_with_members(self) -> None:
        """Fetch and steal one run after another from members, until all has come.

        Some members have more to do than others. So it looks for one that can send at
        once, before it waits.
        """
        refusals = 0
        while not self._is_done:
            connection = self._idle_member()
            job = None if connection is None else self._job(connection)
            if connection is None or job is None:
                await self._news.wait(_TICK)
                continue
            connection.waits = refusals + 1 >= _TRIES
            connection.refused = False
            await job
            refusals = (refusals + 1) % _TRIES if connection.refused else 0

    def _idle_member(self) -> Connection | None:
        """Return a connection to a random member that could give a chunk."""
        now = _now()
        idle = [
            each
            for each in self._of_members
            if not each.is_busy
            and each.peer.error is None
            and each.resting_until <= now
        ]
        useful = [each for each in idle if each.peer.have & self._fresh]
        self._chance.shuffle(useful)
        busy = [each.peer for each in self._of_members if each.is_busy]
        useful.sort(key=lambda each: busy.count(each.peer))
        return next(iter(useful or idle), None)

    async def _watch(self, swarm: Membership, peer: Peer) -> None:
        """Learn which chunks a member has, until everything has come."""
        with anyio.CancelScope() as scope:
            if self._is_done:
                return
            self._joining[peer] = scope
            try:
                async with aclosing(swarm.watch(peer, self._outline)) as news:
                    async for new in news:
                        peer.have |= new
                        peer.joined = True
                        if new & self._fresh:
                            self._news.notify()
            except (ClosedError, StagingError):
                raise  # not the member's fault
            except AiockptError as error:
                self._drop(peer, error)
            finally:
                del self._joining[peer]
                self._news.notify()

    def _stop_slow_members(self) -> None:
        """Stop requests to members that take much longer than is usual.

        Otherwise members that send slowly on purpose could hold all connections.
        """
        usual, now = max(self._usual, self._usual_of_source), _now()
        peers = [*self._left(), *self._members_left()]
        for each in self._assignments if usual else ():
            connection, run = each.connection, each.run
            is_slow = now - each.began > _LONG * usual + _LONGER
            if not (is_slow and connection.peer.member) or run.chunk is None:
                continue
            if any(peer is not connection.peer and peer.has(run) for peer in peers):
                connection.refused = not connection.answered
                self._stop(each, "others can send it")

    def _check_reachable(self) -> None:
        """Fail if no source is left, and no member gets what is missing.

        Raises:
            AiockptError: why the sources were dropped.
        """
        waited = _now() - self._moved > self._client.stall_timeout
        if self._left() or self._assignments or not waited:
            return
        raise self._failure(verdict(self._peers))

    def _failure(self, error: AiockptError) -> AiockptError:
        """Add to the error of the last source what no member of the swarm has."""
        if self._swarm is not None and self._swarm.has_joined and not self._has_failed:
            self._has_failed, missing = True, self._fresh
            for run in (*self._begun, *(each.run for each in self._assignments)):
                missing |= run.bits
            for peer in self._members_left():
                missing &= ~peer.have
            count = missing.bit_count()
            error.add_note(f"no member of the swarm has {count} of the chunks")
        return error

    # ----------------------------------------------------------------- planning

    def _next_for(self, connection: Connection) -> ChunkRun | Assignment | None:
        now = _now()
        if self._shares or not (self._fresh or self._begun):
            again = now - self._looked <= _BUSY
            self._looked = now
            for each in self._assignments:
                each.watch(now, again=again)
        rates = [
            each.rate
            for each in self._connections
            if each.peer is connection.peer and each.rate
        ]
        rate = median(rates) if rates else 0.0
        queue = self._runs_for(connection)
        victims = self._assignments
        if self._shares and self._fresh:
            victims = []  # before the end, there is something else to request
        return choose(connection, queue, victims, rate=rate, now=now)

    def _runs_for(self, connection: Connection) -> Iterator[ChunkRun]:
        """Yield the runs that were given back, and then one of fresh chunks."""
        yield from self._begun
        peer = connection.peer
        wanted = self._fresh & peer.have
        if not wanted:
            return
        if self._shares or peer.member:
            if (chunk := self._shared_chunk(peer, wanted)) is not None:
                yield ChunkRun(self._outline, [chunk])
            return
        first = (wanted & -wanted).bit_length() - 1
        missing = ~(wanted >> first)
        consecutive = (missing & -missing).bit_length() - 1
        most = self._share(connection) // self._outline.grid.chunk_bytes
        yield ChunkRun(
            self._outline, range(first, first + min(consecutive, max(most, 1)))
        )

    def _shared_chunk(self, peer: Peer, wanted: int) -> int | None:
        """Return the chunk to request from a member or from a source of a swarm."""
        have = [each.have for each in self._members_left()]
        if peer.member:
            return next_chunk(wanted, have, self._chance)
        now = _now()
        if any(self._fresh & each for each in have):
            # They may offer much, and send little.
            self._idle_since = max(self._idle_since, self._got_from_member)
        if have and not self._usual_of_source and self._usual:
            have = []  # so that it is known how fast the source is
        return source_chunk(
            peer.next,
            wanted,
            have,
            idle=now - self._idle_since,
            usual=self._usual_seconds(),
            chance=self._chance,
        )

    def _usual_seconds(self) -> float:
        """Return how long a chunk usually takes; 0.0 before anything has come."""
        known = [each for each in (self._usual, self._usual_of_source) if each]
        if not known:  # longer runs may have come before there was a swarm
            size = self._outline.grid.chunk_bytes
            known = [size / each.rate for each in self._connections if each.rate]
        return min(known, default=0.0)

    def _take(self, connection: Connection, run: ChunkRun) -> ChunkRun:
        """Take a run out of what is wanted."""
        peer = connection.peer
        self._forget(run.assign(peer, partial(self._verified, peer)))
        if run in self._begun:
            self._begun.remove(run)
            self._shorten(run, self._share(connection))
        else:
            self._fresh &= ~run.bits
            peer.next = None
        return run

    def _give_back(self, run: ChunkRun, connection: Connection) -> None:
        """Want what is left of a run; the bad chunks of a member, from others."""
        if connection.refused or (connection.peer.member and self._fresh):
            self._forget(run.assign(None, _ignore))
            self._fresh |= run.bits
            return
        if connection.peer.member and (settled := run.want_bad_again()) is not None:
            self._forget(settled[0])
        self._begun.appendleft(run)

    def _shorten(self, run: ChunkRun, nbytes: int) -> None:
        """Give back the chunks of a run behind ``nbytes``, but not the first one."""
        for chunk in run.cut(nbytes):
            self._fresh |= 1 << chunk

    def _share(self, connection: Connection) -> int:
        """Return how many bytes a connection's next run should have.

        The only peer's runs are equal, two for each of its connections. Several peers
        get runs that take all of them about as long, and shorter ones towards the end.
        In a swarm, each run is one chunk.
        """
        if self._shares or connection.peer.member:
            return 0
        if len(self._peers) == 1:
            chunks = -(-self._chunks // (2 * self._most))
            return min(chunks * self._outline.grid.chunk_bytes, _MAX_RUN)
        left = self._fresh.bit_count() * self._outline.grid.chunk_bytes
        connections = len(self._left()) * self._connections_of_each()
        return min(left // (2 * connections), int(connection.rate * _TURN))

    async def _fetch_run(self, connection: Connection, run: ChunkRun) -> None:
        """Fetch what is left of a run; what does not come goes back into the queue."""
        peer, patience, step = connection.peer, connection.patience, self._outline.step
        started = began = _now()
        retries = self._client.retries(peer.origin, step, patience, self._all.on_retry)
        mine = Assignment(connection, run, retries, anyio.CancelScope(), began=started)
        self._assignments.append(mine)
        connection.is_busy = True
        connection.answered = connection.refused = False

        try:
            assert mine.scope is not None
            with mine.scope:
                while run.unverified:
                    try:
                        if run.chunk is not None:
                            await self._request(run, connection)
                        if run.chunk is None:
                            self._want_bad_again(run, peer.origin)
                        continue
                    except AiockptError as error:
                        delay = self._delay_after(error, mine, started=began)
                        if delay is None:
                            raise
                    await self._client.pause(delay)
                    began = _now()
        except (ClosedError, StagingError):
            raise  # not the peer's fault
        except AiockptError as error:
            connection.refused = bool(peer.member) and isinstance(error, PeerBusy)
            if not connection.refused:
                self._drop(peer, error)
        finally:
            connection.is_busy = False
            self._assignments.remove(mine)
            if run.unverified:
                self._give_back(run, connection)
            mine.ended.set()
            self._news.notify()
            if self._is_done:
                for scope in self._joining.values():
                    scope.cancel()
        self._learn(mine, _now() - started)

    def _learn(self, mine: Assignment, took: float) -> None:
        """Note how long a run took; drop a member from which much was stolen."""
        connection, peer = mine.connection, mine.connection.peer
        if connection.refused:
            rest = _LONGEST_REST if mine.stolen else _REST
            connection.resting_until = _now() + rest
            return
        if mine.run.unverified:
            connection.rest(_now())
            pair = (each for each in self._of_members if each.peer is peer)
            if mine.stolen and sum(each.steals for each in pair) >= _VAIN:
                why = f"{peer.origin.base_url} is much slower than other members"
                self._drop(peer, TransportError(why))
            return
        connection.learn(mine.size, took)
        if mine.size > self._outline.grid.chunk_bytes:
            return  # chunks of a swarm are compared with single ones only
        if peer.member:
            self._got_from_member = _now()
            self._usual += (took - self._usual) * (_NEWS if self._usual else 1)
        else:
            before = self._usual_of_source
            self._usual_of_source += (took - before) * (_NEWS if before else 1)

    def _delay_after(
        self, error: AiockptError, failed: Assignment, *, started: float
    ) -> float | None:
        """Return the seconds until the next attempt at a run; None to give it back."""
        if self._swarm is not None and len(failed.run) > 1:
            self._shorten(failed.run, 0)  # by now there may be a swarm
            failed.size = min(failed.size, self._outline.grid.chunk_bytes)
        if failed.connection.peer.member and isinstance(error, PeerBusy):
            return None
        return failed.retries.decide(error, started=started)

    def _want_bad_again(self, run: ChunkRun, origin: Origin) -> None:
        """Want the bad chunks of a run again; raise what is wrong with the first."""
        if (settled := run.want_bad_again()) is not None:
            lost, error = settled
            error.url = origin.base_url
            self._forget(lost)
            raise error

    async def _request(self, run: ChunkRun, connection: Connection) -> None:
        """Receive the bytes of one request directly into the target.

        If the receiver holds bytes and the peer keeps a base, receive deltas instead.
        """
        peer, patience = connection.peer, connection.patience
        start, stop, base = self._reach(run, peer)
        outline, origin = self._outline, peer.origin
        head = outline.header_bytes
        wanted = {} if base is None else format_delta(base)
        # A peer that has just come back may not have published again yet. A member of
        # a swarm may have to serve others first.
        wait = patience.stall_timeout / 2
        if not peer.member:
            wait = min(wait, patience.reconnect_timeout)
        elif not connection.waits:
            wait = 0.0
        request = Request(
            origin=origin,
            path=format_resource(Resource(ResourceKind.FULL, outline.step)),
            headers={
                hdrs.RANGE: format_range(head + start, head + stop),
                hdrs.IF_MATCH: format_etag(outline.snapshot_id),
                "Prefer": format_prefer_wait(min(wait, origin.patience)),
                **wanted,
            },
            status=HTTPStatus.PARTIAL_CONTENT,
            may_be_delta=base is not None,
            may_be_empty=bool(peer.member),
            step=outline.step,
            snapshot_id=outline.snapshot_id,
            chunk=run.chunk,
        )

        is_delta = False

        def count(new: int) -> None:
            patience.heard(_now())
            if not is_delta:  # `_patch` counts those bytes
                self._on_progress(new, 0)

        async with self._client.request(request, count) as answer:
            connection.answered = True
            if answer.status == HTTPStatus.NO_CONTENT:
                raise RemoteProtocolError(
                    f"{request.url} does not have chunk {run.chunk}, which it announced"
                )
            if self._swarm is not None and not peer.member:
                self._swarm.hear(peer, answer.headers)
            _check_range(answer, head + start, head + stop, outline.total_bytes)
            if is_delta := answer.status == HTTPStatus.IM_USED:
                deltas = await _read_deltas(answer, stop - start, base)
                await self._patch(run, deltas, range(start, stop), answer)
                return
            _check_length(answer, stop - start)
            writer = BodySink(self._target.memory.buffers, start, stop, run)
            if (prepare := self._target.prepare) is None:
                await answer.read_into(writer)
                return
            read = Notifier()
            async with beside(partial(self._keep_ready, prepare, writer, start, read)):
                await answer.read_into(writer)
                read.notify()

    def _reach(self, run: ChunkRun, peer: Peer) -> tuple[int, int, str | None]:
        """Return the range to request, and the base of the deltas to ask for.

        The base is None if only the bytes will do. An answer with deltas takes memory,
        so a request covers only a part of a long run. If more deltas have failed than
        succeeded, the receiver does not hold the base, so it asks for no more.
        """
        start, stop = run.begin_request()
        vain = self._unpatched > self._patched + _VAIN
        if peer.delta_base is None or self._target.patch is None or vain:
            return start, stop, None
        grid, chunk = self._outline.grid, run.chunk
        assert chunk is not None
        first, last = grid.range(chunk)
        if start != first or chunk in self._plain:
            return start, last, None
        stop = min(stop, start + max(_DELTAS // grid.chunk_bytes, 1) * grid.chunk_bytes)
        plain = (grid.range(each)[0] for each in self._plain)
        ends = [stop, *(each for each in plain if start < each < stop)]
        return start, min(ends), peer.delta_base if is_available() else None

    async def _patch(
        self, run: ChunkRun, deltas: memoryview, reach: range, answer: Answer
    ) -> None:
        """Apply deltas to the held chunks, until the first wrong digest."""
        size = self._outline.grid.chunk_bytes
        chunks = range(reach.start // size, -(-reach.stop // size))
        patch = self._target.patch
        assert patch is not None
        with answer.blamed():
            parts = split(deltas, len(chunks))
        for chunk, (kind, body) in zip(chunks, parts, strict=True):
            try:
                with answer.blamed():
                    right = await patch(self._target.memory, chunk, kind, body)
            except asyncio.CancelledError:
                self._plain.add(chunk)  # the bytes that a delta needs may have changed
                raise
            if not right:
                self._unpatched += 1
                self._plain.add(chunk)
                return
            self._patched += 1
            self._on_progress(
                min(HEAD_BYTES + len(body), _size(self._outline, chunk)), 0
            )
            run.complete()

    async def _keep_ready(
        self, prepare: Prepare, writer: BodySink, start: int, read: Notifier
    ) -> None:
        """Prepare memory from ``start`` on, a little ahead of what ``writer`` gets.

        No further: a peer that claims gigabytes and sends nothing takes no memory. It
        ends when all is prepared, or when ``read`` says that all has come.
        """
        at, stop = start, start + writer.size
        ahead = max(_AHEAD // self._most, _STEP)
        while at < stop and writer.remaining:
            if at - start - writer.filled >= ahead:
                await read.wait(_LOOK)
                continue
            end = min(at - at % _STEP + _STEP, stop)
            with failing_here("preparing memory"):  # not the fault of the peer
                await self._client.bridge.run(prepare, at, end)
            at = end

    async def _steal(self, thief: Connection, victim: Assignment) -> None:
        """Stop a much slower connection, which puts its run back into the queue."""
        same = victim.connection.peer is thief.peer
        self._stop(victim, f"another {'connection has' if same else 'peer takes'} it")
        await victim.ended.wait()

    def _stop(self, victim: Assignment, why: str) -> None:
        if victim.stolen:
            return
        run, loser = victim.run, victim.connection.peer
        emit(
            TransferEvent(
                stop="retry",
                step=self._outline.step,
                peer=loser.origin.base_url,
                detail=f"too slow with chunk {run.chunk}; {why}",
            )
        )
        run.steals += 1
        victim.stolen = True
        assert victim.scope is not None
        victim.scope.cancel()

    def _verified(self, peer: Peer, chunk: int) -> None:
        start, stop = self._outline.grid.range(chunk)
        peer.given += stop - start
        self._moved = _now()
        self._on_progress(0, 1)
        self._target.complete(chunk)
        if self._swarm is not None:
            self._swarm.add(chunk)

    def _forget(self, nbytes: int) -> None:
        """Take back from the progress what has to come once more."""
        if nbytes:
            self._on_progress(-nbytes, 0)

    def _drop(self, peer: Peer, error: AiockptError) -> None:
        """Ask a peer no more.

        Raises:
            AiockptError: it was the last one.
        """
        if peer.error is not None:
            return  # another of its connections has failed before
        members = [each for each in self._members_left() if each is not peer]
        if len(self._peers) == 1 and not peer.member and not members:
            peer.error = error  # so that its other connections stop
            raise self._failure(error)
        peer.drop(error, self._outline.step)
        if peer.member and self._swarm is not None:
            self._swarm.drop(peer, error)
        if not self._left() and not members:
            raise self._failure(verdict(self._peers))
        self._set_alone()
        for each in self._assignments:
            if each.connection.peer is peer and each.scope is not None:
                each.scope.cancel()
        self._news.notify()

    def _set_alone(self) -> None:
        """Trust a peer that is one of several only until its first wrong chunk."""
        left = self._left()
        for peer in left:
            self._patience[peer].alone = len(left) == 1


async def _read_deltas(answer: Answer, most: int, base: str | None) -> memoryview:
    """Return the body of a 226 answer, of at most ``most`` bytes, for its ``base``."""
    request = answer.request
    named = parse_etag(answer.headers.get(DELTA_BASE_HEADER))
    if named != base or answer.headers.get("IM", "").strip().lower() != DELTA:
        raise RemoteProtocolError(
            f"{request.url} answered with a delta that was not requested: the headers "
            f"IM and Delta-Base must be {DELTA} and {format_etag(str(base))}"
        )
    return await answer.read(most, "deltas")


def _size(outline: Outline, chunk: int) -> int:
    start, stop = outline.grid.range(chunk)
    return stop - start


def _check_range(answer: Answer, start: int, stop: int, size: int) -> None:
    """Raise unless an answer covers the requested ``[start, stop)`` of ``size``."""
    request = answer.request
    # The headers are no variable: a peer may repeat the request's token in them.
    tag = parse_etag(answer.headers.get(hdrs.ETAG))
    if tag is not None and tag != request.snapshot_id:
        raise CheckpointChangedError(
            expected=request.snapshot_id or "", actual=tag, url=request.url
        )
    with answer.blamed():
        given = parse_content_range(answer.headers.get(hdrs.CONTENT_RANGE))
    if given != (start, stop, size):
        raise RemoteProtocolError(
            f"{request.url} sent bytes {given[0]} to {given[1]} of {given[2]} "
            f"where {start} to {stop} of {size} were asked for"
        )


def _check_length(answer: Answer, nbytes: int) -> None:
    if (length := answer.length()) != nbytes:
        raise RemoteProtocolError(
            f"{answer.request.url} sent Content-Length {length} for a range of "
            f"{nbytes} bytes"
        )


def _ignore(_: int) -> None:
    pass


def _now() -> float:
    return asyncio.get_running_loop().time()
