"""A follower of a PEFT model gets its adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(240)
def test_the_follower_answers_as_the_trainer(tmp_path) -> None:
    """It has the base model, and is sent the adapters only."""
    env = {name: os.environ[name] for name in os.environ if name != "PYTHONSAFEPATH"}
    program = Path(__file__).with_name("adapters.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", program],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    *_, follower, trainer = done.stdout.splitlines()
    assert follower.split()[3] == trainer.split()[3]
