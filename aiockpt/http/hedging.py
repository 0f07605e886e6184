"""Fetches runs of chunks from one peer, and hedges the last ones against stragglers.

When nothing is left to assign, a lane that is free races one that is much slower than
its peers were: it asks for the rest of that run, too, over a connection of its own, and
drops what the straggler has until it is well ahead. Only then the straggler is stopped,
and once it has been, the new connection goes on where it was. So a run has one writer
at any time, and no byte that was received is lost. A race that is lost, since the peer
does not answer or is as slow again, costs some bytes: of each run a chunk at most.

What a peer is still staging is not hedged: there it is the peer that is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import anyio

from aiockpt.errors import AiockptError
from aiockpt.events import TransferEvent, emit
from aiockpt.http.board import Hand, Lane
from aiockpt.http.fetching import Body, ChunkFetch
from aiockpt.http.lookout import Lookout
from aiockpt.http.retrying import Retrier, backoff
from aiockpt.http.stretch import Part, Stretch
from aiockpt.runtime.tasks import News, together

__all__ = ["Hedging", "Races"]

_TICK = 0.05  # seconds after which a lane that is free looks again at the others
_PIECE = 64 << 10
_LEAD = 256 << 10  # more than what comes over connections that break at once


Settle: TypeAlias = Callable[[Hand, Hand | None], None]
"""Gets a run that a lane has let go, done or not, and who goes on with it, if any."""


@dataclass(eq=False, slots=True)
class _Claim:
    """A run while one lane fetches it, or tries to get it.

    Attributes:
        spare: Bytes of it that may come twice; none as long as it is not asked for.
        rival: Who tries to get it, and does when it is stopped.
        ended: Set when nothing is received for this claim any more.
    """

    hand: Hand
    retrier: Retrier
    settle: Settle
    spare: int = 0
    rival: _Claim | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def cede(self) -> None:
        """Stop it."""
        self.scope.cancel()
        await self.ended.wait()


class Hedging:
    """One fetch of chunks from one peer."""

    def __init__(self, fetch: ChunkFetch) -> None:
        self._fetch = fetch
        self._races = Races(fetch)
        self._left = 0
        self._news = News()

    def __repr__(self) -> str:
        return f"<Hedging left={self._left} {self._races!r}>"

    async def run(self, runs: Sequence[Sequence[Part]], *, workers: int) -> None:
        """Fetch all chunks, by at most ``workers`` requests at a time; call it once.

        The first chunk that fails for good cancels the others.
        """
        queue = iter(runs)
        self._left = len(runs)
        work = partial(self._work, queue)
        await together([work] * min(workers, len(runs)))
        assert not self._left, "a chunk was left out"

    async def _work(self, queue: Iterator[Sequence[Part]]) -> None:
        fetch, lane = self._fetch, Lane(0)
        self._races.lanes.append(lane)
        for parts in queue:
            stretch = Stretch(parts, on_verified=fetch.verified)
            hand = Hand(lane, parts, stretch, stretch.remaining, _now())
            with self._races.held(hand, Retrier(fetch.patience), self._settle):
                await self._races.fetch(hand)
        while self._left:
            await self._races.assist(lane, self._news)

    def _settle(self, hand: Hand, heir: Hand | None) -> None:
        """Count a run as fetched, unless another lane has got it."""
        if heir is None and hand.stretch.chunk is None:
            hand.lane.learn(hand.size, _now() - hand.started)
            self._left -= 1
            self._news.tell()


class Races:
    """The runs that lanes to one peer have in hand, and who races whom for them.

    Args:
        fetch: What the requests to the peer have in common.

    Attributes:
        lanes: Those whose speeds are compared.
    """

    def __init__(self, fetch: ChunkFetch) -> None:
        self._fetch = fetch
        self._lookout = Lookout()
        self.lanes = self._lookout.lanes
        self._claims: dict[Hand, _Claim] = {}

    def __repr__(self) -> str:
        return f"<Races hands={len(self._claims)}>"

    @contextmanager
    def held(self, hand: Hand, retrier: Retrier, settle: Settle) -> Iterator[None]:
        """Let a lane have a run in the block, which ends early if it is stopped."""
        with self._held(_Claim(hand, retrier, settle)) as self._claims[hand]:
            yield

    async def fetch(self, hand: Hand) -> None:
        """Fetch a run that is held; from now on others may race for it."""
        claim = self._claims[hand]
        claim.spare = self._fetch.outline.grid.chunk_bytes
        await self._finish(claim)

    def stop(self, hand: Hand) -> None:
        """Have a lane let go of its run, and nobody get it who races for it."""
        claim = self._claims[hand]
        if claim.rival is not None:
            claim.rival.scope.cancel()
            claim.rival = None
        claim.scope.cancel()

    async def assist(self, lane: Lane, news: News) -> None:
        """Race a straggler with a free lane; if there is none, wait for news a bit."""
        slow = self._straggler()
        if slow is None:
            await news.wait(_TICK)
        elif not await self._compete(lane, slow):
            lane.lost += 1
            await news.wait(backoff(lane.lost))

    @contextmanager
    def _held(self, claim: _Claim) -> Iterator[_Claim]:
        """Let go of a run after the block; if stopped, to the rival."""
        try:
            with claim.scope:
                yield claim
        finally:
            if self._claims.pop(claim.hand, None) is not None:
                heir = None
                if claim.rival is not None and claim.scope.cancelled_caught:
                    heir = self._take(claim, claim.rival)
                elif claim.rival is not None:
                    claim.rival.scope.cancel()
                claim.settle(claim.hand, heir)
            claim.ended.set()

    async def _finish(self, claim: _Claim) -> None:
        await self._fetch.fetch(claim.hand.stretch, claim.retrier)

    def _straggler(self) -> _Claim | None:
        now = _now()
        open_to = [
            hand
            for hand, claim in self._claims.items()
            if claim.rival is None
            and claim.spare > 0
            and claim.retrier.due <= now
            and not claim.scope.cancel_called
        ]
        hand = self._lookout.straggler(open_to, now)
        return None if hand is None else self._claims[hand]

    async def _compete(self, lane: Lane, old: _Claim) -> bool:
        """Try to get a run, and then fetch the rest of it; say whether it was got."""
        parts, stretch = old.hand.parts, old.hand.stretch
        mine = _Claim(Hand(lane, parts, stretch, 0, 0.0), old.retrier, old.settle)
        old.rival = mine
        with self._held(mine):
            try:
                await self._race(old, mine)
            except AiockptError as error:
                self._fetch.on_retry(error)
                if old.scope.cancel_called:  # nobody else would finish it
                    await old.ended.wait()
            finally:
                old.rival = None
            if mine.hand in self._claims:
                await self._finish(mine)
                return True
        return mine.scope.cancelled_caught

    async def _race(self, old: _Claim, mine: _Claim) -> None:
        async with self._fetch.ask(mine.hand.stretch) as body:
            assert body is not None, "what is staged is not hedged"
            lead = _Lead(body)
            if await lead.gain(old):
                await old.cede()
            # In its last moment it may have gone on, or have begun with a bad chunk.
            if mine.hand in self._claims and lead.trim():
                await body.receive(bytes(lead.data))

    def _take(self, old: _Claim, mine: _Claim) -> Hand:
        """Note that a run has got another owner, and how it is from here."""
        hand, fetch = mine.hand, self._fetch
        hand.size, hand.started = hand.stretch.remaining, _now()
        mine.spare = old.spare
        self._claims[hand] = mine
        step, peer = fetch.outline.step, fetch.source.base_url
        detail = f"too slow with chunk {hand.stretch.chunk}; another connection has it"
        emit(TransferEvent(stop="retry", step=step, peer=peer, detail=detail))
        return hand


class _Lead:
    """What a second request has brought, and the straggler has not yet."""

    def __init__(self, body: Body) -> None:
        self.data = bytearray()
        self._body = body
        self._at = body.start

    def trim(self) -> int:
        """Drop what the straggler has by now; return how many bytes are left."""
        lead = self._at - self._body.stretch.position
        if not self._body.fits or not 0 < lead <= len(self.data):
            lead = 0
        del self.data[: len(self.data) - lead]
        return lead

    async def gain(self, old: _Claim) -> bool:
        """Read until it is far enough ahead; return False if it is given up."""
        body, won = self._body, False
        enough = min(_LEAD, body.fetch.outline.grid.chunk_bytes // 2)
        try:
            while not won and body.fits and (most := old.spare - self._read):
                await self._read_on(most)
                wanted = min(enough, body.stop - body.stretch.position)
                won = 0 < wanted <= self.trim()
        finally:
            old.spare -= self._read - len(self.data) * won
        return won

    @property
    def _read(self) -> int:
        return self._at - self._body.start

    async def _read_on(self, most: int) -> None:
        piece = await self._body.answer.content.read(min(_PIECE, most))
        if not piece:
            raise ConnectionResetError("the body ended early")
        self.data += piece
        self._at += len(piece)


def _now() -> float:
    return asyncio.get_running_loop().time()
