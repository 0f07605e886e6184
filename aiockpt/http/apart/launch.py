"""Starts the process that serves, and waits for its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from aiockpt.http.forks import close_in_forks
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.channel import Channel, pair

__all__ = ["Child"]

_CODE: Final = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from aiockpt.http.apart.child import main; main(int(sys.argv[1]))"
)
_LOOK: Final = 0.01


class Child:
    """One process, from its start until it was reaped.

    Args:
        on_message: Called with each message and its descriptors.
    """

    def __init__(self, on_message: Callable[[bytes, list[int]], None]) -> None:
        self._ended = asyncio.Event()
        ours, self._theirs = pair()
        close_in_forks([ours])
        self.channel = Channel(ours, on_message, self._ended.set)
        self._popen: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<Child pid={self.pid}>"

    @property
    def pid(self) -> int | None:
        """Its process id, once it was launched."""
        return self._popen.pid if self._popen else None

    async def launch(self, bridge: Bridge) -> None:
        """Start it.

        Raises:
            OSError: the system refused.
        """
        try:
            await bridge.run(self._launch)
        finally:
            self._theirs.close()  # or its end would not be noticed

    def _launch(self) -> None:
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing does
        there = self._theirs.fileno()
        self._popen = subprocess.Popen(  # noqa: S603 - this very interpreter
            [sys.executable, *flags, "-c", _CODE, str(there), *map(str, sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(there,),
            # A Ctrl-C, or whatever ends the trainer's group, is not for it. But in a
            # session of its own its niceness would not count (autogroups).
            process_group=0,
        )

    async def gone(self) -> None:
        """Wait until it says nothing more."""
        await self._ended.wait()

    def kill(self) -> None:
        """End it at once, whatever it does."""
        if self._popen is not None:
            self._popen.kill()

    async def reaped(self) -> str:
        """Wait for its end, which is near; return how it has ended."""
        self.channel.close()
        self._theirs.close()
        popen = self._popen
        if popen is None:
            return "it was not started"
        with suppress(OSError, AttributeError):  # an old kernel: by looking
            await _end_of(popen.pid)
        while popen.poll() is None:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(_LOOK)
        return f"exit code {popen.returncode}"


async def _end_of(pid: int) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    fd = os.pidfd_open(pid)
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
