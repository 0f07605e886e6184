"""The matrix of faults: its rows, what a test of a row measured, and the report.

`docs/reliability.md` has the rows: what goes wrong, how, and what must hold. A test
takes the fixture ``record`` and names its row::

    @proves("fault 8")
    async def test_it(record: Record) -> None:
        for seed in record.part_of(range(1000), few=20):
            ...  # make it happen; assert what must hold
            record.ran()
            record.within("to the error", seconds, 0.2)  # the worst is shown

``AIOCKPT_FAULTS=exhaustive`` asks for every seed and for the exact figures. In the
ordinary suite a test does a little of its row, and a figure may be ten times its limit.
``AIOCKPT_FAULTS_OUT`` names a file that gets a line of JSON from every test, and
``python -m tests.support.matrix FILE`` writes these results into the page.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

__all__ = ["EXHAUSTIVE", "PAGE", "Figure", "Outcome", "Record", "load", "rows", "write"]

T = TypeVar("T")

PAGE: Final = Path(__file__).parents[2] / "docs" / "reliability.md"
EXHAUSTIVE: Final = os.environ.get("AIOCKPT_FAULTS") == "exhaustive"
OUT: Final = os.environ.get("AIOCKPT_FAULTS_OUT")
NOT_RUN: Final = "not run"

_MACHINE = re.compile(r"^Measured .*?(?=\n\n)", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"^<!-- code: (.*) -->$", re.MULTILINE)


def rows(page: str) -> dict[int, list[str]]:
    """Return the cells of the page's table by the number of the row.

    They are: fault, how, must hold, runs, worst figure, result, date.
    """
    found = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    return {int(number): re.split(r" ?\| ?", cells) for number, cells in found}


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
        """Say something beside the figures on the page."""
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

        The ordinary suite runs beside other work: there it may be ``slack`` times that.
        """
        self._keep_worse(what, Figure(value, limit, unit))
        allowed = limit if EXHAUSTIVE else limit * slack
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


def stamps(page: str) -> dict[int, str]:
    """Return by row the hash of the tests whose results the page shows."""
    match = _CODE.search(page)
    pairs = (each.split("=") for each in match[1].split()) if match else ()
    return {int(row): stamp for row, stamp in pairs}


def write(
    page: str,
    results: Mapping[int, list[Outcome]],
    *,
    date: str,
    machine: str,
    code: Mapping[int, str],
) -> str:
    """Return the page with new results; rows without any stay as they are.

    Args:
        page: The page as it is.
        results: The outcomes of a run by row.
        date: The day of the run.
        machine: What the figures were measured on.
        code: The hash of the tests of each row, as they ran.
    """
    known = rows(page)
    lines = page.splitlines()
    for number, outcomes in results.items():
        at = next(i for i, line in enumerate(lines) if line.startswith(f"| {number} |"))
        runs = sum(each.runs for each in outcomes)
        measured = [f"{runs:,}" if runs else "", _figures(outcomes), _result(outcomes)]
        cells = [str(number), *known[number][:3], *measured, date]
        lines[at] = "| " + " | ".join(cells) + " |"
    stamped = {**stamps(page), **{row: code[row] for row in results}}
    text = " ".join(f"{row}={stamp}" for row, stamp in sorted(stamped.items()))
    page = _CODE.sub(f"<!-- code: {text} -->", "\n".join(lines) + "\n")
    return _MACHINE.sub(machine, page) if results else page


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


def describe() -> str:
    """Say in words what the figures were measured on."""
    from aiockpt.cli.doctor import describe_machine

    facts = describe_machine()
    names = ("Python", "aiockpt", "torch", "aiohttp")
    versions = ", ".join(f"{name} {facts[name]}" for name in names)
    return (
        f"Measured on {facts['cores']} cores with {facts['memory']} of memory, "
        f"{facts['kernel']}, congestion control\n{facts['congestion control']}; "
        f"{versions}. At most light work ran beside: no figure is better for it."
    )


def main(results: str) -> None:
    """Write the results of a run into the page."""
    from tests.support.proofs import code_of_faults

    date = datetime.now(UTC).strftime("%Y-%m-%d")
    page, found = PAGE.read_text(), load(Path(results))
    code = code_of_faults()
    text = write(page, found, date=date, machine=describe(), code=code)
    PAGE.write_text(text)
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main(*sys.argv[1:])
