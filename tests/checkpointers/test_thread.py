"""Writing in a thread of the trainer: what becomes of it when a loop ends early."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.checkpointers.async_checkpointer import AsyncCheckpointer
from aiockpt.checkpointers.config import CheckpointerConfig, CheckpointProcessConfig
from aiockpt.checkpointers.factories import make_async_checkpointer
from aiockpt.errors import WorkerError
from aiockpt.testing import assert_same
from tests.support.checkpointing import Gate, GatedWriter, Troubled, loaded, wait_until

THREAD = CheckpointerConfig(use_process=False)


def state(fill: float = 1.0) -> dict[str, Any]:
    """Return a state dict that is told from another."""
    return {"weight": torch.full((50_000,), fill)}


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Return a gate for a writer."""
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


def gated(gate: Gate, config: CheckpointerConfig = THREAD) -> AsyncCheckpointer:
    """Make a checkpointer that writes when the gate says so."""
    return make_async_checkpointer(
        config,
        checkpoint_writer_init_fn=GatedWriter,
        checkpoint_writer_init_args={"gate": gate.path},
    )


def said_by_us(records: list[logging.LogRecord]) -> list[str]:
    """Return what the package has logged."""
    return [each.getMessage() for each in records if each.name.startswith("aiockpt")]


class TestLoopEnds:
    """Without ``close``: what was handed over is written, and nothing is silent."""

    def test_it_waits_for_the_thread(self, tmp_path: Path, gate: Gate) -> None:
        """Also for what the thread has not begun; no failure is told of."""

        async def main() -> Any:
            made = gated(gate)
            for step in (1, 2):
                await made.save(state(step), tmp_path / f"{step}")
            threading.Timer(0.2, gate.open, [2]).start()
            return made

        made = asyncio.run(main())
        now = made.statistics()
        assert (now.written, now.failed, now.under_way) == (2, 0, 0)
        for step in (1, 2):
            assert_same(loaded(tmp_path / f"{step}"), state(step))

    def test_a_failure_is_told(
        self, tmp_path: Path, allow_error_logs: list[logging.LogRecord]
    ) -> None:
        """Once, as what it is."""
        (tmp_path / "file").touch()

        async def main() -> Any:
            made = make_async_checkpointer(THREAD)
            await made.save(state(), tmp_path / "file" / "a")
            return made

        made = asyncio.run(main())
        assert made.statistics().failed == 1
        (said,) = said_by_us(allow_error_logs)
        assert "file/a is not saved: StorageError: " in said

    def test_it_is_closed_under_a_write(
        self, tmp_path: Path, gate: Gate, allow_error_logs: list[logging.LogRecord]
    ) -> None:
        """By whoever has made it by hand: the write goes on, or is told to fail."""
        (tmp_path / "file").touch()
        loop = asyncio.new_event_loop()
        made = gated(gate)
        for path in (tmp_path / "a", tmp_path / "file" / "b"):
            loop.run_until_complete(made.save(state(), path))
        loop.close()
        gate.open(2)
        wait_until(lambda: said_by_us(allow_error_logs), "the failure")
        (said,) = said_by_us(allow_error_logs)
        assert "file/b is not saved: StorageError: " in said
        assert_same(loaded(tmp_path / "a"), state())
        del made, loop
        gc.collect()  # asyncio complains of tasks that their loop has left


@pytest.mark.asyncio
class TestEnd:
    """What ``close`` does about a write that does not end."""

    @pytest.mark.allow_error_logs
    async def test_it_is_left_behind(self, tmp_path: Path, gate: Gate) -> None:
        """Every handle knows; the memory stays until the thread has read it."""
        process = CheckpointProcessConfig(subprocess_shutdown_timeout_secs=0.2)
        made = gated(gate, replace(THREAD, process_config=process))
        handles = [await made.save(state(i), tmp_path / f"{i}") for i in (1, 2)]
        await asyncio.sleep(0.1)
        failures = await made.close()
        assert [handle.error for handle in handles] == [*failures]
        assert "1 has not ended within 0.2 s" in str(failures[0])
        assert "2 was not begun within 0.2 s" in str(failures[1])
        gate.open(2)
        wait_until((tmp_path / "1").exists, "the write")
        assert_same(loaded(tmp_path / "1"), state(1))
        assert not (tmp_path / "2").exists()


@pytest.mark.asyncio
@pytest.mark.allow_error_logs
@pytest.mark.parametrize("trouble", ["raise", "system-exit"])
async def test_what_a_writer_raises_is_a_worker_error(
    tmp_path: Path, trouble: str
) -> None:
    """As if it came from a process: asking for it ends no training (C9)."""
    async with make_async_checkpointer(
        THREAD, checkpoint_writer_init_fn=Troubled
    ) as made:
        handle = await made.save(state(), tmp_path / "a", trouble=trouble)
        with pytest.raises(WorkerError, match=r"a raised \w+: ") as caught:
            await handle.written()
        assert "Traceback" in caught.value.remote_traceback
        assert caught.value.__cause__ is not None
        assert await (await made.save(state(), tmp_path / "a")).written()
