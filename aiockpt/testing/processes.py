"""Breaks processes, loops and clocks: kills and stops, blocks, moves the time.

`PeerProcess` is a peer in a process of its own, which can be killed, stopped and
started again::

    async with PeerProcess([sys.executable, "serve.py"]) as peer:
        address = await peer.line()
        await peer.stop()  # SIGSTOP: it is there, and says nothing
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

__all__ = [
    "FaultUnavailableError",
    "LaggingLoop",
    "PeerProcess",
    "WallClock",
    "busy_interpreter",
    "monotonic_ahead",
    "wall_clock_jumped",
]

_POLL = 0.001
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_FAKETIME = "faketime/libfaketimeMT.so.1"
_PLACES = ("/usr/lib", "/usr/local/lib", "/usr/lib64")


class FaultUnavailableError(RuntimeError):
    """This machine does not permit a fault; ``fault`` is which, ``reason`` is why.

    It is no failure of what was to be tested: skip the test, and say the reason.
    """

    def __init__(self, fault: str, reason: str) -> None:
        super().__init__(fault, reason)
        self.fault = fault
        self.reason = reason

    def __str__(self) -> str:
        return f"no {self.fault} here: {self.reason}"


# --------------------------------------------------------------------------- processes


class PeerProcess:
    """A program, and what may happen to it.

    It leads a process group, so a Ctrl-C is not for it; at the end of the block it is
    killed with its group. A child of it in another group is not.

    Args:
        command: The program and its arguments.
        env: Variables beside this process's own.
        errors: A file that gets what it writes to stderr; this process's by default.
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
        """Return the id of the process that was started last."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """Return the code that it ended with, or None while it runs."""
        return self._started().returncode

    async def start(self) -> None:
        """Start the program; one that runs is killed first."""
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
        """Return the next line of what it prints, without the line's end.

        Raises:
            EOFError: it has ended, or closed its output.
        """
        output = self._started().stdout
        assert output is not None
        if not (line := await output.readline()):
            raise EOFError(f"{self!r} says nothing more: {self.command}")
        return line.decode().rstrip("\n")

    async def stop(self) -> None:
        """SIGSTOP it; return when it stands still."""
        process = self._started()
        process.send_signal(signal.SIGSTOP)
        # The kernel tells it by a wait only, and those are the loop's.
        while process.returncode is None and not _stands_still(process.pid):  # noqa: ASYNC110
            await asyncio.sleep(_POLL)

    def resume(self) -> None:
        """SIGCONT it."""
        self._started().send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL it and its group, and wait for its end; does nothing without one."""
        if (process := self._process) is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()  # closes the pipe, too

    async def ended(self) -> int:
        """Wait until it ends by itself; return its code."""
        return await self._started().wait()

    def _started(self) -> Process:
        if self._process is None:
            raise RuntimeError("the process was not started: await start()")
        return self._process


def _stands_still(pid: int) -> bool:
    """Tell whether every thread of a process is stopped."""
    try:
        tasks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False  # a thread ended meanwhile
    return all(task.rpartition(")")[2].split()[0] == "T" for task in tasks)


# -------------------------------------------------------------- loops and interpreters


class LaggingLoop:
    """Blocks the running loop for ``seconds``, again and again; a context manager.

    It is what a training step does that somebody calls on the loop.

    Args:
        seconds: How long the loop stands still each time.
        pause: How long it runs in between.
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
    """Have threads compute in Python until the end of the block.

    Args:
        threads: How many.
        hold: Seconds for which one keeps the interpreter lock each time that it has
            it, as an extension does that does not let go of it; else Python's own.
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
    """Have ``time.time`` and ``time.time_ns`` of this process tell another time.

    That is what Python code sees which calls them by these names. What has imported
    the function itself, or is written in C, sees the real time: see `WallClock`.
    """
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)
    try:
        yield
    finally:
        time.time, time.time_ns = real, real_ns


class WallClock:
    """The wall clock of the processes that are started with its variables.

    It jumps while they run. It needs libfaketime (``apt install libfaketime``). With
    0.9.10 ``time.sleep`` fails (EINVAL) and threads wait for ever, so it is for
    programs without both. What killed processes leave of it in ``/dev/shm`` is swept at
    the end of the block.

    Args:
        file: Where the offset is written; the processes read it.
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
        """Be so many seconds ahead of the machine's clock from now on."""
        self._file.write_text(f"{seconds:+f}\n")

    def environment(self) -> dict[str, str]:
        """Return the variables to start a process with.

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
    """Return the command of a program whose monotonic clock is ahead of the machine's.

    As after a restart of the host, two processes then disagree on it. It needs root.

    Raises:
        FaultUnavailableError: this process may not make a time namespace.
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
