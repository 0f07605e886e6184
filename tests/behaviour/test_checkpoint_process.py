"""CheckpointProcess: what its child does, and what becomes of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch

from aiockpt.checkpointers import (
    CheckpointProcess,
    CheckpointProcessConfig,
    DefaultStager,
    RankInfo,
)
from aiockpt.errors import (
    ClosedError,
    LocalProtocolError,
    StorageError,
    UnsupportedLeafError,
    WorkerError,
    WorkerTimeoutError,
)
from aiockpt.testing import assert_same
from tests.support.commandline import ENVIRONMENT
from tests.support.proofs import proves
from tests.support.saving import (
    Forsaken,
    GatedWriter,
    OwnFormat,
    SlowWriter,
    Troubled,
    has_begun,
    loaded,
    note_threads,
    pass_gate,
    refuse,
    submit,
)
from tests.support.saving import tied_state as state
from tests.support.waiting import (
    OF_TRAINER,
    PATIENCE,
    eventually,
    has_torch,
    ignored,
)

ALONE = RankInfo(0, 1)


@asynccontextmanager
async def process(limits: Any = None, gate: Any = None, **options: Any):
    """Make one, which writes when the gate says so if there is one; close it."""
    if gate is not None:
        options["checkpoint_writer_init_fn"] = GatedWriter
        options["checkpoint_writer_init_args"] = {"gate": gate.path}
    config = CheckpointProcessConfig(**limits or {})
    made = CheckpointProcess(options.pop("rank_info", ALONE), config, **options)
    try:
        yield made
    finally:
        await made.close()


def has_restarted(made: CheckpointProcess, times: int) -> bool:
    """Say whether the child was replaced so often."""
    return made.restarts == times


def pid_of(made: CheckpointProcess) -> int:
    """Return the child's, which is there."""
    assert made.pid is not None
    return made.pid


@pytest.mark.asyncio
class TestWriting:
    """The process writes checkpoints to the disk."""

    @proves("cell CheckpointProcess.write: success")
    async def test_what_was_staged_is_written(self, tmp_path, monkeypatch) -> None:
        """The staged copy is written, though the state dict changes meanwhile."""
        live = state()
        stager = DefaultStager()
        async with process() as made:
            await made.ready()
            monkeypatch.chdir(tmp_path)
            with await stager.stage(live, step=3) as staged:
                live["weight"].zero_()
                await made.write(staged, "step-3")
        await stager.close()
        assert_same(loaded(tmp_path / "step-3"), state())

    async def test_private_memory_is_refused(self, tmp_path) -> None:
        """The process could not map it; the message says how to stage."""
        stager = DefaultStager(shared=False)
        async with process() as made:
            staged = await stager.stage(state(), step=3)
            with staged, pytest.raises(LocalProtocolError, match="without shared="):
                await made.write(staged, tmp_path / "step-3")
        await stager.close()

    async def test_odd_names(self, tmp_path) -> None:
        """Names of files are bytes; one that is too long is refused at once."""
        bad = os.fsdecode(b"\xff")
        async with process() as made:
            await made.write(state(), tmp_path / bad)
            assert_same(loaded(tmp_path / bad), state())
            (tmp_path / f"{bad}2").touch()
            with pytest.raises(StorageError, match=r"\\udcff"):
                await made.write(state(), tmp_path / f"{bad}2" / "a")
            for name in ("x" * 300, "x" * 500_000):
                with pytest.raises(StorageError, match="name too long"):
                    await made.write(state(), tmp_path / name)
            await made.write(state(), tmp_path / "a")
            assert made.restarts == 0

    async def test_a_writer_of_ones_own_may_change_what_it_gets(self, tmp_path) -> None:
        """Its state dict has private pages, so its changes are its own."""
        stager = DefaultStager()
        async with process(checkpoint_writer_init_fn=OwnFormat) as made:
            with await stager.stage(state(), step=1) as staged:
                await made.write(staged, tmp_path / "a", tag="x")
                assert_same(staged.state_dict(), state())
        await stager.close()
        found = torch.load(tmp_path / "a" / "0.own")
        assert_same(found, [state(), {"tag": "x"}])

    async def test_writes_keep_their_order(self, tmp_path, gate) -> None:
        """The last one stands, whoever was handed over while another was written."""
        async with process(gate=gate) as made:
            path = str(tmp_path / "a")
            tasks = [await submit(made, state(fill), path) for fill in (1, 2, 3.0)]
            gate.open(3)
            assert all([await task.written() for task in tasks])
        assert_same(loaded(tmp_path / "a"), state(3.0))


async def later(result):
    """Return it, or raise it, a moment later."""
    await asyncio.sleep(0.01)
    if isinstance(result, Exception):
        raise result
    return result


def resolving(result):
    """Return a thread pool's future, which resolves a moment later."""
    found: Future[Any] = Future()
    to = found.set_exception if isinstance(result, Exception) else found.set_result
    asyncio.get_running_loop().call_later(0.01, to, result)
    return found


@pytest.mark.asyncio
class TestFuture:
    """``write`` takes a future of a state dict, as torch's does."""

    @pytest.mark.parametrize(
        "future_of",
        [resolving, later, lambda result: asyncio.ensure_future(later(result))],
        ids=["concurrent", "coroutine", "task"],
    )
    async def test_it_is_waited_for(self, tmp_path, future_of) -> None:
        """The result of a future is written, and its exception is raised."""
        stager = DefaultStager()
        async with process() as made:
            with await stager.stage(state(), step=1) as staged:
                await made.write(future_of(staged), tmp_path / "step-1")
            await made.write(future_of(state(2.0)), tmp_path / "step-2")
            failing = future_of(ZeroDivisionError("while it was staged"))
            with pytest.raises(ZeroDivisionError, match="while it was staged"):
                await made.write(failing, tmp_path / "step-3")
            assert made.restarts == 0
        await stager.close()
        for step in (1, 2):
            assert_same(loaded(tmp_path / f"step-{step}"), state(float(step)))
        assert not (tmp_path / "step-3").exists()

    @pytest.mark.parametrize("kind", [Future, asyncio.Future])
    async def test_a_cancel_leaves_it_alone(self, tmp_path, kind) -> None:
        """It is the caller's: others may wait for it too, and it may fail later."""
        async with process() as made:
            future = kind()
            writing = asyncio.create_task(made.write(future, tmp_path / "step-1"))
            await asyncio.sleep(0.05)
            writing.cancel()
            await asyncio.wait({writing})
            assert writing.cancelled()
            assert not future.cancelled()
            future.set_exception(ZeroDivisionError("later"))
            assert isinstance(future.exception(), ZeroDivisionError)
        assert not (tmp_path / "step-1").exists()
        with pytest.raises(ClosedError):
            await made.write(kind(), tmp_path / "s", step=1)

    @pytest.mark.parametrize("reason", ["future", "state", "working directory"])
    async def test_the_other_ranks_are_told(
        self, tmp_path, reason: str, monkeypatch
    ) -> None:
        """They would wait for a rank that has handed nothing over."""
        diary, path = tmp_path / "diary", str(tmp_path / "step-3")
        given: Any = {"bad": object()}
        expected: type[Exception] = UnsupportedLeafError
        if reason == "future":
            given, expected = later(ZeroDivisionError("on purpose")), ZeroDivisionError
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


@pytest.mark.asyncio
class TestChild:
    """The child process starts, has limits, and is replaced."""

    @proves("cell CheckpointProcess.ready: success")
    @pytest.mark.usefixtures("fresh_interpreters")
    async def test_it_starts_before_it_is_needed_and_without_torch(self) -> None:
        """The first save waits for no interpreter."""
        async with process() as made:
            await made.ready()
            assert pid_of(made) != os.getpid()
            assert not has_torch(pid_of(made))

    @pytest.mark.parametrize("told", [{}, {"nice": 0}, {"nice": 7, "io_idle": True}])
    async def test_it_is_as_nice_as_told(self, tmp_path, told: dict[str, Any]) -> None:
        """All its threads are nice once it is ready, and none before."""
        noted = tmp_path / "niceness"
        async with process(
            told, subprocess_init_fn=note_threads, subprocess_init_args=(str(noted),)
        ) as made:
            await made.ready()
            mine = os.getpriority(os.PRIO_PROCESS, 0)
            started_at, thread = map(int, noted.read_text().split())
            assert started_at == mine
            for each in (pid_of(made), thread):
                lowered = min(mine + told.get("nice", 10), 19)
                assert os.getpriority(os.PRIO_PROCESS, each) == lowered

    async def test_signals_of_the_trainer_are_not_for_it(self, tmp_path) -> None:
        """The trainer decides what becomes of the save."""
        async with process() as made:
            await made.ready()
            pid = pid_of(made)
            assert ignored(pid) >= OF_TRAINER
            assert os.getsid(pid) == os.getsid(0)  # where its niceness counts
            assert os.getpgid(pid) != os.getpgid(0)
            for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(pid, number)
            await made.write(state(), tmp_path / "a")
            assert made.restarts == 0

    async def test_sigterm_lets_it_finish(self, tmp_path, gate) -> None:
        """The process writes what it has, ends, and is replaced."""
        async with process(gate=gate) as made:
            submission = await submit(made, state(), tmp_path / "a")
            await has_begun(submission)
            first = pid_of(made)
            os.kill(first, signal.SIGTERM)
            gate.open(2)
            assert await submission.written()
            await made.write(state(2.0), tmp_path / "b")  # by either of the two
            await eventually(lambda: made.pid not in (None, first), "the successor")
        assert_same(loaded(tmp_path / "a"), state())

    async def test_what_cannot_be_pickled_is_refused_at_once(self) -> None:
        """The constructor refuses it, not the first save."""
        function: Any = lambda: None  # noqa: E731
        wrong: list[dict[str, Any]] = [
            {"subprocess_init_fn": function},
            {"subprocess_init_args": (function,)},
        ]
        for options in wrong:
            with pytest.raises(LocalProtocolError, match="cannot be pickled"):
                CheckpointProcess(ALONE, **options)

    @proves("cell CheckpointProcess.ready: error")
    @pytest.mark.allow_error_logs
    async def test_a_failed_init_function_is_told(self, tmp_path) -> None:
        """Each write raises it as a RuntimeError, with its traceback, as torch does."""
        async with process(subprocess_init_fn=refuse) as made:
            with pytest.raises(WorkerError, match="no such environment"):
                await made.ready()
            for _ in range(2):
                with pytest.raises(WorkerError, match="no such environment") as caught:
                    await made.write(state(), tmp_path / "a")
                assert "LookupError" in caught.value.remote_traceback
                assert isinstance(caught.value, RuntimeError)
                assert not isinstance(caught.value, TimeoutError)

    @proves("cell CheckpointProcess.ready: timeout")
    @pytest.mark.allow_error_logs
    async def test_a_slow_start_has_a_deadline(self, tmp_path, gate) -> None:
        """A child that does not become ready is killed."""
        async with process(
            {"subprocess_init_timeout_secs": 0.2},
            subprocess_init_fn=pass_gate,
            subprocess_init_args=(gate.path,),
        ) as made:
            limit = r"0.2 s \(subprocess_init_timeout"
            with pytest.raises(WorkerTimeoutError, match=limit) as caught:
                await made.write(state(), tmp_path / "a")
            assert isinstance(caught.value, RuntimeError)
            assert isinstance(caught.value, TimeoutError)
            assert caught.value.exitcode == -9
            assert "raise that limit" in str(caught.value)

    async def test_each_write_has_its_own_limit(self, tmp_path) -> None:
        """Each of several writes has one, also when the trainer is gone."""
        async with process(
            {"write_timeout_secs": 4}, checkpoint_writer_init_fn=SlowWriter
        ) as made:
            for step in range(4):
                await submit(made, state(), tmp_path / f"step-{step}")
            await made.abandon()
            last = tmp_path / "step-3"
            await eventually(last.exists, "the last write")
        assert_same(loaded(last), state())


@pytest.mark.asyncio
class TestDeath:
    """One failed write ends nothing, and a child that dies is replaced."""

    @proves("cell CheckpointProcess.write: error")
    async def test_a_storage_error_arrives_as_one(self, tmp_path) -> None:
        """The error arrives with its path and the traceback of the other process."""
        (tmp_path / "file").touch()
        async with process() as made:
            await made.ready()
            pid = made.pid
            with pytest.raises(StorageError) as caught:
                await made.write(state(), tmp_path / "file" / "a")
            assert str(tmp_path / "file") in caught.value.path
            assert "in the checkpoint process:\nTraceback" in caught.value.__notes__[0]
            await made.write(state(), tmp_path / "a")
            assert (made.pid, made.restarts) == (pid, 0)

    @proves("cell CheckpointProcess.write: the other one dies")
    @pytest.mark.parametrize(("trouble", "exitcode"), [("die", -9), ("exit", 3)])
    async def test_the_write_fails_and_the_next_one_works(
        self, tmp_path, trouble: str, exitcode: int
    ) -> None:
        """The path keeps what was there before."""
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

    @proves(
        "cell AsyncCheckpointer.save: the other one dies",
        "cell CheckpointProcess.submit: the other one dies",
        "cell SaveHandle.written: the other one dies",
    )
    async def test_what_waited_is_written_by_the_next_one(self, tmp_path, gate) -> None:
        """A death is noticed at once, and only what was begun is lost."""
        async with process(gate=gate) as made:
            begun = await submit(made, state(1.0), tmp_path / "a")
            waits = await submit(made, state(2.0), tmp_path / "b")
            await has_begun(begun)
            os.kill(pid_of(made), signal.SIGKILL)
            with pytest.raises(WorkerError, match="by signal 9"):  # and not by a limit
                await begun.written()
            gate.open()
            assert await waits.written()
        assert_same(loaded(tmp_path / "b"), state(2.0))
        assert not (tmp_path / "a").exists()

    async def test_pauses_grow_between_those_that_die(self, tmp_path, caplog) -> None:
        """A save meanwhile returns, and is written by the next one."""
        async with process() as made:
            for death in (1, 2):
                await made.ready()
                os.kill(pid_of(made), signal.SIGKILL)
                await eventually(partial(has_restarted, made, death), "the death")
            assert "another one is started in 1 s" in caplog.text
            assert made.pid is None
            kept = await submit(made, state(), tmp_path / "a")
            dropped = await submit(made, state(), tmp_path / "b")
            made.drop(dropped)
            assert await dropped.written() is False
            assert await kept.written()
        assert_same(loaded(tmp_path / "a"), state())
        assert not (tmp_path / "b").exists()

    @proves("cell CheckpointProcess.write: timeout")
    @pytest.mark.parametrize("limit", ["hang", "write"])
    async def test_a_hung_one_is_killed_and_replaced(
        self, tmp_path, gate, limit: str
    ) -> None:
        """One that is stopped says nothing; one in a hung system call does."""
        limits = {
            "hang": {"hang_timeout_secs": 3},
            "write": {"write_timeout_secs": 3},
        }
        async with process(limits[limit], gate) as made:
            submission = await submit(made, state(), tmp_path / "a")
            await has_begun(submission)
            if limit == "hang":
                os.kill(pid_of(made), signal.SIGSTOP)
            with pytest.raises(WorkerError, match=rf"{limit}_timeout_secs.*was killed"):
                await submission.written()
            gate.open()
            await made.write(state(), tmp_path / "a")
            assert made.restarts == 1

    async def test_a_busy_one_is_not_taken_for_hung(self, tmp_path, gate) -> None:
        """It says that it is alive, also while the loop here stands still."""
        async with process({"hang_timeout_secs": 4}, gate) as made:
            submission = await submit(made, state(), tmp_path / "a")
            await has_begun(submission)
            time.sleep(5)  # noqa: ASYNC251 - a training step that blocks the loop
            await asyncio.sleep(0.05)
            gate.open()
            assert await submission.written()
            assert made.restarts == 0


@pytest.mark.asyncio
class TestEnd:
    """Nothing is left after `close`."""

    @proves(
        "cell CheckpointProcess.submit: success",
        "cell SaveHandle.written: success",
        "cell CheckpointProcess.close, aclose: success",
        "cell CheckpointProcess.close, aclose: cancel",
    )
    async def test_closing_waits_for_what_was_handed_over(self, tmp_path) -> None:
        """It is written, also if the first call of close is cancelled."""
        made = CheckpointProcess(ALONE)
        submissions = [
            await submit(made, state(fill), tmp_path / f"{fill}") for fill in (1.0, 2.0)
        ]
        closing = asyncio.create_task(made.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        await made.close()
        assert all([await each.written() for each in submissions])
        assert_same(loaded(tmp_path / "2.0"), state(2.0))


def test_it_may_be_made_and_closed_before_there_is_a_loop(tmp_path) -> None:
    """It may be closed more than once, and need not have been used."""
    made = CheckpointProcess(ALONE)

    async def ended() -> None:
        await made.close()
        await made.aclose()
        with pytest.raises(ClosedError):
            await made.write(state(), tmp_path / "a")

    asyncio.run(ended())


@proves("cell CheckpointProcess.write: cancel")
@proves("invariant 8")
@pytest.mark.asyncio
async def test_a_cancel_at_every_await_leaves_it_usable(tmp_path) -> None:
    """A write is either not handed over at all, or is written wholly."""
    async with process() as made:
        await made.ready()
        for turns in range(0, 30, 3):
            task = asyncio.create_task(
                made.write(state(float(turns)), tmp_path / f"step-{turns}")
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
        await made.write(state(), tmp_path / "last")
        assert_same(loaded(tmp_path / "last"), state())
        for path in tmp_path.glob("step-*"):
            assert_same(loaded(path), state(float(path.name[5:])))
        assert made.restarts == 0


class TestMainModule:
    """The child may need the trainer's main module."""

    SCRIPT = """
import asyncio, os, torch, aiockpt
print("main runs as", __name__, flush=True)

def init(text):
    print("child says", text, flush=True)

async def main():
    async with aiockpt.make_async_checkpointer({options}) as checkpointer:
        assert await (await checkpointer.save(dict(a=torch.ones(3)), "s")).written()

{guard}
    asyncio.run(main())
"""
    INIT = "subprocess_init_fn=init, subprocess_init_args=('hello',)"
    GUARD = "if __name__ == '__main__':"
    MAIN = "main runs as __main__"
    READ = "import sys; sys.path[:] = {path!r}; exec(open('script.py').read())"

    @pytest.mark.parametrize(
        ("flags", "options", "guard", "said"),
        [
            # It trains once, as it would not with multiprocessing's spawn.
            ([], "", "if True:", [MAIN]),
            # A function of it makes the child import it, under another name.
            ([], INIT, GUARD, [MAIN, "main runs as __mp_main__", "child says hello"]),
            # Without a guard the child would train, too.
            ([], INIT, "if True:", None),
            # The child of an isolated interpreter finds what the trainer has found.
            pytest.param(["-I"], "", "if True:", [MAIN], marks=pytest.mark.nightly),
        ],
    )
    def test_a_script(self, tmp_path, flags, options: str, guard: str, said) -> None:
        """It is imported only if it has a function that the child needs."""
        text = self.SCRIPT.format(options=options, guard=guard)
        script = tmp_path / "script.py"
        script.write_text(text)
        if flags:
            flags = [*flags, "-c", self.READ.format(path=sys.path)]
        done = subprocess.run(
            [sys.executable, *(flags or [str(script)])],
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=PATIENCE * 2,
            check=False,
        )
        assert (tmp_path / "s" / "commit.json").exists() is (said is not None)
        if said is None:
            assert done.returncode
            assert f"guard it by `{self.GUARD}`" in done.stderr
        else:
            assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr
