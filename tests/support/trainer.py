"""A training process that is killed, stopped or broken by the test that runs it.

As a program, ``trainer.py PLACE KEEP WORD...``, it obeys the words one after another:
each is a method of `Training`. Its child writes when the gate at ``PLACE/gate`` opens.
``trainer.py --recover DIRECTORY RUNTIME_DIR`` takes over what such a child keeps.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt.checkpointers import CheckpointProcessConfig
from aiockpt.memory.copies import CopyPlan
from tests.support.commandline import ENVIRONMENT
from tests.support.ranks import process
from tests.support.saving import Gate, GatedWriter, note_pid
from tests.support.waiting import eventually, is_running, wait_until

__all__ = ["Kept", "Trainer", "kept", "state", "trainer"]


def state(step: int) -> dict[str, Any]:
    """Return the state dict of a step."""
    return {"weight": torch.full((300_000,), float(step)), "step": step}


class Own:
    """A type that needs functions to travel."""

    def __init__(self, value: int) -> None:
        self.value = value


def register_own() -> None:
    """Register it in this process."""
    aiockpt.register_leaf(
        Own, tag="trainer.Own", encode=lambda own: own.value, decode=Own
    )


class Trainer:
    """A process that trains, as a test sees it, and the child that writes for it."""

    def __init__(self, place: Path, words: str, keep: float) -> None:
        self.place = place
        command = [sys.executable, __file__, str(place), str(keep), *words.split()]
        # Files, since the child outlives the trainer and would keep a pipe open.
        with (place / "said").open("wb") as said, (place / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=ENVIRONMENT,
                stdout=said,
                stderr=log,
                start_new_session=True,
            )

    @property
    def child(self) -> int:
        """The process that writes; 0: there is none yet."""
        with suppress(OSError):
            return int((self.place / "pid").read_text())
        return 0

    def path(self, step: int) -> Path:
        """Return where a step is saved to."""
        return self.place / "checkpoints" / f"step-{step}"

    async def waits(self) -> None:
        """Wait until it has done everything before its last word."""
        await eventually((self.place / "said").read_bytes, "the last word")
        await eventually(lambda: self.child, "the child's start")

    async def ended(self) -> None:
        """Wait for its end; its child may go on."""
        await eventually(lambda: self.process.poll() is not None, "its end")

    async def killed(self) -> None:
        """Kill it when it has done its words."""
        await self.waits()
        self.process.kill()
        await self.ended()

    async def child_ends(self) -> None:
        """Wait until the child has gone."""
        await eventually(lambda: self.child and not is_running(self.child), "the end")

    async def recovered(self, **options: Any) -> Any:
        """Take over what the child keeps."""
        run = str(self.place / "run")
        found = aiockpt.recover(self.place / "checkpoints", runtime_dir=run, **options)
        return await found

    async def keeps(self) -> None:
        """Wait until the child offers what it keeps."""
        await eventually(lambda: any((self.place / "run").glob("*.sock")), "the offer")

    def close(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.process.wait()
        if child := self.child:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
            wait_until(lambda: not is_running(child), "the child's end")
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)


@asynccontextmanager
async def trainer(place: Path, words: str, keep: float = 0) -> AsyncIterator[Trainer]:
    """Start one, and leave nothing of it."""
    made = Trainer(place, words, keep)
    try:
        yield made
    finally:
        made.close()


@dataclass
class Kept:
    """A snapshot whose trainer has died, who keeps it, and where one finds it."""

    keeper: int
    directory: str
    runtime_dir: str
    state: dict[str, Any]

    def heir(self) -> AbstractAsyncContextManager[Process]:
        """Start a process that asks for it; it says ``asking`` when it does."""
        return process(__file__, "--recover", self.directory, self.runtime_dir)


@asynccontextmanager
async def kept(place: Path) -> AsyncIterator[Kept]:
    """Kill a trainer whose only save was written; end its keeper afterwards."""
    gate = Gate(place / "gate")
    gate.open(2)
    try:
        async with trainer(place, "save wait", keep=60) as made:
            await made.killed()
            await made.keeps()
            yield Kept(made.child, f"{place}/checkpoints", f"{place}/run", state(1))
    finally:
        gate.close()


class Training:
    """What the process does, word by word."""

    def __init__(self, place: str, keep: float) -> None:
        self.place = place
        self.step = 0
        limits = CheckpointProcessConfig(
            keep_last_seconds=keep,
            runtime_dir=f"{place}/run",
            write_timeout_secs=float(os.environ.get("WRITE_TIMEOUT", "1800")),
        )
        self.checkpointer = aiockpt.make_async_checkpointer(
            aiockpt.CheckpointerConfig(process_config=limits),
            subprocess_init_fn=note_pid,
            subprocess_init_args=(f"{place}/pid",),
            checkpoint_writer_init_fn=GatedWriter,
            checkpoint_writer_init_args={"gate": f"{place}/gate"},
        )

    async def save(self, given: Any = None) -> None:
        """Stage and hand over, no more."""
        self.step += 1
        path = f"{self.place}/checkpoints/step-{self.step}"
        await self.checkpointer.save(given or state(self.step), path)

    async def own(self) -> None:
        """Save a value of a type that only this process has registered."""
        register_own()
        await self.save({"config": [Own(7)]})

    async def stuck(self) -> None:
        """Be in the middle of staging for ever."""
        reached = threading.Event()

        def staged(*_: object) -> Iterator[int]:
            reached.set()
            signal.pause()
            yield 0

        setattr(CopyPlan, "staged", staged)  # noqa: B010 - it is a method
        self.saving = asyncio.create_task(self.save({"weight": torch.ones(1 << 20)}))
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

    async def leave(self) -> None:
        """Forget to close."""
        sys.exit(0)

    async def wait(self) -> None:
        """Wait for a signal."""
        print("waiting", flush=True)
        await asyncio.sleep(120)


async def train(place: str, keep: str, *words: str) -> None:
    """Do one word after another."""
    training = Training(place, float(keep))
    for word in words:
        await getattr(training, word)()


async def ask(directory: str, runtime_dir: str) -> None:
    """Ask for what a child keeps, however long it takes."""
    call = aiockpt.recover(directory, runtime_dir=runtime_dir, timeout=600)
    asking = asyncio.create_task(call)
    await asyncio.wait({asking}, timeout=0.3)
    print("asking", flush=True)
    await asking


if __name__ == "__main__":
    if sys.argv[1] == "--recover":
        asyncio.run(ask(*sys.argv[2:]))
    else:
        asyncio.run(train(*sys.argv[1:]))
