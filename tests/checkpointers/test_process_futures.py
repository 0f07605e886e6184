"""CheckpointProcess.write takes a future, as torch's does; and what its errors are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.checkpointers import CheckpointProcessConfig, RankInfo
from aiockpt.checkpointers.process import CheckpointProcess
from aiockpt.checkpointers.stager import DefaultStager
from aiockpt.errors import (
    ClosedError,
    UnsupportedLeafError,
    WorkerError,
    WorkerTimeoutError,
)
from aiockpt.testing import assert_same
from tests.support.checkpointing import Forsaken, eventually, loaded, refuse

pytestmark = pytest.mark.asyncio

Made = Callable[[], Any]


def state() -> dict[str, Any]:
    """Return what is written."""
    return {"weight": torch.arange(1000.0), "more": [1, 2]}


@asynccontextmanager
async def process(**options: Any) -> AsyncIterator[CheckpointProcess]:
    """Make one, and close it."""
    made = CheckpointProcess(options.pop("rank_info", RankInfo(0, 1)), **options)
    try:
        yield made
    finally:
        await made.close()


def resolving(result: Any) -> Future[Any]:
    """Return a thread pool's future, which resolves a moment later."""
    found: Future[Any] = Future()
    asyncio.get_running_loop().call_later(0.05, found.set_result, result)
    return found


async def later(result: Any) -> Any:
    """Return it a moment later."""
    await asyncio.sleep(0.05)
    return result


@pytest.mark.parametrize(
    "future_of",
    [resolving, later, lambda result: asyncio.ensure_future(later(result))],
    ids=["concurrent", "coroutine", "task"],
)
@pytest.mark.parametrize("staged", [False, True])
async def test_a_future_of_a_state_dict(
    tmp_path: Path, future_of: Callable[[Any], Any], *, staged: bool
) -> None:
    """It is written when it is there, staged or not."""
    stager = DefaultStager()
    async with process() as made:
        if staged:
            with await stager.stage(state(), step=1) as given:
                await made.write(future_of(given), tmp_path / "step-1")
        else:
            await made.write(future_of(state()), tmp_path / "step-1")
    await stager.close()
    assert_same(loaded(tmp_path / "step-1"), state())


async def test_a_future_that_fails(tmp_path: Path) -> None:
    """Its own exception is raised, nothing is written, and the process is well."""
    failed: Future[Any] = Future()
    failed.set_exception(ZeroDivisionError("while it was staged"))
    async with process() as made:
        with pytest.raises(ZeroDivisionError, match="while it was staged"):
            await made.write(failed, tmp_path / "step-1")
        assert not (tmp_path / "step-1").exists()
        await made.write(state(), tmp_path / "step-2")
        assert made.restarts == 0


@pytest.mark.parametrize("kind", ["concurrent", "asyncio"])
async def test_a_cancel_leaves_the_future_alone(tmp_path: Path, kind: str) -> None:
    """It is the caller's: others may wait for it too, and it may fail later."""
    future: Any = Future() if kind == "concurrent" else asyncio.Future()
    async with process() as made:
        writing = asyncio.create_task(made.write(future, tmp_path / "step-1"))
        await asyncio.sleep(0.05)
        writing.cancel()
        await asyncio.wait({writing})
        assert writing.cancelled()
        assert not future.cancelled()
        future.set_exception(ZeroDivisionError("later"))
        assert isinstance(future.exception(), ZeroDivisionError)
    assert not (tmp_path / "step-1").exists()


@pytest.mark.parametrize("reason", ["future", "state", "working directory"])
async def test_the_other_ranks_are_told(
    tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for a rank that has handed nothing over."""
    diary = tmp_path / "diary"
    given: Any = {"bad": object()}
    expected: type[Exception] = UnsupportedLeafError
    path = str(tmp_path / "step-3")
    if reason == "future":
        given, expected = Future(), ZeroDivisionError
        given.set_exception(ZeroDivisionError("on purpose"))
    elif reason == "working directory":
        given, path, expected = state(), "step-3", OSError
    async with process(
        rank_info=RankInfo(1, 2),
        checkpoint_writer_init_fn=Forsaken,
        checkpoint_writer_init_args={"diary": str(diary)},
    ) as made:
        await made.ready()
        if reason == "working directory":
            (tmp_path / "gone").mkdir()
            monkeypatch.chdir(tmp_path / "gone")
            (tmp_path / "gone").rmdir()
        with pytest.raises(expected):
            await made.write(given, path)
        await eventually(diary.exists, "the note")
        monkeypatch.chdir(tmp_path)
    told, step, _ = diary.read_text().split(maxsplit=2)
    assert (os.path.basename(told), step) == ("step-3", "3")


@pytest.mark.allow_error_logs
async def test_a_slow_start_is_a_timeout(tmp_path: Path) -> None:
    """And a failed one is none; both are RuntimeErrors, as in torch."""
    config = CheckpointProcessConfig(subprocess_init_timeout_secs=0.001)
    async with process(config=config) as made:
        with pytest.raises(TimeoutError) as caught:
            await made.write(state(), tmp_path / "a")
        assert isinstance(caught.value, WorkerTimeoutError)
        assert isinstance(caught.value, RuntimeError)
        assert "subprocess_init_timeout_secs" in str(caught.value)
        assert caught.value.exitcode == -9
    async with process(subprocess_init_fn=refuse) as made:
        with pytest.raises(RuntimeError) as failed:
            await made.ready()
        assert isinstance(failed.value, WorkerError)
        assert not isinstance(failed.value, TimeoutError)


async def test_a_future_is_not_waited_for_after_the_end(tmp_path: Path) -> None:
    """Nobody could write what it gives."""
    async with process() as closed:
        await closed.ready()
    async with asyncio.timeout(10):
        with pytest.raises(ClosedError):
            await closed.write(Future(), tmp_path / "s", step=1)
