"""What a barrier leaves behind when a rank does not come."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commandline import ENVIRONMENT, PATIENCE
from tests.support.proofs import Cell, each_cell
from tests.support.ranks import SUPPORT

pytestmark = pytest.mark.timeout(180)


@each_cell("DistBarrier.meet: timeout")
def test_a_rank_that_stays_away(cell: Cell, tmp_path: Path) -> None:
    """A group in which a rank was missed once is out of step, and says so at once."""
    done = subprocess.run(
        [sys.executable, SUPPORT / "saving_rank.py", "late", tmp_path],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout.split() == ["ProcessGroupError"] * 2, done.stderr
    assert cell.left == "broken / broken"
