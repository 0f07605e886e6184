"""A training process that is killed, stopped or broken by the test that runs it.

It obeys the words on its command line, one after another, and says when each is done.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator

import torch

import aiockpt
from aiockpt.checkpointers import CheckpointProcessConfig
from aiockpt.memory.copies import CopyPlan
from tests.support.checkpointing import GatedWriter, eventually, note_pid


def state(fill: float) -> dict[str, object]:
    """Return the state dict of a step."""
    return {"weight": torch.full((300_000,), fill), "step": fill}


class Trainer:
    """Does what it is told to."""

    def __init__(self, place: str, keep: float) -> None:
        self.place = place
        self.step = 0
        process = CheckpointProcessConfig(
            keep_last_seconds=keep,
            runtime_dir=f"{place}/run",
            write_timeout_secs=float(os.environ.get("WRITE_TIMEOUT", "1800")),
        )
        self.checkpointer = aiockpt.make_async_checkpointer(
            aiockpt.CheckpointerConfig(
                process_config=process,
            ),
            subprocess_init_fn=note_pid,
            subprocess_init_args=(f"{place}/pid",),
            checkpoint_writer_init_fn=GatedWriter,
            checkpoint_writer_init_args={"gate": f"{place}/gate"},
        )

    async def save(self) -> None:
        """Stage and hand over, no more."""
        self.step += 1
        path = f"{self.place}/checkpoints/step-{self.step}"
        await self.checkpointer.save(state(self.step), path)

    async def half(self) -> None:
        """Be in the middle of staging when the next word comes."""
        self.step += 1
        wide = {"weight": torch.full((300 << 20,), 1.0, dtype=torch.bfloat16)}
        path = f"{self.place}/checkpoints/step-{self.step}"
        asyncio.get_running_loop().create_task(self.checkpointer.save(wide, path))
        for _ in range(20):
            await asyncio.sleep(0)

    async def stuck(self) -> None:
        """Be in the middle of staging for ever."""
        self.step += 1
        reached = threading.Event()

        def staged(*_: object) -> Iterator[int]:
            reached.set()
            signal.pause()
            yield 0

        setattr(CopyPlan, "staged", staged)  # noqa: B010 - it is a method
        wide = {"weight": torch.ones(1 << 20)}
        path = f"{self.place}/checkpoints/step-{self.step}"
        self.saving = asyncio.create_task(self.checkpointer.save(wide, path))
        await eventually(reached.is_set, "the copy")

    async def fork(self) -> None:
        """Leave a child that has every descriptor of this process."""
        if not os.fork():
            signal.pause()

    async def close(self) -> None:
        """End as one should."""
        await self.checkpointer.close()

    async def closing(self) -> None:
        """Be in the middle of the end; what is under way holds it up."""
        end = asyncio.get_running_loop().create_task(self.checkpointer.close())
        await asyncio.wait({end}, timeout=0.2)
        print("closing", flush=True)
        await end

    async def crash(self) -> None:
        """End by an exception inside of the block."""
        async with self.checkpointer:
            raise ZeroDivisionError("on purpose")

    async def leave(self) -> None:
        """Forget to close."""
        sys.exit(0)

    async def wait(self) -> None:
        """Wait for a signal."""
        await asyncio.sleep(120)


async def main(place: str, keep: float, words: list[str]) -> None:
    """Do one after another."""
    trainer = Trainer(place, keep)
    for word in words:
        if word == "wait":
            print("waiting", flush=True)
        todo: Callable[[], Awaitable[None]] = getattr(trainer, word)
        await todo()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
