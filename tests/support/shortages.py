"""Shortages and failures of the system: full disks, no descriptors, failing calls."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any


class FaultUnavailableError(RuntimeError):
    """This machine cannot produce ``fault``, for the given ``reason``.

    The tested code has not failed: skip the test with the reason.
    """

    def __init__(self, fault: str, reason: str) -> None:
        super().__init__(fault, reason)
        self.fault = fault
        self.reason = reason

    def __str__(self) -> str:
        return f"no {self.fault} here: {self.reason}"


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


def in_read_only_root(place: Path, program: Sequence[str]) -> list[str]:
    """Return the command of a program that may write below ``place`` only.

    Raises:
        FaultUnavailableError: this process may not make a mount namespace.
    """
    mount = (
        'mount --bind "$1" "$1" && cd / && '
        "{ mount -o remount,ro,bind / / || mount -o remount,ro /; } && "
        'shift && exec "$@"'
    )
    prefix = ["unshare", "--mount", "sh", "-c", mount, "sh", str(place)]
    if reason := _refused([*prefix, "true"]):
        raise FaultUnavailableError("read-only root", reason)
    return [*prefix, *program]


def in_overlay(lower: Path, spare: Path, program: Sequence[str]) -> list[str]:
    """Return the command of a program that sees a directory as an overlay.

    The directory is its lower layer, as if it came with a container image. What the
    program changes is in memory, at the directory ``spare``, and vanishes with it.

    Raises:
        FaultUnavailableError: this process may not mount one.
    """
    mount = (
        'mount -t tmpfs tmpfs "$2" && mkdir "$2/upper" "$2/work" && mount -t overlay '
        'overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$1" && '
        'shift 2 && exec "$@"'
    )
    prefix = ["unshare", "--mount", "sh", "-c", mount, "sh", str(lower), str(spare)]
    if reason := _refused([*prefix, "true"]):
        raise FaultUnavailableError("overlay", reason)
    return [*prefix, *program]


def _refused(command: Sequence[str]) -> str:
    """Run a command; return why it failed, if it did."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


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


_STOPPED = """
import os, runpy, signal, sys
del sys.argv[0]
os.kill(os.getpid(), signal.SIGSTOP)
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Stands still until it is traced, then runs the program that its arguments name."""


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
        reads: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python program until its end, with what it says captured.

        It is traced from where it begins to run; a fork needs no new interpreter.

        Args:
            program: The interpreter, and a file or ``-m`` and a module.
            env: Its variables.
            timeout: Limit in seconds.
            reads: Whether all its output is read; if not, the reader leaves after the
                first line, as ``head -1`` does.

        Raises:
            FaultUnavailableError: strace is missing, or may not trace.
        """
        if reason := _strace_refused():
            raise FaultUnavailableError("failing system call", reason)
        python, *rest = program
        pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        with ExitStack() as stack:
            log = stack.enter_context(tempfile.NamedTemporaryFile("r", prefix="strace"))
            process = stack.enter_context(
                subprocess.Popen(
                    [python, "-c", _STOPPED, *rest], env=env, text=True, **pipes
                )
            )
            stack.callback(process.kill)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            command = self._command(log.name, process.pid)
            strace = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)  # strace ends with it
            _wait_for_tracer(process.pid, strace)
            process.send_signal(signal.SIGCONT)
            out = ""
            if not reads:
                assert process.stdout is not None
                out = process.stdout.readline()
                process.stdout.close()
            more, err = process.communicate(timeout=timeout)
            strace.wait(timeout)
            code = process.returncode
            killed = self.what == "KILL" and code == -signal.SIGKILL
            self.struck = killed or "(INJECTED" in log.read()
        return subprocess.CompletedProcess(program, code, out or more, err)

    def _command(self, log: str, pid: int) -> list[str]:
        how = "signal=KILL" if self.what == "KILL" else f"error={self.what}"
        inject = f"inject={self.calls}:{how}:when={self.number}"
        only = [word for path in self.paths for word in ("-P", str(path))]
        trace = ["-e", f"trace={self.calls}", "-e", inject]
        return ["strace", "-f", "-qq", "-o", log, *only, *trace, "-p", str(pid)]


def _wait_for_tracer(pid: int, tracer: subprocess.Popen[bytes]) -> None:
    """Return once a stopped process is traced."""
    status = Path(f"/proc/{pid}/status")
    while f"TracerPid:\t{tracer.pid}\n" not in status.read_text():
        assert tracer.poll() is None, "strace has ended"
        time.sleep(0.001)


def system_call_faults(
    calls: str, what: str, *, paths: Sequence[Path] = (), every: int = 1
) -> Iterator[SystemCallFault]:
    """Yield a fault for one such call after another; each is to be run once.

    The last one is the first that did not strike: the program makes no more of them.
    ``every`` leaves out some.
    """
    for number in count(1, every):
        fault = SystemCallFault(calls, what, number, paths)
        yield fault
        if not fault.struck:
            return


@cache
def _strace_refused() -> str:
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
