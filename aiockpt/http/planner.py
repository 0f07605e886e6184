"""Plans a download: which chunks are requested next, from whom, and what is stopped.

`Planner.next` returns what to do now. `Download` does it, and tells the planner what
became of it. Nothing here sends a request, waits or knows the time, so every decision
can be tested as a table, and a simulator can run the same planner.

Sources and members of a swarm are peers alike. A source holds every chunk; a member
holds some, and may be too busy. While others need chunks, too, every request is for one
chunk. Otherwise a request is for a run of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from operator import itemgetter
from random import Random
from typing import NamedTuple

from aiockpt.errors import LocalProtocolError
from aiockpt.format.manifest import Outline
from aiockpt.http.chunk_run import ChunkRun, bits_of
from aiockpt.http.peers import ALL, Peer
from aiockpt.http.rarest import MemberRules, next_chunk, source_chunk
from aiockpt.http.retry import Liveness
from aiockpt.http.tuning import PeerLimits, Tuning, Usual


@dataclass(eq=False, slots=True)
class _ObservedRate:
    """How fast the bytes of an assignment come, since the first look at them.

    Before that look, the connection shared the line with others.

    Attributes:
        since: When the first look was; None before it.
        moved: When bytes had last come.
        left_at_first: Bytes that were still to come at the first look.
        left: Bytes that were still to come at the last look.
    """

    since: float | None = None
    moved: float = 0.0
    left_at_first: int = 0
    left: int = 0

    def look(self, left: int, now: float, *, again: bool) -> None:
        """Note how many bytes are left; ``again`` if earlier looks still count."""
        if not again or self.since is None:
            self.since = self.moved = now
            self.left_at_first = self.left = left
        elif left != self.left:
            self.left, self.moved = left, now

    def elapsed(self, now: float) -> float:
        """Return the seconds since the first look."""
        return 0.0 if self.since is None else now - self.since

    def seconds_left(self, now: float) -> float:
        """Return the estimated seconds left, at the rate since the first look.

        A connection that is silent will probably be silent for as long again.
        """
        come, elapsed = self.left_at_first - self.left, self.elapsed(now)
        left = elapsed * self.left / come if come else elapsed
        return max(left, now - self.moved)


@dataclass(eq=False, slots=True)
class Assignment:
    """A run to fetch from a peer.

    Attributes:
        connection: The connection that fetches the run.
        began: When it began, or was cut short.
        may_wait: Whether the peer may let the request wait until others are served.
        turn: How many members in turn were too busy before this one.
        size: Its bytes when it began.
        failures: How many attempts failed.
        due: When the next attempt begins; 0.0 before the first retry.
        is_stopped: Whether it was stopped, so that another connection takes the run.
        is_answered: Whether the peer has begun to send.
        thief: The connection that waits for its end, to take over the run.
        rate: How fast its bytes have come since the planner began to look.
    """

    connection: _Connection
    run: ChunkRun
    began: float
    may_wait: bool = True
    turn: int = 0
    size: int = 0
    failures: int = 0
    due: float = 0.0
    is_stopped: bool = False
    is_answered: bool = False
    thief: _Connection | None = None
    rate: _ObservedRate = field(default_factory=_ObservedRate)

    @property
    def peer(self) -> Peer:
        """The peer that is asked."""
        return self.connection.state.peer

    @property
    def liveness(self) -> Liveness:
        """Whether the peer is alive, by all its assignments."""
        return self.connection.state.liveness


class Stop(NamedTuple):
    """An assignment to stop, because others can bring its run sooner."""

    assignment: Assignment
    why: str


class Dismiss(NamedTuple):
    """A member that is asked no more, because it is much slower than others."""

    peer: Peer


class Rest(NamedTuple):
    """There is nothing to do until then, unless something happens before."""

    until: float


@dataclass(eq=False, slots=True)
class _Connection:
    """One of the connections to a peer.

    Attributes:
        steals: How often a run was taken from it since its last whole one.
        resting_until: It takes no run before.
        is_busy: Whether it fetches a run, or waits for one that it takes over.
    """

    state: _PeerState
    steals: int = 0
    resting_until: float = 0.0
    is_busy: bool = False

    def is_free(self, now: float) -> bool:
        """Return whether it can take a run."""
        return not self.is_busy and now >= self.resting_until


@dataclass(eq=False, slots=True)
class _PeerState:
    """What the planner knows of a peer.

    Attributes:
        is_member: Whether it is a member of a swarm.
        usual: How long its runs take.
        limits: The limits for peers of its kind.
        refusals: How often it was too busy since its last whole run.
        is_too_slow: Whether it should be dropped.
    """

    peer: Peer
    liveness: Liveness
    is_member: bool
    usual: Usual
    limits: PeerLimits
    connections: list[_Connection] = field(default_factory=list)
    refusals: int = 0
    is_too_slow: bool = False

    def free(self, now: float, most: int) -> _Connection | None:
        """Return the best of its first connections that can take a run."""
        free = (each for each in self.connections[:most] if each.is_free(now))
        return min(free, key=lambda each: each.steals, default=None)

    def is_much_slower(self) -> bool:
        """Return whether too many runs were taken from it in a row."""
        return sum(each.steals for each in self.connections) >= self.limits.steals


class _Work:
    """The chunks that nobody is fetching.

    Attributes:
        chunk_bytes: Size of a chunk.
        count: How many chunks the download has.
        fresh: Those that nobody has begun, as a bitmap.
        begun: Runs that were begun and given back.
    """

    def __init__(
        self, outline: Outline, chunks: Iterable[int], make_run: _MakeRun
    ) -> None:
        wanted = {*chunks}
        for chunk in (max(wanted, default=0), min(wanted, default=0)):
            if wanted and not 0 <= chunk < len(outline.grid):
                raise LocalProtocolError(
                    f"no such chunk: chunk {chunk} of {len(outline.grid)}"
                )
        self._make, self.chunk_bytes = make_run, outline.grid.chunk_bytes
        self.fresh = bits_of(wanted)
        self.count = len(wanted)
        self.begun = deque[ChunkRun]()

    def __bool__(self) -> bool:
        return bool(self.fresh or self.begun)

    def first_run(self, wanted: int, nbytes: int) -> ChunkRun | None:
        """Return the first consecutive chunks of ``wanted``, one at least."""
        if not wanted:
            return None
        first = (wanted & -wanted).bit_length() - 1
        missing = ~(wanted >> first)
        consecutive = (missing & -missing).bit_length() - 1
        most = max(nbytes // self.chunk_bytes, 1)
        return self._make(range(first, first + min(consecutive, most)))

    def run_of(self, chunk: int | None) -> ChunkRun | None:
        """Return a run of one fresh chunk."""
        return None if chunk is None else self._make([chunk])

    def take(self, run: ChunkRun, nbytes: int) -> bool:
        """Take a run out of what is wanted; return whether it is fresh.

        One that was begun is cut to ``nbytes``.
        """
        if run in self.begun:
            self.begun.remove(run)
            self.cut(run, nbytes)
            return False
        self.fresh &= ~run.bits
        return True

    def cut(self, run: ChunkRun, nbytes: int) -> None:
        """Want the chunks of a run behind ``nbytes`` afresh, but not its first one."""
        for chunk in run.cut(nbytes):
            self.fresh |= 1 << chunk


_MakeRun = Callable[[Iterable[int]], ChunkRun]


class _View(NamedTuple):
    """The facts of one decision, all of one moment.

    Attributes:
        sources: The sources that are known to hold the checkpoint.
        members: The members that have said which chunks they hold.
        is_one_by_one: Whether each request is for one chunk: others need chunks, too.
        for_members: The chunks that may be requested from members.
        usual: Seconds that a chunk takes, of the kind of peers that is faster.
        connections: How many connections each source may use.
    """

    now: float
    sources: list[_PeerState]
    members: list[_PeerState]
    is_one_by_one: bool
    for_members: int
    usual: float | None
    connections: int

    def may_bring(self, state: _PeerState, run: ChunkRun) -> bool:
        """Return whether a peer may be asked for the first chunk of a run."""
        if not state.peer.has(run):
            return False
        if not state.is_member or run.chunk is None:
            return True
        return bool(self.for_members >> run.chunk & 1)


class Planner:
    """Decides what one download does next.

    Times are in seconds, by any clock.

    Args:
        outline: Of the checkpoint.
        chunks: The numbers of the chunks that are wanted.
        connections: Most connections to a single peer.
        now: When the download begins.
        chance: Decides between equal chunks and peers.
        make_run: Makes a run of chunks, which bytes arrive for.

    Attributes:
        tuning: The numbers that its decisions use.
        may_share: Whether members of a swarm may be added later.
        has_deltas: Whether the receiver can apply deltas, which sources with a base of
            them send. They are shorter than the chunks of members.
        members: The rules for members of a swarm.

    Raises:
        LocalProtocolError: the checkpoint has no such chunk.
    """

    def __init__(
        self,
        outline: Outline,
        chunks: Iterable[int],
        *,
        connections: int,
        now: float,
        chance: Random | None = None,
        make_run: _MakeRun | None = None,
        tuning: Tuning = Tuning(),  # noqa: B008 - frozen
    ) -> None:
        self._source_connections = connections
        self._work = _Work(outline, chunks, make_run or partial(ChunkRun, outline))
        self._chance = chance or Random()  # noqa: S311 - spreads load, guards nothing
        self.tuning, self.members = tuning, MemberRules(tuning.members, now)
        self.may_share = self.has_deltas = False
        self._states: dict[Peer, _PeerState] = {}
        self._gone: list[Peer] = []
        self._assignments: list[Assignment] = []
        self._usual = {kind: Usual(self._work.chunk_bytes) for kind in (True, False)}
        self._claims = deque[_Connection]()  # those whose victims have ended
        self._looked = self._moved = now

    # ------------------------------------------------------------------- questions

    def is_done(self) -> bool:
        """Whether every chunk has come."""
        return not self._work and not self._assignments

    def is_stuck(self, now: float, silence: float) -> bool:
        """Return whether no source is left, and members bring nothing any more.

        Args:
            now: Loop time.
            silence: Seconds without a chunk that are too many.
        """
        waited = now - self._moved > silence
        return waited and not self._sources() and not self._assignments

    @property
    def peers(self) -> list[Peer]:
        """All peers that were ever added."""
        return [*self._states, *self._gone]

    @property
    def unfinished(self) -> list[ChunkRun]:
        """The runs that were begun, and have not come whole."""
        return [*self._work.begun, *(each.run for each in self._assignments)]

    @property
    def unknown(self) -> int:
        """The chunks that are wanted and that no member has, as a bitmap."""
        missing = self._work.fresh
        for run in self.unfinished:
            missing |= run.bits
        for peer in self._states:
            missing &= ~peer.have if peer.member and peer.has_checkpoint else ALL
        return missing

    @property
    def fresh(self) -> int:
        """The chunks that nobody has begun, as a bitmap."""
        return self._work.fresh

    def is_last(self, peer: Peer) -> bool:
        """Return whether nobody else can bring chunks."""
        others = (each for each in self._states if each is not peer)
        return not any(each.has_checkpoint or not each.member for each in others)

    # --------------------------------------------------------------- what happened

    def add(self, peer: Peer, liveness: Liveness) -> None:
        """Ask a peer, too, once it is known to have the checkpoint."""
        is_member, rules = bool(peer.member), self.tuning.members
        limits = rules.limits if is_member else PeerLimits()
        usual = Usual(self._work.chunk_bytes)
        state = _PeerState(peer, liveness, is_member, usual, limits)
        most = rules.requests_per_member if is_member else self._source_connections
        state.connections = [_Connection(state) for _ in range(most)]
        self._states[peer] = state
        self._trust()

    def drop(self, peer: Peer) -> list[Assignment]:
        """Ask a peer no more; return its assignments, which end now."""
        del self._states[peer]
        self._gone.append(peer)
        self._trust()
        return [each for each in self._assignments if each.peer is peer]

    def began(self, mine: Assignment, now: float) -> None:
        """Note that a run, or what is left of it, begins now."""
        mine.began, mine.size = now, mine.run.remaining

    def verified(self, now: float) -> None:
        """Note that a chunk has come."""
        self._moved = now

    def broke(self, mine: Assignment, now: float) -> bool:
        """Note that an attempt failed; return whether the peer may be asked again."""
        if self.may_share and len(mine.run) > 1:
            self._work.cut(mine.run, 0)  # by now there may be a swarm
            self.began(mine, now)
        mine.failures += 1
        return mine.failures <= mine.connection.state.limits.resumes

    def ended(self, mine: Assignment, now: float, *, was_refused: bool) -> int:
        """Note that an assignment has ended, and want what is left of its run.

        Args:
            mine: The assignment.
            now: The time.
            was_refused: Whether the member was too busy.

        Returns:
            How many bytes of it have to come once more.
        """
        connection, run, state = mine.connection, mine.run, mine.connection.state
        if mine.is_stopped and not mine.is_answered and mine.thief is None:
            was_refused = bool(run.unverified)  # it may have let the request wait
        self._assignments.remove(mine)
        connection.is_busy = False
        if state.is_member:
            self.members.end_turn(mine.turn, was_refused=was_refused)
        if (thief := mine.thief) is not None:
            thief.is_busy = False
            if thief.state.is_member:
                self.members.turns.append(0)
            self._claims.append(thief)
        lost = self._give_back(mine, was_refused=was_refused) if run.unverified else 0
        if was_refused and (mine.may_wait or not mine.is_stopped):
            rests = self.tuning.members.rest_after_refusal
            rest = rests.longest_s if mine.is_stopped else rests.seconds(state.refusals)
            state.refusals += 1
            connection.resting_until = now + rest
        elif run.unverified:
            rest = self.tuning.rest_after_steal.seconds(connection.steals)
            connection.resting_until = now + rest
            connection.steals += 1
            state.is_too_slow = mine.is_stopped and state.is_much_slower()
        else:
            connection.steals = state.refusals = 0
            for usual in (state.usual, self._usual[state.is_member]):
                usual.learn(mine.size, now - mine.began)
            if state.is_member:
                self.members.brought(now)
        return lost

    def _give_back(self, mine: Assignment, *, was_refused: bool) -> int:
        """Want what is left of a run; the bad chunks of a member, from others."""
        run, is_member = mine.run, mine.connection.state.is_member
        if was_refused or (is_member and self._work.fresh):
            lost = run.assign(None)
            self._work.fresh |= run.bits
            return lost
        settled = run.want_bad_again() if is_member else None
        self._work.begun.appendleft(run)
        return settled[0] if settled else 0

    # ---------------------------------------------------------------- what to do

    def next(self, now: float) -> Assignment | Stop | Dismiss | Rest:
        """Decide what to do now, and assume that the caller does it.

        Returns:
            A run to fetch, an assignment to stop, a peer to drop, or until when to
            rest.
        """
        for state in self._states.values():
            if state.is_too_slow:
                return Dismiss(state.peer)
        view = self._view(now)
        if (stop := self._slow_request(view)) is not None:
            return stop
        if view.is_one_by_one or not self._work:  # so runs may be stolen
            again = now - self._looked <= self.tuning.late_s
            self._looked = now
            for each in self._assignments:
                each.rate.look(each.run.remaining, now, again=again)
        for connection in self._free(view):
            if (run := self._run_for(connection.state, view)) is not None:
                return self._take(connection, run, view)
            if (victim := self._victim_of(connection.state, view)) is not None:
                return self._steal(victim, connection)
        return Rest(self._look_at(view))

    def _view(self, now: float) -> _View:
        states, sources = self._states.values(), self._sources()
        holders = [each for each in states if each.peer.has_checkpoint]
        members = [each for each in holders if each.is_member]
        ready = [each for each in sources if each.peer.has_checkpoint]
        is_known = len(states) > len(sources)  # one member, at least
        is_shared = is_known or now < self.members.hope_until
        one_by_one = is_shared and not self.gets_deltas
        usual = min(self._usual_seconds(), default=None)
        most, count = self._source_connections, len(sources) + len(members)
        count += sum(not peer.member for peer in self._gone)
        connections = max(
            1, min(most, self.tuning.max_connections * most // max(count, 1))
        )
        if one_by_one and not is_known and not any(each.member for each in self._gone):
            connections = 1  # a second one would mostly bring what others fetch, too
        elif len(sources) == 1 and (
            not members or self.members.are_useless(usual, now)
        ):
            connections = most
        for_members = ~self.members.reserved if ready else ALL
        return _View(now, ready, members, one_by_one, for_members, usual, connections)

    def _free(self, view: _View) -> Iterator[_Connection]:
        """Yield a free connection to each peer that may get a request.

        Connections that wait for a run to take over come first. Then come sources, the
        fast ones first. Then come members: first those that hold a wanted chunk, then
        those from which no run was stolen, then those that send the least.
        """
        now = view.now
        while self._claims:
            claim = self._claims.popleft()
            if claim.state.peer in self._states and claim.is_free(now):
                yield claim
        fast = sorted(view.sources, key=lambda each: each.usual.seconds() or 0.0)
        for state in fast:
            if (connection := state.free(now, view.connections)) is not None:
                yield connection
        if not self.members.turns:
            return
        wanted = self._work.fresh
        for run in self._work.begun:
            wanted |= run.bits & -run.bits
        wanted &= view.for_members
        found = []
        for state in view.members:
            if (connection := state.free(now, len(state.connections))) is not None:
                busy = sum(each.is_busy for each in state.connections)
                lacks = not state.peer.have & wanted
                order = lacks, connection.steals, busy, self._chance.random()
                found.append((order, connection))
        for _, connection in sorted(found, key=itemgetter(0)):
            yield connection

    def _run_for(self, state: _PeerState, view: _View) -> ChunkRun | None:
        """Return a run that was given back, else one of fresh chunks."""
        peer, work = state.peer, self._work
        for run in work.begun:
            if view.may_bring(state, run):
                return run
        if not (wanted := work.fresh & peer.have):
            return None
        if not view.is_one_by_one and not state.is_member:
            return work.first_run(wanted, self._run_bytes(state, view))
        have = [each.peer.have for each in view.members]
        if state.is_member:
            wanted &= view.for_members
            return work.run_of(next_chunk(wanted, have, self._chance))
        if reserved := wanted & ~view.for_members:
            return work.run_of(next_chunk(reserved, (), self._chance))
        offer = any(work.fresh & each for each in have)
        late = self.members.are_late(offer=offer, usual=view.usual, now=view.now)
        if view.usual is not None and self._usual[False].seconds() is None:
            have = []  # so that it is known how fast the source is
        chunk = source_chunk(
            peer.next, wanted, have, are_late=late, chance=self._chance
        )
        return work.run_of(chunk)

    def _victim_of(self, state: _PeerState, view: _View) -> Assignment | None:
        """Return the slowest assignment, if a peer would bring its run much sooner."""
        if view.is_one_by_one and self._work.fresh:
            return None  # before the end, there is something else to request
        if state.is_member and state.usual.seconds() is None:
            return None  # it may be silent on purpose
        slowest, longest = None, 0.0
        for each in self._assignments:
            if each.run.chunk is None or each.is_stopped:
                continue
            if not view.may_bring(state, each.run):
                continue
            left = self._seconds_left_if_slow(each, state, view.now)
            if left > longest:
                slowest, longest = each, left
        return slowest

    def _seconds_left_if_slow(
        self, victim: Assignment, thief: _PeerState, now: float
    ) -> float:
        """Return the estimated seconds left of a slow run; 0.0 of any other."""
        run, tuning = victim.run, self.tuning
        if victim.connection.state is thief:
            in_vain = run.steals >= tuning.steals_by_same_peer or victim.due > now
            usual = None if in_vain else thief.usual.seconds(run.remaining)
        elif victim.liveness.silent_since is not None:
            return inf
        else:
            usual = thief.usual.seconds(run.unverified)
            usual = tuning.unknown_run_s if usual is None else usual
        watch = tuning.watch_s if usual is None else min(usual, tuning.watch_s)
        left = victim.rate.seconds_left(now)
        is_slow = left > tuning.slow_run.seconds(usual, run.steals)
        return left if is_slow and victim.rate.elapsed(now) > watch else 0.0

    def _slow_request(self, view: _View) -> Stop | None:
        """Return a request to stop, because it takes very long."""
        usual = max(self._usual_seconds(), default=None)
        for each in self._assignments:
            state, run = each.connection.state, each.run
            limit = state.limits.slow_request.seconds(usual)
            if each.is_stopped or view.now - each.began <= limit:
                continue
            others = (one for one in (*view.sources, *view.members) if one is not state)
            if run.chunk is not None and any(one.peer.has(run) for one in others):
                return self._stop(each, "others can send it", in_vain=True)
        return None

    def _take(self, connection: _Connection, run: ChunkRun, view: _View) -> Assignment:
        state, may_wait, turn = connection.state, True, 0
        connection.is_busy = True
        if self._work.take(run, self._run_bytes(state, view)):
            state.peer.next = None
        if state.is_member:
            turn = self.members.turns.pop()
            may_wait = self.members.may_wait(turn)
        taken = Assignment(connection, run, view.now, may_wait, turn)
        self._assignments.append(taken)
        return taken

    def _steal(self, victim: Assignment, thief: _Connection) -> Stop:
        loser = victim.connection.state
        victim.thief, thief.is_busy = thief, True
        if thief.state.is_member:
            self.members.turns.pop()
        same = loser is thief.state
        why = f"another {'connection has' if same else 'peer takes'} it"
        return self._stop(victim, why, in_vain=loser.is_member and not loser.peer.given)

    def _stop(self, victim: Assignment, why: str, *, in_vain: bool) -> Stop:
        if in_vain and victim.run.chunk is not None:
            self.members.stopped(victim.run.chunk)
        victim.run.steals += 1
        victim.is_stopped = True
        return Stop(victim, why)

    # -------------------------------------------------------------------- numbers

    @property
    def gets_deltas(self) -> bool:
        """Whether a source may send deltas instead of chunks."""
        return self.has_deltas and any(each.peer.delta_base for each in self._sources())

    def _sources(self) -> list[_PeerState]:
        return [each for each in self._states.values() if not each.is_member]

    def _usual_seconds(self) -> list[float]:
        """Return how long a chunk takes, of each kind of peers that has brought one."""
        found = (each.seconds(self._work.chunk_bytes) for each in self._usual.values())
        return [each for each in found if each is not None]

    def _run_bytes(self, state: _PeerState, view: _View) -> int:
        """Return how many bytes a peer's next run should have.

        The only source's runs are equal, two for each of its connections. Several
        sources get runs that take all of them about as long, and shorter ones towards
        the end. While others need chunks, too, each run is one chunk.
        """
        if view.is_one_by_one or state.is_member:
            return 0
        chunk_bytes = self._work.chunk_bytes
        if sum(not peer.member for peer in self.peers) == 1:
            chunks = -(-self._work.count // (2 * self._source_connections))
            return min(chunks * chunk_bytes, self.tuning.max_run_bytes)
        left = self._work.fresh.bit_count() * chunk_bytes
        connections = len(self._sources()) * view.connections
        seconds = state.usual.seconds(chunk_bytes)
        mine = chunk_bytes * self.tuning.run_s / seconds if seconds else 0
        return min(left // (2 * connections), int(mine))

    def _trust(self) -> None:
        """Trust a peer that is one of several only until its first wrong chunk."""
        is_alone = len(self._sources()) == 1
        for state in self._states.values():
            state.liveness.alone = is_alone and not state.is_member

    def _look_at(self, view: _View) -> float:
        """Return when to decide anew, if nothing happens before."""
        look = view.now + self.tuning.look_s
        until = look if view.is_one_by_one else inf
        for state in (*view.sources, *(view.members if self.members.turns else ())):
            most = len(state.connections) if state.is_member else view.connections
            for each in state.connections[:most]:
                if each.resting_until > view.now and not each.is_busy:
                    until = min(until, each.resting_until)
                elif self._assignments and not each.is_busy:
                    until = min(until, look)
        return until
