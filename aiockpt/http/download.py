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
(retry) -> `RangeFetcher.fetch` (one range, straight into the target).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing
from functools import partial
from statistics import median
from typing import Any

import anyio
from anyio.abc import TaskGroup

from aiockpt.errors import (
    Advice,
    AiockptError,
    AuthenticationError,
    ClosedError,
    LocalProtocolError,
    StepNotFoundError,
    TransportError,
    advice,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.format.manifest import Outline
from aiockpt.http.chunk_run import ChunkRun, bits_of
from aiockpt.http.client import Answer
from aiockpt.http.manifests import fetch_manifest
from aiockpt.http.membership import Membership, watch
from aiockpt.http.peers import ALL, MemberLeftError, Peer, Peers, verdict
from aiockpt.http.problems import PeerBusy
from aiockpt.http.protocol import Origin
from aiockpt.http.range_fetcher import RangeFetcher
from aiockpt.http.retry import HostLimitError
from aiockpt.http.scheduling import (
    Assignment,
    Connection,
    Pace,
    choose,
    choose_member,
)
from aiockpt.http.swarm import next_chunk, source_chunk
from aiockpt.runtime.system import of_caller
from aiockpt.runtime.tasks import Notifier, task_group
from aiockpt.transfer.source import OnProgress, Target

_MAX_RUN = 1 << 30  # tens of megabytes might come in the time of one request
_TURN = 0.25  # seconds that a run takes where several peers share the work
_BUSY = 0.25  # seconds between two looks; if it takes longer, this process is slow
_TICK = 0.05  # seconds after which a free connection of a peer looks at the others
_SLOW = 3  # runs that are stolen from a member in a row, before it is dropped
_USELESS = 12.0  # usual requests without a chunk, after which members do not count
_VAIN = 2  # requests to members for a chunk, before only sources are asked for it
_REST = 0.1  # seconds for which a member that is busy is not asked; after
_PATIENT = 3  # refusals without a chunk between them, they double each time
_LONG_REST = 2.0  # seconds; the longest rest, and that of one that did not answer
_AGAIN = 2  # times that a member is asked for the rest of a run that broke off
_ALL_PEERS = 4  # most connections to all peers, as a multiple of those to a single one
_FROM_MEMBERS = 5  # chunks that are requested from members at a time
_FROM_MEMBER = 2  # chunks that are requested from one member at a time
_TRIES = 3  # members that are asked in turn; only the last one may let us wait
_LONG = 5.0  # a chunk from a member takes so many times as long as usual, and
_LONGER = 1.0  # so many seconds more, before its request is stopped
_GATHER = 0.1  # seconds between two looks at which members are known


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
        self._complete: Callable[[int], None] = target.complete
        self._on_progress = of_caller(on_progress)
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
        self._stopped = Counter[int]()  # by chunk: requests to members, in vain
        self._vain = 0  # the chunks that only sources are asked for
        self._pace = Pace()
        self._moved = 0.0  # when a chunk was verified last, in loop time
        self._helped = 0.0  # when members last brought something, in loop time
        self._has_failed = False
        self._patience = {peer: peers.client.patience() for peer in self._peers}
        self._connections = [
            Connection(peer, self._patience[peer])
            for peer in self._peers
            for _ in range(self._most)
        ]
        self._joining: dict[Peer, anyio.CancelScope] = {}
        self._news = Notifier()
        self._lookouts = set[Peer | None]()  # those with one that looks; None: members
        self._looked = 0.0
        self._ranges = RangeFetcher(self._client, outline, target, self._on_progress)
        for peer, patience in self._patience.items():
            peer.given, patience.connected = 0, True
        self._set_alone()

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
        began = self._moved = self._helped = _now()
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
            self._ranges.close()
            self._complete, self._swarm = _ignore, None
        assert self._is_done, "a chunk was left out"
        given = self._all.given()
        for each in self._members:  # twice, if one failed and was named again
            url = each.origin.base_url
            given[url] = given.get(url, 0) + each.given
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

    def _sources(self) -> list[Peer]:
        """Return those of them that are known to hold the checkpoint."""
        return [peer for peer in self._left() if peer.joined]

    def _members_left(self) -> list[Peer]:
        """Return the members that have said what they have."""
        return [peer for peer in self._members if peer.joined and peer.error is None]

    @property
    def _one_by_one(self) -> bool:
        """Whether each request is for one chunk, because others need chunks, too."""
        active = self._swarm is not None and self._swarm.is_active
        return active and not self._ranges.gets_deltas(self._left())

    @property
    def _are_members_useless(self) -> bool:
        """Whether members have brought nothing for a long time."""
        usual = self._usual_seconds()
        idle = _now() - max(self._helped, self._pace.last_from_member)
        return bool(usual) and idle > _USELESS * usual

    def _connections_of_each(self) -> int:
        """Return how many connections each peer that is left may use now."""
        most, members = self._most, len(self._members_left())
        if self._one_by_one and not self._members:
            return 1  # a second one would mostly bring what others fetch, too
        if len(self._left()) == 1 and (not members or self._are_members_useless):
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
                    on_answer=self._all.hearing(peer, step),
                )
                peer.require(outline, found.manifest.outline)
                peer.delta_base = found.delta_base
            except AiockptError as error:
                if Advice.OURS in advice(error):
                    raise
                self._drop(peer, error)
            finally:
                del self._joining[peer]
                self._news.notify()

    async def _work(self, connection: Connection, number: int) -> None:
        """Fetch and steal runs over one connection of a peer, until all has come.

        The peer's first connection asks for the manifest, where that is needed.
        """
        peer, looked = connection.peer, False
        if not peer.joined and number == 0:
            await self._join(peer)
        while not self._is_done and peer.error is None:
            if not peer.joined or number >= self._connections_of_each():
                await self._news.wait(None)  # until it joins, or another is dropped
            elif (job := self._job(connection)) is not None:
                if looked:
                    self._news.notify()  # so that another connection looks
                    looked = False
                await job
            else:
                looked = await self._idle(peer, connection.resting_until)

    async def _idle(self, of: Peer | None, until: float = 0.0) -> bool:
        """Wait for news, or for the end of a rest; return whether this one looked.

        A connection can become slow without any news. So one of the free connections
        to each peer, and one of those to members, looks from time to time.
        """
        rest = max(until - _now(), 0.0)
        looks = not rest and of not in self._lookouts
        looks = looks and bool(self._assignments or self._one_by_one)
        if not looks:
            await self._news.wait(rest or None)
            return False
        self._lookouts.add(of)
        try:
            await self._news.wait(_TICK)
        finally:
            self._lookouts.discard(of)
        return True

    def _job(
        self, connection: Connection, *, waits: bool = True
    ) -> Coroutine[Any, Any, bool] | None:
        """Return what a connection does next: fetch a run, steal one, or nothing.

        With ``waits``, a member may let the request wait for others. Awaiting the job
        says whether the member was too busy.
        """
        match self._next_for(connection):
            case ChunkRun() as run:
                return self._fetch_run(self._take(connection, run, waits=waits))
            case Assignment() as victim:
                return self._steal(connection, victim)
        return None

    # ------------------------------------------------------------------ members

    async def _gather(self, swarm: Membership, tasks: TaskGroup) -> None:
        """Add the members that the source names, until everything has come."""
        lanes, before = 0, (self._one_by_one, self._are_members_useless)
        while not self._is_done:
            now = self._one_by_one, self._are_members_useless
            if now != before:  # then other connections may go on
                before = now
                self._news.notify()
            # Deltas of the sources are shorter than the chunks of members.
            gets_deltas = self._ranges.gets_deltas(self._left())
            for peer in () if gets_deltas else swarm.members:
                if peer not in self._members:
                    self._members.append(peer)
                    peer.given, peer.joined = 0, False
                    patience = self._client.patience(0.0)
                    patience.alone, patience.connected = False, True
                    self._patience[peer] = patience
                    pair = [Connection(peer, patience) for _ in range(_FROM_MEMBER)]
                    self._of_members += pair
                    self._connections += pair
                    tasks.start_soon(self._watch, peer)
            while self._members and lanes < _FROM_MEMBERS:
                lanes += 1
                tasks.start_soon(self._work_with_members)
            self._check_reachable()
            self._stop_slow_members()
            await self._news.wait(_GATHER)

    async def _work_with_members(self) -> None:
        """Fetch and steal one run after another from members, until all has come.

        Some members have more to do than others. So it looks for one that can send at
        once, before it waits.
        """
        refusals, looked = 0, False
        while not self._is_done:
            wanted, waits = self._fresh & self._for_members, refusals + 1 >= _TRIES
            for run in filter(self._is_for_members, self._begun):
                wanted |= run.bits
            job, members = None, self._of_members
            connection = choose_member(members, wanted, now=_now(), chance=self._chance)
            if connection is not None:
                job = self._job(connection, waits=waits)
            if job is None:
                looked = await self._idle(None)
                continue
            if looked:
                self._news.notify()
                looked = False
            refusals = (refusals + 1) % _TRIES if await job else 0

    async def _watch(self, peer: Peer) -> None:
        """Learn which chunks a member has, until everything has come."""
        client = self._client
        with anyio.CancelScope() as scope:
            if self._is_done:
                return
            self._joining[peer] = scope
            try:
                async with aclosing(watch(client, peer, self._outline)) as news:
                    async for new in news:
                        peer.have |= new
                        peer.joined = True
                        if new & self._fresh:
                            self._news.notify()
            except ClosedError:
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
        usual, now = max(self._pace.of_members, self._pace.of_sources), _now()
        peers = [*self._sources(), *self._members_left()]
        for each in self._assignments if usual else ():
            connection, run = each.connection, each.run
            is_slow = now - each.began > _LONG * usual + _LONGER
            if not is_slow or not connection.peer.member or each.is_stolen:
                continue
            others = (peer for peer in peers if peer is not connection.peer)
            if run.chunk is not None and any(peer.has(run) for peer in others):
                each.is_refused = not each.is_answered
                self._stop(each, "others can send it", in_vain=True)

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
        if self._one_by_one or not (self._fresh or self._begun):
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
        if self._one_by_one and self._fresh:
            victims = []  # before the end, there is something else to request
        elif connection.peer.member:
            # One that has sent nothing yet may be silent on purpose.
            mine = self._is_for_members
            victims = [each for each in victims if rate and mine(each.run)]
        return choose(connection, queue, victims, rate=rate, now=now)

    def _runs_for(self, connection: Connection) -> Iterator[ChunkRun]:
        """Yield the runs that were given back, and then one of fresh chunks."""
        peer = connection.peer
        for run in self._begun:
            if not peer.member or self._is_for_members(run):
                yield run
        wanted = self._fresh & peer.have
        if not wanted:
            return
        if self._one_by_one or peer.member:
            if (chunk := self._swarm_chunk(peer, wanted)) is not None:
                yield ChunkRun(self._outline, [chunk])
            return
        first = (wanted & -wanted).bit_length() - 1
        missing = ~(wanted >> first)
        consecutive = (missing & -missing).bit_length() - 1
        most = self._run_bytes(connection) // self._outline.grid.chunk_bytes
        yield ChunkRun(
            self._outline, range(first, first + min(consecutive, max(most, 1)))
        )

    def _swarm_chunk(self, peer: Peer, wanted: int) -> int | None:
        """Return the chunk to request from a member or from a source of a swarm."""
        have = [each.have for each in self._members_left()]
        if peer.member:
            return next_chunk(wanted & self._for_members, have, self._chance)
        if vain := wanted & ~self._for_members:
            return next_chunk(vain, (), self._chance)
        now = _now()
        if any(self._fresh & each for each in have):
            # They may offer much, and send little.
            self._helped = max(self._helped, self._pace.last_from_member)
        if have and self._pace.of_members and not self._pace.of_sources:
            have = []  # so that it is known how fast the source is
        return source_chunk(
            peer.next,
            wanted,
            have,
            idle=now - self._helped,
            usual=self._usual_seconds(),
            chance=self._chance,
        )

    @property
    def _for_members(self) -> int:
        """The chunks that members may be asked for."""
        return ~self._vain if self._sources() else ALL

    def _is_for_members(self, run: ChunkRun) -> bool:
        """Say whether members may be asked for the first chunk of a run."""
        return run.chunk is None or bool(self._for_members >> run.chunk & 1)

    def _usual_seconds(self) -> float:
        """Return how long a chunk usually takes; 0.0 before anything has come."""
        pace = self._pace
        known = [each for each in (pace.of_members, pace.of_sources) if each]
        if not known:  # longer runs may have come before there was a swarm
            size = self._outline.grid.chunk_bytes
            known = [size / each.rate for each in self._connections if each.rate]
        return min(known, default=0.0)

    def _take(
        self, connection: Connection, run: ChunkRun, *, waits: bool
    ) -> Assignment:
        """Take a run out of what is wanted."""
        peer, patience = connection.peer, connection.patience
        self._forget(run.assign(peer, partial(self._verified, peer)))
        if run in self._begun:
            self._begun.remove(run)
            self._shorten(run, self._run_bytes(connection))
        else:
            self._fresh &= ~run.bits
            peer.next = None
        retries = self._client.retries(
            peer.origin, self._outline.step, patience, self._all.on_retry
        )
        return Assignment(connection, run, retries, _now(), waits)

    def _give_back(self, mine: Assignment) -> None:
        """Want what is left of a run; the bad chunks of a member, from others."""
        run, peer = mine.run, mine.connection.peer
        if mine.is_refused or (peer.member and self._fresh):
            self._forget(run.assign(None, _ignore))
            self._fresh |= run.bits
            return
        if peer.member and (settled := run.want_bad_again()) is not None:
            self._forget(settled[0])
        self._begun.appendleft(run)

    def _shorten(self, run: ChunkRun, nbytes: int) -> None:
        """Give back the chunks of a run behind ``nbytes``, but not the first one."""
        for chunk in run.cut(nbytes):
            self._fresh |= 1 << chunk

    def _run_bytes(self, connection: Connection) -> int:
        """Return how many bytes a connection's next run should have.

        The only peer's runs are equal, two for each of its connections. Several peers
        get runs that take all of them about as long, and shorter ones towards the end.
        In a swarm, each run is one chunk.
        """
        if self._one_by_one or connection.peer.member:
            return 0
        if len(self._peers) == 1:
            chunks = -(-self._chunks // (2 * self._most))
            return min(chunks * self._outline.grid.chunk_bytes, _MAX_RUN)
        left = self._fresh.bit_count() * self._outline.grid.chunk_bytes
        connections = len(self._left()) * self._connections_of_each()
        return min(left // (2 * connections), int(connection.rate * _TURN))

    async def _fetch_run(self, mine: Assignment) -> bool:
        """Fetch what is left of a run; what does not come goes back into the queue.

        Returns:
            Whether a member was too busy.
        """
        connection, run, began = mine.connection, mine.run, mine.began
        peer = connection.peer
        self._assignments.append(mine)
        connection.is_busy = True

        try:
            with anyio.CancelScope() as mine.scope:
                while run.unverified:
                    try:
                        if run.chunk is not None:
                            await self._ranges.fetch(mine, partial(self._hear, mine))
                        if run.chunk is None:
                            self._want_bad_again(run, peer.origin)
                        continue
                    except AiockptError as error:
                        delay = self._delay_after(error, mine, started=began)
                        if delay is None:
                            raise
                    await self._client.pause(delay)
                    began = _now()
        except AiockptError as error:
            mine.is_refused = _is_refusal(error, peer)
            if not mine.is_refused:
                if advice(error) & (Advice.OURS | Advice.MISUSE):
                    raise
                self._drop(peer, error)
        finally:
            connection.is_busy = False
            self._assignments.remove(mine)
            if run.unverified:
                self._give_back(mine)
            mine.ended.set()
            self._news.notify()
            if self._is_done:
                for scope in self._joining.values():
                    scope.cancel()
        self._learn(mine, _now())
        return mine.is_refused

    def _learn(self, mine: Assignment, now: float) -> None:
        """Note how long a run took; drop a member from which much was stolen."""
        connection, peer, took = mine.connection, mine.connection.peer, now - mine.began
        if mine.is_refused and (mine.waits or not mine.is_stolen):
            # It said that it is busy, or may let the request wait because it is.
            rest = _REST * 2 ** min(max(peer.refusals - _PATIENT, 0), 16)
            rest = _LONG_REST if mine.is_stolen else min(rest, _LONG_REST)
            peer.refusals += 1
            connection.resting_until = now + rest
            return
        if mine.run.unverified:
            connection.rest(now)
            pair = (each for each in self._of_members if each.peer is peer)
            if mine.is_stolen and sum(each.steals for each in pair) >= _SLOW:
                why = f"{peer.origin.base_url} is much slower than other members"
                self._drop(peer, TransportError(why))
            return
        peer.refusals = 0
        connection.learn(mine.size, took)
        # Neither a small part of a chunk nor a long run tells how long a chunk takes.
        if 0.5 <= mine.size / self._outline.grid.chunk_bytes <= 1:
            self._pace.learn(took, now, is_member=bool(peer.member))

    def _delay_after(
        self, error: AiockptError, failed: Assignment, *, started: float
    ) -> float | None:
        """Return the seconds until the next attempt at a run; None to give it back."""
        if self._swarm is not None and len(failed.run) > 1:
            self._shorten(failed.run, 0)  # by now there may be a swarm
            failed.begin_again(_now())
        if _is_refusal(error, peer := failed.connection.peer):
            return None
        failed.retried += bool(peer.member)
        if failed.retried > _AGAIN:
            return None
        return failed.retries.decide(error, started=started)

    def _want_bad_again(self, run: ChunkRun, origin: Origin) -> None:
        """Want the bad chunks of a run again; raise what is wrong with the first."""
        if (settled := run.want_bad_again()) is not None:
            lost, error = settled
            error.url = origin.base_url
            self._forget(lost)
            raise error

    async def _steal(self, thief: Connection, victim: Assignment) -> bool:
        """Stop a much slower connection, which puts its run back into the queue."""
        same = victim.connection.peer is thief.peer
        why = f"another {'connection has' if same else 'peer takes'} it"
        loser = victim.connection.peer
        self._stop(victim, why, in_vain=bool(loser.member) and not loser.given)
        await victim.ended.wait()
        return False

    def _stop(self, victim: Assignment, why: str, *, in_vain: bool) -> None:
        if victim.is_stolen:
            return
        run, loser = victim.run, victim.connection.peer
        if in_vain and run.chunk is not None:
            self._stopped[run.chunk] += 1
            if self._stopped[run.chunk] >= _VAIN:
                self._vain |= 1 << run.chunk
        emit(
            TransferEvent(
                stop="retry",
                step=self._outline.step,
                peer=loser.origin.base_url,
                detail=f"too slow with chunk {run.chunk}; {why}",
            )
        )
        run.steals += 1
        victim.is_stolen = True
        assert victim.scope is not None
        victim.scope.cancel()

    def _hear(self, mine: Assignment, answer: Answer) -> None:
        """Learn that a peer answers; from a source, whether others receive the same."""
        mine.is_answered = True
        peer = mine.connection.peer
        if self._swarm is not None and not peer.member:
            self._swarm.hear(peer, answer)

    def _verified(self, peer: Peer, chunk: int) -> None:
        start, stop = self._outline.grid.range(chunk)
        peer.given += stop - start
        self._moved = _now()
        self._on_progress(0, 1)
        self._complete(chunk)
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
        if peer.member and isinstance(error, AuthenticationError | StepNotFoundError):
            # A member that has left knows neither the token nor the step.
            error = MemberLeftError(self._outline.step, url=peer.origin.base_url)
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


def _is_refusal(error: AiockptError, peer: Peer) -> bool:
    """Return whether a member cannot be asked now: it is busy, or this host is."""
    return bool(peer.member) and isinstance(error, PeerBusy | HostLimitError)


def _ignore(_: int) -> None:
    pass


def _now() -> float:
    return asyncio.get_running_loop().time()
