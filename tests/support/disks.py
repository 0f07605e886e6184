"""A file system that is soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, nbytes: int) -> Iterator[Path]:
    """Mount a tmpfs of a given size at ``place``; skips where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    place.mkdir()
    options = f"size={nbytes},mode=0777"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
