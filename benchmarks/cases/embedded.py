"""What a transfer costs the aiohttp application that serves it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urljoin

from benchmarks.cases.pair import Pair, Phases, Plan, sample_of
from benchmarks.ends import SMALL_PATH
from benchmarks.measures import Candidate, Cost, Sample, Series, percentile
from benchmarks.report import Row, speed_row
from benchmarks.state import Shape
from benchmarks.worker import Worker

__all__ = ["during", "phases", "rows"]

_ALONE = "the app without the transfer"
_BOTH = "the app with the transfer"
_UNVISITED = "the transfer without requests"
_MOMENT = 1.0  # seconds in which only requests are answered


def phases(shape: Shape, plan: Plan, tree: Path) -> Phases:
    """Yield the application and the transfer, together and each by itself."""
    with (
        Worker("app", tree) as app,
        Worker("receiver", tree) as receiver,
        Worker("visitor", tree) as visitor,
    ):
        pair = Pair(app, receiver, shape, plan)
        metadata = app.call("offer_app")
        url = urljoin(metadata, f"/{SMALL_PATH}")
        receiver.call("make_template")

        def alone() -> Sample:
            visitor.call("visit", url=url)
            time.sleep(_MOMENT)
            visits: Sequence[tuple[float, float]] = visitor.call("visited")
            return Sample(seconds=_MOMENT, latencies=[took for _, took in visits])

        def both() -> Sample:
            receiver.call("ready", touched=True)
            app.call("watch")
            visitor.call("visit", url=url)
            try:
                mine: Cost = receiver.call("receive", metadata=metadata, into=True)
            finally:
                visits = visitor.call("visited")
                theirs: Cost = app.call("watched")
            return sample_of(theirs, mine, latencies=during(mine, visits))

        def unvisited() -> Sample:
            return pair.received("receive", touched=True, metadata=metadata, into=True)

        yield [
            Candidate(_ALONE, alone, empty=True),
            Candidate(_BOTH, both, ours=True),
            Candidate(_UNVISITED, unvisited, ours=True),
        ]


def during(cost: Cost, visits: Sequence[tuple[float, float]]) -> list[float]:
    """Return how long those visits took that were under way with the transfer."""
    begin, end = cost["began"], cost["began"] + cost["seconds"]
    return [took for sent, took in visits if sent <= end and sent + took >= begin]


def rows(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
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
    what = "receive in place, meanwhile"
    yield speed_row(shape, what, found[_BOTH], found[_UNVISITED])
