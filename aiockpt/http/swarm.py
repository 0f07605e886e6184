"""Decides who serves whom in a swarm, and which chunk a receiver requests next.

Receivers of one snapshot serve each other the chunks that they hold. The tracker, at
the sender, names some members to each member; a receiver requests the rarest chunks
first. The decisions are plain functions: the same ones run in the simulator
(``benchmarks/swarm_sim.py``).

A bitmap is an int: bit ``i`` is set if a member holds chunk ``i``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

LEASE = 3
"""Heartbeats of a member in one lease, so that two of them may be lost."""

FIRST = 1 / 8
"""Part of the usual time after which a member's second heartbeat comes.

Each further one takes twice as long as the one before, up to the usual time.
"""

_ENOUGH = 12  # more neighbours cost requests, and no longer make a swarm faster
_MORE = 4  # members that one with enough neighbours is told of at a time
_PATIENCE = 3.0  # usual requests, after which what does not come counts as lost
_AT_FIRST = 30.0  # seconds; the same for a receiver that knows no usual request yet
_PERIOD = 2.0  # seconds between two heartbeats of a member, at least
_BUSIEST = 60.0  # heartbeats per second, at most; each takes about a millisecond
_NEWS = 0.1  # of the last duration in the average of all


class Member(NamedTuple):
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
    """Return the seconds between two heartbeats of one of so many members.

    A heartbeat is an announcement at the tracker, whose work is bounded.
    """
    return max(_PERIOD, members / _BUSIEST)


def neighbours(
    asker: Member,
    others: Sequence[Member],
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
    most = _ENOUGH - known
    if most < 1:
        order = [at for at in order if others[at].named < _ENOUGH]
        most = max(min(_MORE, 2 * _ENOUGH - known), 0)
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


def next_chunk(wanted: int, rivals: Sequence[int], chance: random.Random) -> int | None:
    """Choose the chunk to request from a neighbour: a random one of the rarest.

    Receivers that break ties in any other way all request the same chunks.

    Args:
        wanted: What the receiver lacks and the neighbour holds.
        rivals: What each known neighbour holds, the one that is asked included.
        chance: Breaks ties.

    Returns:
        The number of the chunk; None if ``wanted`` has none.
    """
    if not wanted:
        return None
    # Bit i of the k-th counter is bit k of how many rivals hold chunk i. A rival is
    # added to the counts of all chunks at once, as a ripple-carry adder does.
    counters: list[int] = []
    for rival in rivals:
        carry = rival & wanted
        for k, counter in enumerate(counters):
            counters[k] = counter ^ carry
            carry &= counter
            if not carry:
                break
        if carry:
            counters.append(carry)
    rarest = wanted
    for counter in reversed(counters):
        rarest = rarest & ~counter or rarest
    return _nth_bit(rarest, chance.randrange(rarest.bit_count()))


def source_chunk(
    hint: int | None,
    wanted: int,
    rivals: Sequence[int],
    *,
    idle: float,
    usual: float,
    chance: random.Random,
) -> int | None:
    """Choose the chunk to request from the source, or None to leave it alone.

    The source gives each chunk once: its answers name one that it has not given yet to
    anybody. Members pass it on. What they do not offer for a while is lost, for example
    because its only holder left, so the source gives it again. It also gives everything
    to a receiver that knows no member.

    Args:
        hint: The chunk that the source named to this receiver, if any.
        wanted: What the receiver lacks and requests from nobody.
        rivals: What each known neighbour holds.
        idle: Seconds for which neighbours have brought nothing.
        usual: Seconds that a request usually takes; 0.0 before the first one.
        chance: Breaks ties.

    Returns:
        The number of the chunk.
    """
    if hint is not None and wanted >> hint & 1:
        return hint
    if rivals and idle < patience(usual):
        return None
    return next_chunk(wanted, rivals, chance)


def patience(usual: float) -> float:
    """Return for how many idle seconds a receiver waits before it asks the source.

    A receiver that has no chunk yet waits long. In a large swarm most receivers have
    none at first, and the source cannot serve them all.
    """
    return _PATIENCE * usual or _AT_FIRST


def average(before: float, new: float) -> float:
    """Return a moving average of durations; 0.0 before the first one."""
    return before + (new - before) * _NEWS if before else new


def _nth_bit(bits: int, n: int) -> int:
    """Return the position of the set bit that has ``n`` set bits below it."""
    at, width = 0, bits.bit_length()
    while width > 1:
        half = width // 2
        low = bits & ((1 << half) - 1)
        below = low.bit_count()
        if n < below:
            bits, width = low, half
        else:
            bits, n, at, width = bits >> half, n - below, at + half, width - half
    return at
