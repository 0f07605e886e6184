"""What one test of the fault matrix measured, on its way to the report.

``AIOCKPT_FAULTS=exhaustive`` asks for every seed and for the exact figures; else a
test does a little of its row, and a figure of time may be exceeded by what a busy
machine may take. ``AIOCKPT_FAULTS_OUT`` names a file that gets a line of JSON from
every test.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, TypeVar

__all__ = ["EXHAUSTIVE", "OUT", "Figure", "Outcome", "Record"]

T = TypeVar("T")

EXHAUSTIVE: Final = os.environ.get("AIOCKPT_FAULTS") == "exhaustive"
OUT: Final = os.environ.get("AIOCKPT_FAULTS_OUT")

PATIENCE = 20.0
"""Seconds that a figure of time may be exceeded by where it is not measured."""


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
        patience: float = PATIENCE,
    ) -> None:
        """State a figure that may be ``limit`` at most, and fail where it is more.

        ``patience`` is what it may be more by where it is not measured.
        """
        self._worse(what, Figure(value, limit, unit))
        allowed = limit if EXHAUSTIVE else limit + patience
        assert value <= allowed, f"{what}: {value:g}{unit}, not {limit:g} at most"

    def at_least(
        self, what: str, value: float, limit: float, *, unit: str = ""
    ) -> None:
        """State a figure that must reach ``limit``; it is checked where measured."""
        self._worse(what, Figure(value, limit, unit, at_least=True))
        if EXHAUSTIVE:
            assert value >= limit, f"{what}: {value:g}{unit}, not {limit:g} at least"

    def write(self, result: str) -> None:
        """Append the outcome to the file that was asked for."""
        self.outcome.result = result
        if OUT:
            with Path(OUT).open("a") as file:
                file.write(json.dumps(asdict(self.outcome)) + "\n")

    def _worse(self, what: str, new: Figure) -> None:
        old = self.outcome.figures.get(what)
        if old is None or _excess(new) > _excess(old):
            self.outcome.figures[what] = new


def _excess(figure: Figure) -> float:
    over = figure.worst - figure.limit
    return -over if figure.at_least else over


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
