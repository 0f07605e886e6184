"""Waiting for other processes, and looking at them; torch is not needed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds that a slow machine may take to start a process."""


OF_TRAINER = {
    *(signal.SIGINT, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU),  # of a terminal
    *(signal.SIGUSR1, signal.SIGUSR2),  # of a scheduler
}
"""The signals that are not meant for a process of the trainer."""


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Poll for what another process does; block."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.01)


async def eventually(condition: Callable[[], Any], what: str) -> None:
    """Poll for what happens elsewhere; the loop runs."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.01)


def state_of(pid: int) -> str:
    """Return the letter that stands for a process's state; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Tell whether a process is there, and is no zombie."""
    return state_of(pid) not in ("", "Z")


def ignored(pid: int) -> set[signal.Signals]:
    """Return the signals that a process ignores."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert found
    mask = int(found[1], 16)
    return {each for each in signal.Signals if mask >> (each - 1) & 1}


def reaped(pid: int) -> None:
    """Reap a child that was abandoned: who does that dies, as a rule."""
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def servers_of(port: int) -> set[int]:
    """Return the other processes that can accept connections at a port."""
    sockets = set[str]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    found = set[int]()
    for place in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # it has ended, or is another user's
            if sockets & {os.readlink(each) for each in place.iterdir()}:
                found.add(int(place.parent.name))
    return found - {os.getpid()}


def maps(pid: int, what: str) -> bool:
    """Tell whether a process has mapped something of this name."""
    return what in Path(f"/proc/{pid}/maps").read_text()


def has_torch(pid: int) -> bool:
    """Tell whether a process has loaded torch."""
    return maps(pid, "libtorch")


@contextmanager
def forked() -> Iterator[None]:
    """Fork a child, which lives until the end of the block."""
    ready, done = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        os.write(ready[1], b"!")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        yield
    finally:
        os.write(done[1], b"!")
        os.waitpid(pid, 0)
        for end in (*ready, *done):
            os.close(end)
