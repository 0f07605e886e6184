"""``python -m benchmarks``: measures this source tree on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from aiockpt.cli.doctor import describe_machine
from benchmarks.cases import CASES, measure
from benchmarks.cases.pair import Plan
from benchmarks.history import keep, last_runs, slower
from benchmarks.measures import BenchmarkError
from benchmarks.plot import as_svg
from benchmarks.references import has_torchft
from benchmarks.report import Report, as_json, as_markdown, as_text, rows_of_trees
from benchmarks.state import SHAPES, Shape, available_memory, shape_of

__all__ = ["main"]

_SIZE, _REPEAT = 2.0, 5
_DELTA_SIZE, _DELTA_REPEAT = 1.0, 3  # a whole GiB takes 9 s over its line
_QUICK_SIZE, _QUICK_REPEAT = 0.25, 3
_CONNECTIONS = min(4, os.cpu_count() or 4)  # as many as a transport has
_COPIES = 5  # of the state dict, in all processes of a tree together, at most
_ALL_SHAPES = ("http", "pg")


def main(argv: Sequence[str]) -> int:
    """Measure what ``argv`` asks for; return the exit code.

    0: it ran; 1: it could not run, missed a target that ``--check`` asked for, or is
    slower than the runs that ``--history`` has.
    """
    options = _parse(argv)
    report = Report(
        machine=describe_machine(),
        options={name: str(value) for name, value in vars(options).items()},
    )
    worse: list[str] = []
    try:
        _measure(report, options)
        if options.json is not None:
            options.json.write_text(json.dumps(as_json(report)) + "\n")
        if options.plot is not None:
            options.plot.write_text(as_svg(report))
        if options.history is not None:
            run = as_json(report)
            others = last_runs(run, options.history)
            worse = slower(run, others)
            file = keep(run, options.history)
            sys.stderr.write(f"kept as {file}, compared with {len(others)} runs\n")
    except (BenchmarkError, OSError) as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return 1
    sys.stdout.write(as_markdown(report) if options.markdown else as_text(report))
    sys.stderr.writelines(f"SLOWER: {line}\n" for line in worse)
    return int(bool(worse) or (options.check and bool(report.missed)))


def _measure(report: Report, options: argparse.Namespace) -> None:
    size = int(options.size * 2**30)
    trees = 1 if options.against is None else 2
    needed, free = _COPIES * trees * size, available_memory()
    if needed > free:
        raise BenchmarkError(
            f"the benchmark needs {needed / 2**30:.1f} GiB of memory and "
            f"{free / 2**30:.1f} GiB are available: choose a smaller --size"
        )
    plan = Plan(
        size=size,
        repeat=options.repeat,
        connections=tuple(dict.fromkeys((1, options.connections))),
        torchft=options.torchft and (has_torchft() or options.case == "checkpointer"),
    )
    # A small size makes one tensor of several shapes, which is measured once.
    shapes: dict[tuple[int, int], Shape] = {}
    for key in options.shapes:
        shape = shape_of(key, size)
        shapes.setdefault((shape.count, shape.tensor_bytes), shape)
    case = CASES[options.case]
    for shape in shapes.values():

        def note(text: str, shape: Shape = shape) -> None:
            sys.stderr.write(f"{shape}, {text}\n")
            sys.stderr.flush()

        found = measure(case, shape, plan, options.against, note)
        report.series[shape] = found
        report.rows += [*case.rows(shape, found), *rows_of_trees(shape, found)]
    order = list(dict.fromkeys(row.what for row in report.rows))
    report.rows.sort(key=lambda row: order.index(row.what))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; exit with a message for wrong ones."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure this source tree on this machine beside memcpy, raw "
        "sockets and, where it is installed, torchft.",
    )
    add = parser.add_argument
    add("case", nargs="?", choices=CASES, default="http",
        help="transfers over HTTP or a process group (pg), saving (checkpointer), what "
        "a transfer costs the app that serves it (embedded) or a training loop "
        "(trainer); as root: receives into memory that the host has taken back, over "
        "10 Gb/s (cold), or of what has changed, over 1 Gb/s (delta)")  # fmt: skip
    add("--size", type=_size, metavar="GIB", help=f"of a state dict; {_SIZE:g}")
    add("--repeat", type=_count, metavar="N", help=f"of each candidate; {_REPEAT}")
    add("--shapes", nargs="+", choices=SHAPES, help="of tensors; all, or 1m")
    add("--connections", type=_count, default=_CONNECTIONS, metavar="N",
        help="of raw copies, beside 1; as many as a receive has")  # fmt: skip
    add("--quick", action="store_true",
        help=f"{_QUICK_SIZE} GiB, {_QUICK_REPEAT} repeats")  # fmt: skip
    add("--against", type=_tree, metavar="PATH",
        help="measure another source tree too, in the same rounds")  # fmt: skip
    add("--no-torchft", dest="torchft", action="store_false", help="leave rivals out")
    add("--json", type=Path, metavar="FILE",
        help="write all samples there, and what the machine is")  # fmt: skip
    add("--history", type=Path, metavar="DIR",
        help="keep the samples there, and compare with the last runs; exit with 1 if a "
        "figure is over 10 %% slower")  # fmt: skip
    add("--plot", type=Path, metavar="FILE.svg",
        help="draw the rows there, beside what they are compared with")  # fmt: skip
    add("--markdown", action="store_true", help="print tables for a document")
    add("--check", action="store_true", help="exit with 1 if a target is missed")
    given = parser.parse_args(argv)
    size, repeat = _SIZE, _REPEAT
    if given.quick:
        size, repeat = _QUICK_SIZE, _QUICK_REPEAT
    elif given.case == "delta":
        size, repeat = _DELTA_SIZE, _DELTA_REPEAT
    given.size, given.repeat = given.size or size, given.repeat or repeat
    default = SHAPES if given.case in _ALL_SHAPES else SHAPES[:1]
    given.shapes = tuple(dict.fromkeys(given.shapes or default))
    return given


def _size(text: str) -> float:
    size = float(text)
    if not 1 / 1024 <= size < 2**20:
        raise argparse.ArgumentTypeError(f"{text} GiB is less than 1 MiB, or absurd")
    return size


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to 1000")
    return count


def _tree(text: str) -> Path:
    if not (Path(text) / "aiockpt/__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is no source tree of aiockpt")
    return Path(text).resolve()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
