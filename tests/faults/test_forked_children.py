"""Forked children, such as the workers of a data loader, keep no staged checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.ranks import SUPPORT

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="fork hygiene is Linux's"),
    pytest.mark.timeout(300),
]

STAGED_MIB = 2 * 64  # one arena that is offered, and a free one
STACKS_MIB = 40  # of threads that began meanwhile; an arena has 64


def found(mode: str) -> dict[str, Any]:
    """Return what the program found, which runs by itself for its figures."""
    program = [sys.executable, str(SUPPORT / "fork_weight.py"), mode]
    ended = subprocess.run(
        program,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    facts: dict[str, Any] = json.loads(ended.stdout)
    return facts


@proves("fault 41")
@pytest.mark.parametrize("mode", ["loop", "shared", "process"])
def test_a_child_has_no_staged_memory(mode: str, record: Record) -> None:
    """Neither mapped nor by descriptor; the parent serves on, and the child ends."""
    for _ in range(record.pick(1, 5)):
        facts = found(mode)
        parent, child = facts["parent"], facts["child"]
        assert parent["mapped"] - facts["before"]["mapped"] >= STAGED_MIB
        assert child["status"] == 0
        assert child["descriptors"] == child["shared"] == 0
        kept = child["mapped"] - (parent["mapped"] - STAGED_MIB)
        record.within("kept by a child", kept, STACKS_MIB, unit=" MiB", slack=1)
        assert facts["right"]
        record.ran()


@proves("fault 41")
def test_a_child_that_is_forked_while_it_is_staged_has_none(record: Record) -> None:
    """Whenever that is; it has the state dict, which is the parent's."""
    for _ in range(record.pick(1, 5)):
        facts = found("staging")
        assert facts["forks"] > 0
        assert facts["failed"] == []
        kept = facts["child"]["mapped"] - (facts["parent"]["mapped"] - STAGED_MIB + 64)
        record.within("kept by a child", kept, STACKS_MIB, unit=" MiB", slack=1)
        record.ran(facts["forks"])


@proves("fault 41")
@pytest.mark.parametrize("mode", ["received", "share"])
def test_a_child_can_use_what_was_received(mode: str, record: Record) -> None:
    """It reads and changes it; the parent's stays as it was."""
    assert found(mode) == {"child": {"right": True, "status": 0}, "right": True}
    record.ran()
