"""A checkpoint process that keeps the last snapshot of a trainer that has died."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiockpt
from tests.support.checkpointing import Gate, eventually, is_running, wait_until
from tests.support.commandline import ENVIRONMENT
from tests.support.rankprocesses import SUPPORT, process

__all__ = ["Kept", "kept", "training"]

_STEP = 1


@dataclass
class Kept:
    """What is kept, by whom, and where one finds it."""

    keeper: int
    directory: str
    runtime_dir: str

    @property
    def state(self) -> dict[str, Any]:
        """The state dict of the trainer's first step."""
        from tests.support.trainer import state

        return state(_STEP)

    def heir(self) -> AbstractAsyncContextManager[Process]:
        """Start a process that asks for it; it says ``asking`` when it does."""
        return process(__file__, self.directory, self.runtime_dir)


def started(said: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a trainer, which writes to a file: its child would keep a pipe open."""
    with said.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, str(SUPPORT / "trainer.py"), *arguments],
            env=ENVIRONMENT,
            stdout=out,
            start_new_session=True,
        )


@asynccontextmanager
async def training(place: Path, keep: float, *words: str) -> AsyncIterator[int]:
    """Run a trainer until it has done all words, and kill it; give its child's id.

    Its child outlives it, and is killed at the end of the block.
    """
    said, pid = place / "said", place / "pid"
    child = 0
    try:
        trainer = started(said, str(place), str(keep), *words)
        try:
            await eventually(said.read_bytes, "the last word")
            await eventually(pid.exists, "the child")
            child = int(pid.read_text())
        finally:
            trainer.kill()
            trainer.wait()
        yield child
    finally:
        with suppress(OSError):
            if child:
                os.kill(child, signal.SIGKILL)
        wait_until(lambda: not is_running(child), "the child's end")


@asynccontextmanager
async def kept(place: Path) -> AsyncIterator[Kept]:
    """Kill a trainer whose only save was written; end its keeper afterwards."""
    gate = Gate(place / "gate")
    gate.open(2)
    run = place / "run"
    try:
        async with training(place, 60, "save", "wait") as keeper:
            await eventually(lambda: any(run.glob("*.sock")), "the keeping")
            yield Kept(keeper, f"{place}/checkpoints", str(run))
    finally:
        gate.close()


async def _ask(directory: str, runtime_dir: str) -> None:
    call = aiockpt.recover(directory, runtime_dir=runtime_dir, timeout=600)
    asking = asyncio.create_task(call)
    await asyncio.wait({asking}, timeout=0.3)
    print("asking", flush=True)
    await asking


if __name__ == "__main__":
    asyncio.run(_ask(*sys.argv[1:]))
