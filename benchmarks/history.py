"""Keeps each run as JSON, and compares it with the last runs of the same machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

_LAST = 5  # runs that a new one is compared with
_ENOUGH = 3  # runs without which chance decides
_SLOWER = 1.1
_MACHINE = ("cores", "memory", "Python", "torch")
_OPTIONS = ("cases", "scale", "rivals")


def keep(run: Mapping[str, Any], directory: Path) -> Path:
    """Write a run into the directory; return its file. Names sort by time."""
    directory.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S.%f")
    file = directory / f"{now}.json"
    file.write_text(json.dumps(run) + "\n")
    return file


def last_runs(run: Mapping[str, Any], directory: Path) -> list[Mapping[str, Any]]:
    """Return the last kept runs of the same measurement on the same machine."""
    found: list[Mapping[str, Any]] = []
    for file in sorted(directory.glob("*.json"), reverse=True):
        other = json.loads(file.read_text())
        if len(found) < _LAST and _subject(other) == _subject(run):
            found.append(other)
    return found


def slower(run: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each figure that got worse.

    A figure got worse if it costs over 10 % more than the median of the other runs, and
    more than each of them. A speed is compared as its ratio to the reference that was
    measured beside it, so a busy machine slows both. Fewer than three runs, and fewer
    than three values of one figure, are not judged.
    """
    lines = []
    history = [dict(_costs(other)) for other in others]
    for what, cost in _costs(run):
        before = [costs[what] for costs in history if what in costs]
        if len(before) < _ENOUGH:
            continue
        usual = median(before)
        if cost > _SLOWER * usual and cost > max(before):
            name, share = ": ".join(filter(None, what)), cost / usual - 1
            runs = f"the median of the last {len(before)} runs"
            lines.append(f"{name} is {share:.0%} slower than {runs}")
    return lines


def _costs(run: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the figures that are times or speeds, as what grows when it gets slower."""
    for row in run["rows"]:
        what = row["case"], row["what"], row["against"].partition(", num_chunks")[0]
        if row["unit"] in ("s", "ms"):
            yield what, row["value"]
        elif row["unit"] == "GB/s" and (speed := row["ratio"] or row["value"]):
            yield what, 1 / speed


def _subject(run: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what two runs have in common if their figures can be compared."""
    machine, options = run["machine"], run["options"]
    return (
        *(machine.get(name) for name in _MACHINE),
        *(options.get(name) for name in _OPTIONS),
    )
