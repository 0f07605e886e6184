"""The writer is given a state dict when all of it is staged, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from aiockpt.checkpointers.async_checkpointer import AsyncCheckpointer
from aiockpt.checkpointers.barriers import Barrier, Meeting
from aiockpt.checkpointers.config import (
    CheckpointProcessConfig,
    CheckpointStagerConfig,
    CheckpointWriterConfig,
    RankInfo,
)
from aiockpt.checkpointers.process import CheckpointProcess
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.checkpointers.stager import DefaultStager
from aiockpt.checkpointers.submission import BackgroundWriter
from aiockpt.checkpointers.thread import CheckpointThread
from aiockpt.checkpointers.writer import CheckpointWriter, configured_writer
from aiockpt.errors import StagingError
from aiockpt.format.chunks import UNSEALED
from aiockpt.testing import assert_same
from tests.support.checkpointing import PATIENCE, loaded
from tests.support.holding import Copies
from tests.support.serving import settle

pytestmark = pytest.mark.asyncio

ALONE = RankInfo(0, 1)
SIZE = 1 << 20
Make = Callable[..., BackgroundWriter]


def state(fill: float = 1.0) -> dict[str, Any]:
    """Return a state dict of which the copy is held from its first byte on."""
    return {"weight": torch.full((SIZE,), fill), "bias": torch.full((9,), fill)}


def in_process(make: Any = configured_writer) -> BackgroundWriter:
    """Return what writes in a process."""
    return CheckpointProcess(
        ALONE, CheckpointProcessConfig(), checkpoint_writer_init_fn=make
    )


def in_thread(make: Any = configured_writer) -> BackgroundWriter:
    """Return what writes in a thread."""
    return CheckpointThread(
        partial(make, ALONE),
        shutdown_timeout_secs=PATIENCE,
        staging_config=CheckpointStagerConfig(),
    )


@pytest.fixture(params=[in_process, in_thread], ids=["process", "thread"])
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes a writer, for each place where writing happens."""
    found: Make = request.param
    return found


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Return what holds copies."""
    made = Copies(monkeypatch, after=0)
    yield made
    made.go()


def checkpointer(
    writer: BackgroundWriter, stager: DefaultStager | None = None
) -> AsyncCheckpointer:
    """Make one around a writer."""
    return AsyncCheckpointer(stager or DefaultStager(), writer, CheckpointReader(ALONE))


def names(directory: Path) -> list[str]:
    """Return what is in a directory."""
    return [each.name for each in directory.iterdir()]


async def test_nothing_is_written_before_everything_is_staged(
    tmp_path: Path, make: Make, copies: Copies
) -> None:
    """Not even a file."""
    async with checkpointer(make()) as made:
        saving = asyncio.create_task(made.save(state(), tmp_path / "step-1"))
        await settle(lambda: copies.waiting)
        await asyncio.sleep(0.2)
        assert names(tmp_path) == []
        copies.go()
        assert await (await saving).written()
    assert_same(loaded(tmp_path / "step-1"), state())


async def test_a_save_that_is_cancelled_meanwhile_leaves_nothing(
    tmp_path: Path, make: Make, copies: Copies
) -> None:
    """The next one is written."""
    async with checkpointer(make()) as made:
        saving = asyncio.create_task(made.save(state(), tmp_path / "step-1"))
        await settle(lambda: copies.waiting)
        saving.cancel()
        copies.go()
        with pytest.raises(asyncio.CancelledError):
            await saving
        assert await (await made.save(state(2.0), tmp_path / "step-2")).written()
        assert await made.close() == ()
    assert names(tmp_path) == ["step-2"]
    assert_same(loaded(tmp_path / "step-2"), state(2.0))


@pytest.mark.allow_error_logs
async def test_a_copy_that_fails_leaves_nothing(
    tmp_path: Path, make: Make, copies: Copies
) -> None:
    """The handle of the save says why."""
    async with checkpointer(make()) as made:
        saving = asyncio.create_task(made.save(state(), tmp_path / "step-1"))
        await settle(lambda: copies.waiting)
        copies.go(OSError("the bus is gone"))
        handle = await saving
        assert handle.staged is False
        with pytest.raises(StagingError, match="step 1 failed: the bus is gone"):
            await handle.written()
        assert await made.close() == ()
    assert names(tmp_path) == []


async def test_the_state_may_be_mutated_when_save_returns(
    tmp_path: Path, make: Make
) -> None:
    """The write is not at its end then."""
    async with checkpointer(make()) as made:
        live = state()
        handle = await made.save(live, tmp_path / "step-1")
        live["weight"].zero_()
        assert await handle.written()
    assert_same(loaded(tmp_path / "step-1"), state())


async def test_a_state_dict_without_a_byte_is_written(
    tmp_path: Path, make: Make
) -> None:
    """It has a header only."""
    async with checkpointer(make()) as made:
        assert await (await made.save({"a": 1}, tmp_path / "step-1")).written()
    assert_same(loaded(tmp_path / "step-1"), {"a": 1})


async def test_progress_is_told(tmp_path: Path, make: Make) -> None:
    """Up to the last byte."""
    seen: list[int] = []
    async with checkpointer(make()) as made:
        handle = await made.save(
            state(),
            tmp_path / "step-1",
            progress=lambda now: seen.append(now.bytes_done),
        )
        assert await handle.written()
    assert seen == sorted(seen)
    assert seen[-1] >= 4 * SIZE


class Listening(Barrier):
    """Hears what other ranks would be told."""

    barrier_type = "listening"

    def __init__(self) -> None:
        self.heard: list[tuple[str, str | None]] = []

    def execute_barrier(self) -> None:
        pass

    def meet(self, meeting: Meeting, *, failure: str | None = None) -> None:
        self.heard.append((str(meeting), failure))


async def test_other_ranks_are_told_of_a_save_that_is_cancelled(
    tmp_path: Path, copies: Copies
) -> None:
    """Once, and at once."""
    barrier = Listening()

    def writer(rank_info: RankInfo) -> CheckpointWriter:
        return CheckpointWriter(CheckpointWriterConfig(), rank_info, barrier)

    async with checkpointer(in_thread(writer)) as made:
        saving = asyncio.create_task(made.save(state(), tmp_path / "step-2"))
        await settle(lambda: copies.waiting)
        saving.cancel()
        copies.go()
        await asyncio.wait({saving})
    assert barrier.heard == [("step-2/2/written", "it was cancelled")]


class Careful(CheckpointWriter):
    """A writer that looks at the digests before it writes a byte."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__(CheckpointWriterConfig(), rank_info)

    def write_staged(self, path: Any, staged: Any, step: int, /, **kwargs: Any) -> None:
        self.seen.append(staged.seal().digests)
        super().write_staged(path, staged, step, **kwargs)


async def test_a_writer_of_ones_own_gets_the_digests_before_it_writes(
    tmp_path: Path,
) -> None:
    """It need not compute them."""
    Careful.seen.clear()
    async with checkpointer(in_thread(Careful)) as made:
        assert await (await made.save(state(), tmp_path / "step-1")).written()
    (digests,) = Careful.seen
    assert UNSEALED not in digests
    assert_same(loaded(tmp_path / "step-1"), state())


async def test_a_subclass_of_the_stager_may_stage_otherwise(
    tmp_path: Path, make: Make
) -> None:
    """Its ``stage`` is called."""

    class Doubling(DefaultStager):
        async def stage(self, state_dict: Any, **kwargs: Any) -> Any:
            doubled = {key: 2 * value for key, value in state_dict.items()}
            return await super().stage(doubled, **kwargs)

    async with checkpointer(make(), Doubling()) as made:
        assert await (await made.save(state(), tmp_path / "step-1")).written()
    assert_same(loaded(tmp_path / "step-1"), state(2.0))


async def test_memory_that_cannot_be_mapped_is_copied_for_the_process(
    tmp_path: Path,
) -> None:
    """Whatever the stager uses."""
    stager = DefaultStager(CheckpointStagerConfig(use_shared_memory=False))
    async with checkpointer(in_process(), stager) as made:
        assert await (await made.save(state(), tmp_path / "step-1")).written()
    assert_same(loaded(tmp_path / "step-1"), state())
