"""Samples: how one is taken in a process, how candidates take turns, what many say."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import NotRequired, TypedDict, TypeVar

__all__ = [
    "BenchmarkError",
    "Candidate",
    "Cost",
    "Note",
    "Sample",
    "Series",
    "Watch",
    "best",
    "percentile",
    "take_turns",
    "timed",
]

T = TypeVar("T")
Note = Callable[[str], None]

_PERIOD = 0.005  # seconds between the ticks of the task that watches a loop
_HOPELESS = 1.5  # how many times slower than the best setting is not worth repeating


class BenchmarkError(RuntimeError):
    """A worker process could not do what it was asked, or the machine cannot."""


class Cost(TypedDict):
    """What one act took in its process, as it travels between processes.

    ``lags`` says how late each tick of an unrelated task was. ``began`` is on the
    system's monotonic clock, which all processes share.
    """

    seconds: float
    cpu: float
    lags: list[float]
    began: NotRequired[float]


class Watch:
    """Counts seconds, CPU seconds and late ticks from `start` to `stop`."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._ticking: asyncio.Task[None] | None = None
        self._began = self._started = self._cpu = 0.0

    def start(self) -> None:
        """Count from now on."""
        self._lags = []
        self._ticking = asyncio.create_task(self._tick())
        self._began = time.monotonic()
        self._cpu, self._started = time.process_time(), time.perf_counter()

    async def stop(self) -> Cost:
        """Return what was counted.

        The tick that was due at the end counts too, so a loop that was blocked all the
        time has at least one.
        """
        seconds = time.perf_counter() - self._started
        cpu = time.process_time() - self._cpu
        ticking, self._ticking = self._ticking, None
        if ticking is not None:
            ticking.cancel()
            with suppress(asyncio.CancelledError):
                await ticking
        return {
            "seconds": seconds,
            "cpu": cpu,
            "lags": self._lags,
            "began": self._began,
        }

    async def _tick(self) -> None:
        due = time.monotonic() + _PERIOD
        try:
            while True:
                await asyncio.sleep(_PERIOD)
                now = time.monotonic()
                self._lags.append(now - due)
                due = now + _PERIOD
        finally:
            if (late := time.monotonic() - due) > 0:
                self._lags.append(late)


async def timed(act: Callable[[], Awaitable[T]]) -> tuple[T, Cost]:
    """Await ``act()``; return its result and what it cost."""
    watch = Watch()
    watch.start()
    try:
        result = await act()
    finally:
        cost = await watch.stop()
    return result, cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement of one candidate.

    Attributes:
        seconds: How long the receiver took (or the sender, if it is alone).
        sender_cpu: CPU seconds of the sender's process meanwhile.
        receiver_cpu: CPU seconds of the receiver's process meanwhile.
        sender_lags: How late the ticks of the sender's loop were, in seconds.
        receiver_lags: The same of the receiver's loop.
        latencies: How long small requests took meanwhile, one by one.
        figures: Other figures by name.
    """

    seconds: float
    sender_cpu: float = 0.0
    receiver_cpu: float = 0.0
    sender_lags: Sequence[float] = ()
    receiver_lags: Sequence[float] = ()
    latencies: Sequence[float] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Series:
    """All samples of one candidate, which moves ``nbytes`` each time, or none."""

    name: str
    nbytes: int
    samples: Sequence[Sample]

    @property
    def seconds(self) -> float:
        """The median."""
        return median(sample.seconds for sample in self.samples)

    @property
    def speed(self) -> float:
        """The median in GB/s (10^9 bytes)."""
        return self.nbytes / self.seconds / 1e9

    @property
    def speeds(self) -> tuple[float, float]:
        """The slowest and the fastest sample in GB/s."""
        seconds = [sample.seconds for sample in self.samples]
        return self.nbytes / max(seconds) / 1e9, self.nbytes / min(seconds) / 1e9

    @property
    def sender_cost(self) -> float:
        """CPU seconds of the sender per GB."""
        return median(each.sender_cpu for each in self.samples) * 1e9 / self.nbytes

    @property
    def receiver_cost(self) -> float:
        """CPU seconds of the receiver per GB."""
        return median(each.receiver_cpu for each in self.samples) * 1e9 / self.nbytes

    @property
    def cost(self) -> float:
        """CPU seconds of both ends per GB."""
        spent = (each.sender_cpu + each.receiver_cpu for each in self.samples)
        return median(spent) * 1e9 / self.nbytes

    @property
    def sender_lags(self) -> list[float]:
        """The sender's ticks of all samples."""
        return [lag for sample in self.samples for lag in sample.sender_lags]

    @property
    def receiver_lags(self) -> list[float]:
        """The receiver's ticks of all samples."""
        return [lag for sample in self.samples for lag in sample.receiver_lags]

    @property
    def latencies(self) -> list[float]:
        """The small requests of all samples."""
        return [took for sample in self.samples for took in sample.latencies]

    def figure(self, name: str) -> float:
        """Return the median of one of the other figures."""
        return median(sample.figures[name] for sample in self.samples)


def percentile(values: Iterable[float], share: float) -> float:
    """Return what ``share`` of the values do not exceed; 0 if there are none."""
    ordered = sorted(values)
    rank = math.ceil(share * len(ordered))
    return ordered[max(rank, 1) - 1] if ordered else 0.0


def best(series: Mapping[str, Series], prefix: str) -> Series | None:
    """Return the fastest series whose name starts with ``prefix``, if any."""
    found = [each for name, each in series.items() if name.startswith(prefix)]
    return min(found, key=lambda each: each.seconds, default=None)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that is measured.

    Attributes:
        name: Its name in the tables.
        run: Takes one sample.
        rivals: Names of all settings of the same thing, of which the best counts. Such
            a candidate may fail. It is not repeated if the first round shows it more
            than 1.5 times slower than the best.
        once: Whether one sample is enough.
        ours: Whether it measures this library, so that another source tree of it can
            stand beside.
        empty: Whether it moves no bytes, so that it has no speed.
    """

    name: str
    run: Callable[[], Sample]
    rivals: tuple[str, ...] = ()
    once: bool = False
    ours: bool = False
    empty: bool = False


def take_turns(
    candidates: Sequence[Candidate], repeat: int, note: Note
) -> dict[str, list[Sample]]:
    """Sample every candidate ``repeat`` times, in rounds.

    A busy moment of the machine then hits all of them. Every other round goes
    backwards, and every two rounds begin with another candidate: what a disk or a cache
    owes to the one before falls on nobody in particular.
    """
    samples: dict[str, list[Sample]] = {each.name: [] for each in candidates}
    running = list(candidates)
    for turn in range(repeat):
        shift = turn // 2 % max(len(running), 1)
        order = running[shift:] + running[:shift]
        for candidate in order[::-1] if turn % 2 else order:
            note(f"round {turn + 1} of {repeat}: {candidate.name}")
            try:
                samples[candidate.name].append(candidate.run())
            except BenchmarkError as error:
                if not candidate.rivals:
                    raise
                note(f"left out: {error}")
        running = [each for each in running if _is_repeated(each, samples)]
    return {name: found for name, found in samples.items() if found}


def _is_repeated(candidate: Candidate, samples: Mapping[str, list[Sample]]) -> bool:
    if candidate.once:
        return False
    if not candidate.rivals:
        return True
    own = samples[candidate.name]
    firsts = [samples[name][0].seconds for name in candidate.rivals if samples[name]]
    return bool(own) and own[0].seconds <= _HOPELESS * min(firsts)
