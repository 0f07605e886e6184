"""Plain files as references: written with large writes, with and without fsync."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from aiockpt.bench.memory import warm_host

__all__ = ["Figures", "clean", "settle", "timed_call", "write_raw"]

Figures = dict[str, float]
"""What one measurement found, by name; ``seconds`` is always there."""

_PIECE = 8 << 20
_PAUSE = 0.3


def write_raw(path: Path, memory: memoryview, *, fsync: bool) -> float:
    """Write a new file, its blocks allocated first; return the seconds."""
    started = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.posix_fallocate(fd, 0, len(memory))  # or large writes wait for the disk
        rest = memory
        while rest:
            rest = rest[os.write(fd, rest[:_PIECE]) :]
        if fsync:
            os.fsync(fd)
        return time.perf_counter() - started
    finally:
        os.close(fd)


def timed_call(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def settle(nbytes: int) -> None:
    """Have the disk idle, and memory at hand for ``nbytes`` of the system's cache.

    Both are what the one before may have left to whoever comes next.
    """
    os.sync()
    time.sleep(_PAUSE)
    warm_host(nbytes)


def clean(directory: Path) -> None:
    """Remove what was written, and wait until the disk has nothing left to do."""
    for each in directory.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink()
    os.sync()
