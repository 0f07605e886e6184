"""What a free connection does next: a run of the queue, a steal, or nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from aiockpt.errors import TransportError
from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.manifest import Outline
from aiockpt.http.chunk_run import ChunkRun
from aiockpt.http.peers import ALL, Peer
from aiockpt.http.protocol import Origin
from aiockpt.http.retry import Patience, Retries
from aiockpt.http.scheduling import Assignment, Connection, choose, choose_member

pytestmark = pytest.mark.torch_free

MIB = 1 << 20
RATE = 10.0 * MIB
OUTLINE = Outline(1, "id", ChunkGrid(100 * MIB, MIB), ("",) * 100, 0)


def peer_at(port: int, **options: Any) -> Peer:
    """Return a peer."""
    return Peer(Origin(f"http://127.0.0.1:{port}/checkpoint/"), **options)


def connection_to(peer: Peer) -> Connection:
    """Return a connection, with patience of its own."""
    return Connection(peer, Patience(10.0, 10.0, 0.0))


def assignment(connection: Connection, mib: int = 10) -> Assignment:
    """Return a run that a connection has begun at 0, when somebody looked."""
    run = ChunkRun(OUTLINE, range(mib))
    found = Assignment(connection, run, Retries(connection.patience, print))
    found.watch(0.0, again=False)
    return found


def receive(victim: Assignment, nbytes: float, now: float) -> None:
    """Have bytes arrive, right or wrong, and somebody look."""
    victim.run.begin_request()
    victim.run.take(memoryview(bytes(int(nbytes))))
    victim.run.placed()
    victim.run.note()
    victim.watch(now, again=True)


ONE, OTHER = peer_at(1), peer_at(2)


class TestMembers:
    """Which member of a swarm is asked."""

    @staticmethod
    def chosen(connections: list[Connection], wanted: int = 0b100) -> set[int]:
        """Return the places of those that chance may choose."""
        draw, times = random.Random(1), 100
        found = [
            choose_member(connections, wanted, now=5.0, chance=draw)
            for _ in range(times)
        ]
        return {connections.index(each) for each in found if each is not None}

    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("have", 0b111, {0, 1}),
            ("have", 0b011, {0}),
            ("steals", 1, {0}),
            ("resting_until", 6.0, {0}),
            ("error", TransportError("gone"), {0}),
        ],
    )
    def test_of_two(self, name: str, value: object, expected: set[int]) -> None:
        """It has what is wanted, and was not slow."""
        pair = [connection_to(peer_at(port, have=0b111)) for port in (1, 2)]
        setattr(pair[1] if hasattr(pair[1], name) else pair[1].peer, name, value)
        assert self.chosen(pair) == expected

    def test_one_that_sends_already_comes_last(self) -> None:
        """It may get a second request if nobody else is free."""
        one, two = peer_at(1, have=0b111), peer_at(2, have=0b111)
        known = [*map(connection_to, (one, one, two))]
        known[0].is_busy = True
        assert self.chosen(known) == {2}
        known[2].is_busy = True
        assert self.chosen(known) == {1}

    def test_one_that_has_nothing_wanted_may_steal(self) -> None:
        """Towards the end everything is being fetched."""
        assert self.chosen([connection_to(peer_at(1, have=1))], 0) == {0}
        assert self.chosen([]) == set()


class TestQueue:
    """What nobody fetches comes first."""

    def test_the_first_run_that_the_peer_has(self) -> None:
        """A partial peer is a peer."""
        queue = [ChunkRun(OUTLINE, [n]) for n in (3, 5, 7)]
        for have, chosen in ((ALL, 0), (1 << 5 | 1 << 7, 1), (1 << 1, None)):
            free = connection_to(peer_at(1, have=have))
            found = choose(free, queue, [], rate=RATE, now=1.0)
            assert found is (None if chosen is None else queue[chosen])

    def test_a_run_that_is_cut_short_begins_again(self) -> None:
        """What came before it was cut says nothing of how long the rest takes."""
        mine = assignment(connection_to(ONE))
        receive(mine, 2.5 * MIB, 1.0)
        mine.run.cut(0)
        mine.begin_again(1.0)
        assert (mine.began, mine.size) == (1.0, 0.5 * MIB)

    def test_a_connection_that_lost_its_run_rests(self) -> None:
        """Longer each time, until it has brought a whole run again."""
        free, queue = connection_to(ONE), [ChunkRun(OUTLINE, [3])]
        rests = []
        for _ in range(7):
            free.rest(10.0)
            rests.append(free.resting_until - 10.0)
            assert choose(free, queue, [], rate=RATE, now=10.05) is None
            assert choose(free, queue, [], rate=RATE, now=12.0) is queue[0]
        assert rests == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
        free.learn(MIB, 1.0)
        free.rest(10.0)
        assert free.resting_until == pytest.approx(10.1)


@pytest.mark.parametrize("peer", [ONE, OTHER], ids=["same peer", "another peer"])
class TestSteal:
    """A run is taken from a much slower connection."""

    def steal(
        self, peer: Peer, victim: Assignment, now: float, rate: float = RATE
    ) -> bool:
        """Say whether a free connection to a peer steals a run."""
        chosen = choose(connection_to(peer), [], [victim], rate=rate, now=now)
        assert chosen in (victim, None)
        return chosen is victim

    @pytest.mark.parametrize("share", [1.0, 0.6])
    def test_not_from_one_that_keeps_up(self, peer: Peer, share: float) -> None:
        """Nor from one that is a little slower."""
        victim = assignment(connection_to(ONE))
        for tick in range(1, 20):
            if victim.run.remaining > share * RATE / 20:
                receive(victim, share * RATE / 20, tick / 20)
            assert not self.steal(peer, victim, tick / 20)

    @pytest.mark.parametrize("share", [0.001, 0.1, 0.3])
    def test_from_one_that_is_much_slower(self, peer: Peer, share: float) -> None:
        """Half a second is enough to see it."""
        victim = assignment(connection_to(ONE))
        for tick in range(1, 13):
            receive(victim, share * RATE / 20, tick / 20)
            assert self.steal(peer, victim, tick / 20) is (tick > 10)

    def test_from_one_that_is_silent(self, peer: Peer) -> None:
        """After twice the time that the run should take."""
        victim = assignment(connection_to(ONE))
        assert not self.steal(peer, victim, 2.2)
        assert self.steal(peer, victim, 2.3)

    def test_not_after_a_hiccup(self, peer: Peer) -> None:
        """At the end of a run as anywhere."""
        victim = assignment(connection_to(ONE), mib=1)
        receive(victim, MIB - 1, 0.0)
        assert not self.steal(peer, victim, 0.24)

    def test_not_what_has_come(self, peer: Peer) -> None:
        """Or is being stolen already."""
        victim = assignment(connection_to(ONE), mib=1)
        receive(victim, MIB, 0.0)
        assert not self.steal(peer, victim, 100.0)
        victim = assignment(connection_to(ONE))
        victim.is_stolen = True
        assert not self.steal(peer, victim, 100.0)

    def test_ever_later_in_vain(self, peer: Peer) -> None:
        """A run is not passed around while no byte comes."""
        victim = assignment(connection_to(ONE))
        victim.run.steals = 2
        assert not self.steal(peer, victim, 2.9)
        assert self.steal(peer, victim, 3.1)
        victim.run.steals = 3
        assert self.steal(peer, victim, 100.0) is (peer is OTHER)

    def test_with_no_run_to_compare(self, peer: Peer) -> None:
        """The same peer's connections are alike; another peer may be better."""
        victim = assignment(connection_to(ONE))
        assert not self.steal(peer, victim, 1.2, rate=0.0)
        assert self.steal(peer, victim, 1.3, rate=0.0) is (peer is OTHER)

    def test_from_a_peer_that_is_silent(self, peer: Peer) -> None:
        """Another one takes its run at once; the same one waits for its next try."""
        victim = assignment(connection_to(ONE))
        victim.connection.patience.silent_since = 0.0
        victim.retries.due = 200.0
        assert self.steal(peer, victim, 0.01) is (peer is OTHER)
        assert self.steal(peer, victim, 100.0) is (peer is OTHER)


def test_only_what_the_peer_has_is_stolen() -> None:
    """A partial peer helps with its own chunks."""
    victim = assignment(connection_to(ONE))
    for have, stolen in ((1 << 7, None), (1 << 0, victim)):
        free = connection_to(peer_at(3, have=have))
        assert choose(free, [], [victim], rate=RATE, now=9.0) is stolen


def test_the_slowest_run_is_stolen() -> None:
    """It would take longest."""
    slow, slower = (assignment(connection_to(ONE)) for _ in range(2))
    receive(slow, MIB, 0.6)
    receive(slower, 1000, 0.6)
    free = connection_to(ONE)
    assert choose(free, [], [slow, slower], rate=RATE, now=0.6) is slower
    assert choose(free, [], [slow], rate=RATE, now=0.6) is slow


def test_what_was_before_somebody_looked_does_not_count() -> None:
    """It shared the line with the others then, or the loop was busy."""
    victim = assignment(connection_to(ONE))
    victim.watch(1000.0, again=False)
    assert choose(connection_to(ONE), [], [victim], rate=RATE, now=1000.1) is None
    assert choose(connection_to(ONE), [], [victim], rate=RATE, now=1003.0) is victim
