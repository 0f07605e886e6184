"""What a test must not leave behind: threads, descriptors, memory, processes, errors.

:class:`Footprint` is what the process holds at one moment; the difference of two is
what came in between and stayed.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
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


SHM_PREFIXES = ("psm_", "sem.", "torch_", "aiockpt")
"""How multiprocessing, torch and this package name what they share.

Other programs of the same user may come and go in the same directory, and so does what
the other processes of the suite share with their children.
"""


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
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # the descriptor of this very listing
            found.add(f"{link.name} -> {link.readlink()}")
    return found


def shm() -> set[str]:
    """Return the named shared memory that Python or torch made for this user."""
    found = set()
    for entry in Path("/dev/shm").glob("*"):
        with suppress(OSError):
            if (
                entry.name.startswith(SHM_PREFIXES)
                and entry.stat().st_uid == os.getuid()
            ):
                found.add(entry.name)
    return found


def mapped_elsewhere() -> set[str]:
    """Return the shared memory in use by processes that do not descend from this."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end at any moment, or be another user's
            maps = (process / "maps").read_text()
            if not _is_ours(process.name):
                found.update(re.findall(r"/dev/shm/(\S+)$", maps, re.MULTILINE))
    return found


def _is_ours(pid: str) -> bool:
    while int(pid) not in (0, os.getpid()):
        pid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return pid != "0"


def children() -> set[str]:
    """Return the child processes, zombies too, that nobody allowed."""
    multiprocessing.active_children()  # reaps those that have ended
    found: set[str] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            pids = set(map(int, listing.read_text().split())) - forkserver.ADOPTED
            found.update(_describe(pid) for pid in pids if not _is_fork_server(pid))
    return {
        child for child in found if not any(part in child for part in ALLOWED_CHILDREN)
    }


def _is_fork_server(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == forkserver.NAME
    return False


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
        if now.get("shm"):
            now["shm"] -= mapped_elsewhere()
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
