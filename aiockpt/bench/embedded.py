"""``aiockpt bench --embedded``: what a transfer costs the application it is part of."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urljoin

from aiockpt.bench.app import SMALL
from aiockpt.bench.measuring import Pair, sample_of
from aiockpt.bench.process import Worker
from aiockpt.bench.rounds import Candidate, Note, take_turns
from aiockpt.bench.rows import Row
from aiockpt.bench.shapes import Shape
from aiockpt.bench.statistics import Sample, Series, percentile
from aiockpt.bench.timed import Cost
from aiockpt.bench.visitor import Visit

__all__ = ["during", "measure_embedded", "rows_of_embedded"]

_ALONE = "the app without the transfer"
_BOTH = "the app with the transfer"
_UNVISITED = "the transfer without requests"
_MOMENT = 1.0


class AppPair(Pair):
    """An application that serves the state dict, a receiver, and a visitor."""

    def __init__(
        self, app: Worker, receiver: Worker, visitor: Worker, shape: Shape, size: int
    ) -> None:
        super().__init__(app, receiver, shape, size)
        self.visitor = visitor
        self._metadata = app.call("offer")
        self._url = urljoin(self._metadata, f"/{SMALL}")
        receiver.call("make_template")

    def candidates(self) -> list[Candidate]:
        """Return the application and the transfer, together and each by itself."""
        return [
            Candidate(_ALONE, self.alone),
            Candidate(_BOTH, self.both),
            Candidate(_UNVISITED, self.unvisited),
        ]

    def alone(self) -> Sample:
        """Visit the application while nothing else happens."""
        self.visitor.call("visit", url=self._url)
        time.sleep(_MOMENT)
        visits: Sequence[Visit] = self.visitor.call("visited")
        return Sample(seconds=_MOMENT, latencies=[took for _, took in visits])

    def unvisited(self) -> Sample:
        """Receive in place from the application."""
        return self.received(
            "receive", touched=True, metadata=self._metadata, into=True
        )

    def both(self) -> Sample:
        """Visit the application while it serves a receive."""
        self.receiver.call("ready", touched=True)
        self.sender.call("watch")
        self.visitor.call("visit", url=self._url)
        try:
            mine: Cost = self.receiver.call(
                "receive", metadata=self._metadata, into=True
            )
        finally:
            visits: Sequence[Visit] = self.visitor.call("visited")
            theirs: Cost = self.sender.call("watched")
        return sample_of(theirs, mine, latencies=during(mine, visits))


def during(cost: Cost, visits: Sequence[Visit]) -> list[float]:
    """Return how long those visits took that were under way with the transfer."""
    begin, end = cost["began"], cost["began"] + cost["seconds"]
    return [took for sent, took in visits if sent <= end and sent + took >= begin]


def measure_embedded(
    shape: Shape, size: int, repeat: int, note: Note
) -> dict[str, Series]:
    """Measure everything in three processes."""
    with (
        Worker("app") as app,
        Worker("receiver") as receiver,
        Worker("visitor") as visitor,
    ):
        pair = AppPair(app, receiver, visitor, shape, size)
        found = take_turns(pair.candidates(), repeat, note)
    return {
        name: Series(name, 0 if name == _ALONE else shape.nbytes, samples)
        for name, samples in found.items()
    }


def rows_of_embedded(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield the latencies of small requests, and what those cost the transfer."""
    alone, both = found[_ALONE].latencies, found[_BOTH].latencies
    for what, share in (
        ("median of small requests", 0.5),
        ("p99 of small requests", 0.99),
        ("slowest small request", 1.0),
    ):
        yield Row(
            what=what,
            shape=str(shape),
            value=1e3 * percentile(both, share),
            unit="ms",
            reference=_ALONE,
            reference_value=1e3 * percentile(alone, share),
        )
    yield Row(
        what="receive in place, meanwhile",
        shape=str(shape),
        value=found[_BOTH].speed,
        unit="GB/s",
        reference=_UNVISITED,
        reference_value=found[_UNVISITED].speed,
    )
