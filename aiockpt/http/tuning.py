"""The numbers of a download: what is usual, what is slow, and how long to rest.

One rule says when something is slow (`SlowAfter`), and one estimator says how long a
request usually takes (`Usual`). `Tuning` has every number that a planner uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

_FORGOTTEN_PART = 0.1  # of its weight, which a request loses with each later one


@dataclass(frozen=True, slots=True)
class SlowAfter:
    """When something is slow that usually takes ``usual`` seconds.

    It is slow after ``times * usual + slack_s * 2**vain`` seconds. ``vain`` counts how
    often it was found slow before, so that it is found slow ever later.

    Attributes:
        times: How many times the usual seconds it may take.
        slack_s: Seconds beyond these; a lost packet is not slowness.
        unknown_s: Seconds if nothing is known of what is usual.
    """

    times: float
    slack_s: float = 0.0
    unknown_s: float = inf

    def seconds(self, usual: float | None, vain: int = 0) -> float:
        """Return after how many seconds it is slow."""
        if usual is None:
            return self.unknown_s
        return self.times * usual + self.slack_s * (1 << vain)


@dataclass(frozen=True, slots=True)
class Doubling:
    """Rests that double each time.

    Attributes:
        first_s: Seconds of the first rest.
        longest_s: Seconds of the longest one.
        equal: How many rests after the first one are as short as it.
    """

    first_s: float
    longest_s: float
    equal: int = 0

    def seconds(self, before: int) -> float:
        """Return the seconds of a rest after ``before`` others."""
        doublings = min(max(before - self.equal, 0), 16)
        return min(self.first_s * (1 << doublings), self.longest_s)


class Usual:
    """How long requests usually take: a mean that forgets old ones.

    A request for a part of a unit counts as this part, and a request for many units as
    one.

    Args:
        unit: Size of what is usually requested, such as a chunk's bytes.
    """

    def __init__(self, unit: int = 1) -> None:
        self._unit = unit
        self._seconds = self._units = 0.0

    def learn(self, size: int, seconds: float) -> None:
        """Note how long a request of this size took."""
        if size:
            part, keep = size / self._unit, 1 - _FORGOTTEN_PART
            self._seconds = self._seconds * keep + seconds / max(part, 1.0)
            self._units = self._units * keep + min(part, 1.0)

    def seconds(self, size: int = 1) -> float | None:
        """Return how long a request of this size takes; None before the first one."""
        if not self._units:
            return None
        return self._seconds / self._units * size / self._unit


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """The limits for peers of one kind; by default there are none.

    Attributes:
        slow_request: A request is stopped if it takes longer, and if another peer can
            send the chunk.
        steals: Runs that are taken from a peer in a row before it is dropped.
        resumes: How often the planner asks a peer for the rest of a broken run.
    """

    slow_request: SlowAfter = SlowAfter(times=0.0, slack_s=inf)
    steals: float = inf
    resumes: float = inf


@dataclass(frozen=True, slots=True)
class MemberTuning:
    """The numbers of a planner for members of a swarm.

    Attributes:
        requests: Requests to all members at a time.
        requests_per_member: Requests to one member at a time.
        members_in_turn: Members that are asked in turn for a chunk; only the last one
            may let the request wait.
        limits: The limits for members. Without them, members that send slowly on
            purpose could hold all requests.
        rest_after_refusal: Rests of a connection to a member that is busy.
        requests_in_vain: Stopped requests to members for a chunk, after which the
            planner asks only sources for it.
        source_after: If members have brought nothing for so long, the planner asks a
            source for the chunks that they offer. A receiver that has no chunk yet
            waits long: in a large swarm most receivers have none at first, and the
            source cannot serve them all.
        useless_after: Members that have brought nothing for so long do not count.
    """

    requests: int = 5
    requests_per_member: int = 2
    members_in_turn: int = 3
    limits: PeerLimits = PeerLimits(
        slow_request=SlowAfter(times=5.0, slack_s=1.0), steals=3, resumes=2
    )
    rest_after_refusal: Doubling = Doubling(first_s=0.1, longest_s=2.0, equal=3)
    requests_in_vain: int = 2
    source_after: SlowAfter = SlowAfter(times=3.0, unknown_s=30.0)
    useless_after: SlowAfter = SlowAfter(times=12.0)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The numbers of a planner.

    Attributes:
        max_run_bytes: Bytes of the longest run. The request for it takes little time
            beside these bytes.
        run_s: Seconds that a run takes where several peers share the work.
        max_connections: Connections to all peers together, as a multiple of those that
            a single peer gets.
        slow_run: A run is slow, and a free connection takes it over, if its estimated
            time left exceeds this. ``usual`` is the time that the free connection would
            need.
        unknown_run_s: Estimated seconds that a run takes a peer that has brought
            nothing yet.
        steals_by_same_peer: How often a run goes to another connection of the same
            peer, if no byte comes meanwhile.
        rest_after_steal: Rests of a connection that lost its run.
        watch_s: A connection counts as slow only after it was watched for so many
            seconds, or for the usual time if that is shorter.
        look_s: Seconds between two looks at connections that may have become slow.
        late_s: Seconds between two looks after which this process itself was slow.
        members: The numbers for members of a swarm.
    """

    max_run_bytes: int = 1 << 30
    run_s: float = 0.25
    max_connections: int = 4
    slow_run: SlowAfter = SlowAfter(times=2.0, slack_s=0.25)
    unknown_run_s: float = 0.5
    steals_by_same_peer: int = 3
    rest_after_steal: Doubling = Doubling(first_s=0.1, longest_s=2.0)
    watch_s: float = 0.5
    look_s: float = 0.05
    late_s: float = 0.25
    members: MemberTuning = MemberTuning()
