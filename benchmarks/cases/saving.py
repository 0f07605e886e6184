"""Saving and loading: what they cost training, and what the disk allows."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.cases.pair import Phases, Plan
from benchmarks.measures import Candidate, Sample, Series
from benchmarks.report import Row
from benchmarks.saver import NICE, TORCH_SAVERS, Figures
from benchmarks.state import FRESH, SMALL, TOUCHED, Shape
from benchmarks.worker import Worker

__all__ = ["phases", "rows"]

_WRITERS = ("torch.save", "safetensors.save_file")
_STAGED, _DURABLE = "save until it may be mutated", "save until it is durable"
_SYNC = "SyncCheckpointer, no fsync"
_BESIDE, _NOT_NICE = "save beside Python", "save beside Python, nice=0"
_RAW_BESIDE = "raw write and fsync in a thread"

# The targets, as shares of the reference's speed.
_OF_MEMCPY = 1 / 1.2
_OF_FRESH_MEMCPY = 1 / 3
_OF_RAW = 1 / 1.15
_OF_LOAD = 1 / 1.3
_MAX_SLOWDOWN = 5.0  # percent
_SLOWDOWNS = (
    ("slowdown of Python beside the write", "slowdown"),
    ("the same per second of its core", "interference"),
    ("time without a core or the lock", "waited"),
)
_QUICK = (  # what takes milliseconds at most, and how many
    ("load, mapped and unverified", "load, mapped", 20.0),
    ("load one key of 256", "load, one", 20.0),
    ("death of the process noticed", "death", 100.0),
)


def phases(shape: Shape, plan: Plan, tree: Path) -> Phases:
    """Yield durable saves, saves that do not wait, what they disturb, and loads.

    Everything is saved below the working directory.
    """
    with (
        tempfile.TemporaryDirectory(prefix="benchmarks-", dir=Path.cwd()) as place,
        Worker("saver", tree) as saver,
    ):
        saver.call("prepare", key=shape.key, size=plan.size, place=place)

        def candidate(
            name: str,
            do: str,
            /,
            *,
            ours: bool = False,
            empty: bool = False,
            rivals: tuple[str, ...] = (),
            **arguments: object,
        ) -> Candidate:
            def run() -> Sample:
                figures: Figures = saver.call(do, **arguments)
                return Sample(seconds=figures.pop("seconds"), figures=figures)

            # One round of torch's asynchronous ones takes minutes at 2 GiB.
            once = bool(rivals)
            return Candidate(name, run, rivals, once=once, ours=ours, empty=empty)

        def memcpy(kind: str) -> Candidate:
            return candidate(f"memcpy, {kind}", "memcpy", kind=kind)

        yield [
            memcpy(TOUCHED),
            candidate("raw write and fsync", "write_raw", fsync=True),
            candidate("save", "save", ours=True, first=False),
        ]
        yield [
            candidate("raw write", "write_raw", fsync=False),
            candidate(_SYNC, "save_here", ours=True),
            *(
                candidate(how, "write_whole", how=how)
                for how in _WRITERS
                if plan.torchft and importlib.util.find_spec(how.partition(".")[0])
            ),
        ]
        yield [
            memcpy(SMALL),
            candidate("first save", "save", ours=True, first=True),
            candidate(_BESIDE, "spin_beside", ours=True, empty=True, nice=NICE),
            candidate(_NOT_NICE, "spin_beside", ours=True, empty=True, nice=0),
            candidate(_RAW_BESIDE, "spin_beside_raw", empty=True),
            candidate("death", "killed", ours=True, empty=True),
        ]
        saver.call("clean")
        saver.call("keep")
        yield [
            memcpy(FRESH),
            *(
                candidate(f"load, {how}", "load", ours=True, how=how)
                for how in ("whole", "mapped", "one")
            ),
        ]
        if plan.torchft:
            # With itself for a rival it may fail, which not all of them do everywhere.
            yield [
                candidate(f"torch {name}", "save_torch", name=name, rivals=(name,))
                for name in TORCH_SAVERS
            ]


def rows(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield the table; ratios are of speeds, so that more is better."""
    for what, name, figure, reference, target in _comparisons():
        if name in found and reference in found:
            ours, theirs = found[name], found[reference]
            seconds = ours.figure(figure) if figure else ours.seconds
            yield Row(
                what=what,
                shape=str(shape),
                value=shape.nbytes / seconds / 1e9,
                unit="GB/s",
                reference=reference,
                reference_value=theirs.speed,
                at_least=target or None,
            )
    yield from _rows_of_slowdown(shape, found)
    for what, name, limit in _QUICK:
        if name in found:
            value = 1e3 * found[name].seconds
            yield Row(
                what=what, shape=str(shape), value=value, unit="ms", at_most=limit
            )


def _comparisons() -> Iterator[tuple[str, str, str, str, float]]:
    """Yield row, candidate, figure (its seconds if empty), reference and target."""
    copied, written = f"memcpy, {TOUCHED}", "raw write and fsync"
    first = f"memcpy, {SMALL}"
    yield _STAGED, "save", "staged", copied, _OF_MEMCPY
    yield f"first {_STAGED}", "first save", "staged", first, _OF_FRESH_MEMCPY
    yield _DURABLE, "save", "", written, _OF_RAW
    yield _SYNC, _SYNC, "", "raw write", _OF_RAW
    for writer in _WRITERS:
        yield _SYNC, _SYNC, "", writer, 1.0
    yield "load, verified", "load, whole", "", f"memcpy, {FRESH}", _OF_LOAD
    for name in TORCH_SAVERS:
        yield f"torch {name}, {_STAGED}", f"torch {name}", "staged", copied, 0
    for name in TORCH_SAVERS:
        yield f"torch {name}, until written", f"torch {name}", "", written, 0


def _rows_of_slowdown(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    prefixes = {_BESIDE: "", _NOT_NICE: "nice=0, "}
    prefixes |= {f"torch {name}": f"torch {name}, " for name in TORCH_SAVERS}
    for name, prefix in prefixes.items():
        for what, figure in _SLOWDOWNS:
            if name in found:
                ours = name in (_BESIDE, _NOT_NICE)
                yield Row(
                    what=f"{prefix}{what}",
                    shape=str(shape),
                    value=max(found[name].figure(figure), 0.0),
                    unit="%",
                    reference=_RAW_BESIDE if ours else "",
                    reference_value=(
                        found[_RAW_BESIDE].figure(figure) if ours else None
                    ),
                    at_most=_MAX_SLOWDOWN if name == _BESIDE else None,
                )
