"""``python -m benchmarks.swarm_sim``: simulates a swarm of receivers.

Each receiver has a `Planner`, and the tracker names members with the functions of
`aiockpt.swarm.policy`. So the simulator measures the decisions of the library and not a
copy of them. Everything else is a model:

* A host has an uplink and a downlink. Zones have a shared link to the other zones.
* Bodies share links fairly (max-min): a body that is slow elsewhere leaves its part of
  a link to the others. Each start and end of a body changes the rates of the bodies
  around it, until a change is below 1 % or has come three hops far.
* An uplink sends a few bodies at a time (``slots``). More requests wait in FIFO order,
  if the receiver lets them wait.
* A request itself takes no time. A member announces its chunks ``lag`` seconds late.
* The tracker names neighbours at each heartbeat. It draws from a sample of the members
  if there are very many.
* A member that dies is noticed at once by those that receive from it, and by the
  tracker when its lease ends.
"""

from __future__ import annotations

import heapq
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median

from aiockpt.errors import TransportError
from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.manifest import Outline
from aiockpt.http.chunk_run import ChunkRun
from aiockpt.http.peers import Peer
from aiockpt.http.planner import Assignment, Dismiss, Planner, Rest, Stop
from aiockpt.http.protocol import Origin
from aiockpt.http.retry import Liveness
from aiockpt.http.tuning import MemberTuning, SlowAfter, Tuning
from aiockpt.swarm.policy import (
    FIRST,
    HEARTBEATS_PER_LEASE,
    Candidate,
    heartbeat,
    neighbours,
)

__all__ = ["CASES", "Case", "Outcome", "simulate"]

_TOLERANCE = 0.01  # of a rate; a smaller change is not passed on
_HOPS = 3
_HOPE = 1.0  # seconds for which a receiver waits to hear of others
_CONNECTIONS = 4  # of a receiver to a single source, by default
_SAMPLE = 64  # members that the tracker chooses neighbours from
_LARGE = 1000  # members, from which on a case only runs if it is named
_FOREVER = 100.0  # transfers, after which a simulation has failed


@dataclass(frozen=True)
class Case:
    """A swarm to simulate. Rates are bytes per second, times are seconds.

    Attributes:
        members: How many receivers there are at first.
        nbytes: Of the checkpoint.
        rate: Of each uplink and downlink.
        rates: Of the first members, where they differ from ``rate``.
        join_within: Members join at random times in so many transfers.
        killed: Part of the members that die after half a transfer; as many join then.
        late: Whether one more member joins after half a transfer.
        zones: How many there are; members are in them in turn, the source in the first.
        trunk: Rate of a zone's link to the others, in parts of its members' rates.
        lag: Until a member has announced a chunk.
        linger: For which a complete member serves others.
        lanes: Most members that one receiver receives from at a time.
        slots: Most bodies that a member sends at a time.
        probes: Neighbours that a receiver tries in turn. It waits for a slot at the
            last one only.
        greedy: Whether a receiver asks the source whenever it can. The source gives
            chunks that it has given before, then, which the planner avoids.
        seeds: How many simulations the figures are the median of.
    """

    name: str
    members: int
    chunks: int = 512
    nbytes: float = 2.0 * (1 << 30)
    rate: float = 125e6
    rates: tuple[float, ...] = ()
    join_within: float = 0.0
    killed: float = 0.0
    late: bool = False
    zones: int = 1
    trunk: float = 0.5
    lag: float = 0.1
    linger: float = 30.0
    lanes: int = 5
    slots: int = 4
    source_slots: int = 8
    probes: int = 3
    greedy: bool = False
    seeds: int = 5

    @property
    def transfer(self) -> float:
        """Seconds that one transfer takes at ``rate``."""
        return self.nbytes / self.rate

    @property
    def outline(self) -> Outline:
        """The outline of the checkpoint."""
        grid = ChunkGrid(int(self.nbytes), -int(-self.nbytes // self.chunks))
        return Outline(1, "simulated", grid, ("",) * self.chunks, 0)

    @property
    def tuning(self) -> Tuning:
        """What the planners go by."""
        found = MemberTuning(requests=self.lanes, members_in_turn=self.probes)
        if self.greedy:
            found = replace(found, source_after=SlowAfter(0.0, unknown_s=0.0))
        return Tuning(members=found)


@dataclass(frozen=True)
class Outcome:
    """What a simulation gave, in transfers and in payloads.

    Attributes:
        times: Of each member that was not killed, from its join to its last chunk.
        apart: The same of the members that have another rate or joined late, which
            ``times`` leaves out.
        egress: What the source sent.
        egress_then: What it had sent when the last of ``times`` ended.
        hub: What the member that sent most had sent.
        eta: The lower bound of the time, divided by the time.
        complete: Whether all those members have every chunk.
    """

    times: list[float]
    apart: list[float]
    egress: float
    egress_then: float
    hub: float
    eta: float
    complete: bool


class _Link:
    """A link: no body gets more of it than ``level``."""

    __slots__ = ("bodies", "level", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.level = inf
        self.bodies: dict[_Request, None] = {}

    def fair(self) -> float:
        """Return the level at which the bodies fill the link; inf if they cannot."""
        left, count = self.rate, len(self.bodies)
        if not count:
            return inf
        caps = [body.cap(self) for body in self.bodies]
        share = left / count
        if min(caps) >= share:
            return share if min(caps) > share or sum(caps) > left else inf
        caps.sort()
        for at, cap in enumerate(caps):
            if cap * (count - at) >= left:
                return left / (count - at)
            left -= cap
        return inf


class _Host:
    """A member, or the source."""

    def __init__(self, rate: float, slots: int, zone: int, joined: float) -> None:
        self.up, self.down = _Link(rate), _Link(rate)
        self.slots, self.zone, self.joined = slots, zone, joined
        self.alive, self.done, self.killed = True, inf, False
        self.serving = 0
        self.queue: deque[_Request] = deque()
        self.have = self.told = 0
        self.reported = self.named = 0  # what the tracker knows
        self.telling = False
        self.sent = 0.0
        self.known: dict[_Host, Peer] = {}  # what it calls them, the source included
        self.knowers: dict[_Host, None] = {}
        self.requests: dict[Assignment, _Request] = {}
        self.looks_at = inf
        self.source_had_sent = 0.0
        self.pause = FIRST


class _Run(ChunkRun):
    """A run of which ``came`` bytes of the first chunk have come, by the model."""

    came = 0.0

    @property
    def received(self) -> int:
        """Bytes of unverified chunks that have come."""
        return int(self.came)

    def assign(
        self, owner: object, on_verified: Callable[[int], None] = lambda _: None
    ) -> int:
        """Assign the run; another peer than before begins with whole chunks."""
        lost = super().assign(owner, on_verified)
        self.came = 0.0 if lost else self.came
        return lost

    def arrive(self, nbytes: float, chunk_bytes: int) -> None:
        """Have bytes come, and verify the chunks that end in them."""
        self.came += nbytes
        while self.chunk is not None:
            size = min(chunk_bytes, self.unverified)
            if self.came < size - 1:  # a byte less is an error of the arithmetic
                break
            self.came = max(self.came - size, 0.0)
            self.mark_patched()


class _Request:
    """A request for a run, and its body once it has a slot."""

    __slots__ = (
        "at",
        "due",
        "giver",
        "is_new",
        "left",
        "links",
        "mine",
        "rate",
        "receiver",
        "run",
        "seen",
        "since",
        "size",
        "state",
    )

    def __init__(
        self, receiver: _Host, giver: _Host, mine: Assignment, now: float
    ) -> None:
        assert isinstance(mine.run, _Run)
        self.receiver, self.giver, self.mine, self.run = receiver, giver, mine, mine.run
        self.size = self.seen = mine.run.unverified - mine.run.came
        self.since = now
        self.links: tuple[_Link, ...] = ()
        self.left, self.rate = self.size, 0.0
        self.due = self.at = inf
        self.state = "waits"
        self.is_new = False  # whether nobody has had the chunk from the source

    def look(self, now: float, chunk_bytes: int) -> None:
        """Note how much has come."""
        left = max(self.left - self.rate * (now - self.since), 0.0)
        self.run.arrive(self.seen - left, chunk_bytes)
        self.seen = left

    def cap(self, link: _Link) -> float:
        """Return what the other links leave to the body."""
        first, second = self.links[0], self.links[1]
        if len(self.links) == 2:  # the usual case, which is faster
            return second.level if first is link else first.level
        return min(other.level for other in self.links if other is not link)


@dataclass
class _Swarm:
    """One simulation.

    The path of a chunk: `fill` (ask the planner) -> `ask` -> `start` -> `finish` ->
    `tell`.
    """

    case: Case
    chance: random.Random
    now: float = 0.0
    order: int = 0
    events: list[tuple[float, int, Callable[[], None] | _Request]] = field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        case = self.case
        self.full = (1 << case.chunks) - 1
        self.outline, self.tuning = case.outline, case.tuning
        self.planners: dict[_Host, Planner] = {}
        self.source = _Host(case.rate, case.source_slots, 0, 0.0)
        self.source.have = self.source.told = self.full
        self.unsent = list(range(case.chunks))
        self.chance.shuffle(self.unsent)
        self.members: list[_Host] = []  # all that there ever were
        self.tracked: list[_Host] = []  # those that the tracker has heard of
        self.missing = 0  # members that are not complete
        self.joining = 0
        of_zone = case.rate * case.members / case.zones
        self.trunks = [_Link(of_zone * case.trunk) for _ in range(case.zones)]
        self.dirty: dict[_Link, None] = {}
        self.changed: dict[_Request, None] = {}

    # ------------------------------------------------------------------ events

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + seconds, self.order, act))

    def run(self) -> None:
        """Run until all members that live are complete."""
        case = self.case
        within = max(case.join_within * case.transfer, 0.05)
        rates = [*case.rates, *[case.rate] * (case.members - len(case.rates))]
        for number, rate in enumerate(rates):
            self.expect(self.chance.uniform(0, within), rate, number % case.zones)
        if case.late:
            self.expect(case.transfer / 2, case.rate, 0)
        if case.killed:
            self.later(case.transfer / 2, self.kill_some)
        end = _FOREVER * case.transfer
        while self.events and (self.missing or self.joining):
            self.now, _, act = heapq.heappop(self.events)
            if self.now > end:
                return
            if not isinstance(act, _Request):
                act()
            elif act.state == "moves" and act.at == self.now:
                if act.due > self.now + 1e-9:
                    self.push(act)
                    continue
                self.finish(act)
            else:
                continue
            self.settle()

    def expect(self, seconds: float, rate: float, zone: int) -> None:
        """Let a member join later."""
        self.joining += 1

        def join() -> None:
            self.joining -= 1
            self.missing += 1
            member = _Host(rate, self.case.slots, zone, self.now)
            self.members.append(member)
            self.tracked.append(member)
            planner = Planner(
                self.outline,
                range(self.case.chunks),
                connections=_CONNECTIONS,
                now=self.now,
                chance=self.chance,
                make_run=lambda chunks: _Run(self.outline, chunks),
                tuning=self.tuning,
            )
            planner.members.hope_until = self.now + _HOPE
            self.planners[member] = planner
            self.introduce(member, self.source)
            self.beat(member)

        self.later(seconds, join)

    def kill_some(self) -> None:
        case = self.case
        count = round(case.killed * case.members)
        for victim in self.chance.sample(self.members, count):
            victim.killed = True
            self.missing -= victim.have != self.full
            self.leave(victim)
            self.expect(self.chance.uniform(0, 0.05), case.rate, victim.zone)

    def leave(self, member: _Host) -> None:
        """Take a member away; whoever receives from it asks elsewhere."""
        if not member.alive:
            return
        member.alive = False
        for request in list(member.requests.values()):
            if request.is_new and request.run.chunk is not None:  # it broke off
                self.unsent.append(request.run.chunk)
            self.end(request)
            self.start_next(request.giver)
        orphans = [*member.queue, *member.up.bodies]
        for other in dict.fromkeys([*member.knowers, *(o.receiver for o in orphans)]):
            self.drop(other, member)
            self.fill(other)
        for other in member.known:
            other.knowers.pop(member, None)
        hint = member.known[self.source].next

        def forget() -> None:
            self.tracked.remove(member)
            if hint is not None:
                self.unsent.append(hint)

        self.later(HEARTBEATS_PER_LEASE * self.period, forget)

    # ----------------------------------------------------------------- tracker

    def beat(self, member: _Host) -> None:
        """Report to the tracker and learn whom it names."""
        if not member.alive or member.have == self.full:
            member.reported = self.case.chunks
            return
        member.reported = member.have.bit_count()
        others = self.tracked
        if len(others) > _SAMPLE:
            others = self.chance.sample(others, _SAMPLE)
        known = {member, *member.known}  # the source is not tracked
        others = [other for other in others if other not in known]
        chosen = neighbours(
            _record(member),
            [_record(other) for other in others],
            known=len(member.known) - 1,
            chance=self.chance,
        )
        for at in chosen:
            others[at].named += 1
            if others[at].alive:
                self.introduce(member, others[at])
        self.name_next(member)
        self.fill(member)
        self.later(member.pause * self.period, lambda: self.beat(member))
        member.pause = min(2 * member.pause, 1.0)

    @property
    def period(self) -> float:
        """Seconds between two heartbeats of a member, as the tracker wants them."""
        return heartbeat(len(self.tracked))

    # ---------------------------------------------------------------- receiver

    def introduce(self, member: _Host, other: _Host) -> None:
        """Have a receiver know the source, or another member."""
        name = "" if other is self.source else "member"
        peer = Peer(_ORIGIN, other.told, name, has_checkpoint=True)
        member.known[other] = peer
        other.knowers[member] = None
        self.planners[member].add(peer, Liveness(0.0, 0.0, self.now))

    def drop(self, member: _Host, other: _Host) -> None:
        """Have a receiver ask a member no more."""
        peer = member.known.pop(other)
        peer.error = TransportError("gone")
        del other.knowers[member]
        for mine in self.planners[member].drop(peer):
            self.cancel(member.requests[mine])

    def name_next(self, member: _Host) -> None:
        """Name the chunk that a receiver requests from the source next."""
        peer = member.known[self.source]
        is_kept = peer.next is not None and not member.have >> peer.next & 1
        if not is_kept and self.unsent:
            peer.next = self.unsent.pop()

    def fill(self, member: _Host) -> None:
        """Do what a receiver's planner says."""
        if not member.alive or member.have == self.full:
            return
        planner = self.planners[member]
        for request in member.requests.values():
            request.look(self.now, self.outline.grid.chunk_bytes)
        while True:
            hint = member.known[self.source].next
            match planner.next(self.now):
                case Assignment() as mine:
                    self.ask(member, mine).is_new = mine.run.chunk == hint
                case Stop(victim, _):
                    self.cancel(member.requests[victim])
                case Dismiss(peer):
                    self.drop(member, self.host_of(member, peer))
                case Rest(until):
                    self.look_later(member, until)
                    return

    def look_later(self, member: _Host, until: float) -> None:
        """Have a receiver's planner decide anew, if nothing happens before."""
        if self.now < member.looks_at <= until or until == inf:
            return
        member.looks_at = until

        def look() -> None:
            if member.looks_at == until:
                member.looks_at = inf
                self.fill(member)

        self.later(until - self.now, look)

    def host_of(self, member: _Host, peer: Peer) -> _Host:
        """Return the host that a receiver knows as this peer."""
        return next(host for host, known in member.known.items() if known is peer)

    # ---------------------------------------------------------------- requests

    def ask(self, member: _Host, mine: Assignment) -> _Request:
        """Send a request; it waits for a slot if it may."""
        peer, planner = mine.peer, self.planners[member]
        giver = self.host_of(member, peer)

        def verified(chunk: int) -> None:
            member.have |= 1 << chunk
            peer.given += 1
            planner.verified(self.now)
            if not member.telling:
                member.telling = True
                self.later(self.case.lag, lambda: self.tell(member))

        mine.run.assign(peer, verified)
        planner.began(mine, self.now)
        request = _Request(member, giver, mine, self.now)
        member.requests[mine] = request
        giver.queue.append(request)
        self.start_next(giver)
        if request.state == "waits" and not mine.may_wait:
            self.end(request)
            planner.ended(mine, self.now, was_refused=True)
        return request

    def start_next(self, giver: _Host) -> None:
        while giver.queue and giver.serving < giver.slots:
            self.start(giver.queue.popleft())

    def start(self, request: _Request) -> None:
        giver, receiver = request.giver, request.receiver
        giver.serving += 1
        request.state, request.since = "moves", self.now
        request.mine.is_answered = True
        if giver is self.source and receiver.known[giver].next is None:
            self.name_next(receiver)
        request.links = (giver.up, receiver.down)
        if giver.zone != receiver.zone:
            request.links += (self.trunks[giver.zone],)
        for link in request.links:
            link.bodies[request] = None
            self.dirty[link] = None
        self.changed[request] = None

    def end(self, request: _Request) -> None:
        """Free what a request holds; what has come of its body was sent."""
        receiver, giver = request.receiver, request.giver
        request.look(self.now, self.outline.grid.chunk_bytes)
        if request.state == "moves":
            giver.sent += request.size - request.seen
            giver.serving -= 1
            for link in request.links:
                del link.bodies[request]
                self.dirty[link] = None
        else:
            giver.queue.remove(request)
        request.state = "ended"
        del receiver.requests[request.mine]

    def cancel(self, request: _Request) -> None:
        self.end(request)
        self.planners[request.receiver].ended(request.mine, self.now, was_refused=False)
        if request.giver.alive:
            self.start_next(request.giver)

    def finish(self, request: _Request) -> None:
        receiver, giver = request.receiver, request.giver
        request.left, request.since = 0.0, self.now
        self.end(request)
        self.planners[receiver].ended(request.mine, self.now, was_refused=False)
        if receiver.have == self.full and receiver.done == inf:
            receiver.done = self.now
            receiver.source_had_sent = self.source.sent
            self.missing -= 1
            self.later(self.case.linger, lambda: self.leave(receiver))
        self.fill(receiver)
        self.start_next(giver)

    def tell(self, member: _Host) -> None:
        """Announce what came since the last time."""
        member.telling = False
        new, member.told = member.have & ~member.told, member.have
        for other in list(member.knowers):
            other.known[member].have |= new
            if new & self.planners[other].fresh:
                self.fill(other)

    # ------------------------------------------------------------------- rates

    def settle(self) -> None:
        """Share the links that a start or an end has changed."""
        changed = self.changed
        for _ in range(_HOPS):
            if not self.dirty:
                break
            links, self.dirty = self.dirty, {}
            for link in links:
                level, before = link.fair(), link.level
                if level == before:
                    continue
                link.level = level
                passes_on = abs(level - before) > _TOLERANCE * min(level, before)
                for body in link.bodies:
                    changed[body] = None
                    if passes_on:
                        for other in body.links:
                            if other is not link:
                                self.dirty[other] = None
        self.changed = {}
        for body in changed:
            if body.state == "moves":
                self.set_rate(body, min([link.level for link in body.links]))

    def set_rate(self, body: _Request, rate: float) -> None:
        if rate == body.rate:
            return
        body.left = max(body.left - body.rate * (self.now - body.since), 0.0)
        body.since, body.rate = self.now, rate
        body.due = self.now + body.left / rate
        if body.due < body.at:
            self.push(body)

    def push(self, body: _Request) -> None:
        body.at = body.due
        self.order += 1
        heapq.heappush(self.events, (body.at, self.order, body))


_ORIGIN = Origin("http://127.0.0.1:1/checkpoint/")  # nobody asks it


def _record(member: _Host) -> Candidate:
    return Candidate(str(member.zone), member.reported, member.named)


def simulate(case: Case, seed: int) -> Outcome:
    """Simulate a case once.

    Raises:
        AssertionError: a host sent more than its uplink carries.
    """
    swarm = _Swarm(case, random.Random(seed))  # noqa: S311 - guards nothing
    swarm.run()
    one = case.transfer
    stay = [member for member in swarm.members if not member.killed]
    slow = [member for member in stay if member.up.rate != case.rate]
    late = [member for member in stay if case.late and member.joined == one / 2]
    plain = [member for member in stay if member not in [*slow, *late]]
    for host in [swarm.source, *swarm.members]:
        most = host.up.rate * (swarm.now - host.joined)
        size = case.nbytes / case.chunks
        assert host.sent <= 1.02 * most + size, "an uplink carried too much"
    times = _times(plain, one)
    ups = case.rate + sum(member.up.rate for member in swarm.members)
    bound = max(1.0, len(plain) * case.rate / ups)
    return Outcome(
        times=times,
        apart=_times([*slow, *late], one),
        egress=swarm.source.sent / case.nbytes,
        egress_then=max(m.source_had_sent for m in plain) / case.nbytes,
        hub=max(member.sent for member in swarm.members) / case.nbytes,
        eta=bound / max(times),
        complete=all(member.have == swarm.full for member in stay),
    )


def _times(members: Sequence[_Host], one: float) -> list[float]:
    return [(member.done - member.joined) / one for member in members]


_HUGE = Case("", 1000, 2048, 130e9, 1.25e9, linger=300.0, seeds=1)
CASES = {
    case.name: case
    for case in [
        *(Case(f"n{count}", count) for count in (2, 8, 16, 32)),
        Case("killed", 16, killed=1 / 3),
        Case("slow", 16, rates=(12.5e6,)),
        Case("late", 16, late=True),
        Case("spread", 16, join_within=0.5),
        Case("zones", 32, zones=4),
        Case("mixed", 32, rates=(62.5e6,) * 8 + (250e6,) * 8),
        Case("greedy", 16, greedy=True),
        Case("greedy-spread", 16, greedy=True, join_within=0.5),
        Case("spread32", 32, join_within=0.5),
        Case("probes1", 32, probes=1),
        Case("lanes6", 32, lanes=6),
        Case("lanes8", 32, lanes=8, slots=8),
        replace(_HUGE, name="n1000"),
        replace(_HUGE, name="n10000", members=10_000, chunks=512),
    ]
}
"""The cases by name. All but the last two take a few minutes together."""

_HEAD = (
    f"{'case':15}{'N':>6}{'chunks':>7}{'time':>7}  {'(min-max)':13}{'median':>7}"
    f"{'egress':>8}{'then':>6}{'hub':>6}{'eta':>6}{'apart':>7}{'took':>7}\n"
)


def _row(case: Case) -> str:
    """Simulate a case with all its seeds; return its row of the table."""
    began = time.monotonic()
    runs = [simulate(case, seed) for seed in range(case.seeds)]
    longest = [max(run.times) for run in runs]
    spread = f"({min(longest):.2f}-{max(longest):.2f})"
    apart = [max(run.apart) for run in runs if run.apart]
    return (
        f"{case.name:15}{case.members:6}{case.chunks:7}{median(longest):7.2f}"
        f"  {spread:13}{median(median(run.times) for run in runs):7.2f}"
        f"{median(run.egress for run in runs):8.2f}"
        f"{median(run.egress_then for run in runs):6.2f}"
        f"{median(run.hub for run in runs):6.2f}{median(run.eta for run in runs):6.2f}"
        f"{median(apart) if apart else 0:7.2f}{time.monotonic() - began:6.0f}s"
        f"{'' if all(run.complete for run in runs) else '  INCOMPLETE'}\n"
    )


def main(names: Sequence[str]) -> int:
    """Print the table of the named cases, or of all small ones; return the exit code.

    Times are in transfers and bytes in payloads. ``time``: the slowest member, and the
    extremes over the seeds. ``median``: the median member. ``then``: the egress until
    all members but those apart had everything. ``hub``: what the member that sent most
    had sent. ``apart``: the slowest of the members that have other rates or joined
    late; ``time`` leaves them out.
    """
    unknown = [name for name in names if name not in CASES]
    if unknown:
        known = ", ".join(CASES)
        sys.stderr.write(
            f"swarm_sim: no case {', '.join(unknown)}; there are {known}\n"
        )
        return 2
    small = [case.name for case in CASES.values() if case.members < _LARGE]
    sys.stdout.write(_HEAD)
    for name in names or small:
        sys.stdout.write(_row(CASES[name]))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
