"""Clocks of other processes that jump or differ, and an interpreter that is busy."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.support.shortages import FaultUnavailableError

_FAKETIME = "faketime/libfaketimeMT.so.1"
_PLACES = ("/usr/lib", "/usr/local/lib", "/usr/lib64")


@contextmanager
def busy_interpreter(threads: int = 1, *, hold: float | None = None) -> Iterator[None]:
    """Run threads that compute in Python until the end of the block.

    Args:
        threads: The number of threads.
        hold: The seconds for which a thread holds the interpreter lock each time, like
            an extension that does not release it; None: Python's switch interval.
    """
    interval, stop = sys.getswitchinterval(), threading.Event()
    if hold is not None:
        sys.setswitchinterval(hold)
    spinning = [
        threading.Thread(target=_spin, args=(stop,), daemon=True)
        for _ in range(threads)
    ]
    for thread in spinning:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in spinning:
            thread.join()


def _spin(stop: threading.Event) -> None:
    while not stop.is_set():
        for _ in range(1000):
            pass


class WallClock:
    """A wall clock for processes that are started with its environment.

    It can jump while they run. It needs libfaketime (``apt install libfaketime``). With
    version 0.9.10, ``time.sleep`` fails (EINVAL) and threads wait forever, so the
    programs must use neither. At the end of the block, the files that killed processes
    left in ``/dev/shm`` are removed.

    Args:
        file: The file with the offset, which the processes read.
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
        """Set the clock ``seconds`` ahead of the machine's clock."""
        self._file.write_text(f"{seconds:+f}\n")

    def environment(self) -> dict[str, str]:
        """Return the environment variables for a process.

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
    return [*place.glob(_FAKETIME), *place.glob(f"*/{_FAKETIME}")]


def monotonic_ahead(seconds: int, program: Sequence[str]) -> list[str]:
    """Return the command to run a program with its monotonic clock set ahead.

    Two processes then disagree on it, as after a restart of the host. Needs root.

    Raises:
        FaultUnavailableError: this process may not create a time namespace.
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
