"""``python -m benchmarks.swarm_sim``: simulates a swarm of receivers.

The simulator makes its decisions with the functions of `aiockpt.http.swarm`, so it
measures those functions and not a copy of them. Everything else is a model:

* A host has an uplink and a downlink. Zones have a shared link to the other zones.
* Bodies share links fairly (max-min): a body that is slow elsewhere leaves its part of
  a link to the others. Each start and end of a body changes the rates of the bodies
  around it, until a change is below 1 % or has come three hops far.
* An uplink sends a few bodies at a time (``slots``); more requests wait in FIFO order.
* A request itself takes no time. A member announces its chunks ``lag`` seconds late.
* A request is for one chunk. A receiver has one request at a time at each neighbour.
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

from aiockpt.http.swarm import (
    FIRST,
    LEASE,
    Member,
    heartbeat,
    neighbours,
    next_chunk,
    patience,
    source_chunk,
)

__all__ = ["CASES", "Case", "Outcome", "simulate"]

_TOLERANCE = 0.01  # of a rate; a smaller change is not passed on
_HOPS = 3
_MUCH = 2.0  # a request that needs so many times as long elsewhere is stolen
_SLACK = 0.25  # seconds, as for the downloader
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
        probes: Neighbours that a receiver tries for each chunk. It waits for a slot at
            the last one only.
        greedy: Whether a receiver asks the source whenever it can. The source gives
            chunks that it has given before, then, which `source_chunk` avoids.
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
        self.have = self.told = self.asked = 0
        self.reported = self.named = 0  # what the tracker knows
        self.telling = False
        self.sent = 0.0
        self.known: list[_Host] = []
        self.knowers: dict[_Host, None] = {}
        self.requests: dict[int, _Request] = {}
        self.lanes = 0
        self.hint: int | None = None
        self.at_source: _Request | None = None
        self.idle_since = inf
        self.looking = False
        self.usual = 0.0
        self.source_had_sent = 0.0
        self.pause = FIRST


class _Request:
    """A request for one chunk, and its body once it has a slot."""

    __slots__ = (
        "asked",
        "at",
        "chunk",
        "due",
        "giver",
        "is_new",
        "left",
        "links",
        "rate",
        "receiver",
        "since",
        "state",
        "steals",
    )

    def __init__(self, receiver: _Host, giver: _Host, chunk: int, now: float) -> None:
        self.receiver, self.giver, self.chunk = receiver, giver, chunk
        self.asked = self.since = now
        self.links: tuple[_Link, ...] = ()
        self.left = self.rate = 0.0
        self.due = self.at = inf
        self.state = "waits"
        self.steals = 0
        self.is_new = False  # whether nobody has had the chunk from the source

    def seconds_left(self, now: float) -> float:
        """Return the estimated seconds left; as many as it waited if it still waits."""
        if not self.rate:
            return now - self.asked
        return self.left / self.rate - (now - self.since)

    def cap(self, link: _Link) -> float:
        """Return what the other links leave to the body."""
        first, second = self.links[0], self.links[1]
        if len(self.links) == 2:  # the usual case, which is faster
            return second.level if first is link else first.level
        return min(other.level for other in self.links if other is not link)


@dataclass
class _Swarm:
    """One simulation.

    The path of a chunk: `fill` (decide) -> `ask` -> `start` -> `finish` -> `tell`.
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
        self.size = case.nbytes / case.chunks
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
        half = member.at_source
        if half is not None and half.is_new:  # the source sees that the body broke off
            self.unsent.append(half.chunk)
        for request in list(member.requests.values()):
            self.cancel(request)
        orphans = [*member.queue, *member.up.bodies]
        for request in orphans:
            self.cancel(request)
        for other in member.known:
            other.knowers.pop(member, None)
        member.known = []
        knowers, member.knowers = member.knowers, {}
        for other in knowers:
            other.known.remove(member)
        for other in dict.fromkeys([*knowers, *(each.receiver for each in orphans)]):
            self.fill(other)
        hint, member.hint = member.hint, None

        def forget() -> None:
            self.tracked.remove(member)
            if hint is not None:
                self.unsent.append(hint)

        self.later(LEASE * self.period, forget)

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
        known = {member, *member.known}
        others = [other for other in others if other not in known]
        chosen = neighbours(
            _record(member),
            [_record(other) for other in others],
            known=len(member.known),
            chance=self.chance,
        )
        for at in chosen:
            others[at].named += 1
            if others[at].alive:
                member.known.append(others[at])
                others[at].knowers[member] = None
        if member.hint is None and member.at_source is None and self.unsent:
            member.hint = self.unsent.pop()
        self.fill(member)
        self.later(member.pause * self.period, lambda: self.beat(member))
        member.pause = min(2 * member.pause, 1.0)

    @property
    def period(self) -> float:
        """Seconds between two heartbeats of a member, as the tracker wants them."""
        return heartbeat(len(self.tracked))

    # ---------------------------------------------------------------- receiver

    def fill(self, member: _Host) -> None:
        """Let a member ask for what it lacks, while it has free connections."""
        if not member.alive or member.have == self.full:
            return
        while member.lanes < self.case.lanes:
            lacks = self.lacks(member)
            givers = self.others(member, lacks)
            if not givers:
                break
            giver = self.choose(givers)
            maps = [other.told for other in member.known]
            chunk = next_chunk(lacks & giver.told, maps, self.chance)
            assert chunk is not None
            self.ask(member, giver, chunk)
        if member.lanes == self.case.lanes:
            member.idle_since = inf
        elif member.idle_since == inf and self.lacks(member):
            member.idle_since = self.now
            self.later(patience(member.usual) + 1e-6, lambda: self.fill(member))
        if member.at_source is None:
            self.fill_from_source(member)
        if member.lanes < self.case.lanes:
            self.steal(member)

    def lacks(self, member: _Host) -> int:
        """Return what a member has not got and asks nobody for."""
        return self.full & ~(member.have | member.asked)

    def choose(self, givers: list[_Host]) -> _Host:
        """Return the first that has a free slot, or the last that was tried."""
        tried = self.chance.sample(givers, min(self.case.probes, len(givers)))
        return next((each for each in tried if each.serving < each.slots), tried[-1])

    def others(self, member: _Host, wanted: int) -> list[_Host]:
        """Return the neighbours that offer something and are not asked already.

        A neighbour gets one request at a time. More of them compete with the body from
        the source, and two members are 15 % slower.
        """
        busy = {request.giver for request in member.requests.values()}
        return [
            other for other in member.known if other.told & wanted and other not in busy
        ]

    def fill_from_source(self, member: _Host) -> None:
        hint, member.hint = member.hint, None
        lacks = self.lacks(member)
        maps = [other.told for other in member.known]
        if self.case.greedy and (hint is None or not lacks >> hint & 1):
            chunk = next_chunk(lacks, maps, self.chance)
        else:
            chunk = source_chunk(
                hint,
                lacks,
                maps,
                idle=max(self.now - member.idle_since, 0.0),
                usual=member.usual,
                chance=self.chance,
            )
        if chunk is not None:
            self.ask(member, self.source, chunk).is_new = chunk == hint

    def steal(self, member: _Host) -> None:
        """Ask elsewhere for a chunk that comes much too slowly.

        If no neighbour has it, the source gives it once more.
        """
        usual = member.usual or _SLACK
        slowest, longest, instead = None, 0.0, self.source
        for request in member.requests.values():
            left = request.seconds_left(self.now)
            if left <= max(_MUCH * usual + _SLACK * 2**request.steals, longest):
                continue
            others = self.others(member, 1 << request.chunk)
            if others:
                slowest, longest, instead = request, left, self.chance.choice(others)
            elif member.at_source is None:
                slowest, longest, instead = request, left, self.source
        if slowest is not None:
            self.cancel(slowest)
            again = self.ask(member, instead, slowest.chunk)
            again.steals = slowest.steals + 1
        if not member.looking and member.requests:
            member.looking = True
            self.later(max(usual, _SLACK), lambda: self.look(member))

    def look(self, member: _Host) -> None:
        member.looking = False
        self.fill(member)

    # ---------------------------------------------------------------- requests

    def ask(self, member: _Host, giver: _Host, chunk: int) -> _Request:
        request = _Request(member, giver, chunk, self.now)
        member.requests[chunk] = request
        member.asked |= 1 << chunk
        if giver is self.source:
            member.at_source = request
        else:
            member.lanes += 1
        giver.queue.append(request)
        self.start_next(giver)
        return request

    def start_next(self, giver: _Host) -> None:
        while giver.queue and giver.serving < giver.slots:
            self.start(giver.queue.popleft())

    def start(self, request: _Request) -> None:
        giver, receiver = request.giver, request.receiver
        giver.serving += 1
        request.state, request.since, request.left = "moves", self.now, self.size
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
        if request.state == "moves":
            came = request.rate * (self.now - request.since)
            giver.sent += self.size - max(request.left - came, 0.0)
            giver.serving -= 1
            for link in request.links:
                del link.bodies[request]
                self.dirty[link] = None
        else:
            giver.queue.remove(request)
        request.state = "ended"
        del receiver.requests[request.chunk]
        receiver.asked &= ~(1 << request.chunk)
        if giver is self.source:
            receiver.at_source = None
        else:
            receiver.lanes -= 1

    def cancel(self, request: _Request) -> None:
        self.end(request)
        if request.giver.alive:
            self.start_next(request.giver)

    def finish(self, request: _Request) -> None:
        receiver, giver = request.receiver, request.giver
        request.left, request.since = 0.0, self.now
        self.end(request)
        receiver.have |= 1 << request.chunk
        took = self.now - request.asked
        receiver.usual += (took - receiver.usual) * (0.2 if receiver.usual else 1)
        if not receiver.telling:
            receiver.telling = True
            self.later(self.case.lag, lambda: self.tell(receiver))
        if receiver.have == self.full:
            receiver.done = self.now
            receiver.source_had_sent = self.source.sent
            self.missing -= 1
            self.later(self.case.linger, lambda: self.leave(receiver))
        elif giver is self.source and self.unsent:
            receiver.hint = self.unsent.pop()
        self.fill(receiver)
        self.start_next(giver)

    def tell(self, member: _Host) -> None:
        """Announce what came since the last time."""
        member.telling = False
        new, member.told = member.have & ~member.told, member.have
        for other in list(member.knowers):
            if other.lanes < self.case.lanes and new & ~(other.have | other.asked):
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


def _record(member: _Host) -> Member:
    return Member(str(member.zone), member.reported, member.named)


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
        assert host.sent <= 1.02 * most + swarm.size, "an uplink carried too much"
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
