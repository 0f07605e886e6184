"""What serving costs a training loop, and the loop the serving.

A loop of plain Python in the process that serves is slowed down in two ways: by whoever
takes its core, and by whoever has its interpreter's lock. Senders in another process do
the first only, so what they cost it is the reference: the very same receive, and raw
sockets. The receiver, which would be on another host, leaves one core alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

from benchmarks.cases.pair import Pair, Phases, Plan
from benchmarks.ends import Progress
from benchmarks.measures import Candidate, Cost, Sample, Series, best
from benchmarks.references import TORCHFT_CHUNKS
from benchmarks.report import Row
from benchmarks.state import TOUCHED, Shape
from benchmarks.worker import Worker, all_cores_but_one

__all__ = ["ELSEWHERE", "LOOP", "PROCESS", "RAW", "Round", "phases", "rows"]

PROCESS, LOOP = 'aiockpt, server="process"', 'aiockpt, server="loop"'
ELSEWHERE = "aiockpt, from an unrelated process"
RAW = "raw sockets of another process"
_TORCHFT = "torchft"

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

    @property
    def window(self) -> tuple[float, float]:
        """When the receives began, and when they ended."""
        last = self.costs[-1]
        return self.costs[0]["began"], last["began"] + last["seconds"]


def phases(shape: Shape, plan: Plan, tree: Path) -> Phases:
    """Yield everybody who serves beside the loop.

    One of them offers at a time, so that nobody else's memory and threads are there.
    """
    with (
        Worker("trainer", tree, own_session=True) as trainer,
        Worker(
            "receiver", tree, inside=all_cores_but_one(), own_session=True
        ) as receiver,
        Worker("sender", tree, own_session=True) as other,
    ):
        Pair(trainer, receiver, shape, plan)
        other.call("prepare", key=shape.key, size=plan.size)
        receiver.call("make_template")

        def measured(
            what: str, offer: Callable[[], Mapping[str, object]]
        ) -> Callable[[], Sample]:
            def run() -> Sample:
                try:
                    receive = partial(receiver.call, "repeat", what=what, **offer())
                    receiver.call("ready", touched=True)
                    receive(seconds=0)  # connections and threads are no part of it
                    idle = receive(seconds=_SERVED)
                    rounds = [*_rounds(trainer, partial(receive, seconds=_BOTH))]
                finally:
                    trainer.call("retract")
                    other.call("retract")
                return sample_of(shape.nbytes, idle, rounds)

            return run

        def ours(name: str, sender: Worker, **options: object) -> Candidate:
            def offer() -> Mapping[str, object]:
                return {"metadata": sender.call("offer", **options), "into": True}

            return Candidate(name, measured("receive", offer), ours=True)

        def raw_sockets(count: int) -> Candidate:
            def offer() -> Mapping[str, object]:
                port = other.call("offer_raw")
                return {"port": port, "connections": count, "kind": TOUCHED}

            return Candidate(f"{RAW}, x{count}", measured("receive_raw", offer))

        names = tuple(f"{_TORCHFT}, num_chunks={chunks}" for chunks in TORCHFT_CHUNKS)

        def torchft(name: str, chunks: int) -> Candidate:
            def offer() -> Mapping[str, object]:
                metadata = trainer.call("offer_torchft", num_chunks=chunks)
                return {"metadata": metadata, "num_chunks": chunks}

            return Candidate(name, measured("receive_torchft", offer), names)

        yield [
            ours(PROCESS, trainer, process=True),
            ours(LOOP, trainer),
            ours(ELSEWHERE, other),
            raw_sockets(plan.connections[-1]),
            *(map(torchft, names, TORCHFT_CHUNKS) if plan.torchft else ()),
        ]


def _rounds(trainer: Worker, receive: Callable[[], Sequence[Cost]]) -> Iterator[Round]:
    def alone() -> float:
        trainer.call("train")
        began = time.monotonic()
        time.sleep(_TRAINED)
        ended = time.monotonic()
        trainer.call("rest")
        found: Progress = trainer.call("trained", began=began, ended=ended)
        return found["speed"]

    before = alone()
    for _ in range(_ROUNDS):
        trainer.call("train")
        try:
            costs = receive()
        finally:
            trainer.call("rest")
        began, ended = costs[0]["began"], costs[-1]["began"] + costs[-1]["seconds"]
        beside: Progress = trainer.call("trained", began=began, ended=ended)
        after = alone()
        yield Round(mean((before, after)), beside, costs)
        before = after


def sample_of(nbytes: int, idle: Sequence[Cost], rounds: Sequence[Round]) -> Sample:
    """Return the mean receive beside the loop, and what they cost each other."""
    costs = [cost for each in rounds for cost in each.costs]
    lost = sum(each.lost * (each.window[1] - each.window[0]) for each in rounds)
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


def rows(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield what the loop loses, and then how fast it is served from beside it."""
    others = [found[ELSEWHERE], best(found, RAW), best(found, _TORCHFT)]
    references = [each for each in others if each is not None]
    for what, figure, unit, limit in _FIGURES:
        for ours, reference in product((found[PROCESS], found[LOOP]), references):
            yield Row(
                what=f"{what}, {ours.name}",
                shape=str(shape),
                value=ours.figure(figure),
                unit=unit,
                reference=reference.name,
                reference_value=reference.figure(figure),
                at_most=limit if ours.name == PROCESS else None,
            )
    for name in (PROCESS, LOOP):
        yield Row(
            what=f"steps lost beyond those to an unrelated process, {name}",
            shape=str(shape),
            value=found[name].figure("lost") - found[ELSEWHERE].figure("lost"),
            unit="%",
            at_most=_MAX_LOST if name == PROCESS else None,
        )
    for name in (PROCESS, LOOP, *(each.name for each in references)):
        yield Row(
            what=f"receive while it trains, {name}",
            shape=str(shape),
            value=found[name].speed,
            unit="GB/s",
            reference="the same while nothing trains",
            reference_value=found[name].nbytes / found[name].figure("idle") / 1e9,
            at_least=_OF_IDLE if name == PROCESS else None,
        )
