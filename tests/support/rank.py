"""A rank in a process of its own: ``rank.py STORE RANK COUNT WHAT``, over gloo.

WHAT is how it spends its life, until it is killed: a function below.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from aiockpt import Progress
from aiockpt.errors import PeerFailedError, ProcessGroupError
from tests.support.groups import Transport, joined, store_in, summed
from tests.support.transports import weights

MIB_SENT = 128
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


async def answer(transport: Transport, rank: int, count: int) -> None:
    """Receive from rank 0, and send it back."""
    state = await transport.recv_checkpoint(0, "", 1, LONG)
    await transport.send_checkpoint([0], 1, state, LONG)
    await asyncio.Event().wait()


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


async def leave_sending(transport: Transport, rank: int, count: int) -> None:
    """Do the same as a sender, in the middle of a message."""
    await left(transport.send_checkpoint([0], 1, weights(mib=MIB_SENT), LONG))


async def leave_late(transport: Transport, rank: int, count: int) -> None:
    """Leave a thread behind that comes back while the interpreter ends."""
    globals()["ends slowly"] = EndsSlowly()
    await left(transport.recv_checkpoint(0, "", 1, 1))


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
        *(send, receive, die_half_way, stop_half_way, insist, answer, train, idle),
        *(leave, leave_sending, leave_late),
    )
}


async def main(path: str, rank: int, count: int, life: str) -> None:
    """Join the group, say so, and live."""
    group = await joined(store_in(path, count), rank, count)
    async with Transport(group, timeout=LONG) as transport:
        print("ready", flush=True)
        await LIVES[life](transport, rank, count)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
