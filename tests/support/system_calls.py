"""System calls of a program that fail, or kill it, one after another; by strace.

::

    for fault in system_call_faults("fsync", "EIO"):
        done = fault.run([sys.executable, "save.py"])
        ...  # the old checkpoint or the new one is there, whole

A thread counts its own calls, as strace does: "the second ``write``" is the second one
of each thread. All of this blocks.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

from aiockpt.testing.processes import FaultUnavailableError

__all__ = ["SystemCallFault", "system_call_faults"]

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(slots=True)
class SystemCallFault:
    """The ``number``-th of some system calls fails, or kills the program.

    Attributes:
        calls: Names of system calls, separated by commas; a name that begins with
            ``?`` may be unknown here.
        what: The name of the error that it returns, such as ``ENOSPC``; or ``KILL``.
        number: 1 is the first such call of each thread.
        paths: Count only calls for these files; none: count all.
        struck: Whether the last run made so many of them.
    """

    calls: str
    what: str
    number: int = 1
    paths: Sequence[Path] = ()
    struck: bool = False

    def run(
        self,
        program: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program until its end, with what it says captured.

        Raises:
            FaultUnavailableError: strace is missing, or may not trace.
        """
        if reason := _refused():
            raise FaultUnavailableError("failing system call", reason)
        with tempfile.NamedTemporaryFile("r", prefix="strace") as log:
            done = subprocess.run(
                [*self._command(log.name), *program],
                env=env,
                timeout=timeout,
                capture_output=True,
                text=True,
                check=False,
            )
            killed = self.what == "KILL" and done.returncode in _KILLED
            self.struck = killed or "(INJECTED" in log.read()
        return done

    def _command(self, log: str) -> list[str]:
        how = "signal=KILL" if self.what == "KILL" else f"error={self.what}"
        inject = f"inject={self.calls}:{how}:when={self.number}"
        only = [word for path in self.paths for word in ("-P", str(path))]
        trace = ["-e", f"trace={self.calls}", "-e", inject]
        return ["strace", "-f", "-qq", "-o", log, *only, *trace]


def system_call_faults(
    calls: str, what: str, *, paths: Sequence[Path] = (), start: int = 1, every: int = 1
) -> Iterator[SystemCallFault]:
    """Yield a fault for one such call after another; each is to be run once.

    The last one is the first that did not strike: the program makes no more of them.
    ``every`` leaves out some.
    """
    for number in count(start, every):
        fault = SystemCallFault(calls, what, number, paths)
        yield fault
        if not fault.struck:
            return


@cache
def _refused() -> str:
    """Return why strace cannot be used here, if it cannot."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    done = subprocess.run(
        ["strace", "-qq", "-o", "/dev/null", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip() if done.returncode else ""
