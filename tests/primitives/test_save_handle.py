"""A save handle ends once, whoever ends it, and keeps nothing alive."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import CheckpointerConfig, Progress, make_async_checkpointer
from aiockpt.checkpointers import (
    CheckpointProcessConfig,
    CheckpointStagerConfig,
    DefaultStager,
    SaveHandle,
    Written,
    writer,
)
from aiockpt.checkpointers import handle as handles
from aiockpt.checkpointers.thread import CheckpointThread
from aiockpt.checkpointers.writer import Writers
from aiockpt.errors import StorageError
from tests.support.saving import ALONE, Gate, GatedWriter, has_begun, pass_gate
from tests.support.waiting import PATIENCE, eventually

pytestmark = pytest.mark.asyncio

ENDS: list[Any] = [
    Written(),
    StorageError("a", "the disk is full"),
    "skipped",
    "replaced",
]


@pytest.mark.parametrize("end", ENDS, ids=["written", "failed", "skipped", "replaced"])
async def test_only_the_first_end_counts(end: Any) -> None:
    """Its owner hears of it before anyone who waits wakes."""
    heard: list[Any] = []

    def on_end(handle: SaveHandle, how: Any) -> None:
        heard.append((how, handle.done(), waiting.done()))

    handle = SaveHandle("step-7", on_end=on_end)
    waiting = asyncio.ensure_future(handle.written())
    await asyncio.sleep(0)
    handle.end(end)
    for other in ENDS:
        handle.end(other)
    assert heard == [(end, False, False)]
    assert handle.done()
    assert (handle.skipped, handle.replaced) == (end == "skipped", end == "replaced")
    if isinstance(end, StorageError):
        with pytest.raises(StorageError, match="the disk is full"):
            await waiting
    else:
        assert handle.error is None
        assert await waiting is isinstance(end, Written)


async def test_its_end_frees_the_memory() -> None:
    """The arena is free when the last reader ends, and the next copy takes it."""
    stager = DefaultStager()
    places = []
    for step in (1, 2):
        staged = await stager.stage({"w": torch.ones(8)}, step=step)
        handle = SaveHandle("a")
        handle.hand_over(staged.snapshot)
        staged.release()
        assert (handle.staged, handle.step, handle.nbytes) == (True, step, 32)
        assert handle.snapshot is not None
        assert handle.snapshot.arena is not None
        places.append(handle.snapshot.arena.address)
        handle.end("replaced")
        assert handle.snapshot is None
    assert places[0] == places[1]
    await stager.close()


@pytest.mark.parametrize("is_staged", [True, False])
async def test_a_thread_makes_one_write_after_another(
    tmp_path: Path, *, is_staged: bool
) -> None:
    """A failure ends its own write; only what has not begun can be dropped."""
    stager, seen, gate = (
        DefaultStager(shared=False),
        list[Progress](),
        Gate(tmp_path / "g"),
    )
    made = CheckpointThread(
        Writers(GatedWriter, {"gate": gate.path}, ALONE),
        shutdown_timeout_secs=PATIENCE,
        staging_config=CheckpointStagerConfig(),
    )
    state: Any = {"w": torch.ones(8)}
    if is_staged:
        state = await stager.stage(state, step=3)
    (tmp_path / "file").touch()
    paths = [tmp_path / name for name in ("a", "file/b", "c", "d")]
    handles = [SaveHandle(each, 3, progress=seen.append) for each in paths]
    for handle in handles:
        await made.submit(handle, state, {})
    await has_begun(handles[0])
    made.drop(handles[0])
    made.drop(handles[2])
    assert [handle.done() for handle in handles] == [False, False, True, False]
    gate.open(4)
    assert [await handles[n].written() for n in (0, 2, 3)] == [True, False, True]
    with pytest.raises(StorageError, match="file"):
        await handles[1].written()
    await made.close()
    assert [each.exists() for each in (paths[0], *paths[2:])] == [True, False, True]
    assert {(each.stop, each.bytes_total) for each in seen} == {("write", 32)}
    if is_staged:
        state.release()
    await stager.close()
    gate.close()


@pytest.mark.allow_error_logs
async def test_a_retention_that_hangs(tmp_path: Path, gate: Gate, monkeypatch) -> None:
    """What is known to be committed stays known, however long retention takes."""

    def hang(*_: object) -> None:
        pass_gate(gate.path)

    monkeypatch.setattr(handles, "remove_old", hang)
    monkeypatch.setattr(writer, "remove_old", hang)
    monkeypatch.setattr(handles, "_DISK_ANSWER_S", 0.3)
    limits = CheckpointProcessConfig(subprocess_shutdown_timeout_secs=0.3)
    config = CheckpointerConfig(use_process=False, process_config=limits)
    made = make_async_checkpointer(config)
    handle = await made.save({"w": torch.ones(8)}, tmp_path / "step-1")
    await eventually((tmp_path / "step-1").exists, "the commit")
    await made.close()
    assert await handle.written()
    after = threading.active_count() - 2
    gate.open(2)
    await eventually(lambda: threading.active_count() <= after, "the threads' end")
