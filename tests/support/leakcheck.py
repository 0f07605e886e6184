"""What a test must not leave behind: threads, descriptors, memory, processes, errors.

:class:`Footprint` is what the process holds at one moment; the difference of two is
what came in between and stayed.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import forkserver

PATIENCE = 20.0
"""Seconds that a thread or a process which was told to end may take to be gone.

On a busy machine, a process of low priority needs seconds to end.
"""

ALLOWED_THREADS = {
    "tqdm_monitor": "a daemon that other libraries' progress bars start once",
}
"""Names of threads that may stay, with the reason."""

ALLOWED_CHILDREN = {
    "resource_tracker": "multiprocessing starts it once and ends it with the process",
    "multiprocessing.forkserver": "Python starts it once and ends it with the process",
}
"""Parts of command lines of children that may stay, with the reason."""


def threads() -> set[str]:
    """Return the threads that Python knows and nobody allowed."""
    return {
        f"{thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not any(name in thread.name for name in ALLOWED_THREADS)
    }


def fds() -> set[str]:
    """Return the open descriptors with what they point to."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of this very listing
            found.add(f"{number} -> {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def shm() -> set[str]:
    """Return the named shared memory that this process and its descendants made.

    Python's begins with a prefix of this run (``forkserver.name_shared_memory``), and
    torch's has the id of the process.
    """
    prefix = os.environ[forkserver.SHARED]
    ours = (prefix, f"sem.{prefix}", f"torch_{os.getpid()}_")
    return {name for name in os.listdir("/dev/shm") if name.startswith(ours)}


def children() -> set[str]:
    """Return the child processes, zombies too, that nobody allowed."""
    multiprocessing.active_children()  # reaps those that have ended
    pids = forkserver.children_of(os.getpid()) - forkserver.ADOPTED
    found = set(map(_describe, pids))
    return {
        child for child in found if not any(part in child for part in ALLOWED_CHILDREN)
    }


def _describe(pid: int) -> str:
    with suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return f"{pid}: {line.strip() or 'zombie'}"
    return f"{pid}: gone"


KINDS: dict[str, Callable[[], set[str]]] = {
    "threads": threads,
    "fds": fds,
    "shm": shm,
    "children": children,
}


class Footprint:
    """What the process holds now, by kind."""

    def __init__(self, kinds: set[str]) -> None:
        self._held = {kind: KINDS[kind]() for kind in sorted(kinds)}

    def grown(self) -> dict[str, list[str]]:
        """Return what has come since and is still here after a while."""
        deadline = time.monotonic() + PATIENCE
        while (growth := self._growth()) and time.monotonic() < deadline:
            gc.collect()  # again and again: a thread may just have held on to something
            time.sleep(0.01)  # what was told to end has no event to wait for
        return growth

    def _growth(self) -> dict[str, list[str]]:
        now = {kind: KINDS[kind]() - held for kind, held in self._held.items()}
        return {kind: sorted(new) for kind, new in now.items() if new}


class ErrorLog(logging.Handler):
    """Collects the ERROR records of one test."""

    def __init__(self) -> None:
        super().__init__(level=logging.ERROR)
        self.records: list[logging.LogRecord] = []
        self.allowed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record."""
        self.records.append(record)

    def messages(self) -> list[str]:
        """Return the records as lines, with the exception that they carry."""
        return [
            f"{record.name}: {record.getMessage()}"
            + (f" ({record.exc_info[1]!r})" if record.exc_info else "")
            for record in self.records
        ]


def allowed_leaks(item: pytest.Item) -> set[object]:
    """Return the kinds that the test's ``allow_leaks`` markers name."""
    return {kind for mark in item.iter_markers("allow_leaks") for kind in mark.args}
