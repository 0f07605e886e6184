"""What was measured: rows with their targets, as text, as Markdown, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.measures import Series, percentile
from benchmarks.state import Shape

__all__ = [
    "OTHER_TREE",
    "Report",
    "Row",
    "as_json",
    "as_markdown",
    "as_text",
    "rows_of_trees",
    "speed_row",
]

OTHER_TREE = "other tree: "
"""What the names of another source tree's candidates begin with."""

_OF_OTHER_TREE = 0.9
_ROWS = ("what", "tensors", "aiockpt", "compared with", "ratio", "target", "")
_DETAILS = (
    "what",
    "tensors",
    "GB/s",
    "slowest to fastest",
    "CPU s/GB sender",
    "receiver",
    "lag p99 (max) ms sender",
    "receiver",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        what: What was measured.
        shape: Of what.
        value: The median.
        unit: Its unit.
        reference: What it is compared with, if anything.
        reference_value: In the same unit.
        at_least: What the ratio should reach, if anything.
        at_most: What the value should not exceed, if anything.
        ratio_at_most: What the ratio should not exceed, if anything.
    """

    what: str
    shape: str
    value: float
    unit: str
    reference: str = ""
    reference_value: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    ratio_at_most: float | None = None

    @property
    def ratio(self) -> float | None:
        """The value by the reference's; None where less is better."""
        if self.at_most is not None or not self.reference_value:
            return None
        return self.value / self.reference_value

    @property
    def missed(self) -> bool:
        """Whether there is a target, and it was not reached."""
        ratio = self.ratio or 0.0
        return (
            (self.at_least is not None and ratio < self.at_least)
            or (self.at_most is not None and self.value > self.at_most)
            or (self.ratio_at_most is not None and ratio > self.ratio_at_most)
        )

    @property
    def target(self) -> str:
        """The target in words; empty if there is none."""
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        if self.ratio_at_most is not None:
            return f"at most {self.ratio_at_most:g}"
        return "" if self.at_most is None else f"at most {self.at_most:g} {self.unit}"

    @property
    def verdict(self) -> str:
        """``ok`` or ``MISSED``; empty if there is no target."""
        return ("MISSED" if self.missed else "ok") if self.target else ""


def speed_row(
    shape: Shape, what: str, ours: Series, reference: Series, target: float = 0.0
) -> Row:
    """Return a row that compares speeds; without ``target``, for information."""
    return Row(
        what=what,
        shape=str(shape),
        value=ours.speed,
        unit="GB/s",
        reference=reference.name,
        reference_value=reference.speed,
        at_least=target or None,
    )


def rows_of_trees(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield each candidate beside the same one of the other source tree, if any.

    Speeds are compared, so more is better; figures are compared as they are.
    """
    for name, ours in found.items():
        theirs = found.get(OTHER_TREE + name)
        if theirs is None:
            continue
        if ours.nbytes:
            yield speed_row(shape, name, ours, theirs, _OF_OTHER_TREE)
        for figure in ours.samples[0].figures:
            yield Row(
                what=f"{name}: {figure}",
                shape=str(shape),
                value=ours.figure(figure),
                unit="",
                reference=theirs.name,
                reference_value=theirs.figure(figure),
            )


@dataclass(slots=True)
class Report:
    """Everything that one run found."""

    machine: Mapping[str, str]
    options: Mapping[str, object]
    rows: list[Row] = field(default_factory=list)
    series: dict[Shape, Mapping[str, Series]] = field(default_factory=dict)

    @property
    def missed(self) -> list[Row]:
        """The rows whose targets were not reached."""
        return [row for row in self.rows if row.missed]


def as_json(report: Report) -> dict[str, Any]:
    """Return the report with all its samples."""
    return {
        "machine": dict(report.machine),
        "options": dict(report.options),
        "rows": [
            {**asdict(row), "ratio": row.ratio, "verdict": row.verdict}
            for row in report.rows
        ],
        "samples": {
            shape.key: {
                name: [asdict(sample) for sample in series.samples]
                for name, series in found.items()
            }
            for shape, found in report.series.items()
        },
    }


def as_text(report: Report) -> str:
    """Return the report for a terminal."""
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    tables = [_aligned(head, cells) for head, cells in _tables(report)]
    return "\n\n".join([machine, *tables]) + "\n"


def as_markdown(report: Report) -> str:
    """Return the report for a document."""
    machine = "; ".join(f"{name} {value}" for name, value in report.machine.items())
    tables = [_piped(head, cells) for head, cells in _tables(report)]
    return "\n\n".join([machine, *tables]) + "\n"


def _tables(
    report: Report,
) -> Iterator[tuple[Sequence[str], list[list[str]]]]:
    yield _ROWS, [_row_cells(row) for row in report.rows]
    yield (
        _DETAILS,
        [
            [series.name, str(shape), *_speed_cells(series), *_lag_cells(series)]
            for shape, found in report.series.items()
            for series in found.values()
        ],
    )


def _row_cells(row: Row) -> list[str]:
    reference = ""
    if row.reference_value is not None:
        reference = f"{row.reference}: {row.reference_value:.2f} {row.unit}".rstrip()
    return [
        row.what,
        row.shape,
        f"{row.value:.2f} {row.unit}".rstrip(),
        reference,
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.target,
        row.verdict,
    ]


def _speed_cells(series: Series) -> list[str]:
    if not series.nbytes:
        return [""] * 4
    slowest, fastest = series.speeds
    return [
        f"{series.speed:.2f}",
        f"{slowest:.2f} to {fastest:.2f}",
        f"{series.sender_cost:.2f}" if series.sender_lags else "",
        f"{series.receiver_cost:.2f}" if series.receiver_lags else "",
    ]


def _lag_cells(series: Series) -> list[str]:
    return [
        f"{1e3 * percentile(lags, 0.99):.1f} ({1e3 * max(lags):.1f})" if lags else ""
        for lags in (series.sender_lags, series.receiver_lags)
    ]


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _piped(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
