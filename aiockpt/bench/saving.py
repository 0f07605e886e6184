"""``aiockpt bench --checkpointer``: what saving costs training, and what the disk."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from aiockpt.bench.disk import Figures
from aiockpt.bench.memory import FRESH, SMALL, TOUCHED
from aiockpt.bench.process import Worker
from aiockpt.bench.rounds import Candidate, Note, take_turns
from aiockpt.bench.rows import Row
from aiockpt.bench.shapes import Shape
from aiockpt.bench.statistics import Sample, Series
from aiockpt.checkpointers.config import CheckpointProcessConfig

__all__ = ["measure_saving", "rows_of_saving"]

_RIVALS = (
    "AsyncCheckpointer, staging thread",
    "AsyncCheckpointer, staging in the caller",
    "async_save, thread",
    "async_save, process",
)
_WRITERS = ("torch.save", "safetensors.save_file")

# One round of the asynchronous ones takes minutes at 2 GiB.
_RIVAL_REPEAT = 1

_NICE = CheckpointProcessConfig().nice
_BESIDE, _RUDE_BESIDE = "save beside Python", "save beside Python, nice=0"
_RAW_BESIDE = "raw write and fsync in a thread"
_NOT_MOVED = (
    *(_BESIDE, _RUDE_BESIDE, _RAW_BESIDE),
    *("death", "load, mapped", "load, one"),
)

# The targets, as shares of the reference's speed.
_OF_MEMCPY = 1 / 1.2
_OF_FRESH_MEMCPY = 1 / 3
_OF_RAW = 1 / 1.15
_OF_LOAD = 1 / 1.3
_MAX_SLOWDOWN = 5.0  # percent
_SLOWDOWNS = (
    ("slowdown of Python beside the write", "slowdown", _MAX_SLOWDOWN),
    ("the same per second of its core", "interference", _MAX_SLOWDOWN),
    ("time without a core or the lock", "waited", _MAX_SLOWDOWN),
)
_MAX_QUICK = 20.0  # ms
_MAX_DEATH = 100.0  # ms


@dataclass(frozen=True, slots=True)
class Found:
    """All figures of one run, by candidate and by name."""

    nbytes: int
    figures: dict[str, list[Figures]] = field(default_factory=dict)

    def note(self, name: str, figures: Figures) -> Sample:
        """Keep what one measurement found."""
        self.figures.setdefault(name, []).append(figures)
        return Sample(seconds=figures["seconds"])

    def value(self, name: str, figure: str = "seconds") -> float | None:
        """Return the median; None where it was not measured."""
        values = [found[figure] for found in self.figures.get(name, ())]
        return median(values) if values else None

    def speed(self, name: str, figure: str = "seconds") -> float | None:
        """Return the median in GB/s."""
        seconds = self.value(name, figure)
        return self.nbytes / seconds / 1e9 if seconds else None

    def series(self) -> Iterator[tuple[str, Series]]:
        """Yield the times of each candidate."""
        for name, found in self.figures.items():
            if name in _NOT_MOVED:
                continue
            for figure in ("staged", "seconds"):
                if figure in found[0]:
                    label = f"{name}, staged" if figure == "staged" else name
                    samples = [Sample(seconds=each[figure]) for each in found]
                    yield label, Series(label, self.nbytes, samples)


def measure_saving(
    shape: Shape, size: int, repeat: int, note: Note, *, rivals: bool
) -> Found:
    """Measure everything in a process that saves, below the working directory."""
    found = Found(shape.nbytes)
    with (
        tempfile.TemporaryDirectory(prefix="aiockpt-bench-", dir=Path.cwd()) as place,
        Worker("saver") as saver,
    ):
        saver.call("prepare", key=shape.key, size=size, place=place)
        for phase in (_durable, _at_once, _others, _loading):
            take_turns(phase(saver, found, rivals=rivals), repeat, note)
        if rivals:
            slow = [_rival(saver, found, name) for name in _RIVALS]
            take_turns(slow, _RIVAL_REPEAT, note)
    return found


def _run(
    saver: Worker, found: Found, name: str, do: str, **arguments: object
) -> Candidate:
    run = _measurement(saver, found, name, do, arguments)
    return Candidate(name, run)


def _measurement(
    saver: Worker, found: Found, name: str, do: str, arguments: Mapping[str, object]
) -> Callable[[], Sample]:
    return lambda: found.note(name, saver.call(do, **arguments))


def _durable(saver: Worker, found: Found, *, rivals: bool) -> list[Candidate]:
    del rivals  # none of them waits for the disk
    return [
        *_copies(saver, found, TOUCHED),
        _run(saver, found, "raw write and fsync", "write_raw", fsync=True),
        _run(saver, found, "save", "save", first=False),
    ]


def _at_once(saver: Worker, found: Found, *, rivals: bool) -> list[Candidate]:
    writers = _writers() if rivals else ()
    return [
        _run(saver, found, "raw write", "write_raw", fsync=False),
        _run(saver, found, "SyncCheckpointer, no fsync", "save_here"),
        *(_run(saver, found, how, "write_whole", how=how) for how in writers),
    ]


def _others(saver: Worker, found: Found, *, rivals: bool) -> list[Candidate]:
    del rivals
    return [
        *_copies(saver, found, SMALL),
        _run(saver, found, "first save", "save", first=True),
        _run(saver, found, _BESIDE, "spin_beside", nice=_NICE),
        _run(saver, found, _RUDE_BESIDE, "spin_beside", nice=0),
        _run(saver, found, _RAW_BESIDE, "spin_beside_raw"),
        _run(saver, found, "death", "killed"),
    ]


def _rival(saver: Worker, found: Found, name: str) -> Candidate:
    label = f"torch {name}"
    run = _measurement(saver, found, label, "save_rival", {"name": name})
    # With itself for a rival it may fail, which not all of them do everywhere.
    return Candidate(label, run, (label,))


def _writers() -> Sequence[str]:
    there = importlib.util.find_spec("safetensors") is not None
    return _WRITERS if there else _WRITERS[:1]


def _loading(saver: Worker, found: Found, *, rivals: bool) -> list[Candidate]:
    del rivals
    saver.call("clean")
    saver.call("keep")
    return [
        *_copies(saver, found, FRESH),
        *(
            _run(saver, found, f"load, {how}", "load", how=how)
            for how in ("whole", "mapped", "one")
        ),
    ]


def _copies(saver: Worker, found: Found, *kinds: str) -> list[Candidate]:
    """Return the references, which take turns with what is compared with them."""
    return [
        _run(saver, found, f"memcpy, {kind}", "memcpy", kind=kind) for kind in kinds
    ]


def rows_of_saving(shape: Shape, found: Found) -> Iterator[Row]:
    """Yield the table; ratios are of speeds, so that more is better."""
    yield from _rows_of_speed(shape, found)
    yield from _rows_of_slowdown(shape, found)
    for what, name, limit in (
        ("load, mapped and unverified", "load, mapped", _MAX_QUICK),
        ("load one key of 256", "load, one", _MAX_QUICK),
        ("death of the process noticed", "death", _MAX_DEATH),
    ):
        seconds = found.value(name)
        if seconds is not None:
            yield Row(
                what=what,
                shape=str(shape),
                value=1e3 * seconds,
                unit="ms",
                at_most=limit,
            )


def _rows_of_speed(shape: Shape, found: Found) -> Iterator[Row]:
    staged, durable = "save until it may be mutated", "save until it is durable"
    warm, raw = f"memcpy, {TOUCHED}", "raw write and fsync"
    sync = "SyncCheckpointer, no fsync"
    rows: list[tuple[str, str, str, str, float]] = [
        (staged, "save", "staged", warm, _OF_MEMCPY),
        (
            f"first {staged}",
            "first save",
            "staged",
            f"memcpy, {SMALL}",
            _OF_FRESH_MEMCPY,
        ),
        (durable, "save", "seconds", raw, _OF_RAW),
        (sync, sync, "seconds", "raw write", _OF_RAW),
        *((sync, sync, "seconds", each, 1.0) for each in _WRITERS),
        ("load, verified", "load, whole", "seconds", f"memcpy, {FRESH}", _OF_LOAD),
        *((f"torch {n}, {staged}", f"torch {n}", "staged", warm, 0) for n in _RIVALS),
        *(
            (f"torch {n}, until written", f"torch {n}", "seconds", raw, 0)
            for n in _RIVALS
        ),
    ]
    for what, name, figure, reference, target in rows:
        ours, theirs = found.speed(name, figure), found.speed(reference)
        if ours is not None and theirs is not None:
            yield Row(
                what=what,
                shape=str(shape),
                value=ours,
                unit="GB/s",
                reference=reference,
                reference_value=theirs,
                at_least=target or None,
            )


def _rows_of_slowdown(shape: Shape, found: Found) -> Iterator[Row]:
    names = {
        _BESIDE: "",
        _RUDE_BESIDE: "nice=0, ",
        **{f"torch {n}": f"torch {n}, " for n in _RIVALS},
    }
    for name, prefix in names.items():
        ours = name in (_BESIDE, _RUDE_BESIDE)
        for what, figure, limit in _SLOWDOWNS:
            slowdown = found.value(name, figure)
            if slowdown is not None:
                yield Row(
                    what=f"{prefix}{what}",
                    shape=str(shape),
                    value=max(slowdown, 0.0),
                    unit="%",
                    reference=_RAW_BESIDE if ours else "",
                    reference_value=found.value(_RAW_BESIDE, figure),
                    at_most=limit if name == _BESIDE else None,
                )
