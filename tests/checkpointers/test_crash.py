"""The trainer dies: what was staged is written, kept, and taken over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.checkpointers import recovery
from aiockpt.errors import CheckpointNotFoundError, StorageError, WorkerError
from aiockpt.testing import assert_same
from tests.support.checkpointing import (
    PATIENCE,
    Gate,
    eventually,
    is_running,
    loaded,
    state_of,
    wait_until,
)
from tests.support.commandline import ENVIRONMENT
from tests.support.proofs import proves

pytestmark = pytest.mark.asyncio

TRAINER = Path(__file__).parents[1] / "support" / "trainer.py"


def state(fill: float) -> dict[str, Any]:
    """Return what the trainer saves."""
    return {"weight": torch.full((300_000,), fill), "step": fill}


class Trainer:
    """A process that trains, and the child that writes for it."""

    def __init__(self, place: Path, keep: float, words: str) -> None:
        self.place = place
        self.gate = Gate(place / "gate")
        with (place / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, TRAINER, str(place), str(keep), *words.split()],
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    @property
    def child(self) -> int:
        """The process that writes."""
        return int((self.place / "pid").read_text())

    def path(self, step: int) -> Path:
        """Return where a step is saved to."""
        return self.place / "checkpoints" / f"step-{step}"

    async def waits(self) -> None:
        """Wait until the trainer has done everything before ``wait``."""
        assert self.process.stdout
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE):
            line = await loop.run_in_executor(None, self.process.stdout.readline)
        assert line == b"waiting\n"
        await eventually((self.place / "pid").exists, "the child's start")

    async def killed(self) -> None:
        """Kill it, and wait for its end; its child goes on."""
        self.process.kill()
        await eventually(lambda: self.process.poll() is not None, "its end")

    async def child_ends(self) -> None:
        """Wait until the child has gone."""
        await eventually(lambda: not is_running(self.child), "the child's end")

    def close(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        with suppress(OSError, ValueError):
            os.kill(self.child, signal.SIGKILL)
            wait_until(lambda: not is_running(self.child), "the child's end")
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.gate.close()


@asynccontextmanager
async def trainer(
    place: Path, words: str, *, keep: float = 0
) -> AsyncIterator[Trainer]:
    """Start one, and leave nothing of it."""
    made = Trainer(place, keep, words)
    try:
        yield made
    finally:
        made.close()


def cpu_seconds(pid: int) -> float:
    """Return how long a process has had a core."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def recovered(made: Trainer) -> recovery.Recovered:
    """Take over what a trainer's child keeps."""
    return await aiockpt.recover(
        made.place / "checkpoints", runtime_dir=str(made.place / "run")
    )


class TestFinishing:
    """What was handed over is written, whatever becomes of the trainer."""

    @proves(
        "cell AsyncCheckpointer.save: success",
        "cell AsyncCheckpointer.save: this process dies",
        "cell SaveHandle.written: this process dies",
        "cell CheckpointProcess.submit: this process dies",
        "cell CheckpointProcess.write: this process dies",
        "cell Submission.written: this process dies",
        "cell CheckpointProcess.abandon: this process dies",
    )
    @pytest.mark.parametrize("words", ["save wait", "save save wait"])
    async def test_a_killed_trainers_saves_are_written(
        self, tmp_path: Path, words: str
    ) -> None:
        """The one that was begun, and the one that waited; then the child ends."""
        async with trainer(tmp_path, words) as made:
            await made.waits()
            await made.killed()
            assert is_running(made.child)
            made.gate.open(5)
            await made.child_ends()
            for step in range(1, words.count("save") + 1):
                assert_same(loaded(made.path(step)), state(step))

    async def test_one_that_was_told_to_end_only_waits_for_its_write(
        self, tmp_path: Path
    ) -> None:
        """The trainer's death afterwards does not keep it busy."""
        async with trainer(tmp_path, "save wait") as made:
            await made.waits()
            os.kill(made.child, signal.SIGTERM)
            await asyncio.sleep(0.2)  # it may be told in either order
            await made.killed()
            async with asyncio.timeout(PATIENCE):
                spent, before = 1.0, cpu_seconds(made.child)
                while spent > 0.05:  # it has things to do at first
                    await asyncio.sleep(0.5)
                    now = cpu_seconds(made.child)
                    spent, before = now - before, now
            made.gate.open(5)
            await made.child_ends()
            assert_same(loaded(made.path(1)), state(1))

    async def test_a_writer_that_hangs_then_ends_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Within the time of a write: nobody is left who could kill it (C9)."""
        monkeypatch.setitem(ENVIRONMENT, "WRITE_TIMEOUT", "0.5")
        async with trainer(tmp_path, "save wait") as made:
            await made.waits()
            await made.killed()
            await made.child_ends()
            assert aiockpt.latest(made.path(1).parent) is None

    async def test_what_cannot_be_written_then_is_not_silent(
        self, tmp_path: Path
    ) -> None:
        """Nobody is left to be told, so the child logs it (C13)."""
        async with trainer(tmp_path, "save save wait") as made:
            await made.waits()
            await made.killed()
            made.path(1).parent.mkdir()
            made.path(1).touch()
            made.gate.open(5)
            await made.child_ends()
            assert_same(loaded(made.path(2)), state(2))
            said = (tmp_path / "log").read_text()
            assert "step-1 is not saved: StorageError: " in said
            assert "step-2" not in said

    async def test_ctrl_c_and_a_kill_of_the_group_spare_the_child(
        self, tmp_path: Path
    ) -> None:
        """It has a session of its own."""
        async with trainer(tmp_path, "save wait") as made:
            await made.waits()
            os.killpg(made.process.pid, signal.SIGINT)
            os.killpg(made.process.pid, signal.SIGKILL)
            await eventually(lambda: made.process.poll() is not None, "its end")
            made.gate.open()
            await made.child_ends()
            assert_same(loaded(made.path(1)), state(1))

    async def test_a_forked_worker_of_the_trainer_does_not_hide_its_death(
        self, tmp_path: Path
    ) -> None:
        """It holds the trainer's end of the socket, as a data loader's does."""
        async with trainer(tmp_path, "save fork wait") as made:
            await made.waits()
            await made.killed()
            made.gate.open()
            await made.child_ends()
            assert_same(loaded(made.path(1)), state(1))

    @proves("cell AsyncCheckpointer.close, aclose: this process dies")
    async def test_an_exit_without_close_loses_nothing(self, tmp_path: Path) -> None:
        """The trainer does not wait for it."""
        async with trainer(tmp_path, "save leave") as made:
            await eventually(lambda: made.process.poll() is not None, "its end")
            made.gate.open()
            await made.child_ends()
            assert_same(loaded(made.path(1)), state(1))

    @proves("cell CheckpointProcess.ready: this process dies")
    async def test_an_idle_child_ends_with_its_trainer(self, tmp_path: Path) -> None:
        """At once."""
        async with trainer(tmp_path, "wait") as made:
            await made.waits()
            await made.killed()
            await made.child_ends()

    @proves("cell CheckpointProcess.ready: this process dies")
    async def test_a_child_that_starts_when_the_trainer_is_dead_ends(
        self, tmp_path: Path
    ) -> None:
        """After it has written what it was given before it ran."""
        async with trainer(tmp_path, "save leave") as made:
            made.gate.open()
            await eventually((tmp_path / "pid").exists, "the child's start")
            await made.child_ends()
            assert_same(loaded(made.path(1)), state(1))


class TestHalfStaged:
    """It is killed while it stages: the process was given nothing of that save."""

    async def test_nothing_of_it_is_left(self, tmp_path: Path) -> None:
        """The one before is whole."""
        async with trainer(tmp_path, "save stuck wait") as made:
            made.gate.open()
            await made.waits()
            await eventually(made.path(1).exists, "the write")
            await made.killed()
            await made.child_ends()
            assert [each.name for each in made.path(1).parent.iterdir()] == ["step-1"]
            assert_same(loaded(made.path(1)), state(1))

    async def test_what_was_staged_before_is_recovered(self, tmp_path: Path) -> None:
        """Only the whole of a snapshot is worth anything."""
        async with trainer(tmp_path, "save stuck wait", keep=60) as made:
            made.gate.open()
            await made.waits()
            await made.killed()
            found = await _retried(made)
            assert found.step == 1
            assert_same(found.state_dict, state(1))
            await made.child_ends()
            assert [each.name for each in made.path(1).parent.iterdir()] == ["step-1"]


class TestRecovery:
    """A restarted trainer takes over the last staged snapshot, without a disk."""

    @proves("cell recover: success")
    async def test_the_last_staged_state_comes_back(self, tmp_path: Path) -> None:
        """Though nothing of it was written: then the child ends."""
        async with trainer(tmp_path, "save save wait", keep=60) as made:
            await made.waits()
            await made.killed()
            assert not made.path(1).exists()
            found = await _retried(made)
            assert (found.step, found.path) == (2, str(made.path(2)))
            assert_same(found.state_dict, state(2))
            made.gate.open(2)
            await made.child_ends()
            assert_same(loaded(made.path(2)), state(2))
            found.state_dict["weight"].zero_()  # its own
            assert list((tmp_path / "run").iterdir()) == []

    async def test_also_when_it_was_written_long_ago(self, tmp_path: Path) -> None:
        """Memory is quicker than the disk, and newer than its cache."""
        async with trainer(tmp_path, "save wait", keep=60) as made:
            made.gate.open()
            await made.waits()
            await eventually(made.path(1).exists, "the write")
            await made.killed()
            assert_same((await _retried(made)).state_dict, state(1))
            await made.child_ends()

    async def test_staging_of_the_next_does_not_spoil_it(self, tmp_path: Path) -> None:
        """Killed in the middle of a copy: the one before it is whole."""
        async with trainer(tmp_path, "save half wait", keep=60) as made:
            made.gate.open()
            await made.waits()
            await eventually(made.path(1).exists, "the write")
            await made.killed()
            found = await _retried(made)
            assert found.step in (1, 2)
            if found.step == 1:
                assert_same(found.state_dict, state(1))

    @proves("cell CheckpointProcess.abandon: success")
    async def test_an_exception_in_the_block_counts_as_a_death(
        self, tmp_path: Path
    ) -> None:
        """The trainer ends at once, and its successor takes over."""
        async with trainer(tmp_path, "save crash", keep=60) as made:
            await eventually(lambda: made.process.poll() is not None, "its end")
            assert_same((await _retried(made)).state_dict, state(1))
            made.gate.open()
            await made.child_ends()

    async def test_it_is_kept_for_its_time_only(self, tmp_path: Path) -> None:
        """Memory is dear; nothing is left afterwards."""
        async with trainer(tmp_path, "save wait", keep=0.5) as made:
            made.gate.open()
            await made.waits()
            await made.killed()
            await made.child_ends()
            with pytest.raises(CheckpointNotFoundError, match="no process keeps"):
                await recovered(made)
            assert list((tmp_path / "run").iterdir()) == []

    @pytest.mark.parametrize(("keep", "words"), [(60, "save close wait"), (0, "wait")])
    async def test_after_a_good_end_nothing_is_kept(
        self, tmp_path: Path, keep: float, words: str
    ) -> None:
        """Nor where nobody asked for it."""
        async with trainer(tmp_path, words, keep=keep) as made:
            made.gate.open()
            await made.waits()
            await made.killed()
            await made.child_ends()
            with pytest.raises(CheckpointNotFoundError):
                await recovered(made)

    @proves("cell recover: cancel")
    async def test_a_cancelled_recovery_leaves_it_where_it_is(
        self, tmp_path: Path
    ) -> None:
        """Or has taken it; the next one knows."""
        async with trainer(tmp_path, "save wait", keep=60) as made:
            made.gate.open()
            await made.waits()
            await made.killed()
            await eventually(lambda: any((tmp_path / "run").glob("*.sock")), "it")
            for turns in range(8):
                task = asyncio.create_task(recovered(made))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                assert task.cancelled()
            assert_same((await recovered(made)).state_dict, state(1))

    @proves("cell recover: error")
    async def test_nobody_else_may_have_it(self, tmp_path: Path) -> None:
        """The socket lies where only this user may look."""
        async with trainer(tmp_path, "save wait", keep=60) as made:
            made.gate.open()
            await made.waits()
            await made.killed()
            run = tmp_path / "run"
            await eventually(lambda: any(run.glob("*.sock")), "it")
            assert run.stat().st_mode & 0o777 == 0o700
            run.chmod(0o755)
            with pytest.raises(StorageError, match="mode 0700"):
                await recovered(made)
            run.chmod(0o700)
            await recovered(made)

    @proves("cell recover: timeout")
    async def test_a_keeper_that_hangs_has_a_deadline(self, tmp_path: Path) -> None:
        """The trainer loads from the disk then."""
        async with trainer(tmp_path, "save wait", keep=60) as made:
            made.gate.open()
            await made.waits()
            await made.killed()
            await eventually(lambda: any((tmp_path / "run").glob("*.sock")), "it")
            os.kill(made.child, signal.SIGSTOP)
            await eventually(lambda: state_of(made.child) == "T", "the stop")
            began = time.monotonic()
            with pytest.raises(WorkerError, match="said nothing"):
                await aiockpt.recover(
                    tmp_path / "checkpoints",
                    runtime_dir=str(tmp_path / "run"),
                    timeout=0.3,
                )
            assert time.monotonic() - began < 30


async def _retried(made: Trainer) -> recovery.Recovered:
    """Recover as soon as the child has noticed the death."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return await recovered(made)
        except CheckpointNotFoundError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def no_orphans(tmp_path: Path) -> Iterator[None]:
    """Fail a test that leaves a checkpoint process behind."""
    yield
    with suppress(OSError):
        assert not is_running(int((tmp_path / "pid").read_text()))
