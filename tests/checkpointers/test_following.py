"""The write begins while the state dict is still being staged, and stays behind it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from aiockpt import staging
from aiockpt._copy import CopyPlan
from aiockpt.checkpointers.background import AsyncCheckpointer
from aiockpt.checkpointers.barriers import Barrier, Meeting
from aiockpt.checkpointers.config import (
    CheckpointProcessConfig,
    CheckpointStagerConfig,
    CheckpointWriterConfig,
    RankInfo,
)
from aiockpt.checkpointers.defaults import configured_writer
from aiockpt.checkpointers.process import CheckpointProcess
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.checkpointers.stager import DefaultStager
from aiockpt.checkpointers.submission import BackgroundWriter
from aiockpt.checkpointers.thread import CheckpointThread
from aiockpt.checkpointers.writer import CheckpointWriter
from aiockpt.directory import latest, part_of, rank_file
from aiockpt.errors import StagingError, StorageError, WorkerError
from aiockpt.testing import FakeAccelerator, assert_same
from aiockpt.wire.relabel import UNSEALED
from checkpointing import PATIENCE, Gate, GatedWriter, eventually, loaded
from serving import settle

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

ALONE = RankInfo(0, 1)
BESIDE = CheckpointStagerConfig(write_beside=True)
PIECE = 4 << 20
ONE = torch.ones(1).numpy().tobytes()
Make = Callable[..., BackgroundWriter]


def state(fill: float = 1.0) -> dict[str, Any]:
    """Return a state dict of four pieces, and a tensor that lies in the last one."""
    return {"weight": torch.full((PIECE,), fill), "bias": torch.full((9,), fill)}


def in_process(make: Any = configured_writer, **arguments: Any) -> BackgroundWriter:
    """Return what writes in a process."""
    return CheckpointProcess(
        ALONE,
        CheckpointProcessConfig(),
        checkpoint_writer_init_fn=make,
        checkpoint_writer_init_args=arguments,
    )


def in_thread(make: Any = configured_writer, **arguments: Any) -> BackgroundWriter:
    """Return what writes in a thread."""
    return CheckpointThread(
        partial(make, ALONE, **arguments),
        shutdown_timeout_secs=PATIENCE,
        staging_config=CheckpointStagerConfig(),
    )


@pytest.fixture(params=[in_process, in_thread], ids=["process", "thread"])
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes a writer, for each place where writing happens."""
    found: Make = request.param
    return found


class Copies:
    """Holds the copies of host memory from the second piece on, when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = False
        self.failure: Exception | None = None
        self._go = threading.Event()
        copy = CopyPlan.staged

        def staged(plan: CopyPlan, start: int, stop: int, *block: int) -> Iterator[int]:
            if self.held and start >= PIECE:
                assert self._go.wait(PATIENCE)
                if self.failure is not None:
                    raise self.failure
            return copy(plan, start, stop, *block)

        monkeypatch.setattr(staging, "_SPAN", PIECE)
        monkeypatch.setattr(CopyPlan, "staged", staged)

    def go(self, failure: Exception | None = None) -> None:
        """Let them go on, or fail."""
        self.failure = failure
        self._go.set()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Return what holds copies."""
    made = Copies(monkeypatch)
    yield made
    made.go()


def checkpointer(
    writer: BackgroundWriter, stager: DefaultStager | None = None, **options: Any
) -> AsyncCheckpointer:
    """Make one around a writer."""
    reader = CheckpointReader(ALONE)
    stager = stager or DefaultStager(BESIDE)
    return AsyncCheckpointer(stager, writer, reader, **options)


def temporary(path: Path) -> Path:
    """Return the file that a checkpoint's is called while it is filled."""
    return part_of(path) / f"{rank_file(0)}.tmp"


async def begun(path: Path) -> None:
    """Wait until the first piece is in the file, and nothing of the last one."""
    file = temporary(path)

    def first_is_there() -> bool:
        return file.exists() and 100 * ONE in file.read_bytes()[: PIECE // 2]

    await eventually(first_is_there, "the write of the first piece")
    assert ONE not in file.read_bytes()[-PIECE:]


def check_nothing_left(path: Path) -> None:
    """Check that there is no trace of a save, and the one before is whole."""
    assert sorted(each.name for each in path.parent.glob("*step-*")) == ["step-1"]
    assert sorted(each.name for each in path.parent.glob(".*")) == []
    newest = latest(path.parent)
    assert newest is not None
    assert newest.step == 1
    assert_same(loaded(path.parent / "step-1"), state(5.0))


class TestBeside:
    """What is staged is written, before the rest is staged."""

    async def test_the_first_piece_is_written_while_others_wait(
        self, tmp_path: Path, make: Make, copies: Copies
    ) -> None:
        """Nothing is committed until all is there; what it says is the state's."""
        async with checkpointer(make()) as made:
            copies.held = True
            task = asyncio.create_task(made.save(state(), tmp_path / "step-1"))
            await begun(tmp_path / "step-1")
            assert not task.done()
            assert latest(tmp_path) is None
            copies.go()
            assert await (await task).written()
        assert_same(loaded(tmp_path / "step-1"), state())

    async def test_a_slow_device_is_followed(
        self, tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Piece by piece, as its stream gets there."""
        monkeypatch.setattr(staging, "_SPAN", PIECE)
        device = FakeAccelerator()
        one_by_one = replace(BESIDE, threads=1)  # else any piece may be the first
        stager = DefaultStager(one_by_one, ports=device.port_for)
        async with checkpointer(make(), stager) as made:
            task = asyncio.create_task(made.save(state(), tmp_path / "step-1"))
            await settle(lambda: len(device._side) > 2)
            device.run(copies=3)  # the fence, a piece, and its event
            await begun(tmp_path / "step-1")
            assert not task.done()
            device.held = False
            device.run()
            assert await (await task).written()
        assert_same(loaded(tmp_path / "step-1"), state())

    async def test_without_a_core_to_spare_the_file_is_only_prepared(
        self, tmp_path: Path, make: Make, copies: Copies
    ) -> None:
        """Its place is reserved, and nothing is in it, until all is staged."""
        stager = DefaultStager(CheckpointStagerConfig(write_beside=False))
        async with checkpointer(make(), stager) as made:
            copies.held = True
            task = asyncio.create_task(made.save(state(), tmp_path / "step-1"))
            file = temporary(tmp_path / "step-1")
            await eventually(
                lambda: file.exists() and file.stat().st_size > 4 * PIECE, "the file"
            )
            assert ONE not in file.read_bytes()
            copies.go()
            assert await (await task).written()
        assert_same(loaded(tmp_path / "step-1"), state())

    async def test_the_state_may_be_mutated_when_save_returns(
        self, tmp_path: Path, make: Make
    ) -> None:
        """Though the write is not at its end then."""
        async with checkpointer(make()) as made:
            live = state()
            handle = await made.save(live, tmp_path / "step-1")
            live["weight"].zero_()
            assert await handle.written()
        assert_same(loaded(tmp_path / "step-1"), state())

    async def test_nothing_to_stage(self, tmp_path: Path, make: Make) -> None:
        """A state dict without a byte is saved too."""
        async with checkpointer(make()) as made:
            assert await (await made.save({"a": 1}, tmp_path / "step-1")).written()
        assert_same(loaded(tmp_path / "step-1"), {"a": 1})

    async def test_progress_is_told(self, tmp_path: Path, make: Make) -> None:
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
        assert seen[-1] >= 4 * PIECE


class TestEndsEarly:
    """Staging does not end, when a part of it is in the file."""

    async def test_cancelled(self, tmp_path: Path, make: Make, copies: Copies) -> None:
        """The file is thrown away, the one before stays, and the next is saved."""
        path = tmp_path / "step-2"
        async with checkpointer(make()) as made:
            assert await (await made.save(state(5.0), tmp_path / "step-1")).written()
            copies.held = True
            task = asyncio.create_task(made.save(state(), path))
            await begun(path)
            task.cancel()
            copies.go()
            await asyncio.wait({task})
            assert task.cancelled()
            await eventually(lambda: not part_of(path).exists(), "the end of it")
            check_nothing_left(path)
            now = made.statistics()
            assert (now.written, now.failed, now.under_way) == (1, 0, 0)
            assert await (await made.save(state(), path)).written()
            assert await made.close() == ()
        assert_same(loaded(path), state())

    @pytest.mark.allow_error_logs
    async def test_failed(self, tmp_path: Path, make: Make, copies: Copies) -> None:
        """Its handle says why; that the writer failed of it is nobody's news."""
        path = tmp_path / "step-2"
        async with checkpointer(make()) as made:
            assert await (await made.save(state(5.0), tmp_path / "step-1")).written()
            copies.held = True
            task = asyncio.create_task(made.save(state(), path))
            await begun(path)
            copies.go(OSError("the bus is gone"))
            handle = await task
            assert handle.staged is False
            with pytest.raises(StagingError, match="step 2 failed: the bus is gone"):
                await handle.written()
            await eventually(lambda: not part_of(path).exists(), "the end of it")
            check_nothing_left(path)
            copies.held = False
            assert await (await made.save(state(), path)).written()
            now = made.statistics()
            assert (now.written, now.failed, now.under_way) == (2, 1, 0)
            assert await made.close() == ()

    async def test_called_off_before_the_write_has_begun(
        self, tmp_path: Path, make: Make, copies: Copies
    ) -> None:
        """Nobody waits for the one that is being written; the next one's turn comes."""
        gate = Gate(tmp_path / "gate")
        async with checkpointer(make(GatedWriter, gate=gate.path)) as made:
            first = await made.save(state(5.0), tmp_path / "step-1")
            copies.held = True
            task = asyncio.create_task(made.save(state(), tmp_path / "step-2"))
            await asyncio.sleep(0.05)
            task.cancel()
            copies.go()
            await asyncio.wait({task})
            assert task.cancelled()
            third = await made.save(state(), tmp_path / "step-3")
            gate.open(2)
            assert await first.written()
            assert await third.written()
            assert not (tmp_path / "step-2").exists()
        gate.close()

    @pytest.mark.allow_error_logs
    async def test_the_writer_fails_first(self, tmp_path: Path, make: Make) -> None:
        """Staging ends as ever; the handle has the writer's error."""
        (tmp_path / "file").touch()
        async with checkpointer(make()) as made:
            handle = await made.save(state(), tmp_path / "file" / "step-1")
            assert handle.staged
            with pytest.raises(StorageError):
                await handle.written()
            assert await (await made.save(state(), tmp_path / "step-1")).written()

    @pytest.mark.allow_error_logs
    async def test_the_process_is_killed(self, tmp_path: Path, copies: Copies) -> None:
        """The save fails, once; another process sweeps, and saves the next one."""
        path = tmp_path / "step-2"
        process = in_process()
        assert isinstance(process, CheckpointProcess)
        async with checkpointer(process) as made:
            assert await (await made.save(state(5.0), tmp_path / "step-1")).written()
            copies.held = True
            task = asyncio.create_task(made.save(state(), path))
            await begun(path)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            await eventually(lambda: process.restarts, "its end")
            copies.go()
            handle = await task
            assert handle.staged
            with pytest.raises(WorkerError, match="signal 9"):
                await handle.written()
            newest = latest(tmp_path)
            assert newest is not None
            assert newest.step == 1
            assert await (await made.save(state(), tmp_path / "step-3")).written()
            assert not part_of(path).exists()
            assert made.statistics().failed == 1

    @pytest.mark.allow_error_logs
    async def test_its_process_dies_before_it_has_begun(
        self, tmp_path: Path, copies: Copies
    ) -> None:
        """Another process is handed it as far as it is, and told of the rest."""
        gate = Gate(tmp_path / "gate")
        process = in_process(GatedWriter, gate=gate.path)
        assert isinstance(process, CheckpointProcess)
        async with checkpointer(process) as made:
            first = await made.save(state(5.0), tmp_path / "step-1")
            copies.held = True
            task = asyncio.create_task(made.save(state(), tmp_path / "step-2"))
            await eventually(lambda: process.pid, "its start")
            await settle(lambda: len(process._supervisor._sent) == 2)
            submission = process._supervisor._sent[1].submission
            await submission.settled()
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(WorkerError):
                await first.written()
            await eventually(lambda: process.restarts, "another one")
            copies.go()
            gate.open(2)
            assert await (await task).written()
        assert_same(loaded(tmp_path / "step-2"), state())
        gate.close()


class Listening(Barrier):
    """Hears what other ranks would be told."""

    barrier_type = "listening"

    def __init__(self) -> None:
        self.heard: list[tuple[str, str | None]] = []

    def execute_barrier(self) -> None:
        pass

    def meet(self, meeting: Meeting, *, failure: str | None = None) -> None:
        self.heard.append((str(meeting), failure))


class TestRanks:
    """The ranks that wait for this one are told once that it will not come."""

    async def test_when_the_write_had_begun(
        self, tmp_path: Path, copies: Copies
    ) -> None:
        """By the writer itself."""
        barrier = Listening()

        def writer(rank_info: RankInfo) -> CheckpointWriter:
            return CheckpointWriter(CheckpointWriterConfig(), rank_info, barrier)

        async with checkpointer(in_thread(writer)) as made:
            copies.held = True
            task = asyncio.create_task(made.save(state(), tmp_path / "step-2"))
            await begun(tmp_path / "step-2")
            task.cancel()
            copies.go()
            await asyncio.wait({task})
        said = "staging did not end: it was cancelled"
        assert barrier.heard == [("step-2/2/written", said)]

    async def test_when_it_had_not(self, tmp_path: Path, copies: Copies) -> None:
        """On its behalf."""
        gate, barrier = Gate(tmp_path / "gate"), Listening()

        class Gated(GatedWriter):
            def __init__(self, rank_info: RankInfo, gate: str) -> None:
                super().__init__(rank_info, gate)
                self._barrier = barrier

        async with checkpointer(in_thread(Gated, gate=gate.path)) as made:
            first = await made.save(state(5.0), tmp_path / "step-1")
            copies.held = True
            task = asyncio.create_task(made.save(state(), tmp_path / "step-2"))
            await asyncio.sleep(0.05)
            task.cancel()
            copies.go()
            await asyncio.wait({task})
            gate.open()
            assert await first.written()
        assert barrier.heard[2:] == [("step-2/2/written", "it was cancelled")]
        gate.close()


class Careful(CheckpointWriter):
    """A writer as of old: it wants the whole."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__(CheckpointWriterConfig(), rank_info)

    def write_snapshot(self, path: Any, snapshot: Any, /, **kwargs: Any) -> None:
        size = snapshot.manifest.segment_bytes
        (whole,) = snapshot.views(0, size)
        self.seen.append((snapshot.manifest.digests, bytes(whole[-4:])))
        super().write_snapshot(path, snapshot, **kwargs)


class Simple:
    """A writer as the seed's users write them."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, rank_info: RankInfo) -> None:
        pass

    def write(self, path: str, state_dict: Any, **kwargs: Any) -> None:
        self.seen.append(state_dict["weight"].eq(1).all())


class TestOwnWriters:
    """A writer that does not follow is called when everything is there."""

    async def test_a_snapshot_is_whole_and_sealed(
        self, tmp_path: Path, copies: Copies
    ) -> None:
        """As it was before any writer followed."""
        Careful.seen.clear()
        async with checkpointer(in_thread(Careful)) as made:
            copies.held = True
            task = asyncio.create_task(made.save(state(), tmp_path / "step-1"))
            await asyncio.sleep(0.05)
            assert Careful.seen == []
            copies.go()
            assert await (await task).written()
        ((digests, last),) = Careful.seen
        assert UNSEALED not in digests
        assert last == ONE
        assert_same(loaded(tmp_path / "step-1"), state())

    async def test_a_state_dict_is_whole(self, tmp_path: Path, copies: Copies) -> None:
        """And one that never gets whole is never seen."""
        Simple.seen.clear()
        async with checkpointer(in_thread(Simple)) as made:
            copies.held = True
            task = asyncio.create_task(made.save(state(), tmp_path / "step-1"))
            await asyncio.sleep(0.05)
            task.cancel()
            copies.go()
            await asyncio.wait({task})
            assert Simple.seen == []
            assert await (await made.save(state(), tmp_path / "step-2")).written()
        assert Simple.seen == [True]

    async def test_a_stager_that_stages_otherwise_is_asked_for_it(
        self, tmp_path: Path, make: Make
    ) -> None:
        """A subclass with a ``stage`` of its own is not passed by."""

        class Doubling(DefaultStager):
            async def stage(self, state_dict: Any, **kwargs: Any) -> Any:
                doubled = {key: 2 * value for key, value in state_dict.items()}
                return await super().stage(doubled, **kwargs)

        async with checkpointer(make(), Doubling()) as made:
            assert await (await made.save(state(), tmp_path / "step-1")).written()
        assert_same(loaded(tmp_path / "step-1"), state(2.0))

    async def test_memory_that_cannot_be_mapped_is_staged_first(
        self, tmp_path: Path
    ) -> None:
        """Then copied for the process, as before."""
        stager = DefaultStager(CheckpointStagerConfig(use_shared_memory=False))
        async with checkpointer(in_process(), stager) as made:
            assert await (await made.save(state(), tmp_path / "step-1")).written()
        assert_same(loaded(tmp_path / "step-1"), state())
