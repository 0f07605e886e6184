"""Senders in processes of their own, which may be killed and stopped."""

from __future__ import annotations

import os
import sys
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiockpt

__all__ = ["TOKEN", "killed", "serving_process"]

TOKEN = "secret"
SUPPORT = Path(__file__).parent


@asynccontextmanager
async def serving_process(port: int = 0) -> AsyncIterator[tuple[Process, str]]:
    """Start a sender; yield it and its address when it serves."""
    package = Path(aiockpt.__file__).parents[1]
    paths = os.pathsep.join([str(package), str(SUPPORT)])
    process = await create_subprocess_exec(
        *(sys.executable, str(SUPPORT / "served.py"), str(port), TOKEN),
        env={**os.environ, "PYTHONPATH": paths},
        stdout=PIPE,
    )
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        assert address, "the sender did not start"
        yield process, address
    finally:
        await killed(process)


async def killed(process: Process) -> None:
    """Kill a process as the kernel does when memory is short."""
    if process.returncode is None:
        process.kill()
    await process.communicate()
