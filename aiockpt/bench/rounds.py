"""Candidates take turns, so that a busy moment of the machine hits all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aiockpt.bench.process import BenchError
from aiockpt.bench.statistics import Sample

__all__ = ["Candidate", "Note", "take_turns"]

Note = Callable[[str], None]

_HOPELESS = 1.5


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that is measured.

    Attributes:
        name: Its name in the table.
        run: Measures it once.
        rivals: Names of the other settings of the same thing, of which the best
            counts. Such a candidate may fail, and is not repeated when the first
            round shows it more than 1.5 times slower than the best.
    """

    name: str
    run: Callable[[], Sample]
    rivals: tuple[str, ...] = ()


def take_turns(
    candidates: Sequence[Candidate], repeat: int, note: Note, *, until: float = math.inf
) -> dict[str, list[Sample]]:
    """Measure every candidate ``repeat`` times, in rounds.

    No second round begins after ``until``, in seconds of the monotonic clock.

    Every other round goes backwards, and each two begin at another one: what a disk
    or a cache owes to the one before falls on nobody in particular.
    """
    samples: dict[str, list[Sample]] = {each.name: [] for each in candidates}
    running = list(candidates)
    for turn in range(repeat):
        if turn and time.monotonic() >= until:
            break
        shift = turn // 2 % max(len(running), 1)
        order = running[shift:] + running[:shift]
        for candidate in order[::-1] if turn % 2 else order:
            note(f"round {turn + 1} of {repeat}: {candidate.name}")
            samples[candidate.name] += _measure(candidate, note)
        running = [each for each in running if _is_worth_it(each, samples)]
    return {name: found for name, found in samples.items() if found}


def _measure(candidate: Candidate, note: Note) -> Iterable[Sample]:
    try:
        return [candidate.run()]
    except BenchError as error:
        if not candidate.rivals:
            raise
        note(f"left out: {error}")
        return []


def _is_worth_it(candidate: Candidate, samples: dict[str, list[Sample]]) -> bool:
    if not candidate.rivals:
        return True
    own = samples[candidate.name]
    firsts = [samples[name][0].seconds for name in candidate.rivals if samples[name]]
    return bool(own) and own[0].seconds <= _HOPELESS * min(firsts)
