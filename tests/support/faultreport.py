"""Writes what a run of the fault matrix measured into its page.

``python faultreport.py RESULTS PAGE``: rows with results are written anew, the others
stay as they are on the page, as long as their fault is still the same.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tests.support.faultrecord import Figure, Outcome
from tests.support.faultrows import ROWS, Row, fingerprint

__all__ = ["NOT_RUN", "load", "main", "page_rows", "render"]

NOT_RUN: Final = "not run"

HEAD: Final = """\
# What goes wrong, and what happens then

<!-- Written by `nox -s faults -- --report` and `nox -s soak`; rows: {fingerprint} -->

Each row is a fault that a running system meets, made to happen on purpose, and what
must hold then. In addition, in every row: not one wrong byte is accepted; no task,
thread, descriptor, shared memory or child process is left behind; no error is logged
that nobody expected; the result is bit-identical, or a typed error.

{machine}

* `nox -s faults` runs the matrix, `nox -s faults -- --report` writes this page from
  it, and `nox -s soak` runs row 39. A small part of each row is in the ordinary test
  suite.
* *Runs* counts transfers, seeds or points, on asyncio's loop and on uvloop's together.
* The *worst figure* is that of all the runs, with what it may be.
* What breaks things here is public: see
  [how to break a transport on purpose](howto/testing.md).

| # | Fault | How | Must hold | Runs | Worst figure | Result | Date |
|--:|---|---|---|--:|---|---|---|
"""
_LINE = re.compile(r"^\| (\d+) \|")
_MACHINE = re.compile(r"^Measured .*?(?=\n\n)", re.DOTALL | re.MULTILINE)


def load(path: Path) -> dict[int, list[Outcome]]:
    """Return the outcomes of a run by row; of a test that ran again, the last."""
    last: dict[str, Outcome] = {}
    for line in path.read_text().splitlines():
        facts = json.loads(line)
        figures = {what: Figure(**each) for what, each in facts.pop("figures").items()}
        last[facts["test"]] = Outcome(figures=figures, **facts)
    found: dict[int, list[Outcome]] = {}
    for outcome in last.values():
        found.setdefault(outcome.row, []).append(outcome)
    return found


def page_rows(page: str) -> dict[int, str]:
    """Return the lines of the page's table by number."""
    found = ((_LINE.match(line), line) for line in page.splitlines())
    return {int(match[1]): line for match, line in found if match}


def render(
    results: Mapping[int, list[Outcome]], *, date: str, machine: str, old: str = ""
) -> str:
    """Return the page, with what an older one says about rows without results."""
    if not results and (match := _MACHINE.search(old)):
        machine = match[0]
    before = page_rows(old)
    lines = []
    for each in ROWS:
        start = _start(each)
        if outcomes := results.get(each.number):
            line = start + _end(outcomes, date)
        elif before.get(each.number, "").startswith(start):
            line = before[each.number]
        else:
            line = f"{start} | | {NOT_RUN} | |"
        lines.append(line)
    head = HEAD.format(fingerprint=fingerprint(), machine=machine)
    return head + "\n".join(lines) + "\n"


def _start(each: Row) -> str:
    cells = (str(each.number), each.fault, each.how, each.passes)
    return "| " + " | ".join(cells) + " |"


def _end(outcomes: list[Outcome], date: str) -> str:
    runs = sum(each.runs for each in outcomes)
    cells = (f"{runs:,}" if runs else "", _worst(outcomes), _result(outcomes), date)
    return " " + " | ".join(cells) + " |"


def _worst(outcomes: list[Outcome]) -> str:
    figures: dict[str, Figure] = {}
    for outcome in outcomes:
        for what, figure in outcome.figures.items():
            figures[what] = _worse(figures.get(what), figure)
    notes = _unique(note for outcome in outcomes for note in outcome.notes)
    return "; ".join([*(f"{what}: {each}" for what, each in figures.items()), *notes])


def _worse(one: Figure | None, other: Figure) -> Figure:
    if one is None:
        return other
    keys = [each.limit - each.worst for each in (one, other)]
    if one.at_least:
        keys = [-key for key in keys]
    return one if keys[0] <= keys[1] else other


def _result(outcomes: list[Outcome]) -> str:
    results = [each.result for each in outcomes]
    if "fail" in results:
        return "**fail**"
    skipped = _unique(each for each in results if each != "pass")
    ran = ["pass"] if "pass" in results else [NOT_RUN]
    return "; ".join([*ran, *skipped] if skipped else ran)


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def describe() -> str:
    """Say in words what the figures were measured on."""
    from aiockpt.cli.doctor import describe_machine

    facts = describe_machine()
    names = ("Python", "aiockpt", "torch", "aiohttp")
    versions = ", ".join(f"{name} {facts[name]}" for name in names)
    return (
        f"Measured on {facts['cores']} cores with {facts['memory']} of memory, "
        f"{facts['kernel']}, congestion control\n{facts['congestion control']}; "
        f"{versions}. At most light work ran beside: no figure is better for it."
    )


def main(results: str, page: str) -> None:
    """Write the page."""
    path = Path(page)
    old = path.read_text() if path.exists() else ""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    text = render(load(Path(results)), date=date, machine=describe(), old=old)
    path.write_text(text)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
