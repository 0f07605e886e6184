"""``aiockpt bench --url``: receives from another host, beside a plain download."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from aiockpt.bench.guest import Offer
from aiockpt.bench.process import Worker
from aiockpt.bench.rounds import Candidate, Note, take_turns
from aiockpt.bench.rows import Row
from aiockpt.bench.shapes import Shape
from aiockpt.bench.statistics import Sample, Series, percentile
from aiockpt.bench.timed import Cost

__all__ = ["Served", "measure_url", "rows_of_url"]

_IDLE = "idle"
_GET = "a plain GET, unverified"
_WAYS = {
    "receive into fresh memory": "aiockpt, fresh",
    "receive in place": "aiockpt, in place",
}
_MOMENT = 0.5


@dataclass(frozen=True, slots=True)
class Served(Shape):
    """What the other host serves, by its step."""

    step: int = 0

    def __str__(self) -> str:
        return f"step {self.step}, {self.nbytes / 2**20:.4g} MiB"


def measure_url(url: str, repeat: int, note: Note) -> tuple[Served, dict[str, Series]]:
    """Measure everything in one process; the other one is the peer's.

    Raises:
        BenchError: the peer cannot be received from.
    """
    with Worker("guest") as guest:
        offer: Offer = guest.call("find", url=url)
        nbytes = offer["nbytes"]
        found = take_turns(_candidates(guest, nbytes), repeat, note)
    shape = Served("url", 1, nbytes, offer["step"])
    series = {name: Series(name, nbytes, samples) for name, samples in found.items()}
    return shape, series


def _candidates(guest: Worker, nbytes: int) -> list[Candidate]:
    def once(do: str, **arguments: object) -> Callable[[], Sample]:
        return lambda: _sample(guest.call(do, **arguments))

    return [
        Candidate(_IDLE, once("idle", seconds=_MOMENT)),
        Candidate(_GET, once("download", nbytes=nbytes)),
        Candidate("aiockpt, fresh", once("receive", into=False)),
        Candidate("aiockpt, in place", once("receive", into=True)),
    ]


def _sample(cost: Cost) -> Sample:
    return Sample(
        seconds=cost["seconds"],
        receiver_cpu=cost["cpu"],
        receiver_lags=cost["lags"],
    )


def rows_of_url(shape: Served, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield the speeds, and what the receiving loop noticed."""
    for what, name in _WAYS.items():
        yield Row(
            what=what,
            shape=str(shape),
            value=found[name].speed,
            unit="GB/s",
            reference=_GET,
            reference_value=found[_GET].speed,
        )
    for what, name in _WAYS.items():
        yield Row(
            what=f"ticker lag p99, {what}",
            shape=str(shape),
            value=1e3 * percentile(found[name].receiver_lags, 0.99),
            unit="ms",
            reference="idle loop",
            reference_value=1e3 * percentile(found[_IDLE].receiver_lags, 0.99),
        )
