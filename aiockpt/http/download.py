"""Downloads chunks from one peer, or from several that hold the same checkpoint.

Every connection of every peer takes the next run of chunks from one queue. When the
queue is empty, a free connection steals the run of a much slower one: that one is
stopped, and its run goes back into the queue. The same peer goes on from the last
byte that came. Another peer begins with the first byte of the chunk, so that a wrong
chunk is the fault of one peer. A peer that is wrong or gone is dropped; the download
succeeds as long as one is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import median

import anyio

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    LocalProtocolError,
    StagingError,
    TransportError,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.http.chunk_run import ChunkRun
from aiockpt.http.fetching import ChunkFetch
from aiockpt.http.protocol import Source
from aiockpt.http.retrying import Retrier
from aiockpt.runtime.tasks import News, together

__all__ = ["Assignment", "Connection", "Download", "Peer", "choose", "verdict"]

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

Join = Callable[["Peer"], Awaitable[None]]


@dataclass(eq=False, slots=True)
class Peer:
    """One source of a checkpoint.

    Attributes:
        source: Its address and token.
        chunks: The chunks that it holds; None for all of them.
        joined: Whether it is known to hold this checkpoint.
        given: Verified bytes that came from it, in the last download.
        error: Why it is not asked any more.
    """

    source: Source
    chunks: Container[int] | None = None
    joined: bool = False
    given: int = 0
    error: AiockptError | None = None

    def has(self, run: ChunkRun) -> bool:
        """Say whether it holds the first chunk of a run."""
        return self.chunks is None or run.chunk is None or run.chunk in self.chunks

    def drop(self, error: AiockptError, step: int) -> None:
        """Ask it no more. Only the first error counts."""
        if self.error is not None:
            return
        self.error = error
        emit(
            TransferEvent(
                stop="drop",
                step=step,
                peer=self.source.base_url,
                nbytes=self.given,
                detail=str(error),
                level=logging.WARNING,
            )
        )


def verdict(peers: Sequence[Peer]) -> AiockptError:
    """Return the error that says why no peer is left; the others are its notes.

    What one peer answered tells more than that another one said nothing.
    """
    failed = [(peer, peer.error) for peer in peers if peer.error is not None]
    answers = [error for _, error in failed if not isinstance(error, TransportError)]
    chosen = [*answers, *(error for _, error in failed)][0]
    for peer, error in failed:
        if error is not chosen:
            chosen.add_note(f"{peer.source.base_url} failed, too: {error}")
    return chosen


@dataclass(eq=False, slots=True)
class Connection:
    """One of the connections to a peer.

    Attributes:
        rate: Bytes per second of its last run; 0.0 before that.
        steals: How often a run was taken from it since its last whole one.
        resting_until: In loop time; it takes no run before.
    """

    peer: Peer
    fetch: ChunkFetch
    rate: float = 0.0
    steals: int = 0
    resting_until: float = 0.0

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
        retrier: Its attempts.
        scope: Ends it when it is stolen.
        stolen: Whether that has happened.
        ended: Set when nothing is received for it any more.
    """

    connection: Connection
    run: ChunkRun
    retrier: Retrier
    started: float
    scope: anyio.CancelScope | None = None
    stolen: bool = False
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

        What was before does not count: then it shared the line with others.
        """
        left = self.run.remaining
        if not again or self._watched < 0:
            self._watched = self._moved = now
            self._had = self._last = left
        elif left != self._last:
            self._last, self._moved = left, now

    def seconds_left(self, now: float) -> float:
        """Return how long it will take, at the pace since it is watched.

        A connection that is silent will probably be silent for as long again.
        """
        come, elapsed = self._had - self._last, now - self._watched
        pace = elapsed * self._last / come if come else elapsed
        return max(pace, now - self._moved)

    def is_early(self, now: float, seconds: float) -> bool:
        """Say whether it is too early to judge what takes another so many seconds."""
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
        vain = run.steals >= _VAIN or victim.retrier.due > now
        own = inf if vain or not rate else run.remaining / rate
    elif victim.connection.fetch.patience.silent_since is not None:
        return inf, 0.0
    else:
        own = run.unverified / rate if rate else _UNKNOWN
    if victim.is_early(now, own):
        return 0.0, inf
    return victim.seconds_left(now), _MUCH * own + _SLACK * 2**run.steals


class Download:
    """One download of chunks.

    Args:
        peers: Those that are left, with what the requests to each have in common.
        chunks: The numbers of the chunks.
        each: How many connections each peer gets.
        most: How many the only peer gets, also when the others were dropped.
        join: Awaited before a peer is asked; it raises unless that peer holds the
            checkpoint. None if all of them are known to.
    """

    def __init__(
        self,
        peers: Sequence[tuple[Peer, ChunkFetch]],
        chunks: Sequence[int],
        *,
        each: int,
        most: int,
        join: Join | None = None,
    ) -> None:
        self._peers = dict(peers)
        outline = peers[0][1].outline
        self._step, self._grid = outline.step, outline.grid
        try:
            whole = ChunkRun(outline, dict.fromkeys(chunks))
        except IndexError as error:
            raise LocalProtocolError(f"no such chunk: {error}") from None
        self._chunks = len(whole)
        self._queue = deque([whole] if self._chunks else [])
        self._assignments: list[Assignment] = []
        self._each, self._most = each, most
        self._connections: list[Connection] = []
        self._join = join
        self._news = News()
        self._joining: set[Peer] = set()
        self._scopes = {peer: anyio.CancelScope() for peer in self._peers}
        self._looked = 0.0
        self._set_alone()

    def __repr__(self) -> str:
        state = f"queue={len(self._queue)} assignments={len(self._assignments)}"
        return f"<Download peers={len(self._peers)} {state}>"

    async def run(self) -> None:
        """Download everything.

        If cancelled, nothing is written any more, and no connection is left.

        Raises:
            AiockptError: no peer is left; see `verdict`.
        """
        if not self._chunks:
            return
        try:
            await together([partial(self._ask, peer) for peer in self._peers])
        finally:
            for run in self._queue:  # it failed: the beginnings of chunks do not count
                self._forget(run.assign(None, _ignore))
        assert self._is_done, "a chunk was left out"

    @property
    def _is_done(self) -> bool:
        return not self._queue and not self._assignments

    def _left(self) -> list[Peer]:
        return [peer for peer in self._peers if peer.error is None]

    async def _ask(self, peer: Peer) -> None:
        """Ask one peer until everything has come, or the peer is dropped."""
        with self._scopes[peer]:
            try:
                if self._join is not None and not peer.joined:
                    self._joining.add(peer)
                    await self._join(peer)
            except (ClosedError, StagingError):
                raise  # not the peer's fault
            except AiockptError as error:
                self._drop(peer, error)
                return
            finally:
                self._joining.discard(peer)
            fetch = self._peers[peer]
            new = [Connection(peer, fetch) for _ in range(self._most)]
            self._connections += new
            work = [partial(self._work, each, n) for n, each in enumerate(new)]
            await together(work)

    async def _work(self, connection: Connection, number: int) -> None:
        peer = connection.peer
        while not self._is_done and peer.error is None:
            if number >= self._each and len(self._left()) > 1:
                await self._news.wait(None)  # for the other peers to be dropped
                continue
            match self._choose(connection):
                case ChunkRun() as run:
                    await self._fetch(connection, self._take(connection, run))
                case Assignment() as victim:
                    await self._steal(connection, victim)
                case None:
                    await self._news.wait(_TICK)

    def _choose(self, connection: Connection) -> ChunkRun | Assignment | None:
        now = _now()
        if not self._queue:
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
        return choose(connection, self._queue, self._assignments, rate=rate, now=now)

    def _take(self, connection: Connection, run: ChunkRun) -> ChunkRun:
        """Take a run, or its beginning, out of the queue."""
        peer = connection.peer
        self._forget(run.assign(peer, partial(self._verified, peer)))
        rest = run.split(min(self._share(connection), _MAX_RUN))
        at = self._queue.index(run)
        del self._queue[at]
        if rest is not None:
            self._queue.insert(at, rest)
        return run

    def _share(self, connection: Connection) -> int:
        """Return how many bytes a connection's next run should have.

        The only peer's runs are equal, two for each of its connections. Several peers
        get runs that take all of them about as long, and shorter ones towards the end.
        """
        if len(self._peers) == 1:
            return -(-self._chunks // (2 * self._most)) * self._grid.chunk_bytes
        left = sum(run.unverified for run in self._queue)
        peers = len(self._left())
        connections = peers * self._each if peers > 1 else self._most
        return min(left // (2 * connections), int(connection.rate * _TURN))

    async def _fetch(self, connection: Connection, run: ChunkRun) -> None:
        peer, started = connection.peer, _now()
        retrier, scope = Retrier(connection.fetch.patience), anyio.CancelScope()
        mine = Assignment(connection, run, retrier, started, scope)
        self._assignments.append(mine)
        try:
            with scope:
                await connection.fetch.fetch(run, mine.retrier)
        except (ClosedError, StagingError):
            raise  # not the peer's fault
        except AiockptError as error:
            self._drop(peer, error)
        finally:
            self._assignments.remove(mine)
            if run.unverified:
                self._queue.appendleft(run)
            mine.ended.set()
            self._news.tell()
            if self._is_done:
                self._stop_joining()
        if run.unverified:
            connection.rest(_now())
        else:
            connection.learn(mine.size, _now() - started)

    async def _steal(self, thief: Connection, victim: Assignment) -> None:
        """Stop a much slower connection, which puts its run back into the queue."""
        run, loser = victim.run, victim.connection.peer
        who = "connection has it" if loser is thief.peer else "peer takes it"
        emit(
            TransferEvent(
                stop="retry",
                step=self._step,
                peer=loser.source.base_url,
                detail=f"too slow with chunk {run.chunk}; another {who}",
            )
        )
        run.steals += 1
        victim.stolen = True
        assert victim.scope is not None
        victim.scope.cancel()
        await victim.ended.wait()

    def _stop_joining(self) -> None:
        """Let go of the peers whose answer is awaited still.

        Nobody else is cancelled: the traceback of a cancel is in a cycle with its
        task, and keeps the memory of the download until the collector runs.
        """
        for peer in self._joining:
            self._scopes[peer].cancel()

    def _verified(self, peer: Peer, chunk: int) -> None:
        start, stop = self._grid.range(chunk)
        peer.given += stop - start
        self._peers[peer].verified(chunk)

    def _forget(self, nbytes: int) -> None:
        if nbytes:
            next(iter(self._peers.values())).on_progress(-nbytes, 0)

    def _drop(self, peer: Peer, error: AiockptError) -> None:
        """Ask a peer no more.

        Raises:
            AiockptError: it was the last one.
        """
        if len(self._peers) == 1:
            peer.error = error  # so that its other connections stop
            raise error
        peer.drop(error, self._step)
        if not self._left():
            raise verdict(list(self._peers))
        self._set_alone()
        self._scopes[peer].cancel()
        self._news.tell()

    def _set_alone(self) -> None:
        """Have a peer that is one of several tell only one lie."""
        left = self._left()
        for peer in left:
            self._peers[peer].patience.alone = len(left) == 1


def _ignore(_: int) -> None:
    pass


def _now() -> float:
    return asyncio.get_running_loop().time()
