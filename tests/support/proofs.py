"""Which test proves which promise: marks on the tests, and the list made of them.

A promise has a name: ``invariant 3`` of the guarantees, ``fault 8`` of the matrix,
``threat T2`` of the threat model, or ``cell CALL: ENDING`` of the table of failures. A
test that proves promises names them::

    @proves("invariant 3", "threat D1")
    def test_it() -> None: ...

A class that inherits its tests names the one that proves the promise: ``by="test_it"``.

The table of failures says what each call leaves behind. A row is a call, and a column
is the way in which the call ends. A test takes its cells from here, compares what it
finds with their words, and so proves them::

    @each_cell("HTTPTransport.recv_checkpoint*: cancel")
    async def test_a_cancel(cell: Cell) -> None: ...

``python -m tests.support.proofs FILE`` writes the list.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support import matrix

FAILURES: Final = Path(__file__).parents[1] / "faults" / "failures.md"

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
    _, _, text = FAILURES.read_text().partition("## The table")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[each.strip() for each in line.strip("|").split("|")] for line in lines]
    if rows[0] != ["call", *ENDINGS]:
        raise ValueError(f"{FAILURES} has other columns: {rows[0]}")
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
            raise ValueError(f"no cell of {FAILURES.name} is {pattern!r}")
        found += meant
    return found


def each_cell(*patterns: str) -> Any:
    """Give a test a case for each of these cells, all of which it proves."""
    cells = chosen(*patterns)
    return pytest.mark.parametrize("cell", cells, ids=[cell.name for cell in cells])


TESTS: Final = Path(__file__).parents[1]
DOCS: Final = TESTS.parent / "docs"

proves = pytest.mark.proves
"""Marks a test as a proof of the promises that it names."""

HEAD: Final = """\
# Proofs

Each promise of the documentation has a number, and a test that fails if it is broken.
The tests name the promises that they prove. Paths begin in `tests/`.
"""
SECTIONS: Final = {
    "invariant": "What is guaranteed",
    "threat": "The threat model",
    "fault": "The matrix of faults",
    "cell": "What each call leaves behind",
}


def faults_of(item: pytest.Item) -> list[int]:
    """Return the rows of the matrix of faults that a test proves."""
    marked = [each for mark in item.iter_markers("proves") for each in mark.args]
    return [int(each[6:]) for each in marked if each.startswith("fault ")]


def promises() -> dict[str, str]:
    """Return what is promised, by its number, in the order of the pages."""
    cells = {f"cell {cell.name}": cell.left for cell in CELLS.values()}
    return {**_invariants(), **_threats(), **_faults(), **cells}


def _invariants() -> dict[str, str]:
    text = (DOCS / "explanation" / "guarantees.md").read_text().partition("## ")[0]
    parts = re.split(r"^(\d+)\. ", text, flags=re.MULTILINE)[1:]
    return {
        f"invariant {number}": " ".join(sentence.split()).partition(". ")[0].rstrip(".")
        for number, sentence in zip(parts[::2], parts[1::2], strict=True)
    }


def _threats() -> dict[str, str]:
    text = (DOCS / "explanation" / "security.md").read_text()
    table = text.partition("## The threats, one by one")[2]
    cells = re.findall(r"^\| ([STRIDE]\d+) \| (.*?) \|", table, re.MULTILINE)
    return {f"threat {number}": threat for number, threat in cells}


def _faults() -> dict[str, str]:
    return {f"fault {number}": cells[0] for number, cells in matrix.ROWS.items()}


def proofs() -> dict[str, list[str]]:
    """Return the tests, as ``file.py::Class::test``, by what they prove."""
    found = defaultdict(list)
    for promise, test in _marks():
        found[promise].append(test)
    return dict(found)


def _marks() -> Iterator[tuple[str, str]]:
    """Give each promise with a test of it."""
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if "@proves" in text or "@each_cell" in text:
            file = path.relative_to(TESTS).as_posix()
            yield from _marks_in(ast.parse(text).body, f"{file}::")


def _marks_in(body: list[ast.stmt], owner: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in node.decorator_list:
            if not isinstance(call, ast.Call):
                continue
            by: list[str] = []
            match ast.unparse(call.func):
                case "proves":
                    named = [ast.literal_eval(each) for each in call.args]
                    by = [f"::{ast.literal_eval(each.value)}" for each in call.keywords]
                case "each_cell":
                    cells = chosen(*map(ast.literal_eval, call.args))
                    named = [f"cell {cell.name}" for cell in cells]
                case _:
                    continue
            test = owner + node.name + "".join(by)
            yield from ((promise, test) for promise in named)
        if isinstance(node, ast.ClassDef):
            yield from _marks_in(node.body, f"{owner}{node.name}::")


def render() -> str:
    """Return the list of all promises with their tests."""
    found = proofs()
    lines = [HEAD]
    for kind, title in SECTIONS.items():
        lines += [f"## {title}\n", "| # | Promise | Proofs |", "|---|---|---|"]
        for promise, text in promises().items():
            if promise.startswith(kind):
                tests = ", ".join(f"`{each}`" for each in found.get(promise, []))
                number = promise.removeprefix(f"{kind} ")
                lines.append(f"| {number} | {text} | {tests} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
