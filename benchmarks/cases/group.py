"""Transfers over a process group: ours, torchft's and torch's own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.cases.pair import (
    Pair,
    Phases,
    Plan,
    rows_of_memory,
    rows_of_ticker,
    sample_of,
)
from benchmarks.groups import OURS, TORCH, TORCHFT
from benchmarks.measures import Candidate, Cost, Sample, Series
from benchmarks.report import Row, speed_row
from benchmarks.state import TOUCHED, Shape
from benchmarks.worker import Worker

__all__ = ["phases", "rows"]

_FEW = 1 << 20  # bytes, for a transfer that only warms up
_MAX_LAG = 20.0  # ms
_TIMES_TORCHFT = {True: 2.0, False: 8.0}  # of large tensors?
_TIMES_TORCHFT_IN_PLACE = {True: 0.9, False: 8.0}
_TIMES_TORCH = 1.0


def phases(shape: Shape, plan: Plan, tree: Path) -> Phases:
    """Yield transfers into fresh memory, in place, and their memory."""
    everyone = (OURS, TORCHFT, TORCH) if plan.torchft else (OURS, TORCH)
    with (
        Worker("group sender", tree) as sender,
        Worker("group receiver", tree) as receiver,
    ):
        pair = Pair(sender, receiver, shape, plan)
        for by in everyone:
            _join(sender, receiver, by)

        def transfer(by: str, *, into: bool) -> Callable[[], Sample]:
            def run() -> Sample:
                receiver.call("ready", touched=into)
                mine, theirs = _transfer(sender, receiver, by, into=into)
                return sample_of(theirs, mine)

            return run

        def candidates(way: str, *, into: bool) -> list[Candidate]:
            return [
                Candidate(f"{by}, {way}", transfer(by, into=into), ours=by == OURS)
                for by in everyone
            ]

        yield [pair.idle(), *candidates("fresh", into=False)]
        receiver.call("make_template")
        raw = pair.raw(TOUCHED, plan.connections)
        yield [*raw, *candidates("in place", into=True)]
        sender.call("retract")
        receiver.call("release")
        yield [
            Candidate(
                f"memory, {name}",
                _peak(sender, shape, plan, tree, by, into=into),
                once=True,
                ours=by == OURS,
            )
            for name, by, into in (
                ("in place", OURS, True),
                ("fresh", OURS, False),
                ("torchft", TORCHFT, False),
            )
            if by in everyone
        ]


def _join(sender: Worker, receiver: Worker, by: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        sender.begin("join", directory=directory, by=by)
        receiver.call("join", directory=directory, by=by)
        sender.finish()


def _transfer(
    sender: Worker, receiver: Worker, by: str, *, into: bool
) -> tuple[Cost, Cost]:
    """Return what it cost the receiver, and the sender."""
    sender.begin("send", by=by)
    mine: Cost = receiver.call("receive_by", by=by, into=into)
    theirs: Cost = sender.finish()
    return mine, theirs


def _peak(
    sender: Worker, shape: Shape, plan: Plan, tree: Path, by: str, *, into: bool
) -> Callable[[], Sample]:
    """Return what receives once in a new process and looks at its peak."""

    def measure() -> Sample:
        with Worker("group receiver", tree) as receiver:
            _join(sender, receiver, by)
            for key, size in (("one", _FEW), (shape.key, plan.size)):
                for end in (sender, receiver):
                    end.call("prepare", key=key, size=size)
                if size == _FEW:
                    _transfer(sender, receiver, by, into=False)
            empty = receiver.call("memory")
            if into:
                receiver.call("make_template")
            before = receiver.call("memory")
            cost, _ = _transfer(sender, receiver, by, into=into)
            beyond = receiver.call("peak") - before
        figures = {"state": before - empty, "beyond": beyond}
        return Sample(seconds=cost["seconds"], figures=figures)

    return measure


def rows(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield the table."""
    yield from rows_of_speed(shape, found)
    yield from rows_of_ticker(shape, found, _MAX_LAG)
    yield from rows_of_memory(shape, found, f"{TORCHFT}, fresh")


def rows_of_speed(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield the transfers beside those of others."""
    fresh, in_place = found[f"{OURS}, fresh"], found[f"{OURS}, in place"]
    into_fresh, placed, large = (
        "receive into fresh memory",
        "receive in place",
        shape.is_large,
    )
    for what, ours, reference, target in (
        (into_fresh, fresh, f"{TORCHFT}, fresh", _TIMES_TORCHFT[large]),
        (into_fresh, fresh, f"{TORCH}, fresh", _TIMES_TORCH),
        (placed, in_place, f"{TORCHFT}, in place", _TIMES_TORCHFT_IN_PLACE[large]),
        (placed, in_place, f"{TORCH}, in place", _TIMES_TORCH),
        (placed, in_place, f"raw socket, {TOUCHED}, x1", 0),
    ):
        if reference in found:
            yield speed_row(shape, what, ours, found[reference], target)
