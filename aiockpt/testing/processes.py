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
import shutil
import signal
import subprocess
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from aiockpt.runtime.bridge import start_daemon

_POLL = 0.001
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_FAKETIME = "faketime/libfaketimeMT.so.1"
_PLACES = ("/usr/lib", "/usr/local/lib", "/usr/lib64")


class FaultUnavailableError(RuntimeError):
    """This machine cannot produce ``fault``, for the given ``reason``.

    The tested code has not failed: skip the test with the reason.
    """

    def __init__(self, fault: str, reason: str) -> None:
        super().__init__(fault, reason)
        self.fault = fault
        self.reason = reason

    def __str__(self) -> str:
        return f"no {self.fault} here: {self.reason}"


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


@contextmanager
def busy_interpreter(threads: int = 1, *, hold: float | None = None) -> Iterator[None]:
    """Run threads that compute in Python until the end of the block.

    Args:
        threads: The number of threads.
        hold: The seconds for which a thread holds the interpreter lock each time, like
            an extension that does not release it; None: Python's switch interval.
    """
    interval, stop = sys.getswitchinterval(), threading.Event()
    if hold is not None:
        sys.setswitchinterval(hold)
    spinning = [start_daemon("busy", _spin, stop) for _ in range(threads)]
    try:
        yield
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in spinning:
            thread.join()


def _spin(stop: threading.Event) -> None:
    while not stop.is_set():
        for _ in range(1000):
            pass


# ------------------------------------------------------------------------------ clocks


@contextmanager
def wall_clock_jumped(seconds: float) -> Iterator[None]:
    """Shift ``time.time`` and ``time.time_ns`` of this process by ``seconds``.

    This affects Python code that calls them by these names. Code that has imported the
    function itself, or is written in C, sees the real time: see `WallClock`.
    """
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)
    try:
        yield
    finally:
        time.time, time.time_ns = real, real_ns


class WallClock:
    """A wall clock for processes that are started with its environment.

    It can jump while they run. It needs libfaketime (``apt install libfaketime``). With
    version 0.9.10, ``time.sleep`` fails (EINVAL) and threads wait forever, so the
    programs must use neither. At the end of the block, the files that killed processes
    left in ``/dev/shm`` are removed.

    Args:
        file: The file with the offset, which the processes read.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.jump(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for left in Path("/dev/shm").glob("*faketime_*"):
            if not Path("/proc", left.name.rpartition("_")[2]).exists():
                left.unlink(missing_ok=True)

    def jump(self, seconds: float) -> None:
        """Set the clock ``seconds`` ahead of the machine's clock."""
        self._file.write_text(f"{seconds:+f}\n")

    def environment(self) -> dict[str, str]:
        """Return the environment variables for a process.

        Raises:
            FaultUnavailableError: libfaketime is not installed.
        """
        found = [path for place in _PLACES for path in _libraries(Path(place))]
        if not found:
            raise FaultUnavailableError("wall clock that jumps", "no libfaketime")
        return {
            "LD_PRELOAD": str(found[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }


def _libraries(place: Path) -> list[Path]:
    return [*place.glob(_FAKETIME), *place.glob(f"*/{_FAKETIME}")]


def monotonic_ahead(seconds: int, program: Sequence[str]) -> list[str]:
    """Return the command to run a program with its monotonic clock set ahead.

    Two processes then disagree on it, as after a restart of the host. Needs root.

    Raises:
        FaultUnavailableError: this process may not create a time namespace.
    """
    clocks = [f"--{clock}={seconds}" for clock in ("monotonic", "boottime")]
    prefix = ["unshare", "--time", "--fork", "--kill-child", *clocks]
    reason = "unshare is not installed"
    if shutil.which("unshare"):
        tried = [*prefix, "true"]
        done = subprocess.run(tried, capture_output=True, text=True, check=False)
        reason = done.stderr.strip() if done.returncode else ""
    if reason:
        raise FaultUnavailableError("monotonic clock that differs", reason)
    return [*prefix, *program]
