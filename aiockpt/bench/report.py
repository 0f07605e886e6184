"""Writes what was measured: as text, as Markdown, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aiockpt.bench.memory import FRESH, TOUCHED
from aiockpt.bench.rows import Row
from aiockpt.bench.shapes import Shape
from aiockpt.bench.statistics import Series, percentile

__all__ = ["Report", "as_conclusion", "as_json", "as_markdown", "as_text"]

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
    tables = [
        _aligned(_ROWS, _row_cells(report)),
        _aligned(_DETAILS, _detail_cells(report)),
    ]
    return "\n\n".join([machine, *tables]) + "\n"


def as_conclusion(report: Report) -> str:
    """Return three lines: how fast a receive is, what a send costs, and what to do."""
    (found,) = report.series.values()
    fresh, in_place = found["aiockpt, fresh"], found["aiockpt, in place"]
    raw_fresh = found[f"raw socket, {FRESH}, x1"]
    raw_in_place = found[f"raw socket, {TOUCHED}, x1"]
    staged, copied = found["aiockpt, stage warm"], found[f"memcpy, {TOUCHED}"]
    lag, idle = (
        1e3 * percentile(each.sender_lags, 0.99) for each in (in_place, found["idle"])
    )
    nbytes, took, least = staged.nbytes, 1e3 * staged.seconds, 1e3 * copied.seconds
    return (
        f"Receive: {in_place.speed:.1f} GB/s in place and {fresh.speed:.1f} GB/s into "
        f"new memory, on loopback; a raw socket reaches {raw_in_place.speed:.1f} and "
        f"{raw_fresh.speed:.1f}.\n"
        f"Send: {nbytes / 1e6:.0f} MB are copied in {took:.0f} ms, digests included; "
        f"memcpy takes {least:.0f} ms. While they are fetched, the sender's loop is "
        f"late by {lag:.1f} ms (p99; {idle:.1f} ms idle).\n"
        f"{_advice(report)}\n"
    )


def _advice(report: Report) -> str:
    cores, load = (
        int(report.machine["cores"]),
        float(report.machine["load average"].split()[0]),
    )
    if load > cores:
        return (
            f"Conclusion: the machine was busy (load average {load:.1f} on {cores} "
            "cores), so these figures are too low; run it again when it is idle."
        )
    targets = [row for row in report.rows if row.target]
    if report.missed:
        worst = ", ".join(dict.fromkeys(row.what for row in report.missed))
        return (
            f"Conclusion: {len(report.missed)} of {len(targets)} targets are missed "
            f"({worst}); `aiockpt doctor` says what limits this machine."
        )
    return (
        f"Conclusion: all {len(targets)} targets are reached here; `aiockpt bench` "
        "measures more, and larger, state dicts."
    )


def as_markdown(report: Report) -> str:
    """Return the report for a document."""
    machine = "; ".join(f"{name} {value}" for name, value in report.machine.items())
    tables = [
        _piped(_ROWS, _row_cells(report)),
        _piped(_DETAILS, _detail_cells(report)),
    ]
    return "\n\n".join([machine, *tables]) + "\n"


def _row_cells(report: Report) -> list[list[str]]:
    return [
        [
            row.what,
            row.shape,
            _amount(row.value, row.unit),
            _reference(row),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            row.target,
            row.verdict,
        ]
        for row in report.rows
    ]


def _reference(row: Row) -> str:
    if row.reference_value is None:
        return ""
    return f"{row.reference}: {_amount(row.reference_value, row.unit)}"


def _amount(value: float, unit: str) -> str:
    return f"{value:.2f} {unit}"


def _detail_cells(report: Report) -> list[list[str]]:
    return [
        [series.name, str(shape), *_speed(series), *_lags(series)]
        for shape, found in report.series.items()
        for series in found.values()
    ]


def _speed(series: Series) -> list[str]:
    if series.name == "idle" or not series.nbytes:
        return [""] * 4
    slowest, fastest = series.speeds
    return [
        f"{series.speed:.2f}",
        f"{slowest:.2f} to {fastest:.2f}",
        f"{series.sender_cost:.2f}" if series.sender_lags else "",
        f"{series.receiver_cost:.2f}" if series.receiver_lags else "",
    ]


def _lags(series: Series) -> list[str]:
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
