"""What was measured, as rows: for a terminal, a page, its pictures, a comparison."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from benchmarks.cases import CASES, OTHER_TREE, ROWS, Row
from benchmarks.measures import EFFORTS, Samples, counted, estimate, paired, verdict

Found = Mapping[str, Any]
"""One row with what was found: a JSON object. Its value is None if nothing was."""

_OF_OTHER_TREE = 0.9  # of its speed, at least
_SPEEDS = {"speed": "GB/s", "staged speed": "GB/s"}
_PAGE = Path(__file__).with_name("page.md")
PAGE = Path("benchmarks/results")
"""Where the page is."""
GPU_REPORT = "benchmarks-gpu.json"
"""What `benchmarks.gpu` has measured for the page, beside it."""
_VERSIONS = ("aiockpt", "torch", "CUDA")
_HEAD = ("case", "what", "aiockpt", "beside it", "ratio", "target", "verdict")
_EFFORTS = ("case", "a GB of", "CPU s", "system s", "minor faults", "major", "switches")
_HEAD_OF_GPU = (*_HEAD, "machine", "date", "versions")
_GAP = "not measured"


# ---------------------------------------------------------------- rows of samples


def rows_of(
    case: str, samples: Mapping[str, Samples], failures: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a case whose candidates were measured.

    A row beside a rival that has failed says why, and has no ratio.
    """
    failures = failures or {}
    for row in [*ROWS[case], *_rows_of_trees(samples)]:
        ours = _best(samples, row.ours, row.metric)
        theirs = _best(samples, row.against, row.metric) if row.against else ""
        if ours is None or (theirs is None and row.against not in failures):
            continue
        values = [each[row.metric] for each in counted(samples[ours])]
        found = estimate(values)
        beside = None
        if theirs:
            ratios = paired(samples[ours], samples[theirs], row.metric)
            if not ratios:
                continue
            found = estimate(ratios)
            beside = median(each[row.metric] for each in counted(samples[theirs]))
        yield {
            "case": case,
            "what": row.what,
            "ours": ours,
            "against": row.against if theirs is None else theirs,
            "metric": row.metric,
            "unit": row.unit,
            "value": median(values),
            "beside": beside,
            "ratio": found.value if theirs else None,
            "low": found.low,
            "high": found.high,
            "at_least": row.at_least,
            "at_most": row.at_most,
            "verdict": ""
            if theirs is None
            else verdict(found, at_least=row.at_least, at_most=row.at_most),
            **({"why": failures[row.against]} if theirs is None else {}),
        }


def _best(samples: Mapping[str, Samples], name: str, metric: str) -> str | None:
    """Return the candidate, or the best setting of a rival, of that name."""
    if name in samples:
        return name

    def typical(setting: str) -> float:
        return median(each["seconds"] for each in counted(samples[setting]))

    settings = [
        each
        for each, them in samples.items()
        if each.startswith(f"{name}, num_chunks=") and metric in counted(them)[0]
    ]
    return min(settings, key=typical, default=None)


def _rows_of_trees(samples: Mapping[str, Samples]) -> Iterator[Row]:
    """Yield what compares each candidate with that of the other source tree."""
    for name in samples:
        other = OTHER_TREE + name
        if other in samples:
            for metric in counted(samples[name])[0]:
                target = _OF_OTHER_TREE if metric in _SPEEDS else None
                unit = _SPEEDS.get(metric, "")
                yield Row(f"{name}: {metric}", name, other, metric, unit, target)


# ---------------------------------------------------------------- tables


def cells(row: Found) -> list[str]:
    """Return a row as it is printed."""
    if row["value"] is None:
        why = f"{_GAP}: {row['why']}" if row["why"] else _GAP
        return [row["case"], row["what"], why, row["against"], "", _target(row), ""]
    interval = ""
    if row["low"] is not None:
        interval = f" ({_short(row['low'])} to {_short(row['high'])})"
    unit, ours = row["unit"], _short(row["value"])
    compared = row["ratio"] is not None
    beside = f"{row['against']}: {row['why']}" if "why" in row else ""
    if compared:
        beside = f"{row['against']}: {_short(row['beside'])} {unit}".rstrip()
    return [
        row["case"],
        row["what"],
        f"{ours}{'' if compared else interval} {unit}".rstrip(),
        beside,
        f"{_short(row['ratio'])}{interval}" if compared else "",
        _target(row),
        row["verdict"],
    ]


def _target(row: Found) -> str:
    of = "ratio " if row["against"] else ""
    for side, words in (("at_least", "at least"), ("at_most", "at most")):
        if row[side] is not None:
            return f"{of}{words} {row[side]:g}"
    return ""


def _short(value: float) -> str:
    """Write three digits that count, and no exponent."""
    if not value:
        return "0"
    digits = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{min(digits, 4)}f}"


def efforts_of(report: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield what a GB took of both ends, for all candidates that the rows name.

    A cell is ``sender + receivers``, or the figure of the only process.
    """
    sides = ("ours", "against")
    named = ((row["case"], row[side]) for row in report["rows"] for side in sides)
    for case, name in dict.fromkeys(named):
        samples = report["cases"].get(case, {}).get("samples", {}).get(name, [])
        them = counted(samples) or [{}]
        found = [
            " + ".join(
                _short(median(each[end] for each in them))
                for end in (f"{figure}, sending", f"{figure}, receiving", figure)
                if end in them[0]
            )
            for figure in ("cpu", *EFFORTS)
        ]
        if found[-1]:
            yield [case, name, *found]


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report for a terminal."""
    found = [_machine(report)]
    efforts = [_EFFORTS, *efforts_of(report)]
    for lines in ([_HEAD, *map(cells, report["rows"])], efforts):
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        found += ["", *table]
    return "\n".join(found) + "\n"


def _machine(report: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {value}" for name, value in report["machine"].items())


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---------------------------------------------------------------- the page


def write_page(report: Mapping[str, Any], directory: Path) -> None:
    """Write the benchmarks page, its JSON and its two pictures.

    Other cases of the JSON that is there stay on the page. The rows of a GPU are those
    of `GPU_REPORT` in that directory, if it is there.

    Raises:
        ValueError: the page is of another machine, or of other sizes or rounds.
    """
    path = directory / "benchmarks.json"
    if path.exists():
        report = _joined(json.loads(path.read_text()), report)
    path.write_text(json.dumps(report) + "\n")
    rows = [cells(row) for row in report["rows"]]
    verdicts = [row["verdict"] for row in report["rows"] if row["verdict"]]
    absent = [name for name in CASES if name not in report["cases"]]
    rows += [[name, CASES[name].about, _GAP, "", "", "", ""] for name in absent]
    text = Template(_PAGE.read_text()).substitute(
        machine="\n".join(textwrap.wrap(_machine(report), 110)),
        dates=_dates(report),
        rounds=report["options"]["rounds"],
        pairs=report["options"]["rounds"] - 1,
        scale=f"{report['options']['scale']:g}",
        table=_markdown(_HEAD, rows),
        efforts=_markdown(_EFFORTS, efforts_of(report)),
        gpu=_markdown(_HEAD_OF_GPU, _gpu_rows(directory / GPU_REPORT)),
        **{name: str(verdicts.count(name)) for name in ("ok", "missed", "undecided")},
    )
    (directory / "benchmarks.md").write_text(text)
    (directory / "benchmarks-ratios.svg").write_text(picture_of_ratios(report["rows"]))
    star = picture_of_star(report["cases"].get("star", {}).get("samples", {}))
    (directory / "benchmarks-star.svg").write_text(star)


def _joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new report, with the cases that only the old one has."""
    for name in ("cores", "memory", "Python", "torch"):
        if (one := old["machine"][name]) != (other := new["machine"][name]):
            raise ValueError(f"the page is of {name} {one}, and this run of {other}")
    for name in ("rounds", "scale", "rivals"):
        if (one := old["options"][name]) != (other := new["options"][name]):
            raise ValueError(f"the page has {name} {one}, and this run {other}")
    before = {"date": old["machine"]["date"]}
    known = {name: before | case for name, case in old["cases"].items()} | new["cases"]
    names = [name for name in CASES if name in known]
    found = {name: new if name in new["cases"] else old for name in names}
    return {
        **new,
        "options": {**new["options"], "cases": names},
        "rows": [
            row for name in names for row in found[name]["rows"] if row["case"] == name
        ],
        "cases": {name: known[name] for name in names},
    }


def _dates(report: Mapping[str, Any]) -> str:
    """Return when the cases were measured."""
    dates: dict[str, list[str]] = {}
    for name, case in report["cases"].items():
        dates.setdefault(case.get("date", report["machine"]["date"]), []).append(name)
    lines = (f"{date}: {', '.join(names)}." for date, names in dates.items())
    return "\n".join("\n  ".join(textwrap.wrap(f"* {line}", 108)) for line in lines)


def _gpu_rows(path: Path) -> Iterator[list[str]]:
    """Yield what was measured on a GPU, and what was not, with where and when."""
    if not path.exists():
        for case, rows in ROWS.items():
            if case not in CASES:
                for row in rows:
                    gap = {"case": case, "value": None, "why": ""}
                    yield [*cells({**asdict(row), **gap}), "", "", ""]
        return
    report = json.loads(path.read_text())
    machine = report["machine"]
    of = (
        f"{machine['GPU']}, {machine['cores']} cores",
        machine["date"],
        ", ".join(f"{name} {machine[name]}" for name in _VERSIONS),
    )
    yield from ([*cells(row), *of] for row in report["rows"])


# ---------------------------------------------------------------- pictures

_WIDTH, _MARGIN, _LINE = 860, 16, 18
_LEFT = 470  # where the axis of ratios begins
_SPAN = (-2.0, 6.0)  # powers of two on it
_STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e }
.grid { stroke: #d1d9e0; fill: none }
.one { stroke: #59636e; fill: none }
.ok { stroke: #1a7f37; fill: #1a7f37 }
.missed { stroke: #cf222e; fill: #cf222e }
.undecided { stroke: #9a6700; fill: #9a6700 }
.plain { stroke: #0969da; fill: #0969da }
.raw { stroke: #818b98; fill: #818b98 }
polyline { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .small { fill: #9198a1 }
  .grid { stroke: #3d444d }
  .one { stroke: #9198a1 }
}"""


def _svg(title: str, height: float, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {_WIDTH} {height:g}" role="img">'
    )
    style = f"<style>\n{_STYLE}\n</style>"
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", style, *parts, "</svg>\n"]
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _segment(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="{kind}" {ends}/>'


def picture_of_ratios(rows: Iterable[Found]) -> str:
    """Draw each ratio of speeds with its interval and its target, on one axis."""
    drawn = [
        row
        for row in rows
        if row["ratio"]
        and row["metric"] in _SPEEDS
        and OTHER_TREE not in row["against"]
    ]
    bottom = _MARGIN + _LINE * (len(drawn) + 1)

    def at(ratio: float) -> float:
        low, high = _SPAN
        power = min(max(math.log2(max(ratio, 1e-9)), low), high)
        return _LEFT + (power - low) / (high - low) * (_WIDTH - _MARGIN - _LEFT)

    parts = []
    for power in range(int(_SPAN[0]), int(_SPAN[1]) + 1):
        x = at(2.0**power)
        parts.append(_segment("one" if not power else "grid", x, _MARGIN, x, bottom))
        parts.append(_text(x, bottom + 14, f"{2.0**power:g}", "small", "middle"))
    for number, row in enumerate(drawn, 1):
        y, kind = _MARGIN + _LINE * number, row["verdict"] or "plain"
        name = f"{row['case']}: {row['what']} / {row['against']}"
        parts.append(_text(_LEFT - 8, y + 4, name, "small", "end"))
        if row["low"] is not None:
            parts.append(_segment(kind, at(row["low"]), y, at(row["high"]), y))
        parts.append(
            f'<circle class="{kind}" cx="{at(row["ratio"]):.1f}" cy="{y}" r="4"/>'
        )
        if row["at_least"] is not None:
            x = at(row["at_least"])
            parts.append(_segment("one", x, y - 7, x, y + 7))
    title = "How many times the speed of what stands beside it"
    return _svg(title, bottom + 2 * _LINE, parts)


def picture_of_star(samples: Mapping[str, Samples]) -> str:
    """Draw the speed of all receivers together, by their number."""
    height, top, left = 300, 24, 60
    series: dict[str, list[tuple[int, float]]] = {
        "aiockpt": [],
        "raw": [],
        "torchft": [],
    }
    for name, prefix in (("aiockpt", ""), ("raw", "raw, "), ("torchft", "torchft, ")):
        for count in (1, 2, 4, 8):
            found = _best(samples, f"{prefix}{count} at once", "speed")
            if found is not None:
                speed = median(each["speed"] for each in counted(samples[found]))
                series[name].append((count, speed))
    most = max((speed for line in series.values() for _, speed in line), default=1.0)
    bottom = height - 40

    def point(count: int, speed: float) -> tuple[float, float]:
        across = math.log2(count) / 3 * (_WIDTH - 220 - left)
        return left + across, bottom - speed / most * (bottom - top)

    parts = [_text(left, top - 8, "GB/s, all receivers together", "small")]
    for share in (0.0, 0.5, 1.0):
        y = point(1, share * most)[1]
        parts.append(_segment("grid", left, y, _WIDTH - 160, y))
        parts.append(_text(left - 8, y + 4, f"{share * most:.1f}", "small", "end"))
    for count in (1, 2, 4, 8):
        name = f"{count} receiver{'s' * (count > 1)}"
        parts.append(_text(point(count, 0)[0], bottom + 18, name, "small", "middle"))
    for (name, line), kind in zip(
        series.items(), ("plain", "raw", "missed"), strict=True
    ):
        if line:
            points = [point(*each) for each in line]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="{kind}" points="{path}"/>')
            x, y = points[-1]
            label = {"raw": "raw sockets"}.get(name, name)
            parts.append(_text(x + 8, y + 4, label, "small"))
    return _svg("One sender and one to eight receivers", height, parts)
