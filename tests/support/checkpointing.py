"""Writers that wait, fail and die on demand, in whatever process they are made.

What a child imports from here comes without torch, which takes a second.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiockpt.checkpointers.config import CheckpointWriterConfig, RankInfo
from aiockpt.checkpointers.writer import CheckpointWriter, WriterHook
from aiockpt.format.limits import Limits

if TYPE_CHECKING:
    from aiockpt.checkpointers.submission import Submission

PATIENCE = 60.0
"""Seconds that a slow machine may take to start a process."""


FROM_A_TERMINAL = {signal.SIGINT, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU}


class Gate:
    """Lets a writer in another process through, once for each :meth:`open`."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # Both ends, so that neither side waits for the other one to come.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def open(self, times: int = 1) -> None:
        """Let it through."""
        os.write(self._fd, b"x" * times)

    def close(self) -> None:
        os.close(self._fd)


def pass_gate(gate: str) -> None:
    """Wait until the gate is open, however long."""
    fd = os.open(gate, os.O_RDWR)
    try:
        os.read(fd, 1)
    finally:
        os.close(fd)


async def has_begun(submission: Submission) -> None:
    """Wait until a background writer has begun a write."""
    async with asyncio.timeout(PATIENCE):
        while not submission.begun:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)


class GatedWriter(CheckpointWriter):
    """Waits at a gate before each write, beside which staging goes on."""

    def __init__(self, rank_info: RankInfo, gate: str) -> None:
        super().__init__(CheckpointWriterConfig(), rank_info)
        self._gate = gate

    def write_staged(self, path: Any, staged: Any, step: int, /, **kwargs: Any) -> None:
        pass_gate(self._gate)
        super().write_staged(path, staged, step, **kwargs)


class Troubled(CheckpointWriter):
    """Does to a write what its ``trouble`` says."""

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__(CheckpointWriterConfig(), rank_info)

    def write_staged(
        self, path: Any, staged: Any, step: int, /, trouble: str = "", **kwargs: Any
    ) -> None:
        if trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if trouble == "exit":
            os._exit(3)
        if trouble == "raise":
            raise ZeroDivisionError("on purpose")
        if trouble == "system-exit":
            raise SystemExit(4)
        super().write_staged(path, staged, step, **kwargs)


class Forsaken:
    """Writes down which saves the others are told not to wait for."""

    def __init__(self, rank_info: RankInfo, diary: str) -> None:
        self._diary = diary

    def write(self, path: str, state_dict: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is written")

    def abandon(self, path: str, step: int, reason: str) -> None:
        with open(self._diary, "a") as file:
            print(path, step, reason, file=file)


class OwnFormat:
    """A writer as the seed's users write them: it gets a path and a state dict."""

    def __init__(self, rank_info: RankInfo, suffix: str = ".own") -> None:
        self.rank, self.suffix = rank_info.global_rank, suffix

    def write(self, path: str, state_dict: Any, **kwargs: Any) -> None:
        import torch

        os.makedirs(path, exist_ok=True)
        torch.save([state_dict, kwargs], f"{path}/{self.rank}{self.suffix}")
        for value in state_dict.values():
            if isinstance(value, torch.Tensor):
                value.zero_()  # its own until it returns


class Diary(WriterHook):
    """Writes down what it was called with."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _note(self, what: str, path: str, kwargs: Any) -> None:
        with open(self.path, "a") as file:
            print(what, os.path.basename(path), sorted(kwargs.items()), file=file)

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        self._note("pre", path, kwargs)

    async def post_commit(self, path: str, **kwargs: Any) -> None:
        self._note("post", path, kwargs)


def note_pid(path: str) -> None:
    """Say where a child's init function ran, in a file that is never seen empty."""
    written = Path(f"{path}.part")
    written.write_text(str(os.getpid()))
    written.replace(path)


def use_cpu(seconds: float) -> None:
    """Compute for so many seconds, not counting those in which others compute."""
    while time.process_time() < seconds:
        pass


def note_threads(path: str) -> None:
    """Write down this thread's niceness, and the id of a thread that stays."""
    started = threading.Event()
    thread = threading.Thread(target=_stay, args=(started,), daemon=True)
    thread.start()
    started.wait()
    Path(path).write_text(f"{os.nice(0)} {thread.native_id}")


def _stay(started: threading.Event) -> None:
    started.set()
    threading.Event().wait()


def die_between_meetings(mark: str) -> None:
    """Have this process killed in step 2, before its second meeting; once."""
    from aiockpt.checkpointers.barriers import TCPStoreBarrier

    meet = TCPStoreBarrier.meet

    def dying(self: Any, meeting: Any, *, failure: str | None = None) -> None:
        second = (meeting.step, meeting.phase) == (2, "committed")
        if second and failure is None and not os.path.exists(mark):
            open(mark, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        meet(self, meeting, failure=failure)

    TCPStoreBarrier.meet = dying  # type: ignore[method-assign]


def refuse() -> None:
    """Fail to initialise."""
    raise LookupError("no such environment")


def loaded(path: Path, rank: int = 0) -> Any:
    """Return the state dict of a checkpoint's file, every digest verified."""
    from aiockpt.storage.statefile import read_state_file

    assert (path / "commit.json").exists(), f"{path} was not committed"
    file = path / f"checkpoint_{rank}.safetensors"
    return read_state_file(file, limits=Limits()).state


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Poll for what another process does; block."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.01)


async def eventually(condition: Callable[[], Any], what: str) -> None:
    """Poll for what happens elsewhere; the loop runs."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.01)


def state_of(pid: int) -> str:
    """Return the letter that stands for a process's state; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Tell whether a process is there, and is no zombie."""
    return state_of(pid) not in ("", "Z")


def ignored(pid: int) -> set[signal.Signals]:
    """Return the signals that a process ignores."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert found
    mask = int(found[1], 16)
    return {each for each in signal.Signals if mask >> (each - 1) & 1}


def has_torch(pid: int) -> bool:
    """Tell whether a process has loaded torch."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def reaped(pid: int) -> None:
    """Reap a child that was abandoned: who does that dies, as a rule."""
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
