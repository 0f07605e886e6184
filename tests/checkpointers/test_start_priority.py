"""The checkpoint process starts at the trainer's priority, and lowers it when ready.

A low priority during the start only delays the start. Beside two busy processes the
start took longer than its time limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiockpt import CheckpointProcessConfig, RankInfo
from aiockpt.checkpointers.process import CheckpointProcess
from checkpointing import note_threads, use_cpu

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop, pytest.mark.timeout(120)]

NICEST = 19
BUSY = "while True: pass"


@contextmanager
def beside_busy_processes(count: int) -> Iterator[None]:
    """Share one core with processes that never wait, for as long as the block runs."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # what is started now inherits it
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()
        os.sched_setaffinity(0, cores)


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


async def test_it_starts_in_time_beside_busy_processes() -> None:
    """A low priority would leave it less than a hundredth of the core."""
    config = CheckpointProcessConfig(nice=NICEST, subprocess_init_timeout_secs=30)
    with beside_busy_processes(2):
        made = CheckpointProcess(
            RankInfo(0, 1),
            config,
            subprocess_init_fn=use_cpu,
            subprocess_init_args=(1.0,),  # as much as importing torch does
        )
        try:
            await made.ready()
            assert made.pid is not None
            assert niceness_of(made.pid)[0] == NICEST
        finally:
            await made.close()
