"""The trainer dies: what was staged is written, kept, and taken over."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import aiockpt
from aiockpt.errors import CheckpointNotFoundError, StorageError, UnsupportedLeafError
from aiockpt.testing import assert_same
from tests.support.commandline import ENVIRONMENT
from tests.support.proofs import proves
from tests.support.saving import loaded
from tests.support.trainer import register_own, state, trainer
from tests.support.waiting import PATIENCE, is_running

pytestmark = pytest.mark.asyncio


def cpu_seconds(pid: int) -> float:
    """Return how long a process has had a core."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class TestFinishing:
    """The process writes what was handed over, whatever becomes of the trainer."""

    @proves(
        "cell AsyncCheckpointer.save: success",
        "cell AsyncCheckpointer.save: this process dies",
        "cell SaveHandle.written: this process dies",
        "cell CheckpointProcess.submit: this process dies",
        "cell CheckpointProcess.write: this process dies",
        "cell CheckpointProcess.abandon: this process dies",
    )
    async def test_a_killed_trainers_saves_are_written(self, tmp_path, gate) -> None:
        """The one that was begun, and the one that waited; then the child ends."""
        async with trainer(tmp_path, "save save wait") as made:
            await made.killed()
            assert is_running(made.child)
            gate.open(5)
            await made.child_ends()
            for step in (1, 2):
                assert_same(loaded(made.path(step)), state(step))

    async def test_what_cannot_be_written_is_logged(self, tmp_path, gate) -> None:
        """The process logs the failure, since the trainer is gone."""
        async with trainer(tmp_path, "save save wait") as made:
            await made.killed()
            made.path(1).parent.mkdir()
            made.path(1).touch()
            gate.open(5)
            await made.child_ends()
            assert_same(loaded(made.path(2)), state(2))
            said = (tmp_path / "log").read_text()
            assert "step-1 is not saved: StorageError: " in said
            assert "step-2" not in said

    async def test_a_child_that_was_told_to_end_only_waits(
        self, tmp_path, gate
    ) -> None:
        """The trainer's death afterwards does not keep it busy."""
        async with trainer(tmp_path, "save wait") as made:
            await made.waits()
            os.kill(made.child, signal.SIGTERM)
            await made.killed()
            async with asyncio.timeout(PATIENCE):
                spent, before = 1.0, cpu_seconds(made.child)
                while spent > 0.03:  # it has things to do at first
                    await asyncio.sleep(0.3)
                    now = cpu_seconds(made.child)
                    spent, before = now - before, now
            gate.open(5)
            await made.child_ends()
            assert_same(loaded(made.path(1)), state(1))

    async def test_a_writer_that_hangs_ends_too(
        self, tmp_path, gate, monkeypatch
    ) -> None:
        """Within the time of a write: nobody is left who could kill it."""
        monkeypatch.setitem(ENVIRONMENT, "WRITE_TIMEOUT", "0.3")
        async with trainer(tmp_path, "save wait") as made:
            await made.killed()
            await made.child_ends()
            assert aiockpt.latest(made.path(1).parent) is None

    @pytest.mark.parametrize("words", ["save wait", "save fork wait"])
    async def test_who_else_has_the_trainers_descriptors_does_not_matter(
        self, tmp_path, gate, words: str
    ) -> None:
        """Signals to the trainer's group spare the child, which notices the death."""
        async with trainer(tmp_path, words) as made:
            await made.waits()
            if "fork" not in words:
                os.killpg(made.process.pid, signal.SIGINT)
                os.killpg(made.process.pid, signal.SIGKILL)
            await made.killed()
            gate.open()
            await made.child_ends()
            assert_same(loaded(made.path(1)), state(1))

    @proves(
        "cell AsyncCheckpointer.close, aclose: this process dies",
        "cell CheckpointProcess.ready: this process dies",
    )
    @pytest.mark.parametrize("early", [False, True])
    async def test_an_exit_without_close_loses_nothing(
        self, tmp_path, gate, *, early: bool
    ) -> None:
        """The child may start only after the trainer has gone."""
        async with trainer(tmp_path, "save leave") as made:
            if early:
                gate.open()
            await made.ended()
            gate.open()
            await made.child_ends()
            assert_same(loaded(made.path(1)), state(1))

    @proves("cell CheckpointProcess.ready: this process dies")
    async def test_an_idle_child_ends_with_its_trainer(self, tmp_path, gate) -> None:
        """It was given nothing, and keeps nothing."""
        async with trainer(tmp_path, "wait") as made:
            await made.killed()
            await made.child_ends()
            with pytest.raises(CheckpointNotFoundError):
                await made.recovered()


class TestRecovery:
    """A restarted trainer takes over the last staged snapshot, without a disk."""

    @proves("cell recover: success")
    async def test_the_last_staged_state_comes_back(self, tmp_path, gate) -> None:
        """The state comes back before it is written, and is written all the same."""
        async with trainer(tmp_path, "save save wait", keep=60) as made:
            await made.killed()
            await made.keeps()
            assert not made.path(1).exists()
            found = await made.recovered()
            assert (found.step, found.path) == (2, str(made.path(2)))
            assert_same(found.state_dict, state(2))
            gate.open(2)
            await made.child_ends()
            assert_same(loaded(made.path(2)), state(2))
            found.state_dict["weight"].zero_()  # its own
            assert os.listdir(tmp_path / "run") == []

    @pytest.mark.parametrize("keep", [0, 60])
    async def test_a_trainer_dies_while_it_stages(self, tmp_path, gate, keep) -> None:
        """The save before it is whole, is recovered, and is all that is there."""
        gate.open()
        async with trainer(tmp_path, "save stuck wait", keep=keep) as made:
            await made.killed()
            if keep:
                await made.keeps()
                found = await made.recovered()
                assert found.step == 1
                assert_same(found.state_dict, state(1))
            await made.child_ends()
            assert os.listdir(made.path(1).parent) == ["step-1"]
            assert_same(loaded(made.path(1)), state(1))

    @pytest.mark.parametrize(("words", "keep"), [("save", 0.3), ("save close", 60)])
    async def test_it_is_kept_for_its_time_only(
        self, tmp_path, gate, words: str, keep: float
    ) -> None:
        """The snapshot is kept for that time, and not at all after a good end."""
        gate.open()
        async with trainer(tmp_path, f"{words} wait", keep=keep) as made:
            await made.killed()
            await made.child_ends()
            with pytest.raises(CheckpointNotFoundError, match="no process keeps"):
                await made.recovered()
            assert not [*tmp_path.glob("run/*")]

    async def test_a_type_that_is_not_registered_here(self, tmp_path, gate) -> None:
        """The error names it, the snapshot stays, and the remedy works."""
        gate.open()
        async with trainer(tmp_path, "own wait", keep=60) as made:
            await made.killed()
            await made.keeps()
            with pytest.raises(UnsupportedLeafError, match="register") as caught:
                await made.recovered()
            assert caught.value.path == "config[0]"
            assert "trainer.Own" in str(caught.value)
            register_own()
            assert (await made.recovered()).state_dict["config"][0].value == 7

    @proves("cell recover: cancel", "cell recover: error")
    async def test_a_recovery_that_fails_leaves_it_where_it_is(
        self, tmp_path, gate
    ) -> None:
        """One that is cancelled, or that finds a directory open to others."""
        gate.open()
        async with trainer(tmp_path, "save wait", keep=60) as made:
            await made.killed()
            await made.keeps()
            for turns in range(8):
                os.kill(made.child, signal.SIGSTOP)  # or it may succeed before
                task = asyncio.create_task(made.recovered())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                os.kill(made.child, signal.SIGCONT)
                await asyncio.wait({task})
                assert task.cancelled()
            run = tmp_path / "run"
            assert run.stat().st_mode & 0o777 == 0o700
            run.chmod(0o755)
            with pytest.raises(StorageError, match="mode 0700"):
                await made.recovered()
            run.chmod(0o700)
            assert_same((await made.recovered()).state_dict, state(1))
