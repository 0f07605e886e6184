"""Deltas from several senders of shards, by a receiver on another mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.joined import cut, flat, grid, joined, publish, received, shards
from tests.support.mesh_ranks import as_rank, distributed
from tests.support.transports import told

pytestmark = pytest.mark.asyncio

ROWS = torch.arange(1 << 19, dtype=torch.int16).view(2048, 256).view(torch.bfloat16)
"""Sixteen chunks of 64 KiB."""

NEW = ROWS.clone()
NEW.view(torch.int16).view(-1)[::100] += 1  # each hundredth word

Split = Callable[[torch.Tensor], Any]


def full(state: Any) -> torch.Tensor:
    """Return the elements that this rank has, bit by bit."""
    own = state["w"]
    own = own.to_local() if isinstance(own, DTensor) else own
    return own.view(torch.int16)


@asynccontextmanager
async def two_steps(send: Split) -> AsyncIterator[str]:
    """Publish two steps of four ranks; give the metadata of the senders."""
    async with shards(lambda _: {"w": send(ROWS)}, keep_base=True) as senders:
        await publish(senders, lambda _: {"w": send(NEW)}, step=8)
        yield joined(senders)


async def reused(metadata: str, into: Any, **options: Any) -> tuple[int, int]:
    """Receive the second step; return the bytes that came, and those reused."""
    async with told() as events:
        await received(metadata, into=into, have=True, step=8, **options)
    (event,) = (each for each in events if each.stop == "recv")
    return event.nbytes, event.reused


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("send", "take", "world"),
    [
        (lambda w: cut(4, whole=w), lambda w: cut(2, whole=w), 2),
        (lambda w: cut(4, whole=w), lambda w: w.clone(), 1),
        (lambda w: cut(4, Shard(1), whole=w), lambda w: w.clone(), 1),
        (lambda w: distributed(w, grid(), Shard(0), Shard(1)), lambda w: w.clone(), 1),
        (
            lambda w: distributed(w, grid(), Replicate(), Shard(0)),
            lambda w: cut(2, whole=w),
            2,
        ),
    ],
    ids=["halves", "rows", "columns", "blocks", "replicas"],
)
async def test_another_mesh(send: Split, take: Split, world: int, direct: bool) -> None:
    """A step that changes little costs little, and the result is exact."""
    async with two_steps(send) as metadata:
        with as_rank(world - 1, world):
            into, expected = {"w": take(ROWS)}, full({"w": take(NEW)})
            came, held = await reused(metadata, into, direct=direct)
        assert torch.equal(full(into), expected)
        assert came < expected.nbytes // 4
        assert came + held == expected.nbytes


async def test_what_is_no_base() -> None:
    """A receiver that holds something else, or half of each chunk, gets every byte."""
    async with two_steps(lambda w: cut(4, whole=w)) as metadata:
        into = {"w": torch.randn(ROWS.shape).to(torch.bfloat16)}
        await received(metadata, into=into, have=True, step=8)
        assert torch.equal(full(into), NEW.view(torch.int16))
        with as_rank(1, 2):
            into = {"w": distributed(ROWS, flat(2), Shard(1))}
            _, held = await reused(metadata, into)
            expected = {"w": distributed(NEW, flat(2), Shard(1))}
            assert torch.equal(full(into), full(expected))
        assert held == 0
