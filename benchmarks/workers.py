"""Processes that do one end of what is measured.

``Worker`` starts one. It runs this file, reads commands from its standard input, one
JSON object a line, ``{"do": name, "with": {...}}``, and answers ``{"ok": value}`` or
``{"error": text}``. It ends with its input. What it prints goes to the standard error.

These benchmarks always run, but ``aiockpt`` may come from another source tree. The
process's main thread is for training; commands are obeyed in another thread, as the
transports of a trainer under torchft work.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TextIO

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures import BenchmarkError

HERE = Path(__file__).resolve().parents[1]
"""The source tree that these benchmarks belong to."""

_PATIENCE = 30.0


def all_cores_but_one() -> list[int]:
    """Return the cores of this process without the first, or all if there is one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[1:] or cores


class Worker:
    """A process; use it in a ``with`` block, or in two: the inner one ends it.

    Args:
        kind: ``module:class`` of the object whose methods are the commands.
        tree: The source tree to import ``aiockpt`` from.
        inside: A command that runs the process.
        cores: The cores that it may use; all, if empty.
        nice: What is added to its niceness.
        own_session: Whether it gets a session of its own, as other jobs have: Linux may
            share busy cores among sessions first (autogroups).
    """

    def __init__(
        self,
        kind: str = "benchmarks.ends:End",
        tree: Path = HERE,
        *,
        inside: Sequence[str] = (),
        cores: Sequence[int] = (),
        nice: int = 0,
        own_session: bool = False,
    ) -> None:
        self._doing = ""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        settings = json.dumps({"cores": [*cores], "nice": nice})
        script = str(Path(__file__).resolve())
        self._process = subprocess.Popen(
            [*inside, sys.executable, script, kind, str(tree), settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=own_session,
        )

    def __repr__(self) -> str:
        return f"<Worker pid={self._process.pid}>"

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

    def kill(self) -> None:
        """End it at once, from any thread; a command that runs fails."""
        self._process.kill()

    def call(self, do: str, **arguments: object) -> Any:
        """Run a command in the process; return its result.

        Raises:
            BenchmarkError: the command failed, or the process has ended.
        """
        self.begin(do, **arguments)
        return self.finish()

    def begin(self, do: str, **arguments: object) -> None:
        """Start a command, for commands that several processes run together."""
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
            self._process.wait(_PATIENCE)
            self._errors.seek(0)
            words = " | ".join(self._errors.read().split("\n")[-4:]).strip(" |")
            raise BenchmarkError(f"a process has ended: {words or 'it said nothing'}")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(
                f"a process could not {self._doing}: {answer['error']}"
            )
        return answer["ok"]


# ---------------------------------------------------------------- inside the process


def main(kind: str, tree: str, settings: str) -> None:
    """Obey commands in a thread until the input ends; train in this one if told to."""
    chosen = json.loads(settings)
    if chosen["cores"]:
        os.sched_setaffinity(0, chosen["cores"])
    os.nice(chosen["nice"])
    sys.path.insert(0, tree)  # benchmarks is imported already, so only aiockpt follows
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    training = import_module("benchmarks.training").Training()
    module, _, name = kind.partition(":")

    def obey() -> None:
        try:
            asyncio.run(_obey(getattr(import_module(module), name)(training), answers))
        finally:
            training.close()

    thread = threading.Thread(target=obey, name="benchmarks")
    thread.start()
    training.run()
    thread.join()


async def _obey(end: Any, answers: TextIO) -> None:
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
    main(*sys.argv[1:])
