"""One of two ranks that save in the background, and commit from their processes.

``background_rank.py RANK PORT DIRECTORY KIND LIFE`` saves steps 1 and 2, and says how
each went. Rank 1 does so on uvloop's loop. KIND is ``tcp_store`` (at PORT) or
``default`` (that of the process group). LIFE is ``well``, ``unsavable`` (step 2 cannot
be staged), ``hasty`` (it cancels the save of step 2), ``child-dies`` (its process is
killed in step 2, its file written), ``child-dies-late`` (its process is killed in step
2 when all files are written) or ``dies`` (it is killed when step 2 was handed over).
Warnings are printed, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

import aiockpt
from aiockpt.checkpointers import BarrierConfig, CheckpointWriterConfig, RankInfo
from aiockpt.checkpointers.writer import WriterHook
from aiockpt.events import TransferEvent, add_hook
from tests.support.checkpointing import die_between_meetings


class Fatal(WriterHook):
    """Dies in step 2, when the file is written; once."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        if path.endswith("2") and not os.path.exists(self.mark):
            open(self.mark, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)

    def post_commit(self, path: str, **kwargs: Any) -> None:
        pass


def tell(event: TransferEvent) -> None:
    """Print a warning."""
    if event.level == logging.WARNING:
        print(event.step, "warning:", event.detail, flush=True)


async def main(rank: int, port: str, directory: str, kind: str, life: str) -> None:
    """Live that life."""
    barrier = BarrierConfig()
    info = None
    if kind == "default":
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
        )
    else:
        arguments = {"tcpstore_port": int(port), "master_address": "127.0.0.1"}
        barrier = BarrierConfig(kind, arguments)
        info = RankInfo(rank, 2)
    config = aiockpt.CheckpointerConfig(
        writer_config=CheckpointWriterConfig(write_barrier_timeout_secs=100),
        barrier_config=barrier,
    )
    hook = Fatal(f"{directory}.mark") if life == "child-dies" else None
    if life == "child-dies-late":
        made = aiockpt.make_async_checkpointer(
            config, info, die_between_meetings, (f"{directory}.mark",)
        )
    else:
        made = aiockpt.make_async_checkpointer(config, info, commit_hook=hook)
    add_hook(tell)
    async with made as checkpointer:
        for step in (1, 2):
            state: dict[str, Any] = {"w": torch.full((1000,), float(step)), "r": rank}
            if life == "unsavable" and step == 2:
                state["bad"] = object()
            try:
                async with asyncio.timeout(0 if (life, step) == ("hasty", 2) else None):
                    handle = await checkpointer.save(state, f"{directory}/step-{step}")
            except TimeoutError:
                print(step, "cancelled", flush=True)
                continue
            if life == "dies" and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                await handle.written()
                print(step, "saved", flush=True)
            except aiockpt.AiockptError as error:
                print(step, type(error).__name__, error, flush=True)
    if kind == "default":
        dist.barrier()  # the store is rank 0's
        dist.destroy_process_group()


def uvloop_if_there() -> Any:
    """Return what makes the other loop, so that both are tested together."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    place, port, directory, kind, life = sys.argv[1:]
    own_loop = uvloop_if_there() if place == "1" else None
    with asyncio.Runner(loop_factory=own_loop) as runner:
        runner.run(main(int(place), port, directory, kind, life))
