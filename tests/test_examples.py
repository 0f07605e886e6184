"""Every example runs as it is, and is short enough to be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import aiockpt

EXAMPLES = sorted(Path(__file__).parents[1].glob("examples/*.py"))
# The processes that an example starts; it runs them.
PARTS = sorted(Path(__file__).parents[1].glob("examples/*_parts/*.py"))
LINES = 60
PART_LINES = 80
SECONDS = 120
TESTED = str(Path(aiockpt.__file__).parents[1])  # the example imports this one, too


def test_there_are_examples() -> None:
    """A suite that ran none would say nothing about them."""
    assert EXAMPLES


@pytest.mark.timeout(SECONDS + 10)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    """It ends by itself, without an error and without a warning."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", example],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": TESTED},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip(), "an example shows what happened"


@pytest.mark.parametrize("example", [*EXAMPLES, *PARTS], ids=lambda path: path.stem)
def test_example_is_short(example: Path) -> None:
    """It fits on one screen and says first what it shows."""
    text = example.read_text()
    most = PART_LINES if example in PARTS else LINES
    assert len(text.splitlines()) <= most
    assert text.startswith('"""')
