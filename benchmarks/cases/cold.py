"""Receives into fresh memory that the host has taken back, over a line of 10 Gb/s.

Some virtual machines return free memory to their host. The first touch of such a page
waits for the host, and how long depends on its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.cases.pair import Pair, Phases, Plan
from benchmarks.link import Link, hindrance
from benchmarks.measures import BenchmarkError, Candidate, Sample, Series
from benchmarks.report import Row, speed_row
from benchmarks.state import HUGE, SMALL, TOUCHED, Shape
from benchmarks.worker import Worker

__all__ = ["phases", "rows"]

_RATE = "10gbit"
_OURS, _LINE = "aiockpt, fresh and cold", "raw socket, touched"
_COLD = {kind: f"raw socket, {kind}, cold" for kind in (HUGE, SMALL)}
_OF_LINE = _OF_BETTER_KIND = 0.9


def phases(shape: Shape, plan: Plan, tree: Path) -> Phases:
    """Yield receives into cold memory, by this library and by raw sockets.

    Raises:
        BenchmarkError: there can be no line here.
    """
    if why := hindrance():
        raise BenchmarkError(why)
    with (
        Link(_RATE) as line,
        Worker("sender", tree) as sender,
        Worker("receiver", tree, inside=line.inside) as receiver,
    ):
        pair = Pair(sender, receiver, shape, plan)
        metadata = sender.call("offer", host=line.address)
        port = sender.call("offer_raw", host=line.address)
        receiver.call("make_template")

        def raw(kind: str) -> Callable[[], Sample]:
            return lambda: pair.received(
                "receive_raw",
                touched=kind == TOUCHED,
                cold=kind != TOUCHED,
                host=line.address,
                port=port,
                connections=plan.connections[-1],
                kind=kind,
            )

        yield [
            Candidate(_LINE, raw(TOUCHED)),
            *(Candidate(name, raw(kind)) for kind, name in _COLD.items()),
            Candidate(
                _OURS,
                lambda: pair.received(
                    "receive", cold=True, metadata=metadata, into=False
                ),
                ours=True,
            ),
        ]


def rows(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield how fast a state dict arrives, beside the line and each kind of page."""
    ours, what = found[_OURS], "receive over 10 Gb/s, fresh and cold"
    better = min((found[name] for name in _COLD.values()), key=lambda s: s.seconds)
    yield speed_row(shape, what, ours, found[_LINE], _OF_LINE)
    for name in _COLD.values():
        target = _OF_BETTER_KIND if found[name] is better else 0.0
        yield speed_row(shape, what, ours, found[name], target)
