"""Ranks in processes of their own: beside a rank 0 in this one, or forks of one.

``python ranks.py STORE RANK COUNT LIFE`` is one of them, over gloo. It does what the
function of that name does, most often until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from aiockpt import Progress
from aiockpt.errors import PeerFailedError, ProcessGroupError
from tests.support.groups import Transport, joined, store_in, summed
from tests.support.transports import weights

SUPPORT = Path(__file__).parent


@asynccontextmanager
async def process(*command: str, **options: Any) -> AsyncIterator[Process]:
    """Run Python until the end of the block; kill what is left of it then."""
    started = await create_subprocess_exec(
        *(sys.executable, *command), stdout=PIPE, **options
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
        command = (__file__, store)
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


JOB_S = 300
"""Seconds that a busy machine may take for a job."""


def begun(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a job: a process that forks into its ranks by `rank_of`."""
    return subprocess.Popen(
        [sys.executable, script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def check_ends(*jobs: subprocess.Popen[str]) -> None:
    """Wait for all of them; fail with what the first that failed said."""
    try:
        for leader in jobs:
            _, complained = leader.communicate(timeout=JOB_S)
            assert leader.returncode == 0, complained
    finally:
        for leader in jobs:
            kill_all(leader.pid)
            leader.communicate()


def kill_all(leader: int) -> None:
    """Kill that process and its ranks, if it leads a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


MIB_SENT = 32
"""More than the buffers of a connection have."""
LONG = 600


async def send(transport: Transport, rank: int, count: int) -> None:
    """Send to everybody below, again and again."""
    state = weights(mib=MIB_SENT, count=64)
    while True:
        await transport.send_checkpoint(list(range(rank)), 1, state, LONG)


async def receive(transport: Transport, rank: int, count: int) -> None:
    """Receive from rank 0, again and again."""
    while True:
        await transport.recv_checkpoint(0, "", 1, LONG)


async def die_half_way(transport: Transport, rank: int, count: int) -> None:
    """Be killed in the middle of what rank 0 sends."""
    await struck(transport, signal.SIGKILL)


async def stop_half_way(transport: Transport, rank: int, count: int) -> None:
    """Be stopped there."""
    await struck(transport, signal.SIGSTOP)


async def struck(transport: Transport, number: int) -> None:
    """Receive, and get a signal once some of it is there."""

    def strike(progress: Progress) -> None:
        if progress.bytes_done > progress.bytes_total / 10:
            os.kill(os.getpid(), number)

    await transport.recv_checkpoint(0, "", 1, LONG, progress=strike)


async def die_at_the_end(transport: Transport, rank: int, count: int) -> None:
    """Be killed as soon as the last byte of what rank 0 sends is there."""

    def strike(progress: Progress) -> None:
        if progress.bytes_total and progress.bytes_done == progress.bytes_total:
            os.kill(os.getpid(), signal.SIGKILL)

    await transport.recv_checkpoint(0, "", 1, LONG, progress=strike)


async def witness(transport: Transport, rank: int, count: int) -> None:
    """Receive from rank 0, and print how that ended; live on."""
    await _witness(transport, 0)


async def witness_last(transport: Transport, rank: int, count: int) -> None:
    """Receive from the last rank, and print how that ended; live on."""
    await _witness(transport, count - 1)


async def _witness(transport: Transport, source: int) -> None:
    try:
        await transport.recv_checkpoint(source, "", 1, LONG)
    except ProcessGroupError as error:
        print(type(error).__name__, error.rank, flush=True)
    else:
        print("whole", flush=True)
    await asyncio.Event().wait()


async def insist(transport: Transport, rank: int, count: int) -> None:
    """Receive from rank 0 until it can send; print why it could not; send it back."""
    while True:
        try:
            state = await transport.recv_checkpoint(0, "", 1, LONG)
        except PeerFailedError as error:
            print(error, flush=True)
        else:
            break
    await transport.send_checkpoint([0], 1, state, LONG)


async def train(transport: Transport, rank: int, count: int) -> None:
    """Add up numbers with rank 0, before and after a send to it that fails."""
    path = f"{sys.argv[1]} of training"
    training = await joined(store_in(path, count), rank, count)
    await summed(training, rank)
    with suppress(ProcessGroupError):
        state = weights(mib=MIB_SENT, count=64)
        await transport.send_checkpoint([0], 1, state, LONG)
        print("was received", flush=True)
    print(repr(transport), flush=True)
    await summed(training, rank)


async def idle(transport: Transport, rank: int, count: int) -> None:
    """Do nothing."""
    await asyncio.Event().wait()


async def leave(transport: Transport, rank: int, count: int) -> None:
    """Wait for what never comes, lose patience, and leave the threads behind."""
    await left(transport.recv_checkpoint(0, "", 1, LONG))


async def leave_late(transport: Transport, rank: int, count: int) -> None:
    """Leave a thread behind in a message, and one that comes back during the exit."""
    globals()["ends slowly"] = EndsSlowly()
    path = f"{sys.argv[1]} of training"
    other = Transport(await joined(store_in(path, count), rank, count))
    await left(transport.send_checkpoint([0], 1, weights(mib=MIB_SENT), LONG))
    await left(other.recv_checkpoint(0, "", 1, 1))


class EndsSlowly:
    """Lets other threads run while the modules are torn down."""

    def __init__(self) -> None:
        self._sleep = time.sleep

    def __del__(self) -> None:
        self._sleep(2)


async def left(call: Coroutine[Any, Any, object]) -> None:
    """Begin it, and stop."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.wait({task})
    print("cancelled" if task.cancelled() else task.exception(), flush=True)


LIVES: dict[str, Callable[[Transport, int, int], Any]] = {
    life.__name__: life
    for life in (
        *(send, receive, die_half_way, stop_half_way, insist, train, idle),
        *(leave, leave_late, die_at_the_end, witness, witness_last),
    )
}


async def live(path: str, rank: int, count: int, life: str) -> None:
    """Join the group, say so, and live."""
    group = await joined(store_in(path, count), rank, count)
    async with Transport(group, timeout=LONG) as transport:
        print("ready", flush=True)
        await LIVES[life](transport, rank, count)


if __name__ == "__main__":
    asyncio.run(live(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
