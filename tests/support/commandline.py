"""Runs ``aiockpt`` as a person does: in a shell, in another process, or right here."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from aiockpt.testing import Fault

T = TypeVar("T")

CHUNK = 16 << 20
"""Bytes in a chunk of what ``aiockpt serve`` serves."""

PATIENCE = 150.0
"""Seconds that a slow machine may take for anything here."""

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if "AIOCKPT" not in name},
    # The commands that are printed begin with "aiockpt", as it was installed.
    "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
    # Nothing that is here must be asked of a proxy.
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
}


@dataclass
class Commands:
    """Runs commands in this process, and reads what they print."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object, code: int | None = 0) -> tuple[str, str]:
        """Run a command that ends with ``code``; return its stdout and stderr.

        With None, the command may end with any code, but with no exception.
        """
        self.capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["aiockpt", *map(str, arguments)])
            with pytest.raises(SystemExit) as ended:
                runpy.run_module("aiockpt", run_name="__main__")
        out, err = self.capsys.readouterr()
        assert code is None or (ended.value.code or 0) == code, err
        return out, err

    def error(self, *arguments: object, code: int = 1) -> str:
        """Run a command that fails; return its message."""
        out, err = self(*arguments, code=code)
        assert out == ""
        return the_error(err)


def the_error(err: str) -> str:
    """Return the message of the one line that an error is, after those on progress."""
    shown = ("waiting", "fetching", "Reading ")
    (line,) = (line for line in err.splitlines() if not line.startswith(shown))
    assert line.startswith("aiockpt: error: ")
    return line.removeprefix("aiockpt: error: ")


def aiockpt_command(*arguments: object) -> list[str]:
    """Return the command line of this interpreter's ``aiockpt``."""
    return [sys.executable, "-m", "aiockpt", *map(str, arguments)]


def start_aiockpt(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start it in another process; its stderr is a pipe."""
    options = {"stderr": subprocess.PIPE, **options}
    command = aiockpt_command(*arguments)
    return subprocess.Popen(command, env=ENVIRONMENT, text=True, **options)


def run_aiockpt(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run it in another process."""
    process = start_aiockpt(*arguments, stdout=subprocess.PIPE)
    out, err = process.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_shell(
    command: str, *, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run what a person pastes into a shell."""
    return subprocess.run(
        command,
        shell=True,
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


@dataclass
class Serving:
    """A running ``aiockpt serve`` and what it has printed."""

    process: subprocess.Popen[str]
    announcement: str
    fetch: str
    curl: str

    @property
    def metadata(self) -> str:
        """The URL with the token, if that is how one may fetch."""
        return shlex.split(self.fetch.partition(" fetch ")[2])[0]

    @property
    def base(self) -> str:
        """The URL without the token."""
        return self.metadata.partition("#")[0]

    @property
    def token(self) -> str:
        """The token."""
        found = re.search(r'Bearer (\S+)"', self.curl)
        assert found
        return found[1]

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.base.split(":")[2].partition("/")[0])

    def end(self, number: int = signal.SIGTERM) -> str:
        """Interrupt it; return what it wrote to stderr, after a clean exit."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, errors
        return errors


@contextmanager
def serving(path: Path, *options: object) -> Iterator[Serving]:
    """Run ``aiockpt serve`` on 127.0.0.1 until the block ends."""
    process = subprocess.Popen(
        aiockpt_command("serve", path, "--host", "127.0.0.1", *options),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline().strip() for _ in range(3)]
        if not lines[-1]:
            raise AssertionError(f"no announcement: {lines}, {process.communicate()}")
        server = Serving(process, *lines)
        yield server
        if process.returncode is None:
            server.end()
    finally:
        process.kill()
        process.communicate()


def until(condition: Callable[[], object]) -> None:
    """Wait until something has happened in another thread or process."""
    pause = threading.Event()
    for _ in range(int(PATIENCE * 100)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")


class OnlyTheEnd(Fault):
    """A fault: no byte arrives of bodies that begin before a certain byte."""

    def __init__(self, begins: int) -> None:
        self.begins = begins

    async def forward(self, pipe: Any, data: bytes, at: int) -> None:
        found = re.search(rb"Content-Range: bytes (\d+)-", data)
        if found is not None and int(found[1]) < self.begins:
            await pipe.stall()
        await pipe.send(data)


@contextmanager
def beside(made: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Keep an async context open on the loop of another thread."""
    started = threading.Event()
    inside: list[tuple[T, Callable[[], object]]] = []

    async def keep() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        async with made as value:
            inside.append((value, lambda: loop.call_soon_threadsafe(ended.set)))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(keep(),), name="beside")
    thread.start()
    assert started.wait(PATIENCE)
    value, end = inside[0]
    try:
        yield value
    finally:
        end()
        thread.join()


_DYING = """
import os, runpy, signal, sys
sync, left = os.fsync, int(sys.argv.pop(1))
def fsync(fd):
    global left
    left -= 1
    os.kill(os.getpid(), 0 if left else signal.SIGKILL)
    sync(fd)
os.fsync = fsync
runpy.run_module("aiockpt", run_name="__main__")
"""


def killed_at_fsync(number: int, *arguments: object) -> None:
    """Run a command, which is killed when it syncs for the ``number``-th time."""
    command = [sys.executable, "-c", _DYING, str(number), *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, check=False, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL
