"""Transfers over HTTP, staging, and memory that is lent on one host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.cases.pair import (
    RAW_DIGESTED,
    Pair,
    Phases,
    Plan,
    rows_of_memory,
    rows_of_ticker,
)
from benchmarks.measures import Candidate, Cost, Sample, Series, best
from benchmarks.report import Row, speed_row
from benchmarks.state import FRESH, KINDS, TOUCHED, Shape
from benchmarks.worker import Worker

__all__ = ["phases", "rows"]

_SHARED, _COPIED = "aiockpt, same host, shared", "aiockpt, same host, in place"
_BESIDE = "memcpy beside them"
_COPY_DIGESTED = "memcpy and digests, touched"

_THREADS = 2  # as many as a transport stages in
_CAN_LEND = hasattr(os, "memfd_create")

_TIMES_TORCHFT = {True: 3.0, False: 30.0}  # of large tensors?
_OF_RAW_FRESH, _OF_RAW_PLACED = 0.9, 0.75
_OF_MEMCPY_NEW, _OF_MEMCPY_USED = 0.6, 0.85
_OF_MEMCPY_IN_PLACE = 0.7
_TIMES_RAW_CPU = 1.1
_MAX_LAG = 5.0  # ms
_MAX_MANY = 0.35  # s
_MAX_SHARED = 50.0  # ms


def phases(shape: Shape, plan: Plan, tree: Path) -> Phases:
    """Yield receives into fresh memory and in place, lent memory, staging, memory."""
    with Worker("sender", tree) as sender, Worker("receiver", tree) as receiver:
        pair = Pair(sender, receiver, shape, plan)
        yield [
            pair.idle(),
            *pair.raw(FRESH, plan.connections),
            pair.ours("aiockpt, fresh", into=False),
            *(pair.torchft() if plan.torchft else ()),
        ]
        sender.call("retract")
        receiver.call("make_template")
        yield [
            *pair.raw(TOUCHED, plan.connections),
            *pair.raw(TOUCHED, plan.connections[-1:], digest=True),
            pair.ours("aiockpt, in place", into=True),
        ]
        sender.call("retract")
        if _CAN_LEND:
            yield _same_host(pair)
            sender.call("retract")
        receiver.call("release")
        yield _staging(pair)
        sender.call("retract")
        yield _memory(sender, shape, plan, tree)
        sender.call("retract")


def _same_host(pair: Pair) -> list[Candidate]:
    metadata = pair.sender.call("offer", same_host=True)

    def receive(*, into: bool) -> Callable[[], Sample]:
        return lambda: pair.received(
            "receive", touched=True, metadata=metadata, into=into, same_host=True
        )

    return [
        Candidate(_BESIDE, lambda: pair.sent("memcpy", kind=TOUCHED)),
        Candidate(_SHARED, receive(into=False), ours=True),
        Candidate(_COPIED, receive(into=True), ours=True),
    ]


def _staging(pair: Pair) -> list[Candidate]:
    def copy(kind: str) -> Callable[[], Sample]:
        return lambda: pair.sent("memcpy", kind=kind)

    def stage(*, warm: bool) -> Callable[[], Sample]:
        return lambda: pair.sent("stage", warm=warm)

    return [
        *(Candidate(f"memcpy, {kind}", copy(kind)) for kind in KINDS),
        Candidate(
            f"{_COPY_DIGESTED}, x{_THREADS}",
            lambda: pair.sent("memcpy_and_digest", threads=_THREADS),
        ),
        Candidate("aiockpt, stage cold", stage(warm=False), ours=True),
        Candidate("aiockpt, stage warm", stage(warm=True), ours=True),
    ]


def _memory(sender: Worker, shape: Shape, plan: Plan, tree: Path) -> list[Candidate]:
    """Return single receives, each in a new process whose peak is looked at."""
    metadata = sender.call("offer")

    def run(
        do: str, *, template: bool = False, torchft: bool = False, **arguments: object
    ) -> Callable[[], Sample]:
        def measure() -> Sample:
            with Worker("receiver", tree) as receiver:
                receiver.call("prepare", key=shape.key, size=plan.size)
                receiver.call("warm_up", torchft=torchft)
                empty = receiver.call("memory")
                if template:
                    receiver.call("make_template")
                before = receiver.call("memory")
                cost: Cost = receiver.call(do, **arguments)
                beyond = receiver.call("peak") - before
            figures = {"state": before - empty, "beyond": beyond}
            return Sample(seconds=cost["seconds"], figures=figures)

        return measure

    found = [
        Candidate(
            f"memory, {'in place' if into else 'fresh'}",
            run("receive", template=into, metadata=metadata, into=into),
            once=True,
            ours=True,
        )
        for into in (True, False)
    ]
    if plan.torchft:
        theirs = sender.call("offer_torchft", num_chunks=0)
        receive = run("receive_torchft", torchft=True, metadata=theirs, num_chunks=0)
        found.append(Candidate("memory, torchft", receive, once=True))
    return found


def rows(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield the table."""
    yield from rows_of_speed(shape, found)
    yield from rows_of_many(shape, found)
    yield from rows_of_same_host(shape, found)
    yield from rows_of_cost(shape, found)
    yield from rows_of_ticker(shape, found, _MAX_LAG)
    yield from rows_of_memory(shape, found, "torchft, num_chunks=0")


def rows_of_speed(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield what is compared by its speed.

    The number of tensors, and not their bytes, decides about many small ones, so there
    only the comparison with torchft has a target. In fresh memory the target is about a
    single raw socket, and in place about as many as ours; the others are shown.
    """
    large = shape.is_large
    fresh, in_place = found["aiockpt, fresh"], found["aiockpt, in place"]
    cold, warm = found["aiockpt, stage cold"], found["aiockpt, stage warm"]
    raw_fresh, raw_touched = f"raw socket, {FRESH}", f"raw socket, {TOUCHED}"
    into_fresh, placed = "receive into fresh memory", "receive in place"
    new, used = "stage, new memory", "stage, used memory"
    for what, ours, reference, target in (
        (into_fresh, fresh, best(found, "torchft"), _TIMES_TORCHFT[large]),
        (into_fresh, fresh, found.get(f"{raw_fresh}, x1"), _OF_RAW_FRESH * large),
        (into_fresh, fresh, _most(found, raw_fresh), 0),
        (placed, in_place, found.get(f"{raw_touched}, x1"), 0),
        (placed, in_place, _most(found, raw_touched), _OF_RAW_PLACED * large),
        (placed, in_place, best(found, RAW_DIGESTED), 0),
        (new, cold, best(found, f"memcpy, {FRESH}"), _OF_MEMCPY_NEW * large),
        (used, warm, best(found, f"memcpy, {TOUCHED}"), _OF_MEMCPY_USED * large),
        (used, warm, best(found, _COPY_DIGESTED), 0),
    ):
        if reference is not None:
            yield speed_row(shape, what, ours, reference, target)


def _most(found: Mapping[str, Series], prefix: str) -> Series | None:
    """Return the raw copy with the most connections: it was measured last."""
    named = [each for name, each in found.items() if name.startswith(prefix)]
    return named[-1] if len(named) > 1 else None


def rows_of_many(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield how long many small tensors take, which no bytes per second tell."""
    rival = best(found, "torchft")
    if not shape.is_large:
        yield Row(
            what="time of a receive into fresh memory",
            shape=str(shape),
            value=found["aiockpt, fresh"].seconds,
            unit="s",
            reference=rival.name if rival else "",
            reference_value=rival.seconds if rival else None,
            at_most=_MAX_MANY if shape.has_many else None,
        )


def rows_of_same_host(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield how long lent memory takes, where the system can lend it."""
    if _SHARED not in found:
        return
    yield Row(
        what="same host, shared",
        shape=str(shape),
        value=1e3 * found[_SHARED].seconds,
        unit="ms",
        reference=_BESIDE,
        reference_value=1e3 * found[_BESIDE].seconds,
        at_most=_MAX_SHARED if shape.is_large else None,
    )
    target = _OF_MEMCPY_IN_PLACE * shape.is_large
    what = "same host, copied in place"
    yield speed_row(shape, what, found[_COPIED], found[_BESIDE], target)


def rows_of_cost(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield what a GB costs the processors of both ends, beside the fastest raw one."""
    for way, raw, target in (
        ("fresh", f"raw socket, {FRESH}", _TIMES_RAW_CPU),
        ("in place", f"raw socket, {TOUCHED}", _TIMES_RAW_CPU),
        ("in place", RAW_DIGESTED, 0),
    ):
        ours, reference = found[f"aiockpt, {way}"], best(found, raw)
        if reference is not None:
            yield Row(
                what=f"CPU seconds per GB, both ends, {way}",
                shape=str(shape),
                value=ours.cost,
                unit="s",
                reference=reference.name,
                reference_value=reference.cost,
                ratio_at_most=target * shape.is_large or None,
            )
