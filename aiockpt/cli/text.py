"""Text for people: sizes, times, tables, and names that a terminal can bear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["counted", "format_bytes", "format_seconds", "format_table", "printable"]

_UNITS = ("B", "kB", "MB", "GB", "TB")


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


def format_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()
) -> str:
    """Return lines with aligned columns; those in ``right`` are flush right."""
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    flush = set(right)

    def cell(index: int, text: str) -> str:
        width = widths[index]
        return text.rjust(width) if index in flush else text.ljust(width)

    return "\n".join(
        "  ".join(cell(index, text) for index, text in enumerate(line)).rstrip()
        for line in lines
    )


def printable(text: str) -> str:
    """Escape what would control the terminal: names come from files and peers."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )
