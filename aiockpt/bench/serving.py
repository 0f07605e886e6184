"""``aiockpt bench --trainer``: what serving costs a training loop, and it the serving.

A loop of plain Python in the process that serves is slowed down in two ways: by who
takes its core, and by who has its interpreter's lock. Senders of another process do the
first only, so what they cost it is the reference: the very same receive, and raw
sockets. The receiver, which would be on another host, leaves one core alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean

from aiockpt.bench.measuring import Pair, Plan
from aiockpt.bench.memory import TOUCHED
from aiockpt.bench.process import Worker, aside
from aiockpt.bench.rival import CHUNKS
from aiockpt.bench.rounds import Candidate, Note, take_turns
from aiockpt.bench.rows import Row
from aiockpt.bench.shapes import Shape
from aiockpt.bench.statistics import Sample, Series, best
from aiockpt.bench.timed import Cost
from aiockpt.bench.training import Progress

__all__ = [
    "APART",
    "ELSEWHERE",
    "LOOP",
    "RAW",
    "measure_serving",
    "rows_of_serving",
    "sample_of",
]

APART, LOOP = 'aiockpt, server="process"', 'aiockpt, server="loop"'
ELSEWHERE = "aiockpt, from an unrelated process"
RAW = "raw sockets of another process"
_RIVAL = "torchft"
_ALONE = "nothing trains: "

_TRAINED, _SERVED, _BOTH = 0.4, 1.0, 0.5
"""Seconds in which only one of them happens, and in which both do, at least."""

_ROUNDS = 4
"""How often both happen in one measurement, between times of training alone: a core
is faster at one moment than at the next."""

_MAX_LOST = 3.0  # percent of the steps
_FIGURES = (
    ("steps lost", "lost", "%", _MAX_LOST),
    ("time without a core or the lock", "waited", "%", _MAX_LOST),
    ("longest stall", "stall", "ms", 10.0),
    ("training lost per GB served", "price", "ms", None),
)
"""What is said of the loop, and what a server process may cost it at most."""

_OF_IDLE = 0.8


@dataclass(frozen=True, slots=True)
class Round:
    """Some receives beside the loop.

    Attributes:
        usual: How many steps a second it makes alone, at about that time.
        beside: How far it got meanwhile.
        costs: The receives.
    """

    usual: float
    beside: Progress
    costs: Sequence[Cost]

    @property
    def lost(self) -> float:
        """The share of its steps that it did not make."""
        return 1 - self.beside["speed"] / self.usual


_Offer = Callable[[], Mapping[str, object]]


class TrainerPair(Pair):
    """A process that trains and serves, a receiver, and an unrelated sender.

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
            self._ours(APART, self.sender, "offer_apart"),
            self._ours(LOOP, self.sender, "offer"),
            self._ours(ELSEWHERE, self._other, "offer"),
            self._raw_sockets(plan.connections[-1]),
            *(self.rivals() if plan.rival else ()),
        ]

    def _ours(self, name: str, sender: Worker, do: str) -> Candidate:
        def offer() -> Mapping[str, object]:
            return {"metadata": sender.call(do), "into": True}

        return Candidate(name, self._measured("receive", offer))

    def _raw_sockets(self, count: int) -> Candidate:
        def offer() -> Mapping[str, object]:
            port = self._other.call("offer_raw")
            return {"port": port, "connections": count, "kind": TOUCHED}

        return Candidate(f"{RAW}, x{count}", self._measured("receive_raw", offer))

    def rivals(self) -> list[Candidate]:
        """Return torchft, by its settings."""
        names = [f"{_RIVAL}, num_chunks={chunks}" for chunks in CHUNKS]
        offers = [partial(self._torchft, chunks) for chunks in CHUNKS]
        return [
            Candidate(name, self._measured("receive_rival", offer), (*names,))
            for name, offer in zip(names, offers, strict=True)
        ]

    def _torchft(self, chunks: int) -> Mapping[str, object]:
        metadata = self.sender.call("offer_rival", num_chunks=chunks)
        return {"metadata": metadata, "num_chunks": chunks}

    def _measured(self, what: str, offer: _Offer) -> Callable[[], Sample]:
        def run() -> Sample:
            try:
                receive = partial(self.receiver.call, "repeat", what=what, **offer())
                self.receiver.call("ready", touched=True)
                receive(seconds=0)  # connections, threads and pages are no part of it
                idle = receive(seconds=_SERVED)
                rounds = [*self._rounds(partial(receive, seconds=_BOTH))]
            finally:
                self.sender.call("retract")
                self._other.call("retract")
            return sample_of(self.shape.nbytes, idle, rounds)

        return run

    def _rounds(self, receive: Callable[[], Sequence[Cost]]) -> Iterator[Round]:
        before = self._train(_TRAINED)["speed"]
        for _ in range(_ROUNDS):
            costs, beside = self._both(receive)
            after = self._train(_TRAINED)["speed"]
            yield Round(mean((before, after)), beside, costs)
            before = after

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


def sample_of(nbytes: int, idle: Sequence[Cost], rounds: Sequence[Round]) -> Sample:
    """Return the mean receive beside the loop, and what they cost each other."""
    costs = [cost for each in rounds for cost in each.costs]
    lost = sum(each.lost * _length(each.costs) for each in rounds)
    return Sample(
        seconds=mean(cost["seconds"] for cost in costs),
        figures={
            "idle": mean(cost["seconds"] for cost in idle),
            "lost": 100 * mean(each.lost for each in rounds),
            "waited": 100 * mean(each.beside["waited"] for each in rounds),
            "stall": 1e3 * max(each.beside["stall"] for each in rounds),
            "price": 1e3 * lost / (len(costs) * nbytes / 1e9),
        },
    )


def _length(costs: Sequence[Cost]) -> float:
    began, ended = _window(costs)
    return ended - began


def measure_serving(shape: Shape, plan: Plan, note: Note) -> dict[str, Series]:
    """Measure everything in three processes, and those that serve for one of them."""
    with (
        Worker("trainer", apart=True) as trainer,
        Worker("receiver", aside(), apart=True) as receiver,
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
    others = [found[ELSEWHERE], best(found, RAW), best(found, _RIVAL)]
    references = [each for each in others if each is not None]
    for what, figure, unit, limit in _FIGURES:
        for ours, reference in product((found[APART], found[LOOP]), references):
            yield Row(
                what=f"{what}, {ours.name}",
                shape=str(shape),
                value=ours.figure(figure),
                unit=unit,
                reference=reference.name,
                reference_value=reference.figure(figure),
                at_most=limit if ours.name == APART else None,
            )
    for name in (APART, LOOP):
        yield _beyond(shape, found[name], found[ELSEWHERE])
    for name in (APART, LOOP, *(each.name for each in references)):
        yield _speed(shape, found[name], found[_ALONE + name])


def _beyond(shape: Shape, ours: Series, elsewhere: Series) -> Row:
    return Row(
        what=f"steps lost beyond those to an unrelated process, {ours.name}",
        shape=str(shape),
        value=ours.figure("lost") - elsewhere.figure("lost"),
        unit="%",
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
