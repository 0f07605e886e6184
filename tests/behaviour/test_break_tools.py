"""The tools that break processes, calls, loops and clocks do what they say."""

from __future__ import annotations

import asyncio
import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiockpt.testing import (
    LaggingLoop,
    PeerProcess,
    interruptions,
    wall_clock_jumped,
)
from tests.support.waiting import eventually, is_running, state_of

pytestmark = pytest.mark.torch_free


def python(code: str, *arguments: str) -> list[str]:
    """Return the command of a program in Python."""
    return [sys.executable, "-c", code, *arguments]


def said(command: list[str]) -> str:
    """Return what a program prints."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


class Journal:
    """A call with a child task, which writes down how both fared."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def call(self) -> str:
        """Turn the loop, wait for a task, and wait for a failure that may come."""
        await asyncio.sleep(0)
        child = asyncio.create_task(self.child())
        try:
            return await child
        finally:
            child.cancel()
            await asyncio.wait({child})
            self.said.append("over")

    async def child(self) -> str:
        """Wait for what the loop does."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def finish() -> None:
            if not done.done():  # it may be cancelled, and this task not know it yet
                done.set_result("done")

        timer = loop.call_later(0.001, finish)
        try:
            return str(await done)
        except OSError as error:
            self.said.append("failed")
            raise ConnectionError("translated") from error
        except asyncio.CancelledError:
            self.said.append("cancelled")
            raise
        finally:
            timer.cancel()


@pytest.mark.asyncio
class TestInterrupting:
    """One point after another, the ones of its tasks too."""

    async def test_every_point_is_cancelled_once(self) -> None:
        """Each run is cancelled at the next point, and the last one is not."""
        journal = Journal()
        seen = [struck async for struck in interruptions(journal.call)]
        assert [struck.at for struck in seen] == list(range(len(seen)))
        assert [struck.reached for struck in seen] == [True] * (len(seen) - 1) + [False]
        *cut, last = seen
        assert all(struck.cancelled for struck in cut[:3])
        assert last.returned
        assert last.task.result() == "done"
        assert "cancelled" in journal.said
        said = [str(struck) for struck in seen]
        assert any("test_break_tools.py" in each and " child" in each for each in said)
        assert "no point" in said[-1]

    async def test_an_error_comes_out_of_what_was_waited_for(self) -> None:
        """The error comes only where the awaited call can fail."""
        journal = Journal()
        seen = [
            struck
            async for struck in interruptions(
                journal.call, error=lambda: OSError(errno.EIO, "on purpose")
            )
        ]
        kinds = [type(struck.error) for struck in seen]
        assert kinds == [OSError, ConnectionError, type(None)]
        assert journal.said == ["over", "failed", "over", "over"]


@pytest.mark.asyncio
class TestPeerProcess:
    """It is killed, stopped and started again."""

    PROGRAM = (
        "import time\nfor n in range(1000): print(n, flush=True); time.sleep(0.01)"
    )

    async def test_it_stands_still_goes_on_and_is_started_again(self) -> None:
        """Stopped it says nothing; a stopped one is killed, too."""
        async with PeerProcess(python(self.PROGRAM)) as peer:
            assert await peer.line() == "0"
            await peer.stop()
            assert state_of(peer.pid) == "T"
            peer.resume()
            assert await peer.line() == "1"
            first = peer.pid
            await peer.stop()
            await peer.kill()
            assert peer.returncode == -signal.SIGKILL
            await peer.start()
            assert peer.pid != first
            assert await peer.line() == "0"

    async def test_its_children_go_with_it(self) -> None:
        """The tool ends the children, which are in its process group."""
        code = "import os, time\nprint(os.fork(), flush=True)\ntime.sleep(60)"
        async with PeerProcess(python(code)) as peer:
            child = int(await peer.line()) or int(await peer.line())
        await eventually(lambda: not is_running(child), "its end")

    async def test_its_end_is_told(self, tmp_path: Path) -> None:
        """The report has its exit code, and what it wrote to stderr."""
        code = "import sys\nprint('word', file=sys.stderr)\nsys.exit(3)"
        async with PeerProcess(python(code), errors=tmp_path / "errors") as peer:
            with pytest.raises(EOFError, match="ended its output"):
                await peer.line()
            assert await peer.ended() == 3
        assert (tmp_path / "errors").read_text() == "word\n"


@pytest.mark.asyncio
class TestLag:
    """A lag lets time pass while the loop stands still."""

    async def test_the_loop_stands_still_again_and_again(self) -> None:
        """The loop stands still for the given time, until the block ends."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        with LaggingLoop(0.05, pause=0.001) as lag:
            while lag.count < 3:  # noqa: ASYNC110 - it is counted by the loop
                await asyncio.sleep(0)
        assert loop.time() - began >= 0.14
        count = lag.count
        await asyncio.sleep(0.01)
        assert lag.count == count


class TestClocks:
    """Clocks of processes jump, and that of the machine does not."""

    CLOCKS = "print([time.time(), time.monotonic()], flush=True)\n"

    def test_the_wall_clock_of_this_process_jumps(self) -> None:
        """The clock of this process jumps, and comes back at the end."""
        before = time.time()
        with wall_clock_jumped(-3600):
            assert time.time() < before - 3000
            assert time.time_ns() / 1e9 == pytest.approx(time.time(), abs=5)
        assert time.time() >= before
