"""Leaves a process without descriptors, for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["exhausted_fds"]

_OPEN = Path("/dev/fd")


@contextmanager
def exhausted_fds(*, left: int = 0) -> Iterator[None]:
    """Let the process open only ``left`` more descriptors for the length of the block.

    What is open stays so. What the block closes can be opened again.
    """
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.open(os.devnull, os.O_RDONLY)]
    # So low a limit that there is little to fill; never below what is open.
    highest = max(int(entry.name) for entry in _OPEN.iterdir())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + left, limits[1]))
        _fill(spare)
        for fd in spare[:left]:
            os.close(fd)
        del spare[:left]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in spare:
            os.close(fd)


def _fill(fds: list[int]) -> None:
    try:
        while True:
            fds.append(os.dup(fds[0]))
    except OSError:
        return  # there are no more
