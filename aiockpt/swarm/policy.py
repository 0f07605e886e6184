"""Decides who serves whom in a swarm, and how often a member announces itself.

The tracker, at the sender, names some members to each member. The decisions are plain
functions, which the simulator runs, too (``benchmarks/swarm_sim.py``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

HEARTBEATS_PER_LEASE = 3
"""The tracker forgets a member after so many intervals without a heartbeat."""

FIRST = 1 / 8
"""The second heartbeat comes after this fraction of the usual interval.

The interval then doubles up to the usual one.
"""

_NEIGHBOURS = 12  # more of them cost requests, and no longer make a swarm faster
_MORE_NEIGHBOURS = 4  # that a member with enough of them is told of at a time
_MIN_HEARTBEAT_S = 2.0  # between two heartbeats of a member
_MAX_HEARTBEATS_PER_S = 60.0  # each takes the tracker about a millisecond


class Candidate(NamedTuple):
    """What the tracker knows of a member.

    Attributes:
        zone: Members of one zone have a fast network between them.
        have: How many chunks it holds.
        named: How often the tracker has named it to others.
    """

    zone: str
    have: int
    named: int


def heartbeat(members: int) -> float:
    """Return the seconds between two heartbeats of each of so many members.

    A heartbeat is an announcement at the tracker, whose work is bounded.
    """
    return max(_MIN_HEARTBEAT_S, members / _MAX_HEARTBEATS_PER_S)


def neighbours(
    asker: Candidate,
    others: Sequence[Candidate],
    *,
    known: int = 0,
    chance: random.Random | None,
) -> list[int]:
    """Choose the members that the tracker names to a member.

    It names as many as the asker lacks of 12 neighbours. Half of them are from the
    asker's zone and half from elsewhere; where one side has too few, the other one
    fills up. On both sides, those named least often come first. One or more has more
    chunks than the asker, if there is such a member.

    An asker with 12 neighbours learns of a few members that were named to fewer than 12
    others, until it has 24. Otherwise nobody would fetch from those that join last, and
    the source would have to send again what it gave to them.

    Args:
        asker: The member that asks.
        others: The other members that it does not know.
        known: How many it knows.
        chance: Breaks ties. With None, the earlier member comes first.

    Returns:
        Indexes into ``others``, each once.
    """
    order = list(range(len(others)))
    if chance is not None:
        chance.shuffle(order)
    order.sort(key=lambda at: others[at].named)
    most = _NEIGHBOURS - known
    if most < 1:
        order = [at for at in order if others[at].named < _NEIGHBOURS]
        most = max(min(_MORE_NEIGHBOURS, 2 * _NEIGHBOURS - known), 0)
    near = [at for at in order if others[at].zone == asker.zone]
    far = [at for at in order if others[at].zone != asker.zone]
    of_near = max(min(len(near), most // 2), most - len(far))
    near, far = near[:of_near], far[: most - min(of_near, len(near))]
    ahead = [at for at in order if others[at].have > asker.have]
    if most and ahead and not any(others[at].have > asker.have for at in near + far):
        best = ahead[0]
        side = near if others[best].zone == asker.zone else far
        (side or near or far)[-1:] = [best]
    return near + far
