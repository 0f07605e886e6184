"""Who fetches what of a checkpoint that several peers hold; plain decisions.

Every peer has a few *lanes*, connections that each fetch a run of chunks at a time.
What is left is on the board, and a lane that is free takes the next run: the faster it
is, the more it takes, and the longer its runs are. When nothing is left, a lane that is
free relieves one that is much slower, stalled or dead of what it has in hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, ldexp

from aiockpt.http.stretch import MAX_RUN, Part, Stretch

__all__ = ["Board", "Hand", "Lane"]

_TURN = 0.25  # seconds that a run should take
_MUCH = 2.0  # so many times slower is much slower
_SLACK = 0.05  # seconds; what a change of hands may cost
_TELLING = 1 << 20  # bytes from which on a run tells how fast its lane is
_UNKNOWN = 0.5  # seconds for a run, for who has never fetched one
_REST = 0.1  # seconds after the first relief; they double with each one
_LONGEST_REST = 2.0


@dataclass(eq=False, slots=True)
class Lane:
    """One connection to a peer.

    Attributes:
        peer: The number of its peer.
        rate: Bytes per second of its last run; 0 before that.
        reliefs: How often it was relieved since.
        lost: How many races it lost; see `Races`.
    """

    peer: int
    rate: float = 0.0
    reliefs: int = 0
    lost: int = 0

    @property
    def rest(self) -> float:
        """For how many seconds it leaves the work to others after a relief."""
        return min(ldexp(_REST, self.reliefs - 1), _LONGEST_REST)

    def time_for(self, nbytes: int) -> float:
        """Return how long it needs for so many bytes."""
        return nbytes / self.rate if self.rate else _UNKNOWN

    def learn(self, nbytes: int, seconds: float) -> None:
        """Note how long a run took; a short one tells little, but more than none."""
        if nbytes >= _TELLING or not self.rate:
            self.rate = nbytes / max(seconds, 1e-6)


@dataclass(eq=False, slots=True)
class Hand:
    """A run that a lane is fetching; ``relieved`` once another is to fetch it."""

    lane: Lane
    parts: Sequence[Part]
    stretch: Stretch
    size: int
    started: float
    relieved: bool = False
    _come: int = 0
    _moved: float = 0.0
    _lost_at: int = -1

    def lose_peer(self) -> None:
        """Note that the peer cannot be reached; until bytes come again."""
        self._lost_at = self.size - self.stretch.remaining

    def time_left(self, now: float) -> float:
        """Return how long it is going to need, as far as one can see."""
        come, elapsed = self.size - self.stretch.remaining, now - self.started
        if come == self._lost_at:
            return inf
        if come != self._come or not self._moved:
            self._come, self._moved = come, now
        # Who is silent is likely to be so for as long again.
        silent = now - self._moved
        return max(elapsed * (self.size - come) / come if come else elapsed, silent)


class Board:
    """What is to be fetched of a checkpoint, and who has what in hand.

    Args:
        parts: The chunks.
        on_verified: Gets the numbers of the peer and of the chunk that it gave.

    Attributes:
        lanes: Those that fetch, or are free.
    """

    def __init__(
        self, parts: Iterable[Part], *, on_verified: Callable[[int, int], None]
    ) -> None:
        self.lanes: list[Lane] = []
        self._on_verified = on_verified
        self._todo = deque(parts)
        self._left = _nbytes(self._todo)
        self._hands: list[Hand] = []

    def __repr__(self) -> str:
        return f"<Board todo={len(self._todo)} hands={len(self._hands)}>"

    @property
    def done(self) -> bool:
        """Whether everything has been fetched."""
        return not self._todo and not self._hands

    def take(self, lane: Lane, now: float) -> Hand | None:
        """Return the next run, in the lane's hand; None if there is none."""
        if not self._todo:
            return None
        parts = self._next(self._span(lane))
        size = _nbytes(parts)
        self._left -= size
        stretch = Stretch(parts, partial(self._on_verified, lane.peer))
        hand = Hand(lane, parts, stretch, size, now)
        self._hands.append(hand)
        return hand

    def is_left_to(self, peer: int) -> bool:
        """Say whether nobody else fetches, or is about to."""
        at_work = {lane.peer for lane in self.lanes}
        return at_work | {hand.lane.peer for hand in self._hands} == {peer}

    def pass_on(self, hand: Hand, heir: Hand) -> None:
        """Note that another lane of the same peer goes on with a run."""
        self._hands[self._hands.index(hand)] = heir

    def put_back(self, hand: Hand, now: float) -> int:
        """Take a run from a lane; what it has not verified is to be fetched again.

        Returns:
            How many bytes came in vain.
        """
        self._hands.remove(hand)
        lane = hand.lane
        left, come = hand.stretch.leave()
        self._todo.extendleft(reversed(left))
        self._left += _nbytes(left)
        if left:
            lane.reliefs += hand.relieved
        else:
            lane.reliefs = 0
            lane.learn(hand.size, now - hand.started)
        return come

    def slow_hand(self, lane: Lane, now: float) -> Hand | None:
        """Return what a free lane would fetch much sooner than another peer's lane."""
        slow: Hand | None = None
        longest = 0.0
        for hand in self._hands:
            if hand.relieved or hand.lane.peer == lane.peer:
                continue
            left, own = hand.time_left(now), lane.time_for(hand.size)
            early = now - hand.started <= own and left < inf
            if left > max(_MUCH * own + _SLACK, longest) and not early:
                slow, longest = hand, left
        return slow

    def _span(self, lane: Lane) -> int:
        """Return how many bytes a lane's next run should have; it is a chunk at least.

        Runs become short towards the end, so that all lanes end at about the same time.
        """
        share = self._left // (2 * max(len(self.lanes), 1))
        return min(int(lane.rate * _TURN), share, MAX_RUN)

    def _next(self, span: int) -> list[Part]:
        todo = self._todo
        parts = [todo.popleft()]
        start = parts[0].start
        while todo and todo[0].start == parts[-1].stop and todo[0].stop - start <= span:
            parts.append(todo.popleft())
        return parts


def _nbytes(parts: Iterable[Part]) -> int:
    return sum(part.stop - part.start for part in parts)
