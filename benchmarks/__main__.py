"""``python -m benchmarks``: measures this source tree on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiockpt.cli.doctor import describe_machine
from benchmarks.cases import CASES, measure
from benchmarks.history import keep, last_runs, slower
from benchmarks.lines import hindrance
from benchmarks.measures import BenchmarkError, Samples
from benchmarks.memory import available_memory
from benchmarks.report import PAGE, as_text, rows_of, write_page

_ROUNDS = 6  # the first one is discarded, and five pairs are the fewest for an interval
_QUICK = 0.125
_COPIES = 7  # of the largest state dict, in all processes of a tree together, at most
_MEASURED = ("rounds", "rivals", "against")  # options that a case needs
_KEPT = ("cases", "rounds", "scale", "rivals")  # options that a report keeps
_LINES = (
    *("10g", "25g", "lossy", "cold", "delta", "elements-1g", "elements-10g", "shards"),
    "objects",
)


def main(argv: Sequence[str]) -> int:
    """Measure what ``argv`` asks for; return the exit code.

    0: it ran. 1: it could not run, it missed a target that ``--check`` asked for, or it
    is slower than the runs that ``--history`` has.
    """
    options = _parse(argv)
    worse: list[str] = []
    try:
        report = _read(options.from_) if options.from_ else _measure(options)
        text = json.dumps(report) + "\n"
        if options.json is not None:
            options.json.write_text(text)
        if options.page is not None:
            write_page(report, options.page)
        if options.history is not None:
            others = last_runs(report, options.history)
            worse = slower(report, others)
            file = keep(report, options.history)
            sys.stderr.write(f"kept as {file}, compared with {len(others)} runs\n")
    except (BenchmarkError, OSError, ValueError) as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return 1
    sys.stdout.write(as_text(report))
    sys.stderr.writelines(f"SLOWER: {line}\n" for line in worse)
    missed = any(row["verdict"] == "missed" for row in report["rows"])
    return int(bool(report.get("failed") or worse) or (options.check and missed))


def _read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    if not report.keys() >= {"machine", "options", "rows", "cases"}:
        raise ValueError(f"{path} was not written by --json")
    return report


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    trees = 1 if options.against is None else 2
    sizes = {
        name: int(CASES[name].mib * options.scale * 2**20) // 64 * 64
        for name in options.cases
    }
    needed, free = _COPIES * trees * max(sizes.values()), available_memory()
    if needed > free:
        raise BenchmarkError(
            f"the benchmark needs {needed / 2**30:.1f} GiB of memory and "
            f"{free / 2**30:.1f} GiB are available: choose a smaller --scale"
        )
    report: dict[str, Any] = {
        "machine": describe_machine(),
        "options": {name: getattr(options, name) for name in _KEPT},
        "rows": [],
        "cases": {},
        "failed": [],
    }
    given = {name: getattr(options, name) for name in _MEASURED}
    for name, nbytes in sizes.items():

        def note(text: str, name: str = name) -> None:
            sys.stderr.write(f"{name}, {text}\n")

        try:
            found = measure(CASES[name], nbytes=nbytes, note=note, **given)
        except BenchmarkError as error:  # the other cases may work
            sys.stderr.write(f"benchmarks: {name}: {error}\n")
            report["failed"].append(name)
            continue
        rounded = {of: _rounded(them) for of, them in found.samples.items()}
        date = report["machine"]["date"]
        case = {"date": date, "nbytes": nbytes, "samples": rounded}
        if found.failures:
            case["failures"] = found.failures
        report["cases"][name] = case
        report["rows"] += rows_of(name, rounded, found.failures)
    return report


def _rounded(samples: Samples) -> Samples:
    """Keep five digits of each figure: more would be noise, and megabytes of it."""
    return [
        each and {name: float(f"{value:.5g}") for name, value in each.items()}
        for each in samples
    ]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; exit with a message for wrong ones."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure this source tree on this machine beside memcpy, raw "
        "sockets, plain files, torch's checkpointers and torchft.",
        epilog="; ".join(f"{name}: {case.about}" for name, case in CASES.items()),
    )
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="what to measure; all that can be")
    add("--rounds", type=_count, default=_ROUNDS, metavar="N",
        help=f"one of which is discarded; {_ROUNDS}")  # fmt: skip
    add("--scale", type=float, default=1.0, metavar="X", help="of all sizes")
    add("--quick", action="store_true", help=f"the same as --scale {_QUICK}")
    add("--against", type=_tree, metavar="PATH",
        help="measure another source tree too, in the same rounds")  # fmt: skip
    add("--no-rivals", dest="rivals", action="store_false", help="leave rivals out")
    add("--json", type=Path, metavar="FILE", help="write rows and all samples there")
    add("--from", dest="from_", type=Path, metavar="FILE",
        help="report what --json has written, instead of measuring")  # fmt: skip
    add("--page", nargs="?", type=Path, const=PAGE, metavar="DIR",
        help="write the page there, with JSON and pictures; cases that were not "
        f"measured stay as they are; {PAGE}")  # fmt: skip
    add("--history", type=Path, metavar="DIR",
        help="keep the run there, and compare it with the last ones")  # fmt: skip
    add("--check", action="store_true", help="exit with 1 if a target is missed")
    given = parser.parse_args(argv)
    if unknown := [name for name in given.cases if name not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}: choose from {', '.join(CASES)}")
    if not given.cases:
        left_out = _LINES if hindrance() else ()
        given.cases = [name for name in CASES if name not in left_out]
    given.scale = _QUICK if given.quick else given.scale
    if not 1e-4 <= given.scale <= 1e3:
        parser.error("--scale is a number from 0.0001 to 1000")
    return given


def _count(text: str) -> int:
    count = int(text)
    if not 2 <= count <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 2 to 1000")
    return count


def _tree(text: str) -> Path:
    if not (Path(text) / "aiockpt/__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a source tree of aiockpt")
    return Path(text).resolve()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
