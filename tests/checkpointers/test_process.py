"""CheckpointProcess: what its child does, and what becomes of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.checkpointers.config import CheckpointProcessConfig, RankInfo
from aiockpt.checkpointers.messages import Write
from aiockpt.checkpointers.process import CheckpointProcess
from aiockpt.checkpointers.stager import DefaultStager
from aiockpt.checkpointers.writer import configured_writer
from aiockpt.errors import (
    ClosedError,
    LocalProtocolError,
    StorageError,
    UnsupportedLeafError,
    WorkerError,
)
from aiockpt.runtime.ipc import Channel, encode
from aiockpt.testing import assert_same
from tests.support.checkpointing import (
    Diary,
    Gate,
    GatedWriter,
    OwnFormat,
    Troubled,
    eventually,
    has_begun,
    has_torch,
    is_running,
    loaded,
    note_pid,
    refuse,
)
from tests.support.proofs import proves
from tests.support.terminals import FROM_A_TERMINAL, ignored

pytestmark = pytest.mark.asyncio

ALONE = RankInfo(0, 1)
DEFAULTS = CheckpointProcessConfig()


def state(fill: float = 1.0) -> dict[str, Any]:
    """Return a state dict with ties and several containers."""
    weight = torch.full((50_000,), fill)
    return {"weight": weight, "tied": weight[10:20], "more": [1, ("a", {2: None})]}


@asynccontextmanager
async def process(
    config: CheckpointProcessConfig = DEFAULTS, **options: Any
) -> AsyncIterator[CheckpointProcess]:
    """Make one, and close it."""
    made = CheckpointProcess(ALONE, config, **options)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Return a gate for a writer."""
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


def gated(gate: Gate) -> dict[str, Any]:
    """Return the options of a process that writes when the gate says so."""
    return {
        "checkpoint_writer_init_fn": GatedWriter,
        "checkpoint_writer_init_args": {"gate": gate.path},
    }


class TestWriting:
    """What arrives on the disk."""

    @proves("cell CheckpointProcess.write: success")
    async def test_a_staged_state_is_written_and_committed(
        self, tmp_path: Path
    ) -> None:
        """What was staged, whatever became of the state dict since."""
        async with process() as made:
            stager, live = DefaultStager(), state()
            with await stager.stage(live, step=3) as staged:
                live["weight"].zero_()
                await made.write(staged, tmp_path / "step-3")
            await stager.close()
        assert_same(loaded(tmp_path / "step-3"), state())

    async def test_a_state_dict_is_staged_first(self, tmp_path: Path) -> None:
        """Whoever has no stager may leave it to the process."""
        async with process() as made:
            await made.write(state(), tmp_path / "step-1")
        assert_same(loaded(tmp_path / "step-1"), state())

    async def test_relative_paths_are_the_trainers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may have changed its directory since the child was started."""
        async with process() as made:
            await made.ready()
            monkeypatch.chdir(tmp_path)
            await made.write(state(), "step-1")
        assert_same(loaded(tmp_path / "step-1"), state())

    async def test_keywords_arrive_at_the_hooks(self, tmp_path: Path) -> None:
        """As they were given: C7 raised for any of them."""
        diary = tmp_path / "diary"
        arguments = {"commit_hook": Diary(str(diary))}
        async with process(
            checkpoint_writer_init_fn=configured_writer,
            checkpoint_writer_init_args=arguments,
        ) as made:
            await made.write(state(), tmp_path / "a", epoch=3, why=("x", None))
        said = "a [('epoch', 3), ('why', ('x', None))]"
        assert diary.read_text() == f"pre {said}\npost {said}\n"

    async def test_any_keyword_may_be_used(self, tmp_path: Path) -> None:
        """Also those that are names of parameters within."""
        diary = tmp_path / "diary"
        async with process(
            checkpoint_writer_init_fn=configured_writer,
            checkpoint_writer_init_args={"commit_hook": Diary(str(diary))},
        ) as made:
            await made.write(state(), tmp_path / "a", snapshot=3)
        assert diary.read_text().startswith("pre a [('snapshot', 3)]\n")

    async def test_a_path_that_is_no_text(self, tmp_path: Path) -> None:
        """Names of files are bytes; what fails there is told too."""
        path = tmp_path / os.fsdecode(b"step\xff-1")
        async with process() as made:
            await made.write(state(), path)
            assert_same(loaded(path), state())
            (tmp_path / os.fsdecode(b"\xff")).touch()
            with pytest.raises(StorageError, match=r"\\udcff"):
                await made.write(state(), tmp_path / os.fsdecode(b"\xff") / "a")
            assert made.restarts == 0

    async def test_a_path_that_is_too_long(self, tmp_path: Path) -> None:
        """It is refused at once, also if it would fit no message."""
        async with process() as made:
            for name in ("x" * 300, "x" * 5000, "x" * 500_000):
                with pytest.raises(StorageError, match="name too long"):
                    await made.write(state(), tmp_path / name)
            await made.write(state(), tmp_path / "a")
            assert made.restarts == 0

    @proves("cell CheckpointProcess.submit: error")
    async def test_a_keyword_that_is_no_data_is_refused(self, tmp_path: Path) -> None:
        """In the caller, by its name; the process is as before."""
        async with process() as made:
            with pytest.raises(UnsupportedLeafError, match="model"):
                await made.write(state(), tmp_path / "a", model=torch.nn.Linear(1, 1))
            await made.write(state(), tmp_path / "a")

    async def test_a_writer_of_ones_own_gets_a_state_dict(self, tmp_path: Path) -> None:
        """Over the same memory, for it to use until it returns."""
        async with process(
            checkpoint_writer_init_fn=OwnFormat,
            checkpoint_writer_init_args={"suffix": ".mine"},
        ) as made:
            stager = DefaultStager()
            with await stager.stage(state(), step=1) as staged:
                await made.write(staged, tmp_path / "a", tag="x")
                assert_same(staged.state_dict(), state())  # it wrote to its own
            await stager.close()
        found = torch.load(tmp_path / "a" / "0.mine")
        assert_same(found, [state(), {"tag": "x"}])

    async def test_private_memory_is_copied_on_its_way(self, tmp_path: Path) -> None:
        """A stager may be told not to share."""
        from aiockpt.checkpointers.config import CheckpointStagerConfig

        async with process() as made:
            stager = DefaultStager(CheckpointStagerConfig(use_shared_memory=False))
            with await stager.stage(state(), step=1) as staged:
                await made.write(staged, tmp_path / "a")
            await stager.close()
        assert_same(loaded(tmp_path / "a"), state())

    async def test_nothing_large_crosses(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """C11: packets, and a header and keywords in memory; the arena is shared."""
        crossed: list[int] = []
        arenas: list[int] = []
        send = Channel.send

        def counted(self: Channel, message: object, fds: Sequence[int] = ()) -> None:
            sizes = [os.fstat(fd).st_size for fd in fds]
            if isinstance(message, Write):
                arenas.append(sizes.pop())
            crossed.append(len(encode(message)) + sum(sizes))
            send(self, message, fds)

        monkeypatch.setattr(Channel, "send", counted)
        async with process() as made:
            await made.write({"weight": torch.ones(8 << 20)}, tmp_path / "a", loss=0.5)
        assert arenas == [32 << 20]
        assert sum(crossed) < 64 << 10
        assert_same(loaded(tmp_path / "a"), {"weight": torch.ones(8 << 20)})

    async def test_writes_keep_their_order(self, tmp_path: Path, gate: Gate) -> None:
        """The last one stands, whoever was handed over while another was written."""
        async with process(**gated(gate)) as made:
            tasks = [
                await made.submit(state(fill), str(tmp_path / "a"), {})
                for fill in (1.0, 2.0, 3.0)
            ]
            gate.open(3)
            assert all([await task.written() for task in tasks])
        assert_same(loaded(tmp_path / "a"), state(3.0))

    async def test_progress_is_told(self, tmp_path: Path) -> None:
        """From nothing on, never backwards."""
        seen: list[int] = []
        async with process() as made:
            submission = await made.submit(
                {"w": torch.zeros(6 << 20)}, str(tmp_path / "a"), {}, seen.append
            )
            await submission.written()
        assert seen
        assert seen == sorted(seen)
        assert seen[0] == 0


class TestChild:
    """The process itself."""

    @proves("cell CheckpointProcess.ready: success")
    @pytest.mark.usefixtures("fresh_interpreters")
    async def test_it_starts_before_it_is_needed_and_without_torch(
        self, tmp_path: Path
    ) -> None:
        """C15: the first save waits for no interpreter."""
        async with process(
            subprocess_init_fn=note_pid, subprocess_init_args=(str(tmp_path / "pid"),)
        ) as made:
            await made.ready()
            assert made.pid == int((tmp_path / "pid").read_text()) != os.getpid()
        async with process() as made:
            await made.ready()
            assert made.pid
            assert not has_torch(made.pid)

    async def test_making_one_does_not_block(self) -> None:
        """Nor does a loop have to run."""
        began = time.monotonic()
        made = await asyncio.get_running_loop().run_in_executor(
            None, lambda: CheckpointProcess(ALONE)
        )
        assert time.monotonic() - began < 5
        await made.close()

    @pytest.mark.parametrize("told", [{}, {"nice": 0}, {"nice": 7, "io_idle": True}])
    async def test_it_is_as_nice_as_told(self, told: dict[str, Any]) -> None:
        """Training comes first, if nothing is said."""
        async with process(CheckpointProcessConfig(**told)) as made:
            await made.ready()
            assert made.pid
            mine = os.getpriority(os.PRIO_PROCESS, 0)
            added = told.get("nice", 10)
            assert os.getpriority(os.PRIO_PROCESS, made.pid) == min(mine + added, 19)

    async def test_no_terminal_stops_or_ends_it(self) -> None:
        """It is in the background of the trainer's, and says something now and then."""
        async with process() as made:
            await made.ready()
            assert made.pid
            assert ignored(made.pid) >= FROM_A_TERMINAL
            assert os.getsid(made.pid) == os.getsid(0)  # where its niceness counts

    async def test_ctrl_c_is_not_for_it(self, tmp_path: Path) -> None:
        """The trainer decides what becomes of the save."""
        async with process() as made:
            await made.ready()
            assert made.pid
            assert os.getpgid(made.pid) != os.getpgid(0)
            os.kill(made.pid, signal.SIGINT)
            await made.write(state(), tmp_path / "a")
            assert made.restarts == 0

    async def test_sigterm_lets_it_finish(self, tmp_path: Path, gate: Gate) -> None:
        """What was handed over is written; then it ends, and is replaced."""
        async with process(**gated(gate)) as made:
            submission = await made.submit(state(), str(tmp_path / "a"), {})
            await has_begun(submission)
            first = made.pid
            assert first
            os.kill(first, signal.SIGTERM)
            gate.open(2)
            assert await submission.written()
            await made.write(state(2.0), tmp_path / "b")  # by either of the two
            await eventually(lambda: made.pid not in (None, first), "the successor")
        assert_same(loaded(tmp_path / "a"), state())

    @pytest.mark.parametrize("what", ["function", "argument"])
    async def test_what_cannot_be_pickled_is_refused_at_once(self, what: str) -> None:
        """Not in the first save."""
        options: dict[str, dict[str, Any]] = {
            "function": {"subprocess_init_fn": lambda: None},
            "argument": {"subprocess_init_args": (lambda: None,)},
        }
        with pytest.raises(LocalProtocolError, match="cannot be pickled"):
            CheckpointProcess(ALONE, **options[what])


class TestFailure:
    """C9: one failed write ends nothing, and says what happened."""

    @proves("cell CheckpointProcess.write: error")
    async def test_a_storage_error_arrives_as_one(self, tmp_path: Path) -> None:
        """With its path, and with the traceback of the other process."""
        (tmp_path / "file").write_text("")
        async with process() as made:
            await made.ready()
            pid = made.pid
            with pytest.raises(StorageError) as caught:
                await made.write(state(), tmp_path / "file" / "a")
            assert str(tmp_path / "file") in caught.value.path
            assert "in the checkpoint process:\nTraceback" in caught.value.__notes__[0]
            await made.write(state(), tmp_path / "a")
            assert (made.pid, made.restarts) == (pid, 0)

    @pytest.mark.parametrize("trouble", ["raise", "system-exit"])
    async def test_anything_else_is_a_worker_error(
        self, tmp_path: Path, trouble: str
    ) -> None:
        """The child is well afterwards."""
        async with process(checkpoint_writer_init_fn=Troubled) as made:
            with pytest.raises(WorkerError) as caught:
                await made.write(state(), tmp_path / "a", trouble=trouble)
            assert "Traceback" in caught.value.remote_traceback
            assert "write_staged" in caught.value.remote_traceback
            await made.write(state(), tmp_path / "a")
            assert made.restarts == 0

    @proves("cell CheckpointProcess.ready: error")
    @pytest.mark.allow_error_logs
    async def test_a_failed_init_function_is_told(self, tmp_path: Path) -> None:
        """To each write, with its traceback."""
        async with process(subprocess_init_fn=refuse) as made:
            for _ in range(2):
                with pytest.raises(WorkerError, match="no such environment") as caught:
                    await made.write(state(), tmp_path / "a")
                assert "LookupError" in caught.value.remote_traceback

    @proves("cell CheckpointProcess.ready: timeout")
    @pytest.mark.allow_error_logs
    async def test_a_slow_start_has_a_deadline(
        self, tmp_path: Path, gate: Gate
    ) -> None:
        """A child that does not become ready is killed."""
        from tests.support.checkpointing import pass_gate

        config = CheckpointProcessConfig(subprocess_init_timeout_secs=0.5)
        async with process(
            config, subprocess_init_fn=pass_gate, subprocess_init_args=(gate.path,)
        ) as made:
            with pytest.raises(WorkerError, match=r"0.5 s \(subprocess_init_timeout"):
                await made.write(state(), tmp_path / "a")


class TestDeath:
    """A child that dies takes one write with it, and is replaced."""

    @proves("cell CheckpointProcess.write: the other one dies")
    @pytest.mark.parametrize(("trouble", "exitcode"), [("die", -9), ("exit", 3)])
    async def test_the_write_fails_at_once_and_the_next_one_works(
        self, tmp_path: Path, trouble: str, exitcode: int
    ) -> None:
        """What is at the path is what was there before."""
        async with process(checkpoint_writer_init_fn=Troubled) as made:
            await made.write(state(1.0), tmp_path / "a")
            pid = made.pid
            with pytest.raises(WorkerError, match="checkpoint process ended") as caught:
                await made.write(state(2.0), tmp_path / "a", trouble=trouble)
            assert caught.value.exitcode == exitcode
            assert_same(loaded(tmp_path / "a"), state(1.0))
            await made.write(state(3.0), tmp_path / "a")
            assert made.pid != pid
            assert made.restarts == 1
        assert_same(loaded(tmp_path / "a"), state(3.0))

    @proves("cell Submission.written: the other one dies")
    async def test_a_killed_child_is_noticed_in_a_moment(
        self, tmp_path: Path, gate: Gate
    ) -> None:
        """Milliseconds here; the promise is a tenth of a second."""
        async with process(**gated(gate)) as made:
            delays = []
            for _ in range(5):
                submission = await made.submit(state(), str(tmp_path / "a"), {})
                await has_begun(submission)
                assert made.pid
                os.kill(made.pid, signal.SIGKILL)
                began = time.monotonic()
                with pytest.raises(WorkerError, match="by signal 9"):
                    await submission.written()
                delays.append(time.monotonic() - began)
            assert sorted(delays)[2] < 0.1

    @proves(
        "cell AsyncCheckpointer.save: the other one dies",
        "cell CheckpointProcess.submit: the other one dies",
    )
    async def test_what_waited_is_written_by_the_next_one(
        self, tmp_path: Path, gate: Gate
    ) -> None:
        """Only what was begun is lost."""
        async with process(**gated(gate)) as made:
            begun = await made.submit(state(1.0), str(tmp_path / "a"), {})
            waits = await made.submit(state(2.0), str(tmp_path / "b"), {})
            await has_begun(begun)
            assert made.pid
            os.kill(made.pid, signal.SIGKILL)
            with pytest.raises(WorkerError):
                await begun.written()
            gate.open()
            assert await waits.written()
        assert_same(loaded(tmp_path / "b"), state(2.0))
        assert not (tmp_path / "a").exists()

    async def test_an_idle_one_is_replaced_before_it_is_needed(
        self, tmp_path: Path
    ) -> None:
        """The next save finds a process that is ready."""
        async with process() as made:
            await made.ready()
            assert made.pid
            os.kill(made.pid, signal.SIGKILL)
            await eventually(lambda: made.restarts == 1, "the replacement")
            await made.ready()
            await made.write(state(), tmp_path / "a")

    @proves("cell CheckpointProcess.write: timeout")
    @pytest.mark.parametrize("limit", ["hang", "write"])
    async def test_a_hung_one_is_killed_and_replaced(
        self, tmp_path: Path, gate: Gate, limit: str
    ) -> None:
        """One that is stopped says nothing; one in a hung system call does."""
        trouble = "stop" if limit == "hang" else ""
        writer = Troubled if limit == "hang" else GatedWriter
        arguments = {} if limit == "hang" else {"gate": gate.path}
        config = CheckpointProcessConfig(
            hang_timeout_secs=3, write_timeout_secs=100 if limit == "hang" else 0.5
        )
        async with process(
            config,
            checkpoint_writer_init_fn=writer,
            checkpoint_writer_init_args=arguments,
        ) as made:
            await made.ready()
            keywords = {"trouble": trouble} if trouble else {}
            with pytest.raises(WorkerError, match=rf"{limit}_timeout_secs.*was killed"):
                await made.write(state(), tmp_path / "a", **keywords)
            gate.open()
            await made.write(state(), tmp_path / "a")
            assert made.restarts == 1

    async def test_a_silent_but_busy_one_is_not_taken_for_hung(
        self, tmp_path: Path, gate: Gate
    ) -> None:
        """It says that it is alive, also while the loop here stands still."""
        config = CheckpointProcessConfig(hang_timeout_secs=2)
        async with process(config, **gated(gate)) as made:
            submission = await made.submit(state(), str(tmp_path / "a"), {})
            await has_begun(submission)
            time.sleep(4)  # noqa: ASYNC251 - a training step that blocks the loop
            await asyncio.sleep(0.1)
            gate.open()
            assert await submission.written()
            assert made.restarts == 0


class TestEnd:
    """After close nothing is left."""

    @proves(
        "cell CheckpointProcess.submit: success",
        "cell Submission.written: success",
        "cell CheckpointProcess.close, aclose: success",
    )
    async def test_closing_waits_for_what_was_handed_over(self, tmp_path: Path) -> None:
        """It is written, not lost."""
        made = CheckpointProcess(ALONE)
        submissions = [
            await made.submit(state(fill), str(tmp_path / f"{fill}"), {})
            for fill in (1.0, 2.0)
        ]
        await made.close()
        assert all([await each.written() for each in submissions])
        assert_same(loaded(tmp_path / "2.0"), state(2.0))

    @proves(
        "cell Submission.written: error",
        "cell CheckpointProcess.close, aclose: timeout",
    )
    @proves("invariant 6")
    async def test_a_writer_that_hangs_is_killed(
        self, tmp_path: Path, gate: Gate
    ) -> None:
        """Closing takes no longer than told, and the write fails."""
        config = CheckpointProcessConfig(subprocess_shutdown_timeout_secs=0.5)
        made = CheckpointProcess(ALONE, config, **gated(gate))
        submission = await made.submit(state(), str(tmp_path / "a"), {})
        await has_begun(submission)
        pid = made.pid
        assert pid
        await made.close()
        with pytest.raises(WorkerError, match="subprocess_shutdown_timeout_secs"):
            await submission.written()
        assert not is_running(pid)

    async def test_it_may_be_closed_at_any_time_and_twice(self, tmp_path: Path) -> None:
        """Before it was used, while it starts, and again."""
        made = CheckpointProcess(ALONE)
        await made.close()
        await made.aclose()
        with pytest.raises(ClosedError):
            await made.write(state(), tmp_path / "a")

    @proves("cell CheckpointProcess.close, aclose: cancel")
    async def test_a_cancelled_close_goes_on(self) -> None:
        """The next one waits for its end."""
        made = CheckpointProcess(ALONE)
        await made.ready()
        task = asyncio.create_task(made.close())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await made.close()


@proves("cell CheckpointProcess.write: cancel")
@proves("invariant 8")
async def test_a_cancel_at_every_await_leaves_it_usable(tmp_path: Path) -> None:
    """A write is either not handed over at all, or is written wholly."""
    async with process() as made:
        await made.ready()
        for turns in range(40):
            path = tmp_path / f"step-{turns}"
            task = asyncio.create_task(made.write(state(turns), path))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
        last = tmp_path / "last"
        await made.write(state(), last)
        assert_same(loaded(last), state())
        for turns in range(40):
            path = tmp_path / f"step-{turns}"
            if path.exists():
                assert_same(loaded(path), state(turns))
        assert made.restarts == 0
