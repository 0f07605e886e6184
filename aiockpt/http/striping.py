"""Fetches the chunks of a checkpoint from several peers at once.

A chunk comes from one peer, whole, so one that is wrong says who has sent it. Who
fails for good is dropped, and the others fetch what it had in hand; the transfer goes
on while one is left. That one goes on with what it has in hand, and is treated as one
that was alone from the beginning: it gets all connections; its last runs are hedged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import anyio

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    IntegrityError,
    PeerUnreachableError,
    RemoteProtocolError,
    StagingError,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.http.board import Board, Hand, Lane
from aiockpt.http.fetching import ChunkFetch
from aiockpt.http.hedging import Races
from aiockpt.http.member import Members
from aiockpt.http.retrying import Patience, Retrier
from aiockpt.http.stretch import Part
from aiockpt.runtime.tasks import News, together

__all__ = ["Join", "Striping"]

_TICK = 0.05  # seconds after which a lane that is free looks again at the others

Join = Callable[[int], Awaitable[None]]


class Striping:
    """One fetch of chunks from those of ``members`` that are left.

    Args:
        members: The peers.
        fetches: What the requests to each of them have in common.
        parts: The chunks.
        lanes: How many runs are fetched from each of them at a time.
        most: How many from the only one that is left.
        join: Awaited before anything is fetched from one; it raises unless that one
            holds the same checkpoint.
    """

    def __init__(
        self,
        members: Members,
        fetches: Sequence[ChunkFetch],
        parts: Sequence[Part],
        *,
        lanes: int,
        most: int,
        join: Join,
    ) -> None:
        self._members = members
        self._fetches = fetches
        self._races = [Races(fetch) for fetch in fetches]
        self._step = fetches[0].outline.step
        self._board = Board(parts, on_verified=_counting(members, fetches))
        self._lanes, self._most = lanes, most
        self._join = join
        self._news = News()
        self._scope = anyio.CancelScope()
        self._scopes = [anyio.CancelScope() for _ in fetches]
        self._alone = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Striping {self._members!r} {self._board!r}>"

    async def run(self) -> None:
        """Fetch everything, which is a chunk at least.

        Raises:
            AiockptError: nobody is left; see `Members.verdict`.
        """
        left = self._left()
        with self._scope:
            await together([partial(self._serve, number) for number in left])
        assert self._board.done, "a chunk was left out"

    def _left(self) -> list[int]:
        """Return who is left; raise if nobody is."""
        left = self._members.left()
        if not left:
            raise self._members.verdict()
        if len(left) == 1:
            self._alone.set()
        return left

    async def _serve(self, number: int) -> None:
        """Fetch from one member until everything is done, or it is dropped."""
        with self._scopes[number]:
            with self._blaming(number):
                await self._join(number)
            if not self._members.has(number):
                return
            lanes = [Lane(number) for _ in range(self._most)]
            first, others = lanes[: self._lanes], lanes[self._lanes :]
            self._races[number].lanes += lanes
            self._board.lanes += first
            work = [partial(self._work, lane) for lane in first]
            await together([*work, *(partial(self._stand_by, lane) for lane in others)])

    async def _stand_by(self, lane: Lane) -> None:
        await self._alone.wait()
        if self._members.has(lane.peer):  # who is dropped may wake before it ends
            self._board.lanes.append(lane)
            await self._work(lane)

    async def _work(self, lane: Lane) -> None:
        while self._members.has(lane.peer):
            hand, reliefs = self._board.take(lane, _now()), lane.reliefs
            if hand is None:
                await self._assist(lane)
            else:
                await self._fetch(hand)
            if lane.reliefs > reliefs:
                await asyncio.sleep(lane.rest)

    async def _fetch(self, hand: Hand) -> None:
        number = hand.lane.peer
        with (
            self._races[number].held(hand, self._retrier(hand), self._settle),
            self._blaming(number),
        ):
            await self._races[number].fetch(hand)

    async def _assist(self, lane: Lane) -> None:
        """Look after those who are slow, or wait."""
        if self._board.is_left_to(lane.peer):
            with self._blaming(lane.peer):
                await self._races[lane.peer].assist(lane, self._news)
        else:
            self._relieve(lane)
            await self._news.wait(_TICK)

    def _settle(self, hand: Hand, heir: Hand | None) -> None:
        """Have the rest of what a lane had in hand fetched by others."""
        if heir is not None:
            self._board.pass_on(hand, heir)
            return
        in_vain = self._board.put_back(hand, _now())
        if in_vain:
            self._fetches[hand.lane.peer].on_progress(-in_vain, 0)
        if self._board.done:
            self._scope.cancel()
        self._news.tell()

    def _relieve(self, lane: Lane) -> None:
        """Take from a lane that is much slower than this one, which is free."""
        hand = self._board.slow_hand(lane, _now())
        if hand is not None:
            hand.relieved = True
            self._races[hand.lane.peer].stop(hand)
            peer = self._fetches[hand.lane.peer].source.base_url
            detail = f"too slow with chunk {hand.parts[0].chunk}; another peer takes it"
            emit(TransferEvent(stop="retry", step=self._step, peer=peer, detail=detail))

    @contextmanager
    def _blaming(self, number: int) -> Iterator[None]:
        """Use a member no more if its requests, in the block, fail for good.

        Raises:
            AiockptError: it was the last one.
        """
        try:
            yield
        except (ClosedError, StagingError):
            raise  # not the peer's fault
        except AiockptError as error:
            if not self._members.has(number):
                return  # another lane has said so
            self._members.drop(number, error, step=self._step)
            lanes = self._board.lanes
            self._board.lanes = [lane for lane in lanes if lane.peer != number]
            self._left()
            self._scopes[number].cancel()

    def _retrier(self, hand: Hand) -> Retrier:
        number = hand.lane.peer
        patience = self._fetches[number].patience
        return _Choosy(patience, hand, lambda: self._members.left() == [number])


class _Choosy(Retrier):
    """Does not ask again who has lied, as long as there are others."""

    def __init__(
        self, patience: Patience, hand: Hand, is_alone: Callable[[], bool]
    ) -> None:
        super().__init__(patience)
        self._hand = hand
        self._is_alone = is_alone

    def delay_after(
        self, error: AiockptError, *, started: float, now: float
    ) -> float | None:
        """See `Retrier`."""
        lied = isinstance(error, IntegrityError | RemoteProtocolError)
        if lied and not self._is_alone():
            return None
        if isinstance(error, PeerUnreachableError):
            self._hand.lose_peer()
        return super().delay_after(error, started=started, now=now)


def _counting(
    members: Members, fetches: Sequence[ChunkFetch]
) -> Callable[[int, int], None]:
    """Return what notes that a member has given a chunk."""
    # No method: the memory is free with the last name of it, and not when the
    # collector finds that nobody has it.
    grid = fetches[0].outline.grid

    def verified(number: int, chunk: int) -> None:
        start, stop = grid.range(chunk)
        members.given[number] += stop - start
        fetches[number].verified(chunk)

    return verified


def _now() -> float:
    return asyncio.get_running_loop().time()
