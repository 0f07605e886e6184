"""Samples and what they say: rounds of turns, paired ratios, intervals, verdicts.

A sample is one figure or several of one candidate in one round. The first round warms
everything up and is discarded. Two candidates are compared by the ratios of their
samples of the same round, so that a busy minute hits both. The interval of the median
is that of order statistics: it assumes nothing about the distribution, and for ratios
it is the same with and without logarithms. A verdict is given only where the whole
interval lies on one side of the target.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from typing import TypeVar

T = TypeVar("T")
Sample = dict[str, float]
"""Figures by name; ``seconds`` is always there."""
Samples = list[Sample | None]
"""One sample for each round, the discarded first one included; None: not measured."""
Cost = dict[str, float]
"""What an act took in its process: ``seconds``, ``cpu`` seconds and the others of
`EFFORTS`, the 99th percentile of the loop's ``lag`` in seconds, and when it ``began``
on the monotonic clock."""
EFFORTS = ("system", "minor", "major", "switches")
"""CPU seconds in the kernel, minor and major page faults, and context switches."""

WARM_UP = 1  # rounds that are not counted
CONFIDENCE = 0.9
_TRIES = 2  # counted rounds before a rival's setting may be dropped
_HOPELESS = 1.5  # times slower than the best setting
_TICKS = os.sysconf("SC_CLK_TCK")  # in a second of /proc
_SWITCHES = re.compile(r"ctxt_switches:\t(\d+)")
_PERIOD = 0.005  # seconds between the ticks that show how late a loop is


class BenchmarkError(RuntimeError):
    """A process could not do what it was asked, or the machine cannot."""


# ---------------------------------------------------------------- what samples say


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and the interval that holds the true one with `CONFIDENCE`.

    ``low`` and ``high`` are None where there are too few values for an interval.
    """

    value: float
    low: float | None
    high: float | None


def counted(samples: Samples) -> list[Sample]:
    """Return the samples that count."""
    return [each for each in samples[WARM_UP:] if each is not None]


def paired(ours: Samples, theirs: Samples, metric: str) -> list[float]:
    """Return ours / theirs for each counted round that has both."""
    rounds = list(zip(ours, theirs, strict=False))[WARM_UP:]
    return [a[metric] / b[metric] for a, b in rounds if a and b and b[metric]]


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median and its order-statistic interval, the narrowest that suffices.

    The k-th smallest and the k-th largest of n values enclose the median unless fewer
    than k values fall on one of its sides, which has a binomial probability. Five
    values are the fewest that suffice.
    """
    ordered, n = sorted(values), len(values)
    outside, k = 0.0, 0
    while k < n // 2:
        outside += 2 * math.comb(n, k) / 2**n
        if outside > 1 - CONFIDENCE:
            break
        k += 1
    if not k:
        return Estimate(median(ordered), None, None)
    return Estimate(median(ordered), ordered[k - 1], ordered[n - k])


def verdict(
    found: Estimate, *, at_least: float | None = None, at_most: float | None = None
) -> str:
    """Return ``ok``, ``missed`` or ``undecided``; empty if there is no target."""
    if at_least is None and at_most is None:
        return ""
    if found.low is None or found.high is None:
        return "undecided"
    low, high = at_least or -math.inf, math.inf if at_most is None else at_most
    if low <= found.low and found.high <= high:
        return "ok"
    return "missed" if found.high < low or found.low > high else "undecided"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of the values do not exceed, or 0."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else 0.0


# ---------------------------------------------------- how candidates take turns


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that is measured.

    Attributes:
        name: Its name.
        run: Takes one sample.
        rival: The rival that this is one of several settings of. A setting may fail,
            and is dropped when it turns out hopeless.
        ours: Whether it measures this library, so that another source tree has it too.
    """

    name: str
    run: Callable[[], Sample]
    rival: str = ""
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Turns:
    """What candidates have measured, by their names.

    Attributes:
        samples: Of those that have counted rounds.
        failures: Why a rival was left out.
    """

    samples: dict[str, Samples]
    failures: dict[str, str]


def take_turns(
    candidates: Sequence[Candidate],
    rounds: int,
    note: Callable[[str], object],
    until: float = math.inf,
) -> Turns:
    """Sample every candidate once in each round.

    Every other round goes backwards, and every two rounds begin with another candidate,
    so no candidate always runs after the same one. After the first round, none begins
    that would end after ``until``, on the monotonic clock, if it took as long as the
    last one that counts.
    """
    found: dict[str, Samples] = {each.name: [] for each in candidates}
    failures: dict[str, str] = {}
    running = list(candidates)
    needed = 0.0
    for turn in range(rounds):
        if (began := time.monotonic()) + needed > until and turn:
            break
        shift = turn // 2 % max(len(running), 1)
        order = running[shift:] + running[:shift]
        for each in order[::-1] if turn % 2 else order:
            note(f"round {turn + 1} of {rounds}: {each.name}")
            try:
                found[each.name].append(each.run())
            except BenchmarkError as error:
                if not each.rival:
                    raise
                note(f"left out: {error}")
                failures[each.name] = str(error)
                running.remove(each)
        running = [each for each in running if not _is_dropped(each, running, found)]
        if turn >= WARM_UP:
            needed = time.monotonic() - began
    padded = {
        name: [*them, *[None] * (rounds - len(them))] for name, them in found.items()
    }
    counting = {name: them for name, them in padded.items() if counted(them)}
    return Turns(counting, failures)


def _is_dropped(
    candidate: Candidate, all_: Sequence[Candidate], found: Mapping[str, Samples]
) -> bool:
    if not candidate.rival:
        return False
    settings = [
        counted(found[each.name]) for each in all_ if each.rival == candidate.rival
    ]
    return is_hopeless(counted(found[candidate.name]), settings)


def is_hopeless(
    samples: Sequence[Sample], settings: Sequence[Sequence[Sample]]
) -> bool:
    """Return whether one setting of a rival is not worth another round.

    It takes two counted rounds at least: the first may have met a busy moment.
    """
    if len(samples) < _TRIES:
        return False

    def typical(them: Sequence[Sample]) -> float:
        return median(each["seconds"] for each in them)

    return typical(samples) > _HOPELESS * min(
        typical(them) for them in settings if them
    )


# ----------------------------------------------------- how one sample is taken


def spent() -> list[float]:
    """Return what this process and its children have spent; for `spent_since`."""
    children = _spent_by_children()  # first: what it takes to look is not counted
    return [*map(sum, zip(children, _spent_by_itself(), strict=True))]


def spent_since(before: Sequence[float]) -> Cost:
    """Return the CPU seconds and `EFFORTS` since `spent` was called."""
    now = zip(_spent_by_itself(), _spent_by_children(), before, strict=True)
    found = [own + theirs - then for own, theirs, then in now]
    return dict(zip(("cpu", *EFFORTS), found, strict=True))


def _spent_by_itself() -> list[float]:
    own = getrusage(RUSAGE_SELF)
    cpu, switches = own.ru_utime + own.ru_stime, own.ru_nvcsw + own.ru_nivcsw
    return [cpu, own.ru_stime, own.ru_minflt, own.ru_majflt, switches]


def _spent_by_children() -> list[float]:
    """Return what Linux says of a server process, or of one that saves."""
    total = [0.0] * (1 + len(EFFORTS))
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread or a child has just ended
            for child in children.read_text().split():
                process = Path("/proc") / child
                stat = process.joinpath("stat").read_text().rpartition(") ")[2].split()
                minor, major, *ticks = (int(stat[at]) for at in (7, 9, 11, 12))
                texts = [each.read_text() for each in process.glob("task/*/status")]
                switches = sum(map(int, _SWITCHES.findall("".join(texts))))
                used = (sum(ticks) / _TICKS, ticks[1] / _TICKS, minor, major, switches)
                total = [*map(sum, zip(total, used, strict=True))]
    return total


def efforts(gigabytes: float, costs: Sequence[Cost], end: str) -> Sample:
    """Return `EFFORTS` per GB of the processes at one end, as figures of a sample."""
    return {
        f"{name}, {end}": sum(cost[name] for cost in costs) / gigabytes
        for name in EFFORTS
        if name in costs[0]
    }


class Watch:
    """Counts seconds, late ticks, and what this process and its children spend."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._began = 0.0
        self._spent: list[float] = []
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Count from now on."""
        self._lags, self._spent = [], spent()
        self._ticking = asyncio.create_task(self._tick())
        self._began = time.monotonic()

    async def stop(self) -> Cost:
        """Return what was counted; the tick that was due at the end counts too."""
        seconds = time.monotonic() - self._began
        ticking, self._ticking = self._ticking, None
        if ticking is not None:
            ticking.cancel()
            with suppress(asyncio.CancelledError):
                await ticking
        used, lag = spent_since(self._spent), percentile(self._lags, 0.99)
        return {"seconds": seconds, "lag": lag, "began": self._began, **used}

    async def _tick(self) -> None:
        due = time.monotonic() + _PERIOD
        try:
            while True:
                await asyncio.sleep(_PERIOD)
                now = time.monotonic()
                self._lags.append(now - due)
                due = now + _PERIOD
        finally:
            self._lags.append(max(time.monotonic() - due, 0.0))


async def timed(act: Callable[[], Awaitable[T]]) -> tuple[T, Cost]:
    """Await ``act()``; return its result and what it cost."""
    watch = Watch()
    watch.start()
    try:
        result = await act()
    finally:
        cost = await watch.stop()
    return result, cost
