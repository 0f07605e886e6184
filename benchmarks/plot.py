"""The rows as a picture: an SVG that needs no library, on light and dark pages.

Units differ from row to row, so each figure has a scale of its own: the longest of its
bars, or its limit, is as wide as there is room. What is compared with several things is
drawn once, above them, and its ratios have their order.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from operator import attrgetter

from benchmarks.report import Report, Row

__all__ = ["as_svg"]

_WIDTH, _MARGIN = 860, 16
_LABEL, _BAR = 190, 350  # how wide names and bars may be
_LINE, _THICK = 17, 11
_TEXT = 110  # letters of a line of text
_STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.what { font-weight: 600 }
.small { font-size: 11px; fill: #59636e }
.ours { fill: #0969da }
.other { fill: #afb8c1 }
.missed { fill: #cf222e }
.limit { stroke: #1f2328 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .small { fill: #9198a1 }
  .ours { fill: #4493f8 }
  .other { fill: #59636e }
  .missed { fill: #f85149 }
  .limit { stroke: #e6edf3 }
}"""


def as_svg(report: Report) -> str:
    """Return the report's rows, each beside what it is compared with."""
    page = _Page()
    page.text("aiockpt bench", "title", _MARGIN)
    page.skip()
    for what, rows in groupby(report.rows, attrgetter("what")):
        page.text(what, "what", _MARGIN)
        for _, same in groupby(rows, attrgetter("shape", "value")):
            _draw(page, [*same])
        page.skip()
    for line in textwrap.wrap(_words(report.machine), _TEXT):
        page.text(line, "small", _MARGIN)
    return "\n".join(page.lines())


def _words(machine: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {value}" for name, value in machine.items())


class _Page:
    """Lines of text and bars, from top to bottom."""

    def __init__(self) -> None:
        self._at = float(_MARGIN)
        self._found: list[str] = []

    def lines(self) -> Iterator[str]:
        """Yield the whole file."""
        height = self._at + _MARGIN
        size = f'width="{_WIDTH}" height="{height:g}" viewBox="0 0 {_WIDTH} {height:g}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        yield "<title>aiockpt beside its references</title>"
        yield f"<style>\n{_STYLE}\n</style>"
        yield from self._found
        yield "</svg>\n"

    def skip(self) -> None:
        """Leave half a line free."""
        self._at += _LINE / 2

    def text(self, text: str, kind: str, x: float) -> None:
        """Write a line."""
        self._write(text, kind, x)
        self._at += _LINE

    def bar(self, name: str, kind: str, share: float, text: str) -> None:
        """Draw a bar between its name and its value."""
        left = _MARGIN + _LABEL
        width = max(share * _BAR, 1)
        top = self._at + (_LINE - _THICK) / 2
        self._write(name, "small", _MARGIN)
        self._found.append(
            f'<rect class="{kind}" x="{left}" y="{top:g}" width="{width:.1f}" '
            f'height="{_THICK}" rx="2"/>'
        )
        self._write(text, "small", left + width + 6)
        self._at += _LINE

    def limit(self, share: float) -> None:
        """Mark a limit on the bar that was drawn last."""
        x = _MARGIN + _LABEL + share * _BAR
        top, bottom = self._at - _LINE + 1, self._at - 1
        self._found.append(
            f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" '
            f'y2="{bottom:g}" stroke-dasharray="3 2"/>'
        )

    def _write(self, text: str, kind: str, x: float) -> None:
        if not text:
            return
        base = self._at + _LINE - 4
        self._found.append(
            f'<text class="{kind}" x="{x:.1f}" y="{base:g}">{escape(text)}</text>'
        )


def _draw(page: _Page, rows: Sequence[Row]) -> None:
    """Draw one figure, and below it whatever it is compared with, once."""
    ours = rows[0]
    others = {row.reference: row for row in rows if row.reference_value is not None}
    limits = [limit for row in rows if (limit := _limit(row)) is not None]
    references = [row.reference_value or 0.0 for row in others.values()]
    whole = max([ours.value, *references, *limits])
    scale = 1 / whole if whole > 0 else 0.0
    times = [f"{row.ratio:.2f} x" for row in others.values() if row.ratio is not None]
    kind = "missed" if any(row.missed for row in rows) else "ours"
    value = ", ".join([_amount(ours.value, ours.unit), *times])
    page.bar(ours.shape, kind, max(ours.value, 0) * scale, value)
    for limit in dict.fromkeys(limits):
        page.limit(limit * scale)
    for row, reference in zip(others.values(), references, strict=True):
        text = f"{_amount(reference, row.unit)}, {row.reference}"
        page.bar("", "other", max(reference, 0) * scale, text)


def _limit(row: Row) -> float | None:
    """Return what the value should not exceed, if anything."""
    if row.ratio_at_most is None:
        return row.at_most
    return row.ratio_at_most * (row.reference_value or 0.0)


def _amount(value: float, unit: str) -> str:
    return f"{value:.2f} {unit}"
