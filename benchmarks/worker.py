"""Worker processes: how a case starts and asks one, and what runs inside it.

``python -m benchmarks.worker ROLE`` reads commands from its standard input, one JSON
object a line, ``{"do": name, "with": {...}}``. It answers ``{"ok": value}`` or
``{"error": text}`` on its standard output and ends with its input. Whatever prints
meanwhile prints to the standard error.

The process imports ``aiockpt`` from a source tree of the caller's choice. If that tree
has benchmarks of its own, those run there: they know its interface.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

from benchmarks.measures import BenchmarkError

__all__ = ["HERE", "Worker", "all_cores_but_one"]

HERE = Path(__file__).resolve().parents[1]
"""The source tree that these benchmarks belong to."""

_PATIENCE = 30.0
_PINNED = (
    "import os, sys; "
    "os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


def all_cores_but_one() -> Sequence[str]:
    """Return a command that runs another one on all cores but the first.

    It is empty where there is one core, or where the system does not let us choose.
    """
    if not hasattr(os, "sched_setaffinity"):
        return ()
    others = sorted(os.sched_getaffinity(0))[1:]
    if not others:
        return ()
    return (sys.executable, "-c", _PINNED, ",".join(map(str, others)))


class Worker:
    """A process with a role; use it in a ``with`` block.

    Args:
        role: A key of ``ROLES`` in ``benchmarks.ends``.
        tree: The source tree to import ``aiockpt`` from.
        inside: A command that runs the process.
        own_session: Whether the process gets a session of its own, as other jobs have:
            Linux may share busy cores among sessions first (autogroups).
    """

    def __init__(
        self,
        role: str,
        tree: Path = HERE,
        *,
        inside: Sequence[str] = (),
        own_session: bool = False,
    ) -> None:
        self._role = role
        self._doing = ""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        known = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join(filter(None, (str(tree), str(HERE), known)))
        self._process = subprocess.Popen(
            [*inside, sys.executable, "-m", "benchmarks.worker", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=own_session,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )

    def __repr__(self) -> str:
        return f"<Worker {self._role} pid={self._process.pid}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        process = self._process
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            process.communicate(timeout=_PATIENCE if error is None else 0.1)
        if process.poll() is None:
            process.kill()
            process.communicate()
        self._errors.close()

    def call(self, do: str, **arguments: object) -> Any:
        """Run a command in the process; return its result.

        Raises:
            BenchmarkError: the command failed, or the process has ended.
        """
        self.begin(do, **arguments)
        return self.finish()

    def begin(self, do: str, **arguments: object) -> None:
        """Start a command, for commands that two processes run together."""
        assert self._process.stdin is not None
        self._doing = do
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, "with": arguments}) + "\n")
            self._process.stdin.flush()

    def finish(self) -> Any:
        """Return the result of the command that was started.

        Raises:
            BenchmarkError: the command failed, or the process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError(f"the {self._role} has ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            what = f"the {self._role} could not {self._doing}"
            raise BenchmarkError(f"{what}: {answer['error']}")
        return answer["ok"]

    def _last_words(self) -> str:
        self._process.wait(_PATIENCE)
        self._errors.seek(0)
        lines = self._errors.read().split("\n")
        return " | ".join(lines[-4:]).strip(" |") or "it printed nothing"


# -------------------------------------------------------------- inside the process


def main(role: str) -> None:
    """Obey commands until the input ends."""
    from benchmarks.ends import ROLES, Trainer, train_beside

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answers:
        if role == "trainer":  # its main thread trains, and another one obeys
            train_beside(
                lambda loop: asyncio.run(_obey(partial(Trainer, loop), answers))
            )
        else:
            asyncio.run(_obey(ROLES[role], answers))


async def _obey(make: Any, answers: TextIO) -> None:
    end = make()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async for line in reader:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"ok": await getattr(end, request["do"])(**request["with"])}
        except Exception as error:  # noqa: BLE001 - it is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    await end.release()


if __name__ == "__main__":
    main(sys.argv[1])
