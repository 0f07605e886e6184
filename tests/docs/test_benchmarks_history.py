"""What the benchmarks say about a run after they have looked at the last ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.history import keep, last_runs, slower

RECEIVE = "http: receive"
MACHINE = {"cores": "2", "memory": "24 GiB", "Python": "3.11.7", "torch": "2.13.0"}


def run(
    value: float, *, unit: str = "s", ratio: float | None = None, scale: float = 1.0
) -> dict[str, Any]:
    """Return a run with one figure."""
    what = {"case": "http", "what": "receive", "against": "raw" if ratio else ""}
    return {
        "machine": {**MACHINE, "date": "today"},
        "options": {"cases": ["http"], "scale": scale, "rivals": True},
        "rows": [{**what, "value": value, "unit": unit, "ratio": ratio}],
    }


@pytest.mark.parametrize(
    ("before", "now", "worse"),
    [
        ([1.0, 1.0, 1.0], 1.05, False),
        ([1.0, 1.0, 1.0], 1.2, True),
        ([1.0, 1.0, 1.3], 1.2, False),  # as slow as one before
        ([1.0, 1.0], 9.0, False),  # too few
    ],
)
def test_a_time_is_slower(before: list[float], now: float, worse: bool) -> None:
    """It exceeds the median by more than a tenth, and every run before."""
    lines = slower(run(now), [run(each) for each in before])
    assert bool(lines) is worse
    assert all(line.startswith(RECEIVE) for line in lines)


def test_the_last_five_runs_of_the_same_kind_count(tmp_path: Path) -> None:
    """Those of another size do not, nor what is older."""
    for value in range(7):
        keep(run(float(value)), tmp_path)
    keep(run(99.0, scale=2.0), tmp_path)
    found = [other["rows"][0]["value"] for other in last_runs(run(0.0), tmp_path)]
    assert found == [6, 5, 4, 3, 2]


def test_a_slower_run_fails_and_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure of the whole program names the figure."""
    history, file = tmp_path / "history", tmp_path / "run.json"
    for _ in range(3):
        keep(run(1.0), history)
    found = run(2.0) | {"cases": {}}
    found["rows"][0] |= dict.fromkeys(("low", "high", "at_least", "at_most"))
    found["rows"][0] |= {"ours": "fresh", "verdict": ""}
    file.write_text(json.dumps(found))
    assert main(["--from", str(file), "--history", str(history)]) == 1
    assert "SLOWER: http: receive is 100% slower" in capsys.readouterr().err
    assert len(list(history.iterdir())) == 4
