"""What an older state dict saves, over a slow line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.cases.pair import Pair, Phases, Plan
from benchmarks.link import Link, hindrance
from benchmarks.measures import BenchmarkError, Candidate, Sample, Series
from benchmarks.report import Row, speed_row
from benchmarks.state import Shape
from benchmarks.worker import Worker

__all__ = ["phases", "rows"]

_RATE = "1gbit"
_SHARES = {"nothing": 0.0, "2 % of chunks": 0.02, "every chunk": 1.0}
_TIMES = 10.0  # how much faster 2 % of the chunks should be than all of them
_WAYS = {True: "in place", False: "fresh"}


def phases(shape: Shape, plan: Plan, tree: Path) -> Phases:
    """Yield receives of the whole, and of what has changed.

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
        receiver.call("make_template")

        def receive(into: bool, share: float | None) -> Callable[[], Sample]:  # noqa: FBT001
            # The template keeps its bytes: it is what the other receives have.
            return lambda: pair.received(
                "receive", metadata=metadata, into=into, changed=share
            )

        yield [
            Candidate(name, receive(into, share), ours=True)
            for name, into, share in (
                *((_whole(into), into, None) for into in _WAYS),
                *(
                    (_changed(what, into), into, share)
                    for what, share in _SHARES.items()
                    for into in _WAYS
                ),
            )
        ]


def _whole(into: bool) -> str:  # noqa: FBT001 - a key of the ways
    return f"all of it, {_WAYS[into]}"


def _changed(what: str, into: bool) -> str:  # noqa: FBT001 - a key of the ways
    return f"{what} changed, {_WAYS[into]}"


def rows(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield how fast a state dict arrives that was there already, mostly."""
    for what, share in _SHARES.items():
        for into in _WAYS:
            ours = found[_changed(what, into)]
            row = f"receive over 1 Gb/s, {ours.name}"
            target = _TIMES if 0 < share < 1 else 0.0
            yield speed_row(shape, row, ours, found[_whole(into)], target)
