"""Whom the tracker names, which chunk comes next, and a small simulated swarm."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.http.rarest import next_chunk, source_chunk
from aiockpt.swarm.policy import Candidate, neighbours
from benchmarks.swarm_sim import Case, simulate

pytestmark = [pytest.mark.torch_free]

members = st.builds(
    Candidate,
    zone=st.sampled_from("abc"),
    have=st.integers(0, 5),
    named=st.integers(0, 5),
)
swarms = st.lists(members, max_size=40)
seeds = st.integers(0, 1 << 32)
bitmaps = st.integers(0, (1 << 70) - 1)


def bits(bitmap: int) -> set[int]:
    """Return the numbers of the chunks in a bitmap."""
    return {bit for bit in range(bitmap.bit_length()) if bitmap >> bit & 1}


def bitmap(*chunks: int) -> int:
    """Return the bitmap that has these chunks."""
    return sum(1 << chunk for chunk in chunks)


def rarest(wanted: int, rivals: Sequence[int]) -> set[int]:
    """Count the slow way."""
    held = {bit: sum(rival >> bit & 1 for rival in rivals) for bit in bits(wanted)}
    return {bit for bit, count in held.items() if count == min(held.values())}


# ----------------------------------------------------------------------- neighbours


@given(members, swarms, st.integers(0, 12), seeds)
def test_each_member_is_named_once_and_as_many_as_there_are(
    asker: Candidate, others: list[Candidate], most: int, seed: int
) -> None:
    """The tracker names as many members as the asker lacks, none twice."""
    named = neighbours(asker, others, known=12 - most, chance=random.Random(seed))
    if most:
        assert len(named) == len(set(named)) == min(most, len(others))
    assert set(named) <= set(range(len(others)))


@given(members, swarms, st.integers(3, 12), seeds)
def test_both_the_own_zone_and_the_others_have_their_part(
    asker: Candidate, others: list[Candidate], most: int, seed: int
) -> None:
    """Half are from the own zone and two from elsewhere, if there are so many."""
    zones = [other.zone == asker.zone for other in others]
    named = neighbours(asker, others, known=12 - most, chance=random.Random(seed))
    near = sum(zones[at] for at in named)
    assert near >= min(sum(zones), most // 2)
    assert len(named) - near >= min(len(zones) - sum(zones), 2)


@given(members, swarms, st.integers(1, 12), seeds)
def test_one_is_ahead_of_the_asker(
    asker: Candidate, others: list[Candidate], most: int, seed: int
) -> None:
    """The asker can receive something, if anybody has more than it."""
    named = neighbours(asker, others, known=12 - most, chance=random.Random(seed))
    if any(other.have > asker.have for other in others):
        assert any(others[at].have > asker.have for at in named)


@given(swarms, st.integers(1, 12), seeds)
def test_the_least_often_named_of_a_side_come_first(
    others: list[Candidate], most: int, seed: int
) -> None:
    """Nobody is passed over for a member that was named more often."""
    asker = Candidate("a", have=9, named=0)  # nobody is ahead, so nobody is preferred
    named = neighbours(asker, others, known=12 - most, chance=random.Random(seed))
    for near in (True, False):
        side = [at for at, other in enumerate(others) if (other.zone == "a") == near]
        counts = [others[at].named for at in side if at in named]
        left = [others[at].named for at in side if at not in named]
        assert max(counts, default=0) <= min(left, default=9)


def test_a_single_neighbour_is_the_one_ahead() -> None:
    """Being ahead counts more than the zone and the number of namings."""
    others = [Candidate("b", 0, 0), Candidate("a", 1, 7), Candidate("b", 0, 0)]
    assert neighbours(Candidate("a", 0, 0), others, known=11, chance=None) == [1]


def test_equal_members_are_named_equally_often() -> None:
    """Ties are random, so that no member becomes a hub."""
    chance = random.Random(3)
    others = [Candidate("a", 0, 0)] * 24
    asker = Candidate("a", 0, 0)
    count = Counter[int]()
    for _ in range(1000):
        count.update(neighbours(asker, others, chance=chance))
    assert len(count) == 24
    assert min(count.values()) > 430  # of 500; the deviation is 16
    assert max(count.values()) < 570


@given(members, st.lists(st.integers(0, 20), max_size=40), st.integers(12, 30), seeds)
def test_one_that_knows_enough_learns_of_those_that_few_know(
    asker: Candidate, counts: list[int], known: int, seed: int
) -> None:
    """A few at a time, so that somebody fetches from those that join last."""
    others = [Candidate("a", 9, count) for count in counts]
    named = neighbours(asker, others, known=known, chance=random.Random(seed))
    few = sorted(count for count in counts if count < 12)
    assert [counts[at] for at in named] == few[: max(min(4, 24 - known), 0)]


def test_without_chance_the_earlier_member_comes_first() -> None:
    """A caller that needs no random ties gets none."""
    others = [Candidate("a", 0, 0)] * 5
    assert neighbours(Candidate("a", 0, 0), others, known=9, chance=None) == [0, 1, 2]


# ----------------------------------------------------------------------- next_chunk


@given(bitmaps, st.lists(bitmaps, max_size=20), seeds)
def test_the_next_chunk_is_one_of_the_rarest(
    wanted: int, rivals: list[int], seed: int
) -> None:
    """The bit-sliced counters agree with a loop."""
    chunk = next_chunk(wanted, rivals, random.Random(seed))
    assert chunk in rarest(wanted, rivals) if wanted else chunk is None


def test_the_rarest_chunks_are_drawn_equally_often() -> None:
    """Receivers with the same view do not request the same chunk."""
    chance = random.Random(5)
    wanted = bitmap(0, 1, 7, 8, 63, 64, 100, 1999)
    rivals = [wanted | bitmap(3), bitmap(8, 9)]
    count = Counter(next_chunk(wanted, rivals, chance) for _ in range(7000))
    assert count.keys() == bits(wanted) - {8}
    assert min(count.values()) > 880  # of 1000; the deviation is 29
    assert max(count.values()) < 1120


# --------------------------------------------------------------------- source_chunk


@pytest.mark.parametrize(
    ("hint", "are_late", "chunk"),
    [
        (2, False, 2),
        (2, True, 2),
        (5, False, None),  # it has come from elsewhere
        (5, True, 1),
        (None, False, None),
        (None, True, 1),
    ],
)
def test_the_source_gives_what_is_new_or_lost(
    hint: int | None, are_late: bool, chunk: int | None
) -> None:
    """The source is asked for its hint, or for what does not come otherwise."""
    found = source_chunk(
        hint,
        bitmap(1, 2),
        [bitmap(2)],
        are_late=are_late,
        chance=random.Random(6),
    )
    assert found == chunk


def test_a_receiver_that_knows_nobody_asks_the_source_at_once() -> None:
    """Nobody else can bring what is left."""
    chance = random.Random(6)
    assert source_chunk(None, 2, [], are_late=False, chance=chance) == 1


# ----------------------------------------------------------------------- simulation


@pytest.mark.parametrize(
    ("case", "egress"),
    [
        (Case("a quarter is replaced", 8, 128, killed=1 / 4), 1.3),
        (Case("spread joins, zones", 8, 128, join_within=0.5, zones=2), 1.1),
        (Case("probes", 8, 128, probes=3), 1.1),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_a_swarm_completes_and_its_source_sends_little(
    case: Case, egress: float
) -> None:
    """Every member gets every chunk, mostly from other members."""
    outcome = simulate(case, 7)
    assert outcome.complete
    assert len(outcome.times) == 8
    assert 1 <= outcome.egress < egress
    assert outcome.hub < 1.5
    assert max(outcome.times) < 1.5


def test_a_simulation_can_be_repeated() -> None:
    """The seed decides the whole simulation."""
    case = Case("three", 3, 64)
    assert simulate(case, 1) == simulate(case, 1)
