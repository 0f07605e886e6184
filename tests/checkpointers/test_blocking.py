"""BackgroundCheckpointer: what a training script without an event loop sees of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import BackgroundCheckpointer, CheckpointerConfig
from aiockpt.checkpointers import Recovered
from aiockpt.errors import (
    CheckpointNotFoundError,
    ClosedError,
    LocalProtocolError,
    MissingKeysError,
    SaveInProgressError,
    StorageError,
    TransferTimeoutError,
)
from aiockpt.testing import assert_same
from tests.support.checkpointing import PATIENCE, Gate, GatedWriter, loaded
from tests.support.commandline import ENVIRONMENT

PROCESS = CheckpointerConfig()
THREAD = CheckpointerConfig(use_process=False)


def state(fill: float = 1.0) -> dict[str, Any]:
    """Return a small state dict."""
    return {"weight": torch.full((50_000,), fill), "epoch": 3}


@pytest.fixture(params=[PROCESS, THREAD], ids=["process", "thread"])
def config(request: pytest.FixtureRequest) -> CheckpointerConfig:
    """Return a config for each place where writing happens."""
    found: CheckpointerConfig = request.param
    return found


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Return a gate for a writer."""
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


@pytest.fixture
def gated(gate: Gate, config: CheckpointerConfig) -> Iterator[BackgroundCheckpointer]:
    """Make a checkpointer that writes when the gate says so."""
    made = gated_by(gate, config)
    yield made
    gate.open(20)
    made.close()


def gated_by(
    gate: Gate, config: CheckpointerConfig, **options: Any
) -> BackgroundCheckpointer:
    """Return a checkpointer that writes when the gate says so."""
    return aiockpt.make_background_checkpointer(
        replace(config, **options),
        checkpoint_writer_init_fn=GatedWriter,
        checkpoint_writer_init_args={"gate": gate.path},
    )


class TestSave:
    """What ``save`` and its handle promise."""

    def test_it_blocks_for_the_copy_only(
        self, tmp_path: Path, gate: Gate, gated: BackgroundCheckpointer
    ) -> None:
        """The write has not begun, and the state may be mutated."""
        live = state()
        handle = gated.save(live, tmp_path / "step-7")
        assert (handle.staged, handle.done(), handle.step) == (True, False, 7)
        live["weight"].zero_()
        gate.open()
        assert handle.result(timeout=PATIENCE)
        assert handle.done()
        assert_same(gated.load(tmp_path / "step-7"), state())

    def test_waiting_has_an_end(
        self, tmp_path: Path, gate: Gate, gated: BackgroundCheckpointer
    ) -> None:
        """The write goes on, and can be waited for again."""
        handle = gated.save(state(), tmp_path / "c")
        with pytest.raises(TransferTimeoutError, match="timed out"):
            handle.result(timeout=0.05)
        gate.open()
        assert handle.result(timeout=PATIENCE)

    def test_a_failure_is_the_handles(
        self,
        tmp_path: Path,
        config: CheckpointerConfig,
        allow_error_logs: list[Any],
    ) -> None:
        """Whoever has seen it is not told again by ``close``."""
        (tmp_path / "file").write_text("")
        made = aiockpt.make_background_checkpointer(config)
        seen = made.save(state(), tmp_path / "file" / "a")
        unseen = made.save(state(), tmp_path / "file" / "b")
        with pytest.raises(StorageError):
            seen.result(timeout=PATIENCE)
        (failure,) = made.close()
        assert failure is unseen.error
        assert made.close() == ()

    def test_a_failure_is_raised_if_asked_for(
        self,
        tmp_path: Path,
        config: CheckpointerConfig,
        allow_error_logs: list[Any],
    ) -> None:
        """``close`` raises it, and has closed everything."""
        (tmp_path / "file").write_text("")
        made = aiockpt.make_background_checkpointer(
            replace(config, raise_on_failure=True)
        )
        made.save(state(), tmp_path / "file" / "a")
        with pytest.raises(StorageError):
            made.close()
        with pytest.raises(ClosedError):
            made.save(state(), tmp_path / "c")

    def test_a_policy_holds(
        self, tmp_path: Path, gate: Gate, config: CheckpointerConfig
    ) -> None:
        """A third save fails while two others are under way."""
        with gated_by(gate, config, busy_policy="fail") as made:
            handles = [made.save(state(n), tmp_path / f"step-{n}") for n in (1, 2)]
            with pytest.raises(SaveInProgressError):
                made.save(state(3), tmp_path / "step-3")
            gate.open(2)
            assert all(each.result(timeout=PATIENCE) for each in handles)

    def test_an_interrupt_before_a_save_begins_is_raised_at_once(
        self, gated: BackgroundCheckpointer, gate: Gate, tmp_path: Path
    ) -> None:
        """While the checkpointer's own thread is busy with something else."""
        armed, entered, go = threading.Event(), threading.Event(), threading.Event()

        def hold(_: aiockpt.Progress) -> None:
            if armed.is_set():
                entered.set()
                go.wait(PATIENCE)

        first = gated.save(state(), tmp_path / "a", progress=hold)
        armed.set()
        gate.open(20)
        assert entered.wait(PATIENCE)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                gated.save(state(2.0), tmp_path / "b")
        finally:
            timer.cancel()  # or the signal would end the tests
            signal.signal(signal.SIGINT, before)
        assert time.monotonic() - began < 3
        go.set()
        assert first.result(PATIENCE)
        assert not (tmp_path / "b").exists()

    def test_an_interrupted_save_saves_nothing(
        self, tmp_path: Path, gate: Gate, gated: BackgroundCheckpointer
    ) -> None:
        """Ctrl-C ends the wait for earlier saves; those are written."""
        handles = [gated.save(state(n), tmp_path / f"step-{n}") for n in (1, 2)]
        # A shell that starts the tests in the background has the signal ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                gated.save(state(3), tmp_path / "step-3")
        finally:
            timer.cancel()  # or the signal would end the tests
            signal.signal(signal.SIGINT, before)
        gate.open(3)
        assert all(each.result(timeout=PATIENCE) for each in handles)
        gated.close()
        assert [each.step for each in aiockpt.list_checkpoints(tmp_path)] == [1, 2]

    def test_threads_may_share_it(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """Their saves are written one after another."""
        with aiockpt.make_background_checkpointer(config) as made:
            threads = [
                threading.Thread(
                    target=lambda n=n: made.save(state(n), tmp_path / f"step-{n}")
                )
                for n in range(4)
            ]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        assert len(aiockpt.list_checkpoints(tmp_path)) == 4


def test_a_block_that_fails_closes_it(tmp_path: Path) -> None:
    """What was handed over is written, and the block's error comes out."""
    made = aiockpt.make_background_checkpointer()

    def train() -> None:
        with made:
            made.save(state(), tmp_path / "c")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert_same(loaded(tmp_path / "c"), state())
    with pytest.raises(ClosedError):
        made.save(state(), tmp_path / "d")


@pytest.mark.asyncio
async def test_a_loop_does_not_wait_for_itself(tmp_path: Path, gate: Gate) -> None:
    """``result`` on the loop that writes would never return."""
    async with aiockpt.make_async_checkpointer(
        checkpoint_writer_init_fn=GatedWriter,
        checkpoint_writer_init_args={"gate": gate.path},
    ) as made:
        handle = await made.save(state(), tmp_path / "c")
        with pytest.raises(LocalProtocolError, match=r"await SaveHandle\.written"):
            handle.result()
        gate.open()
        await handle.written()
        assert handle.result()


def test_a_checkpoint_is_loaded_in_one_line(tmp_path: Path) -> None:
    """Whole, in place, in part; what is missing is told."""
    with aiockpt.make_sync_checkpointer() as made:
        made.save(state(), tmp_path / "c")
    assert_same(aiockpt.load(tmp_path / "c"), state())
    template = state(0.0)
    assert aiockpt.load(tmp_path / "c", template) is template
    assert_same(template, state())
    assert_same(aiockpt.load(tmp_path / "c", select=["epoch"]), {"epoch": 3})
    with pytest.raises(MissingKeysError, match="head"):
        aiockpt.load(tmp_path / "c", {"head": None}, strict=True)


SCRIPT = """
import sys, torch, aiockpt
config = aiockpt.CheckpointerConfig(use_process=sys.argv[1] == "process")
made = aiockpt.make_background_checkpointer(config)
made.save({"a": torch.ones(3_000_000)}, "step-1")
"""


@pytest.mark.parametrize("where", ["process", "thread"])
def test_a_program_may_end_without_closing_it(tmp_path: Path, where: str) -> None:
    """What was handed over is written all the same."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, where],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    until = time.monotonic() + PATIENCE
    while aiockpt.latest(tmp_path) is None and time.monotonic() < until:
        time.sleep(0.05)
    assert_same(loaded(tmp_path / "step-1"), {"a": torch.ones(3_000_000)})


GONE = """
import os, torch, aiockpt
made = aiockpt.make_background_checkpointer()
made.save({"a": torch.ones(3)}, "step-1")
os._exit(0)
"""


def test_a_program_may_die_before_its_process_has_started(tmp_path: Path) -> None:
    """The process finds what was handed over, and that its trainer is gone."""
    subprocess.run(
        [sys.executable, "-c", GONE],
        cwd=tmp_path,
        env=ENVIRONMENT,
        timeout=PATIENCE * 2,
        check=True,
    )
    until = time.monotonic() + PATIENCE
    while aiockpt.latest(tmp_path) is None and time.monotonic() < until:
        time.sleep(0.05)
    assert_same(loaded(tmp_path / "step-1"), {"a": torch.ones(3)})


CRASH = """
import torch, aiockpt
from aiockpt.checkpointers import CheckpointProcessConfig
process = CheckpointProcessConfig(keep_last_seconds=60, runtime_dir="run")
config = aiockpt.CheckpointerConfig(process_config=process)
with aiockpt.make_background_checkpointer(config) as made:
    made.save({"a": torch.ones(3_000_000)}, "all/step-7")
    raise ZeroDivisionError("on purpose")
"""


def test_a_block_that_fails_leaves_the_last_snapshot(tmp_path: Path) -> None:
    """With ``keep_last_seconds``, an exception in the block counts as a death."""
    # Not a pipe: the process that keeps the snapshot would hold it open.
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", CRASH],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stderr=log,
            timeout=PATIENCE * 2,
            check=False,
        )
    assert done.returncode == 1
    said = (tmp_path / "log").read_text()
    assert said.strip().endswith("ZeroDivisionError: on purpose")
    found = asyncio.run(taken_over(tmp_path))
    assert (found.step, found.path) == (7, str(tmp_path / "all" / "step-7"))
    assert_same(found.state_dict, {"a": torch.ones(3_000_000)})
    until = time.monotonic() + PATIENCE
    while [*(tmp_path / "run").iterdir()] and time.monotonic() < until:
        time.sleep(0.05)
    assert not [*(tmp_path / "run").iterdir()]


async def taken_over(place: Path) -> Recovered:
    """Recover, once the process that keeps the snapshot offers it."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return await aiockpt.recover(place / "all", runtime_dir=str(place / "run"))
        except CheckpointNotFoundError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.05)
