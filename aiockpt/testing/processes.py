"""A peer in a process of its own, which can be killed, stopped and started again.

::

    async with PeerProcess([sys.executable, "serve.py"]) as peer:
        address = await peer.line()
        await peer.stop()  # SIGSTOP: it is there, and says nothing
        peer.resume()
        await peer.kill()  # SIGKILL
        await peer.start()  # the same program once more
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["PeerProcess"]

_POLL = 0.001


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


_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def _stands_still(pid: int) -> bool:
    """Tell whether every thread of a process is stopped."""
    try:
        tasks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False  # a thread ended meanwhile
    return all(task.rpartition(")")[2].split()[0] == "T" for task in tasks)
