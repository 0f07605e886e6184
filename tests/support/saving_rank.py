"""One of two ranks that save together, as a process that may die at a given moment.

``saving_rank.py RANK PORT DIRECTORY BARRIER LIFE`` saves steps 1 and 2 and says how
each went. LIFE is ``well``, ``fails`` (its state of step 2 cannot be saved), ``lost``
(its path of step 2 cannot be resolved), ``stays-away``, or where it is killed in step
2: ``before``, ``at`` or ``after`` the first meeting at the barrier, or ``committed``:
right before the second one. With ``tells`` the rank lives well, keeps one checkpoint,
and prints its warnings and the calls of its ``post_commit`` too.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from aiockpt.checkpointers.barriers import (
    Barrier,
    Meeting,
    barrier_config_for,
    create_barrier_from_config,
)
from aiockpt.checkpointers.config import (
    BarrierConfig,
    CheckpointWriterConfig,
    RankInfo,
)
from aiockpt.checkpointers.writer import CheckpointWriter, WriterHook
from aiockpt.events import TransferEvent, add_hook

TIMEOUTS = {1: 60.0, 2: 2.0}
"""How long another rank is waited for: to start, and when it may have died."""


def die() -> None:
    """End without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


class Fatal(WriterHook):
    """Dies when its file is written."""

    def pre_commit(self, path: str, **kwargs: Any) -> None:
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
    if event.level == logging.WARNING:
        print(f"{event.step} warning: {event.detail}", flush=True)


class FatalBarrier(Barrier):
    """Another barrier, at or behind which its rank dies."""

    def __init__(self, real: Barrier, moment: str) -> None:
        self._real, self._moment = real, moment

    def execute_barrier(self) -> None:
        raise NotImplementedError

    def meet(self, meeting: Meeting, *, failure: str | None = None) -> None:
        if self._moment == "committed" and meeting.phase == "written":
            self._real.meet(meeting, failure=failure)
            return
        if self._moment == "committed":
            die()
        if self._moment == "at":
            threading.Timer(0.3, die).start()
            self._real.meet(meeting, failure=failure)
            threading.Event().wait()
        self._real.meet(meeting, failure=failure)
        die()


def barrier_of(kind: str, rank: int, port: int) -> Barrier:
    """Return the barrier; for two of three kinds there is a process group too."""
    info = RankInfo(rank, 2)
    arguments = {"tcpstore_port": port, "master_address": "127.0.0.1"}
    config = BarrierConfig("tcp_store", arguments)
    if kind != "tcp_store":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=2)
        apart = kind == "default_store"
        config = barrier_config_for(BarrierConfig(), info, in_process=apart)
    barrier = create_barrier_from_config(config, info)
    assert barrier is not None
    return barrier


def main(rank: int, port: int, directory: str, kind: str, life: str) -> None:
    """Save twice."""
    barrier = barrier_of(kind, rank, port)
    if life == "tells":
        add_hook(tell)
    for step, timeout in TIMEOUTS.items():
        tells = life == "tells"
        config = CheckpointWriterConfig(
            write_barrier_timeout_secs=timeout, keep_last=1 if tells else None
        )
        hook: WriterHook | None = Telling() if tells else None
        if life == "before" and step == 2:
            hook = Fatal()
        if life in ("at", "after", "committed") and step == 2:
            barrier = FatalBarrier(barrier, life)
        state: dict[str, Any] = {
            "rank": rank,
            "step": step,
            "w": torch.full((50_000,), float(step)),
        }
        if life == "fails" and step == 2:
            state = {"unknown": object()}
        if life == "stays-away" and step == 2:
            return
        writer = CheckpointWriter(config, RankInfo(rank, 2), barrier, hook)
        place = directory
        if life == "lost" and step == 2:
            place = f"{directory}/{'x' * 300}"  # no name can be so long
        try:
            writer.write(f"{place}/step-{step}", state)
        except Exception as error:  # noqa: BLE001 - it is told
            print(f"{step} {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{step} saved", flush=True)
    writer.close()
    if kind == "default_store" and life in ("well", "fails", "lost"):
        with suppress(RuntimeError):  # the other one may be dead
            dist.monitored_barrier(timeout=timedelta(seconds=5))  # rank 0 is the store
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    rank, port, directory, kind, life = sys.argv[1:]
    main(int(rank), int(port), directory, kind, life)
