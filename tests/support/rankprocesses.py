"""Ranks in processes of their own: beside a rank 0 in this one, or forks of one."""

from __future__ import annotations

import os
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


def rank_of(world: int) -> int:
    """Fork into ``world`` ranks, and return in each of them which one it is.

    It must come before anything starts a thread. The process that forked waits for its
    ranks; when one fails, it kills the others and fails as well.
    """
    ranks: set[int] = set()
    for rank in range(world):
        if not (child := os.fork()):
            return rank
        ranks.add(child)
    while ranks:
        child, status = os.wait()
        ranks.discard(child)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank of {world} ended with status {status}")
    sys.exit()


def kill_all(leader: int) -> None:
    """Kill that process and its ranks, if it leads a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
