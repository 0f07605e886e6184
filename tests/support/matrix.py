"""The matrix of faults: its rows, what a test of a row measured, and the report.

`tests/faults/matrix.md` has the rows: what goes wrong, how, and what must hold. A test
takes the fixture ``record`` and names its row::

    @proves("fault 8")
    async def test_it(record: Record) -> None:
        for seed in record.part_of(range(1000), few=20):
            ...  # make it happen; assert what must hold
            record.ran()
            record.within("to the error", seconds, 0.2)  # the worst is shown

``AIOCKPT_FAULTS=exhaustive`` asks for every seed and for the exact figures. In the
ordinary suite a test does a little of its row, and a busy machine fails no figure.
``AIOCKPT_FAULTS_OUT`` names a file that gets a line of JSON from every test, and
``python -m tests.support.matrix FILE PAGE`` makes a page of these results.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, TypeVar

__all__ = ["EXHAUSTIVE", "ROWS", "Figure", "Outcome", "Record", "load", "render"]

T = TypeVar("T")

EXHAUSTIVE: Final = os.environ.get("AIOCKPT_FAULTS") == "exhaustive"
OUT: Final = os.environ.get("AIOCKPT_FAULTS_OUT")
NOT_RUN: Final = "not run"
BUSY_S: Final = 20.0
"""What a busy machine may add to a time in the ordinary suite."""


def _rows() -> dict[int, list[str]]:
    text = (Path(__file__).parents[1] / "faults" / "matrix.md").read_text()
    found = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    return {int(number): cells.split(" | ") for number, cells in found}


ROWS: Final = _rows()
"""By its number what a row says: fault, how, must hold."""


@dataclass(slots=True)
class Figure:
    """The worst of one kind of figure, and what it may be."""

    worst: float
    limit: float
    unit: str
    at_least: bool = False

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{_short(self.worst)}{self.unit} ({sign} {_short(self.limit)})"

    @property
    def excess(self) -> float:
        """How far it is beyond the limit; negative where it is within."""
        over = self.worst - self.limit
        return -over if self.at_least else over


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(slots=True)
class Outcome:
    """What is written for one test."""

    row: int
    test: str
    runs: int = 0
    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    result: str = "pass"  # or "fail", or why it was skipped


class Record:
    """Where a test of the matrix counts its runs and states its figures."""

    def __init__(self, row: int, test: str) -> None:
        self.outcome = Outcome(row, test)

    @property
    def exhaustive(self) -> bool:
        """Whether everything is run and every figure must be reached."""
        return EXHAUSTIVE

    def pick(self, few: T, everything: T) -> T:
        """Return the one or the other: how many seeds, how much data."""
        return everything if EXHAUSTIVE else few

    def part_of(self, everything: Sequence[T], *, few: int) -> Sequence[T]:
        """Return the seeds or points to run: all of them, or a few, evenly spread.

        The test on asyncio's loop gets one half of all, that on uvloop's the other.
        """
        if EXHAUSTIVE:
            return everything[self._second :: 2]
        return everything[:: max(1, len(everything) // few)][:few]

    def chance(self) -> random.Random:
        """Return the same chance at every run, another one on the other loop."""
        return random.Random(f"{self.outcome.row} {self._second}")

    @property
    def _second(self) -> bool:
        return "uvloop" in self.outcome.test

    def ran(self, count: int = 1) -> None:
        """Count runs: transfers, seeds, points."""
        self.outcome.runs += count

    def note(self, text: str) -> None:
        """Say something beside the figures in the report."""
        if text not in self.outcome.notes:
            self.outcome.notes.append(text)

    def within(
        self,
        what: str,
        value: float,
        limit: float,
        *,
        unit: str = " s",
        slack: float = 10,
    ) -> None:
        """State a figure that may be ``limit`` at most, and fail where it is more.

        The ordinary suite runs beside other work: there it may be ``slack`` times that,
        and a time may be longer by ``BUSY_S``.
        """
        self._keep_worse(what, Figure(value, limit, unit))
        busy = limit + BUSY_S if unit == " s" else 0.0
        allowed = limit if EXHAUSTIVE else max(limit * slack, busy)
        assert value <= allowed, f"{what}: {value:g}{unit}, not {limit:g} at most"

    def at_least(
        self, what: str, value: float, limit: float, *, unit: str = ""
    ) -> None:
        """State a figure that must reach ``limit``; it is checked where measured."""
        self._keep_worse(what, Figure(value, limit, unit, at_least=True))
        if EXHAUSTIVE:
            assert value >= limit, f"{what}: {value:g}{unit}, not {limit:g} at least"

    def write(self, result: str) -> None:
        """Append the outcome to the file that was asked for."""
        self.outcome.result = result
        if OUT:
            with Path(OUT).open("a") as file:
                file.write(json.dumps(asdict(self.outcome)) + "\n")

    def _keep_worse(self, what: str, new: Figure) -> None:
        self.outcome.figures[what] = _worse(self.outcome.figures.get(what), new)


def _worse(one: Figure | None, other: Figure) -> Figure:
    return other if one is None or other.excess > one.excess else one


# ------------------------------------------------------------------------ the report


def load(path: Path) -> dict[int, list[Outcome]]:
    """Return the outcomes of a run by row; of a test that ran again, the last."""
    last: dict[str, Outcome] = {}
    for line in path.read_text().splitlines():
        facts = json.loads(line)
        figures = {what: Figure(**each) for what, each in facts.pop("figures").items()}
        last[facts["test"]] = Outcome(figures=figures, **facts)
    found: dict[int, list[Outcome]] = {}
    for outcome in last.values():
        found.setdefault(outcome.row, []).append(outcome)
    return found


def render(results: Mapping[int, list[Outcome]], machine: Mapping[str, str]) -> str:
    """Return a page that shows for each row that ran what was measured, and where."""
    lines = [
        "# Faults, and what was measured\n",
        *(f"* {name}: {value}" for name, value in machine.items()),
        "\n| # | Fault | Must hold | Runs | Worst figure (limit) | Result |",
        "|--:|---|---|--:|---|---|",
    ]
    for number, outcomes in sorted(results.items()):
        fault, _, must_hold = ROWS[number]
        runs = sum(each.runs for each in outcomes)
        measured = [f"{runs:,}" if runs else "", _figures(outcomes), _result(outcomes)]
        cells = [str(number), fault, must_hold, *measured]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _figures(outcomes: list[Outcome]) -> str:
    worst: dict[str, Figure] = {}
    for outcome in outcomes:
        for what, figure in outcome.figures.items():
            worst[what] = _worse(worst.get(what), figure)
    notes = _unique(note for outcome in outcomes for note in outcome.notes)
    return "; ".join([*(f"{what}: {each}" for what, each in worst.items()), *notes])


def _result(outcomes: list[Outcome]) -> str:
    results = [each.result for each in outcomes]
    if "fail" in results:
        return "**fail**"
    skipped = _unique(each for each in results if each != "pass")
    ran = ["pass"] if "pass" in results else [NOT_RUN]
    return "; ".join([*ran, *skipped] if skipped else ran)


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def main(results: str, page: str) -> None:
    """Make a page of the results of a run on this machine."""
    from aiockpt.cli.doctor import describe_machine

    Path(page).write_text(render(load(Path(results)), describe_machine()))
    print(f"wrote {page}")


if __name__ == "__main__":
    main(*sys.argv[1:])
