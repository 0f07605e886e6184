"""The table of `docs/explanation/failure-semantics.md`: what each call leaves behind.

A row is a call, and a column is the way in which the call ends. A cell has the words
for what is left: those for this end and, after a slash, those for the other end. A test
takes its cells from here and compares what it finds with their words::

    @each_cell("HTTPTransport.recv_checkpoint*: cancel")
    async def test_a_cancel(cell: Cell) -> None: ...
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

__all__ = ["CELLS", "ENDINGS", "PAGE", "Cell", "chosen", "each_cell"]

PAGE: Final = (
    Path(__file__).parents[2] / "docs" / "explanation" / "failure-semantics.md"
)

ENDINGS: Final = (
    "success",
    "error",
    "timeout",
    "cancel",
    "this process dies",
    "the other one dies",
)
"""The columns of the table."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One ending of one call, and the page's words for what it leaves behind."""

    call: str
    ending: str
    left: str

    @property
    def name(self) -> str:
        """How a test of this cell is called."""
        return f"{self.call}: {self.ending}"


def _cells() -> dict[tuple[str, str], Cell]:
    _, _, text = PAGE.read_text().partition("(failure-semantics)=")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[each.strip() for each in line.strip("|").split("|")] for line in lines]
    if rows[0] != ["call", *ENDINGS]:
        raise ValueError(f"{PAGE} has other columns: {rows[0]}")
    found = {}
    for first, *words in rows[2:]:
        call = first.replace("`", "")
        for ending, left in zip(ENDINGS, words, strict=True):
            if left != "—":  # the call cannot end so
                found[call, ending] = Cell(call, ending, left)
    return found


CELLS: Final = _cells()
"""By call and ending, in the order of the page."""


def chosen(*patterns: str) -> list[Cell]:
    """Return the cells of ``call: ending``; a call may end with ``*``.

    Raises:
        ValueError: no cell is meant by one of the patterns.
    """
    found = []
    for pattern in patterns:
        call, _, ending = pattern.rpartition(": ")
        meant = [
            cell
            for cell in CELLS.values()
            if cell.ending == ending
            and (
                cell.call.startswith(call[:-1])
                if call.endswith("*")
                else cell.call == call
            )
        ]
        if not meant:
            raise ValueError(f"no cell of {PAGE.name} is {pattern!r}")
        found += meant
    return found


def each_cell(*patterns: str) -> Any:
    """Give a test a case for each of these cells, all of which it proves."""
    cells = chosen(*patterns)
    return pytest.mark.parametrize("cell", cells, ids=[cell.name for cell in cells])
