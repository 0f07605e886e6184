"""Fetches the chunks of a checkpoint from several peers at once.

A chunk comes from one peer, whole, so one that is wrong says who has sent it. Who
fails for good is dropped, and the others fetch what it had in hand; the transfer goes
on while one is left, which is then treated as one that was alone from the beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio

from aiockpt._tasks import News, together
from aiockpt.errors import (
    AiockptError,
    ClosedError,
    IntegrityError,
    PeerUnreachableError,
    RemoteProtocolError,
)
from aiockpt.http.board import Board, Hand, Lane
from aiockpt.http.fetching import ChunkFetch
from aiockpt.http.member import Members
from aiockpt.http.retrying import Patience, Retrier
from aiockpt.http.stretch import Part
from aiockpt.observe import TransferEvent, emit

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
        join: Join,
    ) -> None:
        self._members = members
        self._fetches = fetches
        self._step = fetches[0].outline.step
        self._board = Board(parts, on_verified=fetches[0].verified)
        self._lanes = lanes
        self._join = join
        self._news = News()
        self._scope = anyio.CancelScope()
        self._scopes = [anyio.CancelScope() for _ in fetches]
        self._running: dict[Hand, anyio.CancelScope] = {}

    def __repr__(self) -> str:
        return f"<Striping {self._members!r} {self._board!r}>"

    async def run(self) -> None:
        """Fetch everything, which is a chunk at least.

        Raises:
            AiockptError: nobody is left; see `Members.verdict`.
        """
        left = self._members.left()
        if not left:
            raise self._members.verdict()
        with self._scope:
            await together([partial(self._serve, number) for number in left])
        assert self._board.done, "a chunk was left out"

    async def _serve(self, number: int) -> None:
        """Fetch from one member until everything is done, or it is dropped."""
        with self._scopes[number]:
            try:
                await self._join(number)
            except ClosedError:
                raise
            except AiockptError as error:
                self._drop(number, error)
                return
            lanes = [Lane(number) for _ in range(self._lanes)]
            self._board.lanes += lanes
            await together([partial(self._work, lane) for lane in lanes])

    async def _work(self, lane: Lane) -> None:
        while self._members.has(lane.peer):
            hand = self._board.take(lane, _now())
            if hand is None:
                self._relieve(lane)
                await self._news.wait(_TICK)
                continue
            try:
                with anyio.CancelScope() as self._running[hand]:
                    await self._fetch(hand)
            finally:
                self._settle(hand)
            if lane.reliefs:
                await asyncio.sleep(lane.rest)

    async def _fetch(self, hand: Hand) -> None:
        number = hand.lane.peer
        fetch = self._fetches[number]
        await fetch.have_ready(hand.parts)
        try:
            await fetch.fetch(hand.stretch, self._retrier(hand))
        except ClosedError:
            raise
        except AiockptError as error:
            self._drop(number, error)

    def _settle(self, hand: Hand) -> None:
        """Count what a lane has brought, and have the rest fetched by others."""
        number = hand.lane.peer
        del self._running[hand]
        nbytes, in_vain = self._board.put_back(hand, _now())
        self._members.given[number] += nbytes
        if in_vain:
            self._fetches[number].on_progress(-in_vain, 0)
        if self._board.done:
            self._scope.cancel()
        self._news.tell()

    def _relieve(self, lane: Lane) -> None:
        """Take from a lane that is much slower than this one, which is free."""
        hand = self._board.slow_hand(lane, _now())
        if hand is not None:
            hand.relieved = True
            self._running[hand].cancel()
            peer = self._fetches[hand.lane.peer].source.base_url
            detail = f"too slow with chunk {hand.parts[0].chunk}; another peer takes it"
            emit(TransferEvent(stop="retry", step=self._step, peer=peer, detail=detail))

    def _drop(self, number: int, error: AiockptError) -> None:
        """Use a member no more.

        Raises:
            AiockptError: it was the last one.
        """
        if not self._members.has(number):
            return  # another lane has said so
        self._members.drop(number, error, step=self._step)
        self._board.lanes = [each for each in self._board.lanes if each.peer != number]
        if not self._members.left():
            raise self._members.verdict()
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


def _now() -> float:
    return asyncio.get_running_loop().time()
