"""The checkpoint process starts at the trainer's priority, and lowers it when ready.

A low priority during the start only delays the start. Beside two busy processes the
start took longer than its time limit.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiockpt.checkpointers import CheckpointProcessConfig, RankInfo
from aiockpt.checkpointers.process import CheckpointProcess
from tests.support.checkpointing import note_threads

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

NICEST = 19


def niceness_of(pid: int) -> list[int]:
    """Return the niceness of every thread of a process, the main thread's first."""
    threads = sorted(int(each) for each in os.listdir(f"/proc/{pid}/task"))
    return [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]


async def test_the_checkpoint_process_starts_at_the_trainers_priority(
    tmp_path: Path,
) -> None:
    """Its init function runs at that priority; when it is ready, its threads do not."""
    noted = tmp_path / "niceness"
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    made = CheckpointProcess(
        RankInfo(0, 1),
        CheckpointProcessConfig(nice=7),
        subprocess_init_fn=note_threads,
        subprocess_init_args=(str(noted),),
    )
    try:
        await made.ready()
        assert made.pid is not None
        started_at, thread = map(int, noted.read_text().split())
        assert started_at == mine
        lowered = min(mine + 7, NICEST)
        assert niceness_of(made.pid)[0] == lowered
        # So is a thread that the init function has left running.
        assert os.getpriority(os.PRIO_PROCESS, thread) == lowered
    finally:
        await made.close()
