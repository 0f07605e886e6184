"""Distributed tensors between real ranks: gloo, FSDP2, two jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import JOB_S, SUPPORT, begun, check_ends

pytestmark = pytest.mark.timeout(2 * JOB_S)

SCRIPT = f"{SUPPORT / 'sharded_rank.py'}"


def test_an_fsdp_model_is_trained_beside_a_prepared_checkpoint(tmp_path: Path) -> None:
    """Torch does not count what its optimizers write, so nothing of it is skipped."""
    check_ends(begun(SCRIPT, "prepared_while_trained", 2, tmp_path))


def test_two_jobs(tmp_path: Path) -> None:
    """FSDP2 models of two worlds: over HTTP, and over a group of a rank of either."""
    for name in ("sending", "receiving"):
        (tmp_path / name).mkdir()
    check_ends(
        *(
            begun(SCRIPT, f"{name}_job", 2, tmp_path / name)
            for name in ("sending", "receiving")
        )
    )
