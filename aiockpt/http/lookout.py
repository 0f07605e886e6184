"""Who is a straggler among the lanes that fetch from one peer; plain decisions.

A straggler goes on at less than half the speed that the lanes of its transfer had. So
lanes that are equally slow have none. Judged is what happens while a lane is free: one
that was slow as long as it shared the line with the others may be fast without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from aiockpt.http.board import Hand, Lane

__all__ = ["Lookout"]

_MUCH = 2.0  # so many times slower is a straggler
_SLACK = 0.25  # seconds; a lost packet, or a loop that was busy, is none
_GLANCE = 0.5  # seconds for which one is watched at most, if bytes come
_BUSY = 0.25  # seconds between two looks; if it takes longer, it is this process


class Lookout:
    """What was seen of the lanes of one transfer.

    Attributes:
        lanes: All of them.
    """

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self._looks: dict[Hand, Hand] = {}
        self._looked = 0.0

    def __repr__(self) -> str:
        return f"<Lookout lanes={len(self.lanes)} watched={len(self._looks)}>"

    def straggler(self, hands: Iterable[Hand], now: float) -> Hand | None:
        """Return which of these a free lane should fetch, if any.

        It wants to be called again and again, with all that may be chosen: one that
        was not among them is watched from the beginning the next time, and so are all
        when the loop was busy elsewhere.
        """
        looks = self._looks if now - self._looked <= _BUSY else {}
        self._looked = now
        self._looks = {
            hand: looks.get(hand) or _look(hand, now)
            for hand in hands
            if hand.stretch.chunk is not None  # or nothing is left to ask for
        }
        rates = [lane.rate for lane in self.lanes if lane.rate]
        if not rates:
            return None
        rate, slow, longest = median(rates), None, 0.0
        for hand, look in self._looks.items():
            left = _time_left(look, rate, now)
            if left > longest:
                slow, longest = hand, left
        return slow


def _look(hand: Hand, now: float) -> Hand:
    return Hand(hand.lane, hand.parts, hand.stretch, hand.stretch.remaining, now)


def _time_left(look: Hand, rate: float, now: float) -> float:
    """Return how long a straggler is going to need; 0 for who is none."""
    left, own = look.time_left(now), look.size / rate
    early = now - look.started <= min(own, _GLANCE)
    much = _MUCH * look.stretch.remaining / rate
    return 0.0 if early or left <= much + _SLACK else left
