"""Places that are soon full: a small disk, and a small ``/dev/shm``. They need root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from aiockpt.testing.processes import FaultUnavailableError

__all__ = ["in_small_shm", "small_disk"]


@contextmanager
def small_disk(place: Path, nbytes: int) -> Iterator[Path]:
    """Give a file system of ``nbytes`` at ``place``, a directory that is made for it.

    It is a tmpfs: it knows a full disk (ENOSPC), and has no disk that could fail.

    Raises:
        FaultUnavailableError: this process may not mount it.
    """
    place.mkdir(exist_ok=True)
    options = f"size={nbytes},mode=0777"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", os.fspath(place)]
    if reason := _refused(mount):
        raise FaultUnavailableError("small disk", reason)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def in_small_shm(nbytes: int, program: Sequence[str]) -> list[str]:
    """Return the command of a program for which ``/dev/shm`` has ``nbytes``.

    It runs in a mount namespace of its own, so nobody else notices.

    Raises:
        FaultUnavailableError: this process may not make one.
    """
    mount = f'mount -t tmpfs -o size={nbytes} tmpfs /dev/shm && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if reason := _refused([*prefix, "true"]):
        raise FaultUnavailableError("small /dev/shm", reason)
    return [*prefix, *program]


def _refused(command: Sequence[str]) -> str:
    """Run a command; return why it failed, if it did."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""
