"""Gloo groups whose ranks are all in this process, and transports over them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed

from aiockpt import PGTransport
from aiockpt.pg.mover import Mover

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


def flip_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last bit of every message of a data segment change on its way."""
    segment, post = Mover.send_segment, Mover._post_send
    flipping: set[Mover] = set()

    def send_segment(mover: Mover, *arguments: Any) -> None:
        flipping.add(mover)
        segment(mover, *arguments)
        flipping.discard(mover)

    def post_send(mover: Mover, tensor: torch.Tensor, lane: int = 0) -> Any:
        if mover in flipping:
            tensor = tensor.clone()
            tensor[-1] ^= 128
        return post(mover, tensor, lane)

    monkeypatch.setattr(Mover, "send_segment", send_segment)
    monkeypatch.setattr(Mover, "_post_send", post_send)
