"""Text for people: sizes, times, tables, names that a terminal can bear, a bar."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TextIO, TypeVar

from aiockpt.events import Progress
from aiockpt.runtime.words import clipped

T = TypeVar("T")

_UNITS = ("B", "kB", "MB", "GB", "TB")
_WORDS = {
    "fetch_manifest": "waiting",
    "allocate": "preparing",
    "plan": "checking what is there",
    "fetch_chunk": "fetching",
    "rebuild": "rebuilding",
    "load": "copying",
    "write": "writing",
}
_MAX_BAR_CHARACTERS = 40
MAX_CELL = 100  # characters of a cell of a table
MAX_ROWS = 10_000  # of a table; a JSON document has all
_REDRAW_S = 0.1
_LINE_EVERY_S = 5.0
_CLEAR = "\r\x1b[2K"


def counted(count: int, what: str) -> str:
    """Return "1 chunk", or "2 chunks"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def format_bytes(count: float) -> str:
    """Return a size as a person reads it, in powers of 1000: ``"90.9 MB"``."""
    for unit in _UNITS:
        # What would be rounded to 1000 belongs to the next unit.
        if abs(count) < 999.95 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a time as a clock shows it: ``"0:07"``, ``"1:02:03"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def some(
    items: Iterable[T], most: int, show: Callable[[T], str], hint: str = ""
) -> Iterator[str]:
    """Yield lines of at most so many items, and then how many more there are."""
    each = iter(items)
    yield from map(show, islice(each, most))
    if more := sum(1 for _ in each):
        yield f"... and {more} more{hint}"


def format_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[int] = (),
    last: Callable[[int], Sequence[str]] | None = None,
    hint: str = "",
) -> Iterator[str]:
    """Yield lines with aligned columns; those in ``right`` are flush right.

    Names of peers and files may be in it: each cell is clipped, and what would control
    the terminal is escaped. Of more than `MAX_ROWS` rows, the others are counted.

    Args:
        heads: The names of the columns.
        rows: The cells of each row.
        right: The numbers of the columns that are flush right.
        last: Returns the last row, from the number of all others.
        hint: Follows the number of rows that are not shown.
    """
    each = iter(rows)
    shown = [_cells(row) for row in islice(each, MAX_ROWS)]
    more = sum(1 for _ in each)
    end = [] if last is None else [_cells(last(len(shown) + more))]
    lines = [_cells(heads), *shown, *end]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    flush = set(right)

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if index in flush else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    yield from map(line, lines[: 1 + len(shown)])
    if more:
        yield f"... and {more} more{hint}"
    yield from map(line, end)


def _cells(row: Sequence[str]) -> tuple[str, ...]:
    return tuple(clipped(cell, MAX_CELL) for cell in row)


def render(progress: Progress, width: int) -> str:
    """Return one line of at most ``width`` columns."""
    done, total = progress.bytes_done, progress.bytes_total
    word = _WORDS.get(progress.stop, progress.stop)
    if not total:
        return word[:width]
    share = min(done / total, 1.0)
    facts = f"{share:4.0%}  {format_bytes(done)} of {format_bytes(total)}"
    if progress.rate:
        left = (total - done) / progress.rate
        facts += f"  {format_bytes(progress.rate)}/s  ETA {format_seconds(left)}"
    room = min(width - len(word) - len(facts) - 6, _MAX_BAR_CHARACTERS)
    if room < 5:
        return f"{word} {facts}"[:width]
    filled = math.floor(share * room)
    return f"{word}  [{'#' * filled}{'-' * (room - filled)}] {facts}"


class ProgressBar:
    """A ``progress`` callable that draws itself on a stream.

    Args:
        stream: Where to draw; a terminal gets a bar, anything else plain lines.
        quiet: Draw nothing.

    Attributes:
        last: What it was told last.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self.last = Progress(stop="fetch_manifest")
        self._stream = stream
        self._quiet = quiet
        self._bar = not quiet and stream.isatty()
        self._pause = _REDRAW_S if self._bar else _LINE_EVERY_S
        self._moves = False
        self._next = time.monotonic() + (0 if self._bar else self._pause)

    def __call__(self, progress: Progress) -> None:
        """Show ``progress``, unless the last one was shown a moment ago."""
        self.last, self._moves = progress, True
        now = time.monotonic()
        if not self._quiet and now >= self._next:
            self._next = now + self._pause
            self._draw()

    def note(self, text: str) -> None:
        """Write a line of text, above the bar."""
        if not self._quiet:
            self._write(f"{_CLEAR if self._bar else ''}{text}\n")

    def close(self) -> None:
        """Leave the bar as it was in the end, and the cursor on a line of its own."""
        if self._bar and self._moves:
            self._draw()
            self._write("\n")
        self._moves = False

    def _draw(self) -> None:
        if self._bar:
            self._write(_CLEAR + render(self.last, self._width() - 1))
        else:
            self._write(f"{render(self.last, 200)}\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # nobody sees it any more, which is no reason to stop
            self._quiet, self._bar = True, False

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80
