"""Decides which run of chunks a free connection of a download takes, and from whom.

Nothing here sends a request or touches memory, so the decisions can be tested as a
table.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from random import Random

import anyio

from aiockpt.http.chunk_run import ChunkRun
from aiockpt.http.peers import Peer
from aiockpt.http.retry import Patience, Retries
from aiockpt.http.swarm import average

_MUCH = 2.0  # a connection that needs so many times as long is much slower
_SLACK = 0.25  # seconds; a lost packet, or a loop that was busy, is not slowness
_GLANCE = 0.5  # seconds for which a connection is watched at most, if bytes come
_TELLING = 1 << 20  # bytes from which on a run tells how fast its connection is
_UNKNOWN = 0.5  # seconds for a run, for a peer that never brought one
_VAIN = 3  # steals of one run, from the same peer, between which no byte came
_REST = 0.1  # seconds that a connection rests after a steal; they double each time
_LONGEST_REST = 2.0


@dataclass(eq=False, slots=True)
class Connection:
    """One of the connections to a peer.

    Attributes:
        patience: With the peer; its connections share it.
        rate: Bytes per second of its last run; 0.0 before that.
        steals: How often a run was taken from it since its last whole one.
        resting_until: In loop time; it takes no run before.
        is_busy: Whether it is fetching a run.
    """

    peer: Peer
    patience: Patience
    rate: float = 0.0
    steals: int = 0
    resting_until: float = 0.0
    is_busy: bool = False

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
        began: When it was assigned, or cut short, in loop time.
        waits: Whether a member may let it wait until others are served.
        is_stolen: Whether it was stopped, so that another connection takes the run.
        is_answered: Whether the peer has begun to send.
        is_refused: Whether it was given up before the member had begun to send.
        retried: How often a member was asked again for the rest of the run.
        size: Its bytes at the beginning.
        scope: Ends it, once it has begun.
        ended: Set when nothing is received for it any more.
    """

    connection: Connection
    run: ChunkRun
    retries: Retries
    began: float = 0.0
    waits: bool = True
    is_stolen: bool = False
    is_answered: bool = False
    is_refused: bool = False
    retried: int = 0
    size: int = field(init=False)
    scope: anyio.CancelScope | None = field(default=None, init=False)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _watched: float = -1.0
    _moved: float = 0.0
    _had: int = 0
    _last: int = 0

    def __post_init__(self) -> None:
        self.size = self.run.remaining

    def begin_again(self, now: float) -> None:
        """Count only what is left of the run, after it was cut short."""
        self.began, self.size = now, self.run.remaining

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


@dataclass(slots=True)
class Pace:
    """How many seconds a single chunk takes on average; 0.0 before the first one.

    Attributes:
        of_members: From a member of the swarm.
        of_sources: From a peer with the whole checkpoint.
        last_from_member: When a member brought the last one, in loop time.
    """

    of_members: float = 0.0
    of_sources: float = 0.0
    last_from_member: float = 0.0

    def learn(self, took: float, now: float, *, is_member: bool) -> None:
        """Note how long a chunk took."""
        if is_member:
            self.last_from_member = now
            self.of_members = average(self.of_members, took)
        else:
            self.of_sources = average(self.of_sources, took)


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


def choose_member(
    connections: Iterable[Connection], wanted: int, *, now: float, chance: Random
) -> Connection | None:
    """Return the connection over which a member of a swarm is asked next.

    Members that have something wanted come first. Of those, the ones that were slow
    come last, and then the ones that are sending already.

    Args:
        connections: To the members.
        wanted: The chunks that nobody is fetching, as a bitmap.
        now: Loop time.
        chance: Decides between equal ones.

    Returns:
        The connection; a member that has nothing wanted may still steal. None if no
        connection is free.
    """
    known = [each for each in connections if each.peer.error is None]
    busy = Counter(each.peer for each in known if each.is_busy)
    free = [each for each in known if not each.is_busy and each.resting_until <= now]
    chance.shuffle(free)
    return min(
        free,
        key=lambda each: (
            not each.peer.have & wanted,
            each.steals,
            busy[each.peer],
        ),
        default=None,
    )


def _steal_at(
    free: Connection, victim: Assignment, rate: float, now: float
) -> tuple[float, float]:
    """Return the seconds that a run will take, and above how many it is stolen."""
    run = victim.run
    if run.chunk is None or victim.is_stolen or not free.peer.has(run):
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
