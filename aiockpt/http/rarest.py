"""Chooses the chunk that a receiver requests next where some peers have a part.

Receivers of one snapshot serve each other the chunks that they hold, so each requests
the rarest chunks first. The decisions are plain functions. `MemberRules` is what a
receiver's planner knows of all members together. The simulator runs the same code
(``benchmarks/swarm_sim.py``).

A bitmap is an int: bit ``i`` is set if a member holds chunk ``i``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from math import inf

from aiockpt.http.tuning import MemberTuning


def next_chunk(wanted: int, rivals: Sequence[int], chance: random.Random) -> int | None:
    """Choose the chunk to request from a neighbour: a random one of the rarest.

    Receivers that break ties in any other way all request the same chunks.

    Args:
        wanted: The chunks that the receiver lacks and the neighbour holds.
        rivals: The chunks that each known neighbour holds, this one included.
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
    are_late: bool,
    chance: random.Random,
) -> int | None:
    """Choose the chunk to request from the source, or None to leave it alone.

    The source gives each chunk once: its answers name one that it has not given yet to
    anybody. Members pass it on. What they do not offer for a while is lost, for example
    because its only holder left, so the source gives it again. It also gives everything
    to a receiver that knows no member.

    Args:
        hint: The chunk that the source named to this receiver, if any.
        wanted: The chunks that the receiver lacks and requests from nobody.
        rivals: The chunks that each known neighbour holds.
        are_late: Whether neighbours have brought nothing for too long.
        chance: Breaks ties.

    Returns:
        The number of the chunk.
    """
    if hint is not None and wanted >> hint & 1:
        return hint
    if rivals and not are_late:
        return None
    return next_chunk(wanted, rivals, chance)


class MemberRules:
    """The rules by which a receiver asks the members of a swarm for chunks.

    Args:
        tuning: The numbers of these rules.
        now: When the download begins.

    Attributes:
        hope_until: Until when the receiver waits to hear of members.
        reserved: The chunks that the receiver requests from sources only, as a bitmap.
        turns: The requests to members that may begin now. Each number says how many
            members in turn were too busy before.
    """

    def __init__(self, tuning: MemberTuning, now: float) -> None:
        self.hope_until = -inf
        self.reserved = 0
        self.turns = [0] * tuning.requests
        self._tuning = tuning
        self._stopped = Counter[int]()  # by chunk: requests to members
        self._brought = self._helped = now

    def brought(self, now: float) -> None:
        """Note that a member has brought a chunk."""
        self._brought = now

    def may_wait(self, turn: int) -> bool:
        """Return whether a member may let a request wait until others are served."""
        return turn + 1 >= self._tuning.members_in_turn

    def end_turn(self, turn: int, *, was_refused: bool) -> None:
        """Note that a request to a member has ended."""
        again = (turn + 1) % self._tuning.members_in_turn
        self.turns.append(again if was_refused else 0)

    def stopped(self, chunk: int) -> None:
        """Note that a request to a member was stopped in vain."""
        self._stopped[chunk] += 1
        if self._stopped[chunk] >= self._tuning.requests_in_vain:
            self.reserved |= 1 << chunk

    def are_useless(self, usual: float | None, now: float) -> bool:
        """Return whether members have brought nothing for a long time."""
        idle = now - max(self._helped, self._brought)
        return idle > self._tuning.useless_after.seconds(usual)

    def are_late(self, *, offer: bool, usual: float | None, now: float) -> bool:
        """Return whether the receiver asks a source for chunks that members offer.

        Args:
            offer: Whether members offer anything that is wanted. What they bring counts
                only while they do: they may offer much, and send little.
            usual: Seconds that a chunk usually takes, if that is known.
            now: The loop time.
        """
        if offer:
            self._helped = max(self._helped, self._brought)
        return now - self._helped >= self._tuning.source_after.seconds(usual)


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
