"""Which lane is a straggler among those that fetch from one peer."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.http.board import Hand, Lane
from aiockpt.http.lookout import Lookout
from aiockpt.http.stretch import Part, Stretch

pytestmark = pytest.mark.torch_free

MIB = 1 << 20
RATE = 10.0 * MIB


def hand_of(lane: Lane, *, mib: int = 10) -> Hand:
    """Return a run, begun at 0, of which nothing has come."""
    parts = [Part(n, n * MIB, (n + 1) * MIB, "") for n in range(mib)]
    return Hand(lane, parts, Stretch(parts, lambda _: None), mib * MIB, 0.0)


def receive(hand: Hand, nbytes: float) -> None:
    """Have some bytes arrive; whether they are right does not matter here."""
    hand.stretch.take(memoryview(bytes(int(nbytes))))
    hand.stretch.placed()
    hand.stretch.note()


def lookout_of(*rates: float) -> Lookout:
    """Return one for lanes that had these speeds in their last runs."""
    lookout = Lookout()
    lookout.lanes += [Lane(0, rate) for rate in rates]
    return lookout


def watch(
    lookout: Lookout, hand: Hand, rate: float, seconds: float, *, since: float = 0.0
) -> float | None:
    """Have bytes arrive at a speed; return when it was called a straggler, if ever."""
    for tick in range(int(seconds * 20) + 1):
        if lookout.straggler([hand], since + tick / 20) is not None:
            return tick / 20
        receive(hand, min(rate / 20, hand.stretch.remaining))
        if not hand.stretch.remaining:
            break
    return None


class TestStraggler:
    """It is much slower than its peers were."""

    @pytest.mark.parametrize("share", [1.0, 0.6])
    def test_who_keeps_up_is_none(self, share: float) -> None:
        """Nor who is a little slower."""
        lookout = lookout_of(RATE, 0.0)
        assert watch(lookout, hand_of(lookout.lanes[1]), RATE * share, 10) is None

    @pytest.mark.parametrize("share", [0.0001, 0.1, 0.3])
    def test_who_is_much_slower_is_one_soon(self, share: float) -> None:
        """Half a second is enough to see it."""
        lookout = lookout_of(RATE, 0.0)
        when = watch(lookout, hand_of(lookout.lanes[1]), RATE * share, 10)
        assert when is not None
        assert 0.5 < when < 0.7

    def test_who_is_silent_is_one_after_twice_the_time(self) -> None:
        """A pause may end any moment."""
        lookout = lookout_of(RATE, 0.0)
        when = watch(lookout, hand_of(lookout.lanes[1]), 0, 10)
        assert when is not None
        assert 2.2 < when < 2.4

    def test_a_hiccup_is_none(self) -> None:
        """A lost packet costs about that, at the end of a run as anywhere."""
        lookout = lookout_of(RATE, 0.0)
        hand = hand_of(lookout.lanes[1])
        receive(hand, 10 * MIB - 1)
        seen = [lookout.straggler([hand], now) for now in (0.0, 0.1, 0.24, 0.26, 0.4)]
        assert seen == [None, None, None, hand, hand]

    def test_what_was_before_somebody_looked_does_not_count(self) -> None:
        """It had to share the line with the others then."""
        lookout = lookout_of(RATE, 0.0)
        hand = hand_of(lookout.lanes[1])
        for tick in range(20):
            now = 1000 + tick / 20
            assert lookout.straggler([hand], now) is None
            receive(hand, RATE / 20)

    def test_who_paused_meanwhile_is_watched_from_the_beginning(self) -> None:
        """It was not among those that may be chosen."""
        lookout = lookout_of(RATE, 0.0)
        hand = hand_of(lookout.lanes[1])
        assert watch(lookout, hand, 0, 2) is None
        assert lookout.straggler([], 2.1) is None
        when = watch(lookout, hand, 0, 10, since=2.2)
        assert when is not None
        assert when > 2.2

    def test_a_loop_that_was_busy_elsewhere_is_not_the_lanes_fault(self) -> None:
        """Nobody could have read what had come."""
        lookout = lookout_of(RATE, 0.0)
        hand = hand_of(lookout.lanes[1])
        assert watch(lookout, hand, 0, 2) is None
        receive(hand, 1)
        assert watch(lookout, hand, RATE, 10, since=5) is None

    def test_nobody_is_one_while_no_run_was_fetched(self) -> None:
        """There is nothing to compare with."""
        lookout = lookout_of(0.0, 0.0)
        assert watch(lookout, hand_of(lookout.lanes[0]), 1, 20) is None

    def test_one_lane_that_is_very_fast_makes_no_stragglers(self) -> None:
        """Most lanes are the measure."""
        lookout = lookout_of(100 * RATE, RATE, RATE)
        assert watch(lookout, hand_of(lookout.lanes[1]), RATE, 10) is None

    def test_of_two_the_slower_one_is_chosen(self) -> None:
        """It would take longest."""
        lookout = lookout_of(RATE, 0.0, 0.0)
        slow, slower = map(hand_of, lookout.lanes[1:])
        for tick in range(5):
            assert lookout.straggler([slow, slower], tick / 8) is None
        receive(slow, MIB)
        receive(slower, 1000)
        assert lookout.straggler([slow, slower], 0.6) is slower
        assert lookout.straggler([slow], 0.6) is slow


@given(
    rates=st.lists(st.floats(1e3, 1e9), min_size=1, max_size=8),
    steps=st.lists(st.tuples(st.floats(0.001, 0.2), st.floats(0, 1)), max_size=12),
)
def test_a_straggler_is_much_slower_than_most_whatever_happens(rates, steps) -> None:
    """Or it is silent; and there is something to fetch in its place."""
    lookout = lookout_of(*rates)
    hand, now, moved = hand_of(lookout.lanes[0], mib=2), 0.0, 0.0
    for seconds, share in steps:
        come = 2 * MIB - hand.stretch.remaining
        if lookout.straggler([hand], now) is not None:
            assert hand.stretch.chunk is not None
            assert come < median(rates) * now / 2 or now - moved > 0.25
        nbytes = int(share * hand.stretch.remaining)
        receive(hand, nbytes)
        now += seconds
        moved = now if nbytes else moved
