"""What one measurement yields, and what several of them say together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

__all__ = ["Sample", "Series", "best", "percentile"]


def percentile(values: Iterable[float], share: float) -> float:
    """Return what ``share`` of the values do not exceed; 0 where there are none."""
    ordered = sorted(values)
    rank = math.ceil(share * len(ordered))
    return ordered[max(rank, 1) - 1] if ordered else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of one candidate.

    Attributes:
        seconds: How long the receiver (or, if it is alone, the sender) took.
        sender_cpu: Seconds that the sender's process computed meanwhile.
        receiver_cpu: Seconds that the receiver's process computed meanwhile.
        sender_lags: How late the sender's ticker was, in seconds, tick by tick.
        receiver_lags: How late the receiver's ticker was.
        latencies: How long small requests took meanwhile, one by one.
        figures: What else was found, by name.
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
    """All samples of one candidate, which moved ``nbytes`` each time."""

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
        """Return the median of what else was found."""
        return median(sample.figures[name] for sample in self.samples)


def best(series: Mapping[str, Series], prefix: str) -> Series | None:
    """Return the fastest of those whose name starts with ``prefix``, if any."""
    found = [each for name, each in series.items() if name.startswith(prefix)]
    return min(found, key=lambda each: each.seconds, default=None)
