"""What a save leaves behind that is cancelled, and a recovery that goes wrong."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt import CheckpointerConfig, make_async_checkpointer
from aiockpt.checkpointers import (
    CheckpointProcess,
    DefaultStager,
    RankInfo,
    StagedState,
    recovery,
)
from aiockpt.errors import CheckpointNotFoundError, WorkerError
from aiockpt.testing import assert_same, interrupted
from tests.support.proofs import Cell, each_cell
from tests.support.saving import loaded, submit
from tests.support.trainer import Kept, kept
from tests.support.transports import arenas, weights
from tests.support.waiting import eventually, state_of

LOOP = "asyncio"  # uvloop's processes would be no forks of one with torch

pytestmark = [pytest.mark.asyncio(loop_factories=[LOOP]), pytest.mark.timeout(180)]


Begin = Callable[[Path], Coroutine[Any, Any, Any]]
"""Begins what the cell is about, below a path."""


@asynccontextmanager
async def saving() -> AsyncIterator[Begin]:
    """Save in a thread, where every await is one of ours."""
    config = CheckpointerConfig(use_process=False)
    async with make_async_checkpointer(config) as made:
        yield lambda path: made.save(weights(), path)


@asynccontextmanager
async def submitting() -> AsyncIterator[Begin]:
    """Hand a state dict to a process."""
    made = CheckpointProcess(RankInfo(0, 1))
    await made.ready()
    yield lambda path: submit(made, weights(), path)
    await made.close()


@asynccontextmanager
async def staging() -> AsyncIterator[Begin]:
    """Stage it, and no more."""
    made = DefaultStager()
    yield lambda _: made.stage(weights())
    await made.close()


MAKE = {
    "AsyncCheckpointer.save": saving,
    "CheckpointProcess.submit": submitting,
    "DefaultStager.stage": staging,
}


@each_cell(
    "AsyncCheckpointer.save: cancel",
    "CheckpointProcess.submit: cancel",
    "DefaultStager.stage: cancel",
    "CheckpointProcess.submit: timeout",
    "DefaultStager.stage: timeout",
)
async def test_a_cancel_at_every_await(cell: Cell, tmp_path: Path) -> None:
    """Nothing was handed over, nothing is written; the same object saves the next."""
    before = arenas()
    async with MAKE[cell.call]() as begin:
        for at in count():
            cut = await interrupted(begin(tmp_path / f"cut-{at}"), at)
            if not cut.task.cancelled():
                break  # it has returned before, or a task of its own was waiting
        made = cut.task.result()
        assert at > 2
        if isinstance(made, StagedState):
            assert_same(made.state_dict(), weights())
            made.release()
        else:
            assert await made.written()
            assert_same(loaded(tmp_path / f"cut-{at}"), weights())
    del made, cut
    left = set(os.listdir(tmp_path))
    assert left in ({f"cut-{at}"}, set())
    assert arenas() <= before
    assert cell.left in ("nothing / before", "nothing", "as cancel")


async def taken(found: Kept, timeout: float = 60) -> recovery.Recovered:
    """Take over what is kept."""
    return await aiockpt.recover(
        found.directory, runtime_dir=found.runtime_dir, timeout=timeout
    )


async def stopped(found: Kept) -> None:
    """Stop who keeps it."""
    os.kill(found.keeper, signal.SIGSTOP)
    await eventually(lambda: state_of(found.keeper) == "T", "the stop")


@each_cell("recover: timeout")
async def test_a_keeper_that_hangs(cell: Cell, tmp_path: Path) -> None:
    """It is given up at the deadline, and still keeps what it has afterwards."""
    async with kept(tmp_path) as found:
        await stopped(found)
        with pytest.raises(WorkerError, match="did not answer"):
            await taken(found, 0.3)
        os.kill(found.keeper, signal.SIGCONT)
        assert_same((await taken(found)).state_dict, found.state)
    assert cell.left == "nothing / keeps"


@each_cell("recover: this process dies")
async def test_a_heir_dies(cell: Cell, tmp_path: Path) -> None:
    """The restarted trainer dies before it has all of it, and the next one gets it."""
    async with kept(tmp_path) as found:
        await stopped(found)
        async with found.heir() as heir:
            assert heir.stdout is not None
            assert await heir.stdout.readline() == b"asking\n"
            heir.kill()
            await heir.wait()
        os.kill(found.keeper, signal.SIGCONT)
        assert_same((await taken(found)).state_dict, found.state)
    assert cell.left == "keeps"


@each_cell("recover: the other one dies")
async def test_a_keeper_dies(cell: Cell, tmp_path: Path) -> None:
    """The checkpoint process dies while it is asked, and the error comes at once."""
    async with kept(tmp_path) as found:
        await stopped(found)
        taking = asyncio.create_task(taken(found))
        await asyncio.sleep(0.1)
        os.kill(found.keeper, signal.SIGKILL)
        async with asyncio.timeout(20):
            with pytest.raises(CheckpointNotFoundError):
                await taking
        with pytest.raises(CheckpointNotFoundError):
            await taken(found)
    assert cell.left == "nothing"
