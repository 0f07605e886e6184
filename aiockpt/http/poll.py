"""Which of several answers counts: a plain decision over who said what.

Peers that hold the same checkpoint say the same; one that lies, or is of another run,
says something else. What most say is taken. Nobody waits long for those who are
silent: they may still agree when everything is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aiockpt.errors import AiockptError

__all__ = ["PATIENCE", "Party", "Poll"]

V = TypeVar("V")

PATIENCE = 1.0
"""Seconds after the first answer in which others may still outvote it."""


@dataclass(frozen=True, slots=True)
class Party(Generic[V]):
    """Those who said the same, by their numbers; and what the first of them said."""

    value: V
    voters: list[int]


class Poll(Generic[V]):
    """One question to ``voters``, which are numbered in the caller's order.

    Args:
        voters: How many are asked.
        key: What is equal where two answers agree.
        rank: The higher one is preferred where as many say one thing as another; then
            the one of whom the caller named first.
    """

    def __init__(
        self,
        voters: int,
        *,
        key: Callable[[V], Hashable],
        rank: Callable[[V], Any] = lambda _: 0,
    ) -> None:
        self.failures: dict[int, AiockptError] = {}
        self._key, self._rank = key, rank
        self._parties: dict[Hashable, Party[V]] = {}
        self._voters = voters
        self._awaited = {*range(voters)}
        self._first: float | None = None

    def __repr__(self) -> str:
        return f"<Poll parties={len(self._parties)} awaited={len(self._awaited)}>"

    def vote(self, voter: int, value: V, now: float) -> None:
        """Count an answer."""
        party = self._parties.setdefault(self._key(value), Party(value, []))
        party.voters.append(voter)
        self._awaited.discard(voter)
        self._first = now if self._first is None else self._first

    def doubt(self, voter: int) -> None:
        """Note that a voter has trouble; it may still vote."""
        self._awaited.discard(voter)

    def fail(self, voter: int, error: AiockptError) -> None:
        """Note that a voter has no answer."""
        self.failures[voter] = error
        self._awaited.discard(voter)

    def parties(self) -> list[Party[V]]:
        """Return who said what, the best first."""

        def merit(party: Party[V]) -> tuple[Any, ...]:
            return len(party.voters), self._rank(party.value), -min(party.voters)

        return sorted(self._parties.values(), key=merit, reverse=True)

    def is_settled(self, now: float) -> bool:
        """Say whether the first of the `parties` is to be taken, or there is none."""
        if self._first is None:
            return len(self.failures) == self._voters
        best, *others = (len(party.voters) for party in self.parties())
        lead = best - max(others, default=0)
        late = now - self._first >= PATIENCE
        return late or not self._awaited or lead > len(self._awaited)

    def left(self, now: float) -> float | None:
        """Return the seconds until it is settled whoever is silent; None: for ever."""
        return None if self._first is None else max(self._first + PATIENCE - now, 0.0)
