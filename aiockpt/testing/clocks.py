"""Clocks that jump: the wall clock here, or in a process; the monotonic one there.

The clock of the machine itself is never touched.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from aiockpt.testing.unavailable import FaultUnavailableError

__all__ = ["WallClock", "monotonic_ahead", "wall_clock_jumped"]

_LIBRARY = "faketime/libfaketimeMT.so.1"
_PLACES = ("/usr/lib", "/usr/local/lib", "/usr/lib64")


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
    return [*place.glob(_LIBRARY), *place.glob(f"*/{_LIBRARY}")]


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
