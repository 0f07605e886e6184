"""What a download does next: a run to fetch, one to stop, a peer to drop, or a rest."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.manifest import Outline
from aiockpt.http.peers import ALL, Peer
from aiockpt.http.planner import Assignment, Dismiss, Planner, Rest, Stop
from aiockpt.http.protocol import Origin
from aiockpt.http.retry import Liveness
from aiockpt.http.tuning import MemberTuning, Tuning, Usual

pytestmark = pytest.mark.torch_free

MIB = 1 << 20
CHUNKS = 64
OUTLINE = Outline(1, "id", ChunkGrid(CHUNKS * MIB, MIB), ("",) * CHUNKS, 0)
CHUNK_S = 0.1  # seconds that a chunk takes, where nothing else is said
TICK = 0.05
EVER = 100.0


def bits(*chunks: int) -> int:
    """Return the bitmap of these chunks."""
    return sum(1 << chunk for chunk in chunks)


class Session:
    """A planner, its clock, and peers that do what a test says.

    Args:
        chunks: Those that are wanted.
        connections: Most connections to a source.
        sources: How many there are.
        members: What each member of the swarm has.
        tuning: The numbers of the planner.
    """

    def __init__(
        self,
        chunks: Sequence[int] = range(CHUNKS),
        *,
        connections: int = 2,
        sources: int = 1,
        members: Sequence[int] = (),
        seed: int = 1,
        tuning: Tuning = Tuning(),  # noqa: B008 - frozen
    ) -> None:
        self.now = 0.0
        self.planner = Planner(
            OUTLINE,
            chunks,
            connections=connections,
            now=0.0,
            chance=Random(seed),
            tuning=tuning,
        )
        self.sources = [self.add() for _ in range(sources)]
        self.members = [self.add(have) for have in members]

    def add(self, have: int | None = None) -> Peer:
        """Add a source, or a member that has these chunks."""
        number = len(self.planner.peers)
        origin = Origin(f"http://127.0.0.1:{number + 1}/checkpoint/")
        member = "" if have is None else f"m{number}"
        peer = Peer(origin, ALL if have is None else have, member, has_checkpoint=True)
        self.planner.add(peer, Liveness(10.0, 10.0, 0.0))
        return peer

    def next(self) -> Assignment | Stop | Dismiss | Rest:
        """Ask what to do now; a run that is taken begins."""
        found = self.planner.next(self.now)
        if isinstance(found, Assignment):
            found.run.assign(found.peer, lambda _: self.planner.verified(self.now))
            self.planner.began(found, self.now)
        return found

    def take(self) -> Assignment:
        """Take a run."""
        found = self.next()
        assert isinstance(found, Assignment)
        return found

    def take_all(self) -> list[Assignment]:
        """Take runs until there is nothing else to do."""
        found = []
        while isinstance(each := self.next(), Assignment):
            found.append(each)
        assert isinstance(each, Rest)
        return found

    def finish(self, *mine: Assignment, after: float | None = None) -> None:
        """Have every chunk of these runs come, by default as fast as usual."""
        longest = max(len(each.run) for each in mine)
        self.now += longest * CHUNK_S if after is None else after
        for each in mine:
            while each.run.chunk is not None:
                each.run.mark_patched()
            self.planner.ended(each, self.now, was_refused=False)

    def fail(self, mine: Assignment, *, was_refused: bool = False) -> int:
        """Have a run end, with what has come of it."""
        return self.planner.ended(mine, self.now, was_refused=was_refused)

    def teach(self, seconds: float) -> None:
        """Have a member bring the last chunk in so many seconds, and leave."""
        member = self.add(bits(CHUNKS - 1))
        mine = self.take()
        assert mine.peer is member
        self.finish(mine, after=seconds)
        self.planner.drop(member)

    def later(self, seconds: float) -> Assignment | Stop | Dismiss | Rest:
        """Look from time to time; return the first thing to do, or a rest."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now = min(self.now + TICK, until)
            if not isinstance(found := self.next(), Rest):
                return found
        return Rest(until)


def for_members(**numbers: int) -> Tuning:
    """Return the usual numbers, but these of the members."""
    return Tuning(members=MemberTuning(**numbers))  # type: ignore[arg-type]


def chunks_of(found: list[Assignment]) -> list[list[int]]:
    """Return the chunks of each run."""
    return [
        [chunk for chunk in range(CHUNKS) if each.run.bits >> chunk & 1]
        for each in found
    ]


def receive(mine: Assignment, nbytes: float) -> None:
    """Have bytes of a run arrive; they need not be right."""
    mine.run.digest(memoryview(bytes(int(nbytes))))
    mine.run.mark_stored()
    mine.run.verify_stored()


# -------------------------------------------------------------------- which chunks


@pytest.mark.parametrize(
    ("chunks", "options", "runs"),
    [
        (range(8), {}, ["01", "23"]),  # two for each connection of the only source
        (range(7), {"connections": 3}, ["01", "23", "45"]),
        ([0, 1, 3, 4, 5], {}, ["01", "34"]),  # they are consecutive
        (range(3), {"connections": 4}, ["0", "1", "2"]),
        (range(8), {"tuning": Tuning(max_run_bytes=MIB)}, ["0", "1"]),
        (range(8), {"sources": 2}, ["0", "1", "2", "3"]),  # nobody knows how fast
        (range(8), {"sources": 2, "tuning": Tuning(max_connections=1)}, ["0", "1"]),
        (range(8), {"members": [0]}, []),  # the source has named nothing
        (range(8), {"members": [bits(5)]}, ["5"]),
        (range(8), {"members": [bits(5, 6)] * 9}, ["5", "6"]),
        (range(8), {"sources": 0, "members": [bits(1), bits(1, 2)]}, ["1", "2"]),
    ],
)
def test_the_first_runs(
    chunks: Sequence[int], options: dict[str, Any], runs: list[str]
) -> None:
    """Sources get runs in order, and members one chunk at a time."""
    found = chunks_of(Session(chunks, **options).take_all())
    assert sorted("".join(map(str, run)) for run in found) == runs


def test_runs_of_several_sources_take_about_as_long() -> None:
    """The runs take equal times, and become shorter towards the end."""
    one = Session(connections=1, sources=2, tuning=Tuning(run_s=0.5))
    fast, slow = one.take_all()
    one.finish(fast, after=0.05)
    assert len(one.take().run) == 10  # half a second
    one.finish(slow, after=0.45)
    assert len(one.take().run) == 1
    few = Session(range(8), connections=1, sources=2, tuning=Tuning(run_s=0.5))
    fast, _ = few.take_all()
    few.finish(fast, after=0.01)
    assert len(few.take().run) == 1  # a quarter of the rest


def test_a_source_that_breaks_off_a_long_run_may_have_a_swarm() -> None:
    """The rest is wanted afresh, so that the next answer comes soon."""
    one = Session(range(8), connections=1)
    mine = one.take()
    assert one.planner.broke(mine, 1.0)
    assert len(mine.run) == 4
    one.planner.may_share = True
    mine.run.begin_request()
    receive(mine, MIB / 4)
    assert one.planner.broke(mine, 2.0)
    assert (len(mine.run), mine.began, mine.size) == (1, 2.0, 0.75 * MIB)


def test_when_it_is_done() -> None:
    """It is done when every chunk has come and no request is left."""
    one = Session(range(2), connections=1)
    found = []
    for _ in range(2):
        mine = one.take()
        found.append(one.planner.is_done())
        one.finish(mine)
        found.append(one.planner.is_done())
    assert found == [False, False, False, True]
    assert one.next() == Rest(float("inf"))


# -------------------------------------------------------------------------- steals


def straggler(*, same: bool) -> tuple[Session, Assignment]:
    """Give a run of ten chunks that began when nothing else was left to do.

    The free connection, to the same peer or to another one, took a second for as many.
    """
    one = Session(range(40 if same else 20), connections=2 if same else 1)
    victim = one.take()
    victim.run.begin_request()
    if not same:
        one.add()
    while runs := one.take_all():
        one.finish(*runs)
    assert len(victim.run) == 10
    one.now += 1.0  # so the next look is the first one
    one.next()
    return one, victim


same_or_other = pytest.mark.parametrize("same", [True, False], ids=["same", "other"])


@same_or_other
@pytest.mark.parametrize(
    ("share", "at"),
    [(1.0, None), (0.6, None), (0.3, 0.55), (0.1, 0.55), (0.001, 0.55), (0.0, 2.3)],
)
def test_a_run_that_comes_slowly(*, same: bool, share: float, at: float | None) -> None:
    """It is stopped where another connection is more than twice as fast.

    Half a second is enough to see it, if any byte comes.
    """
    one, victim = straggler(same=same)
    began, found = one.now, None
    while victim.run.remaining > share * MIB / 2 and one.now < began + 3:
        receive(victim, share * MIB / 2)
        if isinstance(found := one.later(TICK), Stop):
            break
    if at is None:
        assert not isinstance(found, Stop)
        return
    assert isinstance(found, Stop)
    assert found.assignment is victim
    assert found.why == f"another {'connection has' if same else 'peer takes'} it"
    assert one.now - began == pytest.approx(at)
    assert isinstance(one.later(EVER), Rest)  # once only
    one.fail(victim)
    taken = one.take()  # by the one that waited for it
    assert taken.run is victim.run
    assert (taken.peer is victim.peer) is same


@same_or_other
@pytest.mark.parametrize(
    ("steals", "seconds"), [(0, 2.25), (1, 2.5), (2, 3.0), (3, 4.0), (4, 6.0)]
)
def test_a_run_is_stolen_ever_later(*, same: bool, steals: int, seconds: float) -> None:
    """It is not passed around while no byte comes, nor for ever at the same peer."""
    one, victim = straggler(same=same)
    victim.run.steals = steals
    assert isinstance(one.later(seconds), Rest)
    stops = isinstance(one.later(EVER), Stop)
    assert stops is (steals < 3 or not same)


@same_or_other
def test_who_has_brought_nothing_steals_late(*, same: bool) -> None:
    """The same peer's connections are alike; another peer may be better."""
    one = Session([0], connections=2 if same else 1)
    one.take()
    if not same:
        one.add()
    one.next()
    assert isinstance(one.later(1.2), Rest)
    assert isinstance(one.later(EVER), Rest if same else Stop)


def test_the_one_that_waited_takes_over() -> None:
    """It does so though the slow peer has another free connection."""
    one = Session([0], connections=2)
    victim, other = one.take(), one.add()
    one.next()
    assert isinstance(one.later(2.0), Stop)
    one.fail(victim)
    assert one.take().peer is other


def test_only_a_single_source_is_trusted_after_a_wrong_chunk() -> None:
    """A member, or one of several sources, is dropped at its first wrong chunk."""
    one = Session(connections=1, sources=2, members=[ALL])
    one.sources[0].next, one.sources[1].next = 1, 2
    runs = {each.peer: each for each in one.take_all()}
    assert [each.liveness.alone for each in runs.values()] == [False] * len(runs)
    one.planner.drop(one.sources[0])
    alone = {peer for peer, each in runs.items() if each.liveness.alone}
    assert alone == {one.sources[1]}


@same_or_other
def test_a_run_of_a_peer_that_fell_silent(*, same: bool) -> None:
    """Another peer takes it at once; the same one waits for its next attempt."""
    one, victim = straggler(same=same)
    victim.liveness.silent_since = 0.0
    victim.due = one.now + EVER
    assert isinstance(one.later(TICK), Rest if same else Stop)
    assert isinstance(one.later(EVER - 1), Rest)


@same_or_other
def test_a_hiccup_is_not_slowness(*, same: bool) -> None:
    """A short pause is none at the end of a run, either; no bytes are asked twice."""
    one, victim = straggler(same=same)
    receive(victim, 10 * MIB - 1)
    one.later(TICK)
    one.now += 1.0
    one.next()
    assert isinstance(one.later(0.2), Rest)
    receive(victim, 1)
    assert isinstance(one.later(EVER), Rest)


@same_or_other
def test_what_was_before_somebody_looked_does_not_count(*, same: bool) -> None:
    """The line was shared with others then, or this process was slow."""
    one, victim = straggler(same=same)
    one.now += EVER
    assert isinstance(one.next(), Rest)
    assert isinstance(one.later(2.2), Rest)
    found = one.later(0.2)
    assert isinstance(found, Stop)
    assert found.assignment is victim


def test_the_slowest_run_is_stolen_first() -> None:
    """It would take longest. Each waiting connection takes over one run."""
    one = Session(range(10), connections=5)
    runs = one.take_all()
    for each in runs:
        each.run.begin_request()
    one.finish(*runs[2:])
    while others := one.take_all():
        one.finish(*others)
    receive(runs[0], 3000)
    receive(runs[1], 1000)
    found = [one.later(2.0), one.later(2.0)]
    stopped = [each.assignment for each in found if isinstance(each, Stop)]
    assert stopped == [runs[1], runs[0]]


@pytest.mark.parametrize(("have", "stops"), [(bits(7), False), (bits(0), True)])
def test_a_member_steals_what_it_has(*, have: int, stops: bool) -> None:
    """Towards the end, and once it has brought something."""
    one = Session([0, 1], connections=1, sources=1, members=[bits(1)])
    one.sources[0].next = 0
    runs = {each.peer: each for each in one.take_all()}
    one.members[0].have = have
    assert isinstance(one.later(0.3), Rest)
    one.finish(runs[one.members[0]], after=0.0)
    assert isinstance(one.later(3.0), Stop if stops else Rest)


def test_a_connection_that_lost_its_run_rests_ever_longer() -> None:
    """The connection rests until it has brought a whole run again."""
    one, rests = Session(connections=1), []
    for number in range(9):
        mine = one.take()
        if number == 7:
            one.finish(mine)
            continue
        one.fail(mine)
        found = one.next()
        assert isinstance(found, Rest)
        rests.append(found.until - one.now)
        one.now = found.until
    assert rests == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 0.1])


# ------------------------------------------------------------------------- members


def asked(happened: str, seed: int) -> int:
    """Return which of two members is asked, after something happened to the second."""
    most = 2 if happened == "sends" else 1
    tuning = for_members(requests_per_member=most)
    members = [0, bits(5)]
    one = Session([2, 5], sources=0, members=members, seed=seed, tuning=tuning)
    first, second = one.members
    if happened in ("was slow", "rests", "sends"):
        mine = one.take()
        if happened != "sends":
            one.fail(mine)
        one.now += 1.0 if happened == "was slow" else 0.0
    if happened == "gone":
        one.planner.drop(second)
    first.have, second.have = bits(2), bits(7 if happened == "lacks it" else 2)
    return one.members.index(one.take().peer)


@pytest.mark.parametrize(
    ("happened", "expected"),
    [
        ("nothing", {0, 1}), ("lacks it", {0}), ("gone", {0}), ("was slow", {0}),
        ("rests", {0}), ("sends", {0}),
    ],
)  # fmt: skip
def test_which_of_two_members(happened: str, expected: set[int]) -> None:
    """One that has what is wanted, was not slow, and sends nothing else."""
    assert {asked(happened, seed) for seed in range(20)} == expected


def test_one_that_sends_already_comes_last() -> None:
    """It may get a second request if nobody else is free, and no third one."""
    one = Session(sources=0, members=[ALL, ALL])
    asked = [each.peer for each in one.take_all()]
    assert {*asked[:2]} == {*asked[2:]} == {*one.members}
    assert len(asked) == 4


def test_five_requests_to_members_at_a_time() -> None:
    """The planner counts them beside the requests to the sources."""
    one = Session(members=[ALL] * 9)
    assert sum(bool(each.peer.member) for each in one.take_all()) == 5


def test_a_member_that_is_busy_rests_ever_longer() -> None:
    """A few refusals are nothing; a whole chunk is the end of them."""
    tuning = for_members(requests_per_member=1)
    one, rests = Session(sources=0, members=[ALL], tuning=tuning), []
    for number in range(12):
        began, mine = one.now, one.later(EVER)
        assert isinstance(mine, Assignment)
        rests.append(round(one.now - began, 2))
        if number == 10:
            one.finish(mine)
            continue
        one.fail(mine, was_refused=True)
        assert one.planner.fresh.bit_count() == CHUNKS - number // 11  # it is anybody's
    short = [0.1] * 4
    expected = [0.05, *short, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 0.05]
    assert rests == pytest.approx(expected, abs=0.06)


def test_only_the_last_of_three_members_may_let_a_request_wait() -> None:
    """Some have more to do than others, so one is looked for that can send at once."""
    one = Session(sources=0, members=[ALL] * 9, tuning=for_members(requests=1))
    waits = []
    for number in range(8):
        mine = one.take()
        waits.append(mine.may_wait)
        if number == 4:
            one.finish(mine)
        else:
            one.fail(mine, was_refused=True)
    assert waits == [False, False, True, False, False, False, False, True]


def test_what_is_left_of_a_members_run() -> None:
    """Others bring it; only towards the end its beginning is of use."""
    one = Session([0, 1], sources=0, members=[bits(0), bits(1)])
    (mine, other) = one.take_all()
    mine.run.begin_request()
    receive(mine, MIB / 2)
    one.fail(other)  # so something else is left to request
    other_chunk = other.run.chunk
    assert one.planner.fresh == 0
    assert one.planner.unfinished[0].chunk == other_chunk
    assert one.fail(mine) == 0
    two = Session([0, 1], sources=0, members=[bits(0)])
    mine = two.take()
    mine.run.begin_request()
    receive(mine, MIB / 2)
    assert two.fail(mine) == MIB / 2
    assert two.planner.fresh == bits(0, 1)


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_request_to_a_member_that_takes_very_long(*, is_answered: bool) -> None:
    """It is stopped if others can send the chunk; one that may wait is not blamed."""
    tuning = for_members(members_in_turn=1)
    one = Session([0, 1, 2], connections=1, members=[bits(1)], tuning=tuning)
    (source,) = one.sources
    source.next = 0
    runs = {bool(each.peer.member): each for each in one.take_all()}
    mine = runs[True]
    mine.is_answered = is_answered
    one.finish(runs[False], after=0.2)
    source.next = 2
    one.take()  # so that the source cannot steal
    source.has_checkpoint = False
    assert isinstance(one.later(3.0), Rest)  # nobody else has it
    source.has_checkpoint, one.now = True, 1.9
    assert isinstance(one.later(0.1), Rest)
    found = one.later(0.1)
    assert found == Stop(mine, "others can send it")
    one.fail(mine)
    assert one.planner.fresh == (0 if is_answered else bits(1))


def test_a_member_that_is_slow_three_times_is_dropped() -> None:
    """Slow members cannot hold all requests."""
    tuning = for_members(members_in_turn=1, requests_in_vain=9)
    one = Session(range(3), connections=1, members=[bits(1)], tuning=tuning)
    one.sources[0].next = 0
    runs = {bool(each.peer.member): each for each in one.take_all()}
    one.finish(runs[False])
    one.sources[0].next = 2
    assert one.take().peer is one.sources[0]  # which is busy from now on
    for number in range(3):
        mine = runs[True] if not number else one.later(3.0)
        assert isinstance(mine, Assignment)
        assert mine.peer.member
        mine.is_answered = True
        found = one.later(3.0)
        assert isinstance(found, Stop)
        one.fail(mine)
    assert one.next() == Dismiss(one.members[0])


def test_a_chunk_that_members_did_not_bring_is_for_sources() -> None:
    """The planner assigns it to a source as long as there is one."""
    one = Session([1], connections=1, members=[bits(1)])
    one.planner.members.stopped(1)
    assert one.planner.members.reserved == 0
    one.planner.members.stopped(1)
    assert one.planner.members.reserved == bits(1)
    taken = one.take()
    assert taken.peer is one.sources[0]
    one.fail(taken)
    one.planner.drop(taken.peer)
    assert one.take().peer is one.members[0]


# ------------------------------------------------------------- sources of a swarm


@pytest.mark.parametrize(
    ("hint", "usual", "idle", "asks"),
    [
        (True, None, 0.0, True),  # what it has not given to anybody
        (True, 1.0, 0.0, True),
        (False, 1.0, 2.5, False),  # members bring it
        (False, 1.0, 3.5, True),
        (False, None, 29.0, False),
        (False, None, 31.0, True),
    ],
)
def test_what_a_source_is_asked_for(
    *, hint: bool, usual: float | None, idle: float, asks: bool
) -> None:
    """The chunk that it named, or what members have not brought for long."""
    tuning = for_members(requests_per_member=0)
    one = Session([5, 7, 9], connections=1, members=[bits(5, 7)], tuning=tuning)
    source = one.sources[0]
    if usual:
        source.next = 9
        one.finish(one.take(), after=usual)
        one.now = 0.0
    source.next = 5 if hint else 3  # which has come from elsewhere
    one.now = idle
    found = one.next()
    assert isinstance(found, Assignment if asks else Rest)
    if isinstance(found, Assignment):
        assert found.peer is source
        assert found.run.chunk == 5 if hint else found.run.chunk in (5, 7, 9)
        assert source.next is None


@pytest.mark.parametrize(
    ("members", "hope", "usual", "connections"),
    [
        (0, -1.0, None, 4),
        (0, 1.0, None, 1),  # it may be about to hear of others
        (1, -1.0, 1.0, 4),
        (7, -1.0, 1.0, 2),
        (31, -1.0, 1.0, 1),
        (31, -1.0, 0.1, 4),  # they have brought nothing for long
    ],
)
def test_how_many_connections_a_source_gets(
    members: int, hope: float, usual: float | None, connections: int
) -> None:
    """Fewer, the more members there are, unless these are useless."""
    one = Session(connections=4)
    if usual:
        one.teach(usual)
    for _ in range(members):
        one.add(0)
    one.now += 1.3 if usual else 0.0
    one.planner.members.hope_until = hope
    runs = one.take_all()
    assert len(runs) == connections
    assert {len(each.run) for each in runs} == {1 if usual or hope > 0 else 8}


def test_deltas_are_better_than_a_swarm() -> None:
    """They are shorter than the chunks of members."""
    one = Session(range(8), connections=1)
    one.planner.members.hope_until = EVER
    one.sources[0].delta_base = "base"
    found = []
    for has_deltas in (False, True):
        one.planner.has_deltas = has_deltas
        found.append(one.planner.gets_deltas)
    assert found == [False, True]
    assert len(one.take().run) == 4


def test_when_a_download_cannot_go_on() -> None:
    """No source is left, no request is under way, and members bring nothing."""
    one = Session([0, 1, 2], connections=1, members=[bits(1)])
    one.sources[0].next = 0
    runs = one.take_all()
    assert not one.planner.is_stuck(EVER, 10.0)
    one.planner.drop(one.sources[0])
    for each in runs:
        one.fail(each)
    assert not one.planner.is_stuck(9.0, 10.0)
    assert one.planner.is_stuck(EVER, 10.0)
    assert one.planner.unknown == bits(0, 2)


# -------------------------------------------------------------------- what is slow


@pytest.mark.parametrize(
    ("requests", "seconds"),
    [
        ([], None),
        ([(100, 1.0)], 1.0),
        ([(1000, 5.0)], 0.5),  # many chunks
        ([(50, 1.0)], 2.0),  # half a chunk
        ([(0, 1.0)], None),
        ([(100, 9.0)] * 99 + [(100, 1.0)] * 99, 1.0),  # it forgets
        ([(100, 1.0)] * 99 + [(100_000, 10_000.0)], 1.9),  # no request counts more
        ([(100, 1.0)] * 99 + [(1, 1.0)], 1.1),
    ],
)
def test_what_is_usual(requests: list[tuple[int, float]], seconds: float) -> None:
    """The mean of the last requests for a chunk."""
    usual = Usual(100)
    for size, took in requests:
        usual.learn(size, took)
    assert usual.seconds(100) == (seconds and pytest.approx(seconds, rel=0.02))
