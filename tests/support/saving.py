"""Saves: what they save, how they are held up, and ranks that save together."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aiockpt
from aiockpt import SyncCheckpointer
from aiockpt.checkpointers import (
    BackgroundWriter,
    CheckpointReader,
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
    SaveHandle,
    TCPStoreBarrier,
    WriterHook,
)
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE


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


async def submit(writer: BackgroundWriter, state: Any, path: Any) -> SaveHandle:
    """Hand something over to a background writer, without a checkpointer."""
    handle = SaveHandle(path)
    await writer.submit(handle, state, {})
    return handle


async def has_begun(handle: SaveHandle) -> None:
    """Wait until a background writer has begun a write."""
    async with asyncio.timeout(PATIENCE):
        while not handle.begun:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)


class GatedWriter(CheckpointWriter):
    """Waits at a gate before each write, beside which staging goes on."""

    def __init__(self, rank_info: RankInfo, gate: str) -> None:
        super().__init__(CheckpointWriterConfig(), rank_info)
        self._gate = gate

    def write_staged(self, path: Any, staged: Any, step: int, /, **kwargs: Any) -> None:
        pass_gate(self._gate)
        super().write_staged(path, staged, step, **kwargs)


class SlowWriter(CheckpointWriter):
    """Takes more than a second for each write."""

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__(CheckpointWriterConfig(), rank_info)

    def write_staged(self, path: Any, staged: Any, step: int, /, **kwargs: Any) -> None:
        time.sleep(1.2)
        super().write_staged(path, staged, step, **kwargs)


class Troubled(CheckpointWriter):
    """A writer that does to a write what its ``trouble`` says."""

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
    from aiockpt.checkpointers import TCPStoreBarrier

    meet = TCPStoreBarrier.meet

    def dying(self: Any, meeting: Any) -> Any:
        second = (meeting.step, meeting.phase) == (2, "committed")
        if second and not os.path.exists(mark):
            open(mark, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return meet(self, meeting)

    TCPStoreBarrier.meet = dying  # type: ignore[method-assign]


def refuse() -> None:
    """Fail to initialise."""
    raise LookupError("no such environment")


def loaded(path: Path, rank: int = 0) -> Any:
    """Return the state dict of a checkpoint's file, every digest verified."""
    return aiockpt.load(path, rank=rank)


ALONE = RankInfo(0, 1)
CHUNK = 64 << 10
"""The smallest chunk, so that small checkpoints have several."""


def config(**options: Any) -> CheckpointWriterConfig:
    """Return a config with small chunks, and without waiting for the disk."""
    return CheckpointWriterConfig(**{"chunk_bytes": CHUNK, "fsync": False, **options})


def sync_checkpointer(hook: Any = None, **options: Any) -> SyncCheckpointer:
    """Return a checkpointer of one rank."""
    writer = CheckpointWriter(config(**options), ALONE, commit_hook=hook)
    return SyncCheckpointer(writer, CheckpointReader(ALONE))


def save(path: Path, state: Any, **options: Any) -> Path:
    """Save a state dict; return the path."""
    with sync_checkpointer(**options) as checkpointer:
        checkpointer.save(state, path)
    return path


class Wrapped(TCPStoreBarrier):
    """Another barrier; a subclass does something more to its rank."""

    def __init__(self, real: TCPStoreBarrier) -> None:
        self._real = real

    def expect(self, meeting: Any) -> None:
        self._real.expect(meeting)

    def meet(self, meeting: Any) -> dict[int, str]:
        return self._real.meet(meeting)

    def report(self, meeting: Any, failure: str) -> None:
        self._real.report(meeting, failure)

    def close(self) -> None:
        pass


def save_by_two(path: Path, state: Any = None) -> Path:
    """Save a checkpoint of two ranks; the values of rank 0 may be more."""
    port, states = free_port(), ({"rank": 0, **(state or {})}, {"rank": 1})
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        saves = []
        for rank, value in enumerate(states):
            meets = stack.enter_context(closing(barrier(rank, 2, port)))
            writer = CheckpointWriter(config(), RankInfo(rank, 2), meets)
            saves.append(pool.submit(writer.write, path, value))
        for each in saves:
            each.result(LONG)
    return path


def load(path: Any, *args: Any, **options: Any) -> Any:
    """Return what is saved."""
    return read(path, *args, **options)[0]


def read(path: Any, *args: Any, **options: Any) -> tuple[Any, list[str]]:
    """Return what is saved, and the missing keys."""
    return CheckpointReader(ALONE).read(path, *args, **options)


def training_state(seed: int = 0) -> dict[str, Any]:
    """Return what a training loop saves: nested, tied, with values of many kinds."""
    torch.manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(128, 256))
    return {
        "model": OrderedDict(
            [
                ("embed.weight", weight),
                ("head.weight", weight),
                ("norm.bias", torch.randn(256, dtype=torch.float64)),
                ("half", torch.randn(300).bfloat16()),
            ]
        ),
        "optimizer": {
            "state": {
                0: {"step": torch.tensor(7.0), "exp_avg": torch.randn(128, 256)},
                1: {"step": torch.tensor(7.0), "exp_avg": torch.randn(256)},
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "step": 100,
        "rng": np.arange(600, dtype=np.uint32),
        "log": b"x" * 5000,
        "transposed": torch.arange(35.0).reshape(5, 7).t(),
    }


def tied_state(fill: float = 1.0) -> dict[str, Any]:
    """Return a small state dict with a tie and several containers."""
    weight = torch.full((50_000,), fill)
    return {"weight": weight, "tied": weight[10:20], "more": [1, ("a", {2: None})]}


def flip(path: Path, offset: int) -> None:
    """Flip a bit of a file; a negative offset counts from its end."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def names(directory: Path) -> list[str]:
    """Return everything in a directory, hidden or not."""
    return sorted(os.listdir(directory))


SHORT, LONG = 0.6, 20.0
"""Seconds to wait for a rank that does not come, and for one that does."""


class Dead(Exception):  # noqa: N818 - no error, but the end of a rank
    """Stands for the death of a rank's process."""


class Dying(Wrapped):
    """Another barrier, whose rank dies before its second meeting."""

    def meet(self, meeting: Any) -> dict[int, str]:
        if meeting.phase == "committed":
            raise Dead
        return super().meet(meeting)


def barrier(rank: int, world_size: int, port: int, **options: Any) -> TCPStoreBarrier:
    """Return a rank's side of a barrier; rank 0 hosts the store."""
    return TCPStoreBarrier(
        *(rank, world_size),
        tcpstore_port=port,
        master_address="127.0.0.1",
        use_checkpoint_barrier_tcpstore_libuv=False,  # it keeps a pipe
        **options,
    )


class Job:
    """Two ranks, which save the same path as one step, in threads."""

    def __init__(self, path: Path, port: int, pool: ThreadPoolExecutor) -> None:
        self._path, self._port, self._pool = path, port, pool
        self._barriers = [barrier(0, 2, port), barrier(1, 2, port)]

    def restart(self, rank: int) -> None:
        """Have the next save of a rank begin with nothing remembered."""
        self._barriers[rank] = barrier(rank, 2, self._port)

    def mourn(self, rank: int) -> None:
        """Have a rank tell the others that a save was lost with its process."""
        config = CheckpointWriterConfig(fsync=False)
        writer = CheckpointWriter(config, RankInfo(rank, 2), self._barriers[rank])
        writer.abandon(self._path, 7, "its process died", begun=True)

    def save(
        self,
        rank: int,
        value: object,
        timeout: float = LONG,
        wrap: Callable[[TCPStoreBarrier], TCPStoreBarrier] = lambda barrier: barrier,
    ) -> Future[None]:
        """Begin to save."""
        config = CheckpointWriterConfig(write_barrier_timeout_secs=timeout, fsync=False)
        meets = wrap(self._barriers[rank])
        writer = CheckpointWriter(config, RankInfo(rank, 2), meets)
        state: Any = {"rank": rank, "value": value}
        return self._pool.submit(writer.write, self._path, state, step=7)

    def close(self) -> None:
        """Let go of the store, which is rank 0's."""
        for each in reversed(self._barriers):
            each.close()


@contextmanager
def job(path: Path) -> Iterator[Job]:
    """Have a job until the end of the block."""
    with ThreadPoolExecutor(4) as pool:
        made = Job(path, free_port(), pool)
        try:
            yield made
        finally:
            made.close()
