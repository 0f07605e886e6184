"""``aiockpt bench --trainer``: what serving costs a training loop, and it the serving.

A loop of plain Python in the process that serves is slowed down in two ways: by who
takes its core, and by who has its interpreter's lock. Raw sockets of another process do
the first only, so what they cost it is the reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import mean

from aiockpt.bench.measuring import Pair, Plan
from aiockpt.bench.memory import TOUCHED
from aiockpt.bench.process import Worker
from aiockpt.bench.rival import CHUNKS
from aiockpt.bench.rounds import Candidate, Note, take_turns
from aiockpt.bench.rows import Row
from aiockpt.bench.shapes import Shape
from aiockpt.bench.statistics import Sample, Series, best
from aiockpt.bench.timed import Cost
from aiockpt.bench.training import Progress

__all__ = ["APART", "LOOP", "RAW", "measure_serving", "rows_of_serving", "sample_of"]

APART, LOOP = 'aiockpt, server="process"', 'aiockpt, server="loop"'
RAW = "raw sockets of another process"
_RIVAL = "torchft"
_ALONE = "nothing trains: "

_TRAINED, _SERVED, _BOTH = 0.5, 1.0, 2.0
"""Seconds in which only one of them happens, and in which both do, at least."""

_MAX_LOST = 3.0  # percent of the steps
_MAX_STALL = 10.0  # ms
_OF_IDLE = 0.8

_Offer = Callable[[], Mapping[str, object]]


class TrainerPair(Pair):
    """A process that trains and serves, a receiver, and one that sends raw bytes.

    One of them offers at a time, so that nobody else's memory and threads are there.
    """

    def __init__(
        self, trainer: Worker, receiver: Worker, other: Worker, shape: Shape, size: int
    ) -> None:
        super().__init__(trainer, receiver, shape, size)
        self._other = other
        other.call("prepare", key=shape.key, size=size)
        receiver.call("make_template")

    def candidates(self, plan: Plan) -> list[Candidate]:
        """Return everybody who serves beside the loop."""
        return [
            Candidate(APART, self._measured("receive", self._ours("offer_apart"))),
            Candidate(LOOP, self._measured("receive", self._ours("offer"))),
            self._raw_sockets(plan.connections[-1]),
            *(self.rivals() if plan.rival else ()),
        ]

    def _ours(self, do: str) -> _Offer:
        return lambda: {"metadata": self.sender.call(do), "into": True}

    def _raw_sockets(self, count: int) -> Candidate:
        def offer() -> Mapping[str, object]:
            port = self._other.call("offer_raw")
            return {"port": port, "connections": count, "kind": TOUCHED}

        return Candidate(f"{RAW}, x{count}", self._measured("receive_raw", offer))

    def rivals(self) -> list[Candidate]:
        """Return torchft, by its settings."""
        names = tuple(f"{_RIVAL}, num_chunks={chunks}" for chunks in CHUNKS)
        return [
            Candidate(name, self._measured("receive_rival", self._rival(chunks)), names)
            for name, chunks in zip(names, CHUNKS, strict=True)
        ]

    def _rival(self, chunks: int) -> _Offer:
        return lambda: {
            "metadata": self.sender.call("offer_rival", num_chunks=chunks),
            "num_chunks": chunks,
        }

    def _measured(self, what: str, offer: _Offer) -> Callable[[], Sample]:
        def run() -> Sample:
            try:
                receive = partial(self.receiver.call, "repeat", what=what, **offer())
                self.receiver.call("ready", touched=True)
                receive(seconds=0)  # connections, threads and pages are no part of it
                before, idle = self._train(_TRAINED), receive(seconds=_SERVED)
                costs, beside = self._both(partial(receive, seconds=_BOTH))
                usual = mean((before["speed"], self._train(_TRAINED)["speed"]))
            finally:
                self.sender.call("retract")
                self._other.call("retract")
            return sample_of(self.shape.nbytes, usual, idle, beside, costs)

        return run

    def _train(self, seconds: float) -> Progress:
        self.sender.call("train")
        began = time.monotonic()
        time.sleep(seconds)
        ended = time.monotonic()
        self.sender.call("rest")
        found: Progress = self.sender.call("trained", began=began, ended=ended)
        return found

    def _both(
        self, receive: Callable[[], Sequence[Cost]]
    ) -> tuple[Sequence[Cost], Progress]:
        self.sender.call("train")
        try:
            costs = receive()
        finally:
            self.sender.call("rest")
        began, ended = _window(costs)
        return costs, self.sender.call("trained", began=began, ended=ended)


def _window(costs: Sequence[Cost]) -> tuple[float, float]:
    return costs[0]["began"], costs[-1]["began"] + costs[-1]["seconds"]


def sample_of(
    nbytes: int,
    usual: float,
    idle: Sequence[Cost],
    beside: Progress,
    costs: Sequence[Cost],
) -> Sample:
    """Return the mean receive beside the loop, and what they cost each other.

    ``usual`` is how many steps a second the loop makes when it is alone.
    """
    began, ended = _window(costs)
    lost = 1 - beside["speed"] / usual
    return Sample(
        seconds=mean(cost["seconds"] for cost in costs),
        receiver_cpu=mean(cost["cpu"] for cost in costs),
        figures={
            "idle": mean(cost["seconds"] for cost in idle),
            "lost": 100 * lost,
            "stall": 1e3 * beside["stall"],
            "price": 1e3 * lost * (ended - began) / (len(costs) * nbytes / 1e9),
        },
    )


def measure_serving(shape: Shape, plan: Plan, note: Note) -> dict[str, Series]:
    """Measure everything in three processes, and those that serve for one of them."""
    with (
        Worker("trainer", apart=True) as trainer,
        Worker("receiver", apart=True) as receiver,
        Worker("sender", apart=True) as other,
    ):
        pair = TrainerPair(trainer, receiver, other, shape, plan.size)
        found = take_turns(pair.candidates(plan), plan.repeat, note)
    beside = {
        name: Series(name, shape.nbytes, samples) for name, samples in found.items()
    }
    return beside | {_ALONE + name: _alone(series) for name, series in beside.items()}


def _alone(series: Series) -> Series:
    samples = [Sample(seconds=each.figures["idle"]) for each in series.samples]
    return Series(_ALONE + series.name, series.nbytes, samples)


def rows_of_serving(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield what the loop loses, and then how fast it is served from beside it."""
    others = [best(found, RAW), best(found, _RIVAL)]
    references = [each for each in others if each is not None]
    for row in (_lost, _beyond, _stall, _price):
        for name in (APART, LOOP):
            yield from row(shape, found[name], references)
    for name in (APART, LOOP, *(each.name for each in references)):
        yield _speed(shape, found[name], found[_ALONE + name])


def _figures(
    what: str, figure: str, unit: str, limit: float | None
) -> Callable[[Shape, Series, Sequence[Series]], Iterator[Row]]:
    """Return what yields a row for each reference; the limit is for a process."""

    def rows(shape: Shape, ours: Series, references: Sequence[Series]) -> Iterator[Row]:
        for reference in references:
            yield Row(
                what=f"{what}, {ours.name}",
                shape=str(shape),
                value=ours.figure(figure),
                unit=unit,
                reference=reference.name,
                reference_value=reference.figure(figure),
                at_most=limit if ours.name == APART else None,
            )

    return rows


_lost = _figures("steps lost", "lost", "%", _MAX_LOST)
_stall = _figures("longest stall", "stall", "ms", _MAX_STALL)
_price = _figures("training lost per GB served", "price", "ms", None)


def _beyond(shape: Shape, ours: Series, references: Sequence[Series]) -> Iterator[Row]:
    raw, *rivals = references
    usual = raw.figure("lost")
    yield Row(
        what=f"steps lost beyond what {RAW} cost, {ours.name}",
        shape=str(shape),
        value=ours.figure("lost") - usual,
        unit="%",
        reference=rivals[0].name if rivals else "",
        reference_value=rivals[0].figure("lost") - usual if rivals else None,
        at_most=_MAX_LOST if ours.name == APART else None,
    )


def _speed(shape: Shape, beside: Series, alone: Series) -> Row:
    return Row(
        what=f"receive while it trains, {beside.name}",
        shape=str(shape),
        value=beside.speed,
        unit="GB/s",
        reference="the same while nothing trains",
        reference_value=alone.speed,
        at_least=_OF_IDLE if beside.name == APART else None,
    )
