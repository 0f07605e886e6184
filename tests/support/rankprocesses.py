"""Starts ranks in processes of their own, beside a rank 0 in this one."""

from __future__ import annotations

import signal
import sys
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.groups import Transport, joined, store_in

SUPPORT = Path(__file__).parent


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[Process]:
    """Run Python until the end of the block; kill what is left of it then."""
    started = await create_subprocess_exec(
        *(sys.executable, *command),
        stdout=PIPE,
    )
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            started.send_signal(signal.SIGKILL)
        await started.communicate()


@asynccontextmanager
async def ranks(path: Path, *lives: str) -> AsyncIterator[tuple[Any, list[Process]]]:
    """Give rank 0's group, and the processes of the other ranks, all of them ready."""
    store, count = str(path / "store"), len(lives) + 1
    async with AsyncExitStack() as stack:
        command = (str(SUPPORT / "rank.py"), store)
        started = [
            await stack.enter_async_context(
                process(*command, str(rank), str(count), life)
            )
            for rank, life in enumerate(lives, 1)
        ]
        group = await joined(store_in(store, count), 0, count)
        for each in started:
            assert each.stdout is not None
            assert await each.stdout.readline() == b"ready\n"
        yield group, started


def transport(group: Any, **options: Any) -> Transport:
    """Return rank 0's transport."""
    return Transport(group, **{"timeout": 30, **options})
