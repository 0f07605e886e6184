"""Two ranks that save together, as processes that may die at a given moment.

``saving_rank.py told RANK PORT`` saves in the background when it is told to: a value
for each line ``PATH STEP VALUE`` of its input. Then it prints the id of its checkpoint
process, and ``saved`` or the error.

``saving_rank.py live RANK PORT DIRECTORY KIND LIFE`` saves steps 1 and 2 and says how
each went. KIND is where the ranks meet: ``tcp_store`` (one of their own), or in the
store of the default group, ``dist_barrier`` or ``default_store``; after
``background/``, a checkpoint process saves. LIFE is ``well``, or what happens in
step 2:

* ``fails``: its state cannot be saved; ``lost``: its path cannot be resolved;
* ``stays-away``: it does not save; ``hasty``: it cancels its save;
* ``before``, ``at``, ``after``: it is killed around the first meeting of the ranks;
  ``committed``: it is killed right before the second one;
* ``child-dies``, ``child-dies-late``: its checkpoint process is killed when its file is
  written, or when all files are;
* ``dies``: it is killed when it has handed its save to the process.

With ``tells`` the rank lives well, keeps one checkpoint, and prints the calls of its
``post_commit``. Warnings are printed, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import aiockpt
from aiockpt import TransferEvent, add_hook
from aiockpt.checkpointers import (
    BarrierConfig,
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
    TCPStoreBarrier,
    WriterHook,
    create_barrier_from_config,
)
from tests.support.saving import Wrapped, die_between_meetings

TIMEOUTS = {1: 60.0, 2: 5.0}
"""How long another rank is waited for: to start, and when it may have died."""


def die() -> None:
    """End without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


class Fatal(WriterHook):
    """Dies in step 2, when the file is written; once, if it is given a mark."""

    def __init__(self, mark: str = "") -> None:
        self.mark = mark

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        if path.endswith("2") and not os.path.exists(self.mark):
            if self.mark:
                open(self.mark, "x").close()
            die()

    def post_commit(self, path: str, **kwargs: Any) -> None:
        pass


class Telling(WriterHook):
    """Prints that a checkpoint was committed."""

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        pass

    def post_commit(self, path: str, **kwargs: Any) -> None:
        print(f"{path[-1]} post_commit", flush=True)


def tell(event: TransferEvent) -> None:
    """Print a warning."""
    if event.stop != "restart" and event.level == logging.WARNING:
        print(f"{event.step} warning: {event.detail}", flush=True)


class FatalBarrier(Wrapped):
    """Another barrier, at or behind which its rank dies."""

    def __init__(self, real: TCPStoreBarrier, moment: str) -> None:
        super().__init__(real)
        self._moment = moment

    def meet(self, meeting: Any) -> dict[int, str]:
        if self._moment == "committed" and meeting.phase == "committed":
            die()
        if self._moment == "at":
            threading.Timer(0.3, die).start()
        snapshots = super().meet(meeting)
        if self._moment == "at":
            threading.Event().wait()
        if self._moment == "after":
            die()
        return snapshots


def state_of(rank: int, step: int, life: str) -> dict[str, Any]:
    """Return what a rank saves."""
    if (life, step) == ("fails", 2):
        return {"unknown": object()}
    return {"rank": rank, "step": step, "w": torch.full((50_000,), float(step))}


def barrier_of(kind: str, rank: int, port: str) -> BarrierConfig:
    """Say where the ranks meet; but for a store of their own in a process group."""
    if kind != "tcp_store":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        dist.init_process_group("gloo", rank=rank, world_size=2)
        return BarrierConfig("dist_barrier" if kind == "dist_barrier" else None)
    arguments = {"tcpstore_port": int(port), "master_address": "127.0.0.1"}
    return BarrierConfig("tcp_store", arguments)


def save(rank: int, directory: str, kind: str, life: str, where: BarrierConfig) -> None:
    """Save twice, in the foreground, to a path that leads nowhere if it is lost."""
    parent, name = os.path.split(directory)
    os.makedirs(parent, exist_ok=True)
    os.chdir(parent)
    info, tells = RankInfo(rank, 2), life == "tells"
    barrier = create_barrier_from_config(where, info)
    assert barrier is not None
    for step, timeout in TIMEOUTS.items():
        hook = Telling() if tells else Fatal() if life == "before" else None
        if step == 2 and life in ("at", "after", "committed"):
            barrier = FatalBarrier(barrier, life)
        if step == 2 and life == "stays-away":
            return
        config = CheckpointWriterConfig(
            write_barrier_timeout_secs=timeout, keep_last=1 if tells else None
        )
        writer = CheckpointWriter(config, info, barrier, hook)
        if step == 2 and life == "lost":
            os.chdir(tempfile.mkdtemp())
            os.symlink(name, name)
        path = f"/proc/self/cwd/{name}/step-{step}"
        try:
            writer.write(path, state_of(rank, step, life))
        except Exception as error:  # noqa: BLE001 - it is told
            print(f"{step} {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{step} saved", flush=True)
    writer.close()
    if kind == "default_store" and life in ("well", "fails", "lost"):
        with suppress(RuntimeError):  # the other one may be dead
            dist.monitored_barrier(timeout=timedelta(seconds=5))  # rank 0 is the store


async def save_in_the_background(
    rank: int, directory: str, life: str, where: BarrierConfig
) -> None:
    """Save twice, by a checkpoint process."""
    config = aiockpt.CheckpointerConfig(
        writer_config=CheckpointWriterConfig(write_barrier_timeout_secs=100),
        barrier_config=where,
    )
    mark, options = f"{directory}.mark", dict[str, Any]()
    if life == "child-dies":
        options["commit_hook"] = Fatal(mark)
    elif life == "child-dies-late":
        options["subprocess_init_fn"] = die_between_meetings
        options["subprocess_init_args"] = (mark,)
    info = None if dist.is_initialized() else RankInfo(rank, 2)
    async with aiockpt.make_async_checkpointer(config, info, **options) as made:
        for step in (1, 2):
            hasty = (life, step) == ("hasty", 2)
            path = f"{directory}/step-{step}"
            try:
                async with asyncio.timeout(0 if hasty else None):
                    handle = await made.save(state_of(rank, step, life), path)
            except TimeoutError:
                print(step, "cancelled", flush=True)
                continue
            except aiockpt.errors.StateDictError as error:  # no retry can save it
                print(f"{step} {type(error).__name__}: {error}", flush=True)
                continue
            if (life, step) == ("dies", 2):
                die()
            try:
                await handle.written()
                print(step, "saved", flush=True)
            except aiockpt.AiockptError as error:
                print(f"{step} {type(error).__name__}: {error}", flush=True)


def main(rank: int, port: str, directory: str, kind: str, life: str) -> None:
    """Live that life."""
    background, _, kind = kind.rpartition("/")
    where = barrier_of(kind, rank, port)
    add_hook(tell)
    if background:
        asyncio.run(save_in_the_background(rank, directory, life, where))
        if dist.is_initialized():
            dist.barrier()  # the store is rank 0's
    else:
        save(rank, directory, kind, life, where)
    if dist.is_initialized():
        dist.destroy_process_group()


async def told(rank: int, port: int) -> None:
    """Save until the input ends."""
    where = {"tcpstore_port": port, "master_address": "127.0.0.1", "is_master": False}
    config = aiockpt.CheckpointerConfig(
        writer_config=CheckpointWriterConfig(
            write_barrier_timeout_secs=30, fsync=False
        ),
        barrier_config=BarrierConfig("tcp_store", where),
    )
    made = aiockpt.make_async_checkpointer(config, RankInfo(rank, 2))
    writer: Any = made._writer
    async with made as checkpointer:
        await writer.ready()
        print(writer.pid, "ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            path, step, value = line.split()
            state = {"rank": rank, "w": torch.full((4_000_000,), float(value))}
            handle = await checkpointer.save(state, path, step=int(step))
            try:
                await handle.written()
                said = "saved"
            except aiockpt.AiockptError as error:
                said = f"{type(error).__name__}: {error}".replace("\n", " ")
            print(writer.pid, said, flush=True)


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "told":
        asyncio.run(told(int(words[0]), int(words[1])))
    else:
        main(int(words[0]), *words[1:])
