"""The measuring side of a worker process: start it, ask it, end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

__all__ = ["BenchError", "Worker", "aside"]

_PATIENCE = 30.0
_ASIDE = (
    "import os, sys; "
    "os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


class BenchError(RuntimeError):
    """A worker could not do what it was asked."""


def aside() -> Sequence[str]:
    """Return a command that runs another one on all cores but the first.

    Empty where there is one core, or the system does not let us choose.
    """
    if not hasattr(os, "sched_setaffinity"):
        return ()
    others = sorted(os.sched_getaffinity(0))[1:]
    if not others:
        return ()
    return (sys.executable, "-c", _ASIDE, ",".join(map(str, others)))


class Worker:
    """A process with a role, ``sender`` or ``receiver``; use it in a ``with`` block.

    ``inside`` is a command that runs it. One that is ``apart`` has a session of its
    own, as other jobs have: systems may share cores among sessions (autogroups).
    """

    def __init__(
        self, role: str, inside: Sequence[str] = (), *, apart: bool = False
    ) -> None:
        self._role = role
        self._doing = ""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [*inside, sys.executable, "-m", "aiockpt.bench.worker", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=apart,
        )

    def __repr__(self) -> str:
        return f"<Worker {self._role} pid={self._process.pid}>"

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            process.communicate(timeout=_PATIENCE if error is None else 0.1)
        if process.poll() is None:
            process.kill()
            process.communicate()
        self._errors.close()

    def call(self, do: str, **arguments: object) -> Any:
        """Have a command done; return its result.

        Raises:
            BenchError: it failed, or the process is gone.
        """
        self.begin(do, **arguments)
        return self.finish()

    def begin(self, do: str, **arguments: object) -> None:
        """Have a command begun, for commands that two processes do together."""
        assert self._process.stdin is not None
        self._doing = do
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, "with": arguments}) + "\n")
            self._process.stdin.flush()

    def finish(self) -> Any:
        """Return the result of what was begun.

        Raises:
            BenchError: it failed, or the process is gone.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the {self._role} is gone: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            what = f"the {self._role} could not {self._doing}"
            raise BenchError(f"{what}: {answer['error']}")
        return answer["ok"]

    def _last_words(self) -> str:
        self._process.wait(_PATIENCE)
        self._errors.seek(0)
        lines = self._errors.read().split("\n")
        return " | ".join(lines[-4:]).strip(" |") or "no word"
