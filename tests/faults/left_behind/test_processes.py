"""What the calls of a checkpoint process leave behind when something is cut short."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiockpt import make_async_checkpointer
from aiockpt.checkpointers import CheckpointProcess, CheckpointProcessConfig, RankInfo
from aiockpt.errors import ClosedError, WorkerError
from aiockpt.testing import assert_same
from tests.support.proofs import Cell, each_cell
from tests.support.saving import (
    Forsaken,
    Gate,
    GatedWriter,
    has_begun,
    loaded,
    pass_gate,
    submit,
)
from tests.support.trainer import trainer
from tests.support.transports import weights
from tests.support.waiting import eventually, is_running, reaped

LOOP = "asyncio"  # uvloop's processes would be no forks of one with torch

pytestmark = [pytest.mark.asyncio(loop_factories=[LOOP]), pytest.mark.timeout(120)]

ALONE = RankInfo(0, 1)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Return a gate for a writer, or for a start."""
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


def gated(gate: Gate) -> dict[str, Any]:
    """Return the options of a process that writes when the gate says so."""
    return {
        "checkpoint_writer_init_fn": GatedWriter,
        "checkpoint_writer_init_args": {"gate": gate.path},
    }


def late(gate: Gate) -> CheckpointProcess:
    """Make a process that starts when the gate says so."""
    return CheckpointProcess(
        ALONE, subprocess_init_fn=pass_gate, subprocess_init_args=(gate.path,)
    )


@each_cell("CheckpointProcess.ready: cancel")
async def test_a_cancelled_wait_for_the_start(
    cell: Cell, tmp_path: Path, gate: Gate
) -> None:
    """The process starts all the same, and the next who waits is told."""
    made = late(gate)
    waiting = asyncio.create_task(made.ready())
    await eventually(lambda: made.pid, "the launch")
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    pid = made.pid
    gate.open(3)
    await made.ready()
    assert (made.pid, made.restarts) == (pid, 0)
    await made.write(weights(), tmp_path / "a")
    await made.close()
    assert cell.left == "as before"


@pytest.mark.allow_error_logs
@each_cell("CheckpointProcess.ready: the other one dies")
async def test_a_child_that_dies_at_its_start(
    cell: Cell, tmp_path: Path, gate: Gate
) -> None:
    """The waiting call gets an error, and the next call starts another child."""
    made = late(gate)
    waiting = asyncio.create_task(made.ready())
    await eventually(lambda: made.pid, "the launch")
    await asyncio.sleep(0.1)
    assert made.pid
    os.kill(made.pid, signal.SIGKILL)
    with pytest.raises(WorkerError):
        await waiting
    gate.open(3)
    await made.write(weights(), tmp_path / "a")
    await made.close()
    assert cell.left == "restarts"


@each_cell("SaveHandle.written: timeout", "SaveHandle.written: cancel")
async def test_a_cancelled_wait_for_a_write(
    cell: Cell, tmp_path: Path, gate: Gate
) -> None:
    """The write goes on, and the next who waits is told."""
    made = CheckpointProcess(ALONE, **gated(gate))
    first = await submit(made, weights(), tmp_path / "a")
    second = await submit(made, weights(), tmp_path / "b")
    await has_begun(first)
    for call in (first.written, second.written):
        waiting = asyncio.ensure_future(call())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
    gate.open(2)
    assert all([await each.written() for each in (first, second)])
    await made.close()
    assert cell.left in ("as before / later", "as cancel")


@each_cell(
    "CheckpointProcess.forsake: success",
    "CheckpointProcess.forsake: error",
    "CheckpointProcess.forsake: timeout",
    "CheckpointProcess.forsake: cancel",
    "CheckpointProcess.forsake: the other one dies",
)
async def test_a_save_that_is_forsaken(cell: Cell, tmp_path: Path) -> None:
    """The writer, which meets the other ranks, is told; unless nobody can tell it."""
    diary = tmp_path / "diary"
    made = CheckpointProcess(
        RankInfo(0, 2),
        checkpoint_writer_init_fn=Forsaken,
        checkpoint_writer_init_args={"diary": str(diary)},
    )
    here, _, there = cell.left.partition(" / ")
    await made.ready()
    if cell.ending == "error":  # the only one: it is closed, which is no news here
        await made.close()
        with pytest.raises(ClosedError):
            await made.ready()
    elif "dies" in cell.ending:
        assert made.pid
        os.kill(made.pid, signal.SIGKILL)
        await eventually(lambda: made.restarts == 1, "the replacement")
    call = asyncio.ensure_future(made.forsake(str(tmp_path / "a"), 1, "no time"))
    if "cancel" in (cell.ending, cell.left.removeprefix("as ")):
        call.cancel()  # before it has begun: it never waits for anything
        await asyncio.wait({call})
    else:
        await call
    await made.close()
    told = "told" if diary.exists() and "no time" in diary.read_text() else "waits"
    assert there in (told, "")
    assert here in ("as before", "as cancel", "restarts")


@pytest.mark.allow_error_logs
@each_cell(
    "AsyncCheckpointer.close, aclose: the other one dies",
    "CheckpointProcess.close, aclose: the other one dies",
    "CheckpointProcess.abandon: the other one dies",
)
async def test_a_child_that_dies_at_the_end(
    cell: Cell, tmp_path: Path, gate: Gate
) -> None:
    """What it had not written has failed; the end does not wait for its time."""
    config = CheckpointProcessConfig(subprocess_shutdown_timeout_secs=600)
    made: Any = CheckpointProcess(ALONE, config, **gated(gate))
    ends: Any = made
    if cell.call.startswith("AsyncCheckpointer"):
        await made.close()
        ends = made = make_async_checkpointer(**gated(gate))
        handle = await made.save(weights(), tmp_path / "a")
        made = made._writer
    else:
        handle = await submit(made, weights(), tmp_path / "a")
    await made.ready()
    pid = made.pid
    method = ends.abandon if "abandon" in cell.call else ends.close
    ending = asyncio.ensure_future(method())
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await ending
        with pytest.raises(WorkerError):
            await handle.written()
    await eventually(lambda: not is_running(pid), "its end")
    reaped(pid)
    assert not (tmp_path / "a").exists()
    assert cell.left in ("closed / decided", "closed")


@each_cell(
    "AsyncCheckpointer.close, aclose: this process dies",
    "CheckpointProcess.close, aclose: this process dies",
)
async def test_a_trainer_that_dies_while_it_closes(
    cell: Cell, tmp_path: Path, gate: Gate
) -> None:
    """The process writes what it was given all the same."""
    async with trainer(tmp_path, "save closing") as made:
        await made.killed()
        assert is_running(made.child)
        gate.open(5)
        await made.child_ends()
    found = loaded(tmp_path / "checkpoints" / "step-1")
    assert_same(found["step"], 1)
    assert cell.left == "later"
