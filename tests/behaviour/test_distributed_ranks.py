"""Distributed tensors between real ranks: gloo, FSDP2, tensor parallelism, two jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import kill_all

SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = 150

pytestmark = pytest.mark.timeout(SECONDS + 30)

Job = tuple[subprocess.Popen[str], int]
"""The process that leads the ranks of a job, and how many these are."""


def started(scenario: str, ranks: int, directory: Path) -> Job:
    """Start the ranks of one job: a process that forks into them."""
    directory.mkdir()
    command = [sys.executable, str(SUPPORT / "sharded_rank.py"), scenario]
    leader = subprocess.Popen(
        [*command, str(ranks), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return leader, ranks


def joined(*jobs: Job) -> None:
    """Wait for all of them; fail with what the first that failed said."""
    try:
        for leader, ranks in jobs:
            said, complained = leader.communicate(timeout=SECONDS)
            assert leader.returncode == 0, complained
            assert said.count("done") == ranks
    finally:
        for leader, _ in jobs:
            kill_all(leader.pid)
            leader.communicate()


def test_an_fsdp_model_is_trained_beside_a_prepared_checkpoint(tmp_path: Path) -> None:
    """Torch does not count what its optimizers write, so nothing of it is skipped."""
    joined(started("prepared_while_trained", 2, tmp_path / "job"))


def test_two_jobs(tmp_path: Path) -> None:
    """FSDP2 models of two worlds: over HTTP, and over a group of a rank of either."""
    sending = started("sending_job", 2, tmp_path / "sending")
    receiving = started("receiving_job", 2, tmp_path / "receiving")
    joined(sending, receiving)
