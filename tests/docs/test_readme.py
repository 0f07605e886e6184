"""What the README shows works as it is copied: each block by itself."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commandline import ENVIRONMENT, PATIENCE, run_aiockpt
from tests.support.forkserver import FRESH

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]
TOOLS = sorted(
    {words[1] for words in map(shlex.split, COMMANDS) if words[0] == "aiockpt"}
)

pytestmark = pytest.mark.timeout(180)


def test_there_is_something_to_copy() -> None:
    """A suite that found no block would say nothing."""
    assert len(PROGRAMS) >= 2
    assert {"serve", "fetch", "verify"} <= set(TOOLS)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_runs_by_itself(number: int, tmp_path: Path) -> None:
    """It prints what it has done; the first runs in a fresh interpreter."""
    script = tmp_path / "copied.py"
    script.write_text(PROGRAMS[number])
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=ENVIRONMENT if number else {**ENVIRONMENT, FRESH: "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "step" in done.stdout


@pytest.mark.parametrize("command", TOOLS)
def test_a_command_exists(command: str) -> None:
    """It knows its own help."""
    done = run_aiockpt(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")


def test_what_is_run_is_there() -> None:
    """The sessions of nox, and the examples."""
    sessions = re.findall(r"-m nox -s (\w+)", README)
    assert {"demo", "tests"} <= set(sessions)
    known = (ROOT / "noxfile.py").read_text()
    assert all(f"\ndef {name}(" in known for name in sessions)
    listed = (ROOT / "examples" / "README.md").read_text()
    named = set(re.findall(r"^\| `(\w+\.py)` \|", listed, re.MULTILINE))
    assert named == {path.name for path in ROOT.glob("examples/*.py")}
    named |= set(re.findall(r"examples/(\w+\.py)", README))
    assert all((ROOT / "examples" / name).is_file() for name in named)


def test_figures_are_of_the_run_that_the_benchmarks_page_has() -> None:
    """A new measurement renews the README's table, too."""
    section = README.partition("## How fast it is")[2].partition("\n## ")[0]
    page = (ROOT / "benchmarks" / "results" / "benchmarks.md").read_text()
    [day] = set(re.findall(r"\d{4}-\d\d-\d\d", section))
    assert f"date {day}" in page
    rows = re.findall(r"^\| (?!what )[^|]+ \| ([^|]+) \|", section, re.MULTILINE)
    assert len(rows) >= 8
    known = re.findall(r"(\d+\.?\d*) (?:\([^)]*\) )?(GB/s|ms|s|%)", page)
    for row in rows:
        number, unit = row.split()
        digits = len(number.partition(".")[2])
        factor = 1000 if unit == "MB/s" else 1
        unit = unit.replace("MB/s", "GB/s")
        assert any(
            unit == other and round(factor * float(value), digits) == float(number)
            for value, other in known
        ), row
