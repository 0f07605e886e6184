"""Faults of processes, event loops and clocks.

`PeerProcess` runs a peer in its own process, which can be killed, stopped and started
again::

    async with PeerProcess([sys.executable, "serve.py"]) as peer:
        address = await peer.line()
        await peer.stop()  # SIGSTOP: the process exists and does nothing
        peer.resume()
        await peer.kill()  # SIGKILL
        await peer.start()  # the same program once more

The clock of the machine itself is never touched.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_POLL = 0.001
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


# --------------------------------------------------------------------------- processes


class PeerProcess:
    """A program that can be stopped, killed and started again.

    It leads its own process group, so Ctrl-C does not reach it. At the end of the block
    it is killed with its group, but its children in other groups are not.

    Args:
        command: The program and its arguments.
        env: Environment variables in addition to this process's own.
        errors: A file for the program's stderr; by default this process's stderr.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        errors: Path | None = None,
    ) -> None:
        self.command = [os.fspath(word) for word in command]
        self._env = {**os.environ, **(env or {})}
        self._errors = errors
        self._process: Process | None = None

    def __repr__(self) -> str:
        if self._process is None:
            return "<PeerProcess not started>"
        code = self._process.returncode
        state = "running" if code is None else f"ended code={code}"
        return f"<PeerProcess pid={self._process.pid} {state}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.kill()

    @property
    def pid(self) -> int:
        """Return the id of the last started process."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._started().returncode

    async def start(self) -> None:
        """Start the program; if it runs already, kill it first."""
        await self.kill()
        errors = os.open(self._errors, _APPEND, 0o600) if self._errors else None
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                env=self._env,
                stdout=PIPE,
                stderr=errors,
                start_new_session=True,
            )
        finally:
            if errors is not None:
                os.close(errors)

    async def line(self) -> str:
        """Return the next line of its output, without the newline.

        Raises:
            EOFError: the process has ended or closed its output.
        """
        output = self._started().stdout
        assert output is not None
        if not (line := await output.readline()):
            raise EOFError(f"{self!r} has ended its output: {self.command}")
        return line.decode().rstrip("\n")

    async def stop(self) -> None:
        """Send SIGSTOP; return when all threads have stopped."""
        process = self._started()
        process.send_signal(signal.SIGSTOP)
        # The kernel reports a stop only to wait(), which belongs to the event loop.
        while process.returncode is None and not _stands_still(process.pid):  # noqa: ASYNC110
            await asyncio.sleep(_POLL)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._started().send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """Send SIGKILL to its group and wait for its end, if the process runs."""
        if (process := self._process) is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()  # closes the pipe, too

    async def ended(self) -> int:
        """Wait until the process ends by itself; return its exit code."""
        return await self._started().wait()

    def _started(self) -> Process:
        if self._process is None:
            raise RuntimeError("the process was not started: await start()")
        return self._process


def _stands_still(pid: int) -> bool:
    """Say whether every thread of a process is stopped."""
    try:
        tasks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False  # a thread ended meanwhile
    return all(task.rpartition(")")[2].split()[0] == "T" for task in tasks)


# -------------------------------------------------------------- loops and interpreters


class LaggingLoop:
    """Blocks the running loop for ``seconds`` repeatedly; a context manager.

    It simulates training steps that run on the event loop.

    Args:
        seconds: How long the loop is blocked each time.
        pause: How long it runs in between, in seconds.
    """

    def __init__(self, seconds: float, *, pause: float) -> None:
        self.seconds = seconds
        self.pause = pause
        self.count = 0
        self._next: asyncio.Handle | None = None

    def __enter__(self) -> LaggingLoop:
        self._next = asyncio.get_running_loop().call_soon(self._block)
        return self

    def __exit__(self, *_: object) -> None:
        if self._next is not None:
            self._next.cancel()

    def __repr__(self) -> str:
        return f"<LaggingLoop seconds={self.seconds} count={self.count}>"

    def _block(self) -> None:
        time.sleep(self.seconds)
        self.count += 1
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(self.pause, self._block)


# ------------------------------------------------------------------------------ clocks


@contextmanager
def wall_clock_jumped(seconds: float) -> Iterator[None]:
    """Shift ``time.time`` and ``time.time_ns`` of this process by ``seconds``.

    This affects Python code that calls them by these names. Code that has imported the
    function itself, or is written in C, sees the real time.
    """
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)
    try:
        yield
    finally:
        time.time, time.time_ns = real, real_ns
