"""Gloo groups whose ranks are all in this process, and transports over them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

from torch import distributed

from aiockpt import PGTransport

Transport = PGTransport[Any]

TIMEOUT = timedelta(seconds=60)


async def gloo_groups(count: int) -> list[Any]:
    """Make a group and return what each of its ranks has of it."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    return await asyncio.gather(*(joined(store, rank, count) for rank in range(count)))


def store_in(path: str, count: int) -> Any:
    """Return what ranks in other processes find one another by."""
    return distributed.FileStore(path, count)  # type: ignore[attr-defined]


async def joined(store: Any, rank: int, count: int) -> Any:
    """Join a group, which waits for the others: in a thread."""
    made: list[Any] = []

    def make() -> None:
        made.append(distributed.ProcessGroupGloo(store, rank, count, TIMEOUT))

    thread = threading.Thread(target=make)
    thread.start()
    while thread.is_alive():  # noqa: ASYNC110 - joining it would block the loop
        await asyncio.sleep(0.001)
    return made[0]


@asynccontextmanager
async def transports(count: int = 2, **options: Any) -> AsyncIterator[list[Transport]]:
    """Make the transports of all ranks of a new group."""
    options = {"timeout": 20, "chunk_bytes": 64 << 10, **options}
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(Transport(group, **options))
            for group in await gloo_groups(count)
        ]


async def moved(
    sender: Transport, receiver: Transport, state: object, step: int = 1, **options: Any
) -> Any:
    """Move a state from rank 0 to rank 1; return what arrived."""
    sent, got = await both(sender, receiver, state, step, **options)
    assert sent is None, sent
    assert not isinstance(got, BaseException), got
    return got


async def both(
    sender: Transport, receiver: Transport, state: object, step: int = 1, **options: Any
) -> tuple[Any, Any]:
    """Do the same, and return what came of either call, be it an error."""
    return await asyncio.gather(
        sender.send_checkpoint([1], step, state),
        receiver.recv_checkpoint(0, "", options.pop("wanted", step), **options),
        return_exceptions=True,
    )
