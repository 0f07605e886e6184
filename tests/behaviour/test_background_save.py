"""Saves that no loop waits for: BackgroundCheckpointer, and loops that end early."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import aiockpt
from aiockpt import CheckpointerConfig, make_async_checkpointer
from aiockpt.errors import (
    CheckpointNotFoundError,
    ClosedError,
    LocalProtocolError,
    StorageError,
    TransferTimeoutError,
)
from aiockpt.testing import assert_same
from tests.support.commandline import ENVIRONMENT
from tests.support.proofs import proves
from tests.support.saving import GatedWriter, loaded
from tests.support.saving import tied_state as state
from tests.support.waiting import PATIENCE, wait_until

THREAD = CheckpointerConfig(use_process=False)


def by(gate):
    """Return the options of a checkpointer that writes when the gate says so."""
    return {
        "checkpoint_writer_init_fn": GatedWriter,
        "checkpoint_writer_init_args": {"gate": gate.path},
    }


@pytest.fixture
def gated(gate):
    """Make a checkpointer that writes when the gate says so."""
    made = aiockpt.make_background_checkpointer(THREAD, **by(gate))
    yield made
    gate.open(20)
    made.close()


@contextmanager
def interrupt():
    """Press Ctrl-C a moment later; expect it to end the block."""
    # A shell that starts the tests in the background has the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        timer.cancel()  # or the signal would end the tests
        signal.signal(signal.SIGINT, before)


class TestHandle:
    """A handle tells a caller without a loop what became of a save."""

    def test_waiting_has_an_end(self, tmp_path, gate, gated) -> None:
        """The write goes on, and can be waited for again."""
        handle = gated.save(state(), tmp_path / "step-7")
        assert (handle.staged, handle.done(), handle.step) == (True, False, 7)
        with pytest.raises(TransferTimeoutError, match="timed out"):
            handle.result(timeout=0.05)
        gate.open()
        assert handle.result(timeout=PATIENCE)
        assert handle.done()

    @pytest.mark.allow_error_logs
    def test_a_failure_is_told_once(self, tmp_path) -> None:
        """The handle tells it, or else `close`, which raises it if it was told to."""
        (tmp_path / "file").touch()
        made = aiockpt.make_background_checkpointer(THREAD)
        seen = made.save(state(), tmp_path / "file" / "a")
        unseen = made.save(state(), tmp_path / "file" / "b")
        with pytest.raises(StorageError):
            seen.result(timeout=PATIENCE)
        assert [*map(str, made.close())] == [str(unseen.error)]
        assert made.close() == ()
        config = replace(THREAD, raise_on_failure=True)
        made = aiockpt.make_background_checkpointer(config)
        made.save(state(), tmp_path / "file" / "a")
        with pytest.raises(StorageError):
            made.close()

    def test_ctrl_c_ends_the_wait_for_earlier_saves(
        self, tmp_path, gate, gated
    ) -> None:
        """The interrupted save writes nothing, and the earlier ones are written."""
        handles = [gated.save(state(n), tmp_path / f"step-{n}") for n in (1, 2)]
        with interrupt():
            gated.save(state(3), tmp_path / "step-3")
        gate.open(3)
        assert all(each.result(timeout=PATIENCE) for each in handles)
        gated.close()
        assert [each.step for each in aiockpt.list_checkpoints(tmp_path)] == [1, 2]

    def test_ctrl_c_does_not_wait_for_a_busy_loop(self, tmp_path, gate, gated) -> None:
        """A callback holds the checkpointer's own thread; the save has not begun."""
        armed, entered, go = threading.Event(), threading.Event(), threading.Event()

        def hold(_: aiockpt.Progress) -> None:
            if armed.is_set():
                entered.set()
                go.wait(PATIENCE)

        first = gated.save(state(), tmp_path / "a", progress=hold)
        armed.set()
        gate.open(20)
        assert entered.wait(PATIENCE)
        with interrupt():
            gated.save(state(2.0), tmp_path / "b")
        assert not go.is_set()
        go.set()
        assert first.result(PATIENCE)
        assert not (tmp_path / "b").exists()

    def test_threads_may_share_it(self, tmp_path, gate, gated) -> None:
        """The saves of several threads are written one after another."""
        gate.open(4)
        threads = [
            threading.Thread(target=gated.save, args=(state(n), tmp_path / f"step-{n}"))
            for n in range(4)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        gated.close()
        assert len(aiockpt.list_checkpoints(tmp_path)) == 4

    def test_a_block_that_fails_closes_it(self, tmp_path, gate, gated) -> None:
        """The staged saves are written, and the block's error comes out."""
        gate.open()

        def train() -> None:
            with gated:
                gated.save(state(), tmp_path / "c")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            train()
        assert_same(loaded(tmp_path / "c"), state())
        with pytest.raises(ClosedError):
            gated.save(state(), tmp_path / "d")

    @pytest.mark.asyncio
    async def test_a_loop_does_not_wait_for_itself(self, tmp_path, gate) -> None:
        """``result`` on the loop that writes would never return."""
        async with make_async_checkpointer(THREAD, **by(gate)) as made:
            handle = await made.save(state(), tmp_path / "c")
            with pytest.raises(LocalProtocolError, match=r"await SaveHandle\.written"):
                handle.result()
            gate.open()
            await handle.written()
            assert handle.result()


class TestProgramEnds:
    """A program that ends without ``close`` still writes what was handed over."""

    SAVES = """
import torch, aiockpt
from aiockpt.checkpointers import CheckpointProcessConfig
process = CheckpointProcessConfig(keep_last_seconds={keep}, runtime_dir="run")
config = aiockpt.CheckpointerConfig(use_process={process}, process_config=process)
made = aiockpt.make_background_checkpointer(config)
made.save(dict(a=torch.ones(3_000_000)), "all/step-7")
"""

    def run(self, place, program: str):
        """Run it until its end; return its code and what it complained of."""
        # Not a pipe: the process that keeps the snapshot would hold it open.
        with (place / "log").open("w") as log:
            done = subprocess.run(
                [sys.executable, "-c", program],
                cwd=place,
                env=ENVIRONMENT,
                stderr=log,
                timeout=PATIENCE * 2,
                check=False,
            )
        return done.returncode, (place / "log").read_text().strip()

    @pytest.mark.parametrize("process", [True, False])
    def test_a_save_is_written_all_the_same(self, tmp_path, *, process: bool) -> None:
        """The process writes it, or the thread, for which the program waits."""
        program = self.SAVES.format(process=process, keep=0)
        assert self.run(tmp_path, program) == (0, "")
        wait_until(lambda: aiockpt.latest(tmp_path / "all"), "the write")
        assert_same(loaded(tmp_path / "all" / "step-7"), {"a": torch.ones(3_000_000)})

    @proves("cell CheckpointProcess.abandon: success")
    def test_a_block_that_fails_leaves_the_last_snapshot(self, tmp_path) -> None:
        """With ``keep_last_seconds``, an exception in the block counts as a death."""
        program = self.SAVES.format(process=True, keep=60)
        code, said = self.run(tmp_path, f"{program}with made: 1 / 0")
        assert (code, said.rpartition("\n")[2]) == (
            1,
            "ZeroDivisionError: division by zero",
        )

        async def taken_over():
            async with asyncio.timeout(PATIENCE):
                while True:
                    try:
                        return await aiockpt.recover(
                            tmp_path / "all", runtime_dir=str(tmp_path / "run")
                        )
                    except CheckpointNotFoundError:
                        await asyncio.sleep(0.02)

        found = asyncio.run(taken_over())
        assert (found.step, found.path) == (7, str(tmp_path / "all" / "step-7"))
        assert_same(found.state_dict, {"a": torch.ones(3_000_000)})
        wait_until(lambda: not os.listdir(tmp_path / "run"), "its end")


def said_by_us(records) -> list[str]:
    """Return what the package has logged."""
    return [each.getMessage() for each in records if each.name.startswith("aiockpt")]


class TestLoopEnds:
    """A loop may end without ``close`` while a thread writes."""

    def test_it_waits_for_the_thread(self, tmp_path, gate, allow_error_logs) -> None:
        """The program waits for saves that have not begun, and tells a failure once."""
        (tmp_path / "file").touch()

        async def main():
            made = make_async_checkpointer(THREAD, **by(gate))
            for path in ("1", "file/2"):
                await made.save(state(), tmp_path / path)
            threading.Timer(0.1, gate.open, [2]).start()
            return made

        now = asyncio.run(main()).statistics()
        assert (now.written, now.failed, now.under_way) == (1, 1, 0)
        assert_same(loaded(tmp_path / "1"), state())
        (said,) = said_by_us(allow_error_logs)
        assert "file/2 is not saved: StorageError: " in said

    def test_it_is_closed_under_a_write(self, tmp_path, gate, allow_error_logs) -> None:
        """Without asyncio.run, the write goes on or is told to fail."""
        (tmp_path / "file").touch()
        loop = asyncio.new_event_loop()
        made = make_async_checkpointer(THREAD, **by(gate))
        for path in ("a", "file/b"):
            loop.run_until_complete(made.save(state(), tmp_path / path))
        loop.close()
        gate.open(2)
        wait_until(lambda: said_by_us(allow_error_logs), "the failure")
        (said,) = said_by_us(allow_error_logs)
        assert "file/b is not saved: StorageError: " in said
        assert_same(loaded(tmp_path / "a"), state())
        del made, loop
        gc.collect()  # asyncio complains of tasks that their loop has left
