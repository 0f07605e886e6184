"""A checkpoint process where descriptors run out, and where a time has no end."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.checkpointers import (
    CheckpointProcess,
    CheckpointProcessConfig,
    DefaultStager,
    RankInfo,
)
from aiockpt.checkpointers.messages import Write
from aiockpt.checkpointers.worker import _threads
from aiockpt.errors import StagingError, WorkerError
from aiockpt.runtime.children import Child, Pauses
from aiockpt.runtime.ipc import Channel, encode
from aiockpt.testing import assert_same
from tests.support.saving import pass_gate, submit
from tests.support.servers import settle
from tests.support.shortages import exhausted_fds
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio

ALONE = RankInfo(global_rank=0, global_world_size=1)
STATE: dict[str, Any] = {"w": torch.ones(8)}


def is_stopped(pid: int) -> bool:
    """Tell whether all threads of a child have stopped: a signal takes a moment."""
    look = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, look) is not None


def has_restarted(made: CheckpointProcess) -> bool:
    """Tell whether the child was replaced once."""
    return made.restarts == 1


async def until_it_fails(made: CheckpointProcess) -> None:
    """Ask for the process until its end was noticed."""
    while True:
        await made.ready()
        await asyncio.sleep(0.01)


@pytest.mark.allow_error_logs
async def test_a_checkpoint_process_without_descriptors_is_started_again(
    tmp_path: Path,
) -> None:
    """It died while there were none: who waits is told, and a later save is written."""
    made = CheckpointProcess(ALONE)
    try:
        await made.ready()
        assert made.pid is not None
        with exhausted_fds(left=0):
            os.kill(made.pid, signal.SIGKILL)
            with pytest.raises(WorkerError):
                await until_it_fails(made)
        await made.write(STATE, tmp_path / "step-1")
    finally:
        await made.close()
    assert_same(aiockpt.load(tmp_path / "step-1"), STATE)


async def test_a_write_that_has_to_wait_without_descriptors_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket to the process is full, and the message needs copies of its own."""
    monkeypatch.setattr(
        "aiockpt.runtime.ipc._BUFFER_BYTES", 1
    )  # the kernel takes a few
    made, stager = CheckpointProcess(ALONE), DefaultStager()
    try:
        await made.ready()
        assert made.pid is not None
        os.kill(made.pid, signal.SIGSTOP)
        await settle(partial(is_stopped, made.pid))
        with await stager.stage(STATE, step=1) as staged:
            paths = [str(tmp_path / f"step-{n}") for n in range(20)]
            others = [await submit(made, staged, path) for path in paths]
            with exhausted_fds(left=1):
                lost = await submit(made, staged, tmp_path / "lost")
            with pytest.raises(StagingError, match="Too many open files"):
                await lost.written()
        os.kill(made.pid, signal.SIGCONT)
        assert all([await each.written() for each in others])
        assert made.restarts == 0
    finally:
        await stager.close()
        await made.close()
    assert_same(aiockpt.load(paths[-1]), STATE)


async def test_a_checkpoint_process_takes_times_without_end(tmp_path: Path) -> None:
    """No limit of the process is shorter then."""
    config = CheckpointProcessConfig(
        write_timeout_secs=math.inf, keep_last_seconds=math.inf
    )
    made = CheckpointProcess(ALONE, config)
    try:
        await made.write(STATE, tmp_path / "step-1")
    finally:
        await made.close()
    assert_same(aiockpt.load(tmp_path / "step-1"), STATE)


async def test_nothing_large_crosses(tmp_path, monkeypatch) -> None:
    """The arena is shared; a header and keywords are sent."""
    crossed: list[int] = []
    arenas: list[int] = []
    send = Channel.send

    def counted(self, message, fds=()) -> None:
        sizes = [os.fstat(fd).st_size for fd in fds]
        if isinstance(message, Write):
            arenas.append(sizes.pop())
        crossed.append(len(encode(message)) + sum(sizes))
        send(self, message, fds)

    monkeypatch.setattr(Channel, "send", counted)
    async with aclosing(CheckpointProcess(ALONE)) as made:
        await made.write({"w": torch.ones(1 << 20)}, tmp_path / "a", loss=0.5)
    assert arenas == [4 << 20]
    assert sum(crossed) < 64 << 10


async def test_time_without_a_core_does_not_count(tmp_path, gate, monkeypatch) -> None:
    """A process on a busy host may need minutes for the work of a second."""
    monkeypatch.setattr(Child, "starved", 600.0)
    config = CheckpointProcessConfig(subprocess_init_timeout_secs=0.2)
    made = CheckpointProcess(
        ALONE, config, subprocess_init_fn=pass_gate, subprocess_init_args=(gate.path,)
    )
    async with aclosing(made):
        writing = asyncio.create_task(made.write(STATE, tmp_path / "a"))
        await asyncio.sleep(0.5)
        gate.open()
        await writing
        assert made.restarts == 0


async def test_closing_cuts_a_pause_short(tmp_path, monkeypatch) -> None:
    """Saves that wait are written; otherwise no process is started."""
    monkeypatch.setattr(Pauses, "next", lambda *_: 600.0)
    for saves in (True, False):
        async with aclosing(CheckpointProcess(ALONE)) as made:
            await made.ready()
            assert made.pid is not None
            os.kill(made.pid, signal.SIGKILL)
            await eventually(partial(has_restarted, made), "the death")
            if saves:
                kept = await submit(made, STATE, tmp_path / "a")
        assert made.pid is None
    assert await kept.written()
    assert_same(aiockpt.load(tmp_path / "a"), STATE)


async def test_threads_without_proc(monkeypatch) -> None:
    """Without /proc, the threads that Python has started are still known."""

    def nothing(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "listdir", nothing)
    assert threading.get_native_id() in _threads()
