"""What a call leaves behind when it ends: the cells of the page on failures, in code.

Each cell has the words that the page shows, and the tests that prove them. A test in
``tests/semantics`` takes its cells from here, and compares what it finds with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = ["ENDINGS", "Cell", "Cells", "Proven", "row"]

ENDINGS: Final = (
    "success",
    "error",
    "timeout",
    "cancel",
    "this process dies",
    "the other one dies",
)
"""The columns of the table."""

Proven: TypeAlias = tuple[str, ...]
"""A cell's words, and the tests that prove them: ``file.py::name``, below ``tests``."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One ending of one call.

    ``left`` is what the page says: the words for this end, and after a slash those for
    the other end.
    """

    call: str
    ending: str
    left: str
    proofs: tuple[str, ...]

    @property
    def name(self) -> str:
        """How a test of this cell is called."""
        return f"{self.call}-{self.ending}"


Cells: TypeAlias = dict[tuple[str, str], Cell]


def row(
    call: str,
    success: Proven,
    error: Proven,
    timeout: Proven,
    cancel: Proven,
    this_dies: Proven,
    other_dies: Proven,
) -> Cells:
    """Return the cells of one call; nothing proves a cell that says ``—``."""
    given = (success, error, timeout, cancel, this_dies, other_dies)
    return {
        (call, ending): Cell(call, ending, left, tuple(proofs))
        for ending, (left, *proofs) in zip(ENDINGS, given, strict=True)
    }
