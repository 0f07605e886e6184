"""Deltas from several senders of shards, by a receiver on another mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.joined import cut, flat, grid, joined, publish, received, shards
from tests.support.mesh_ranks import as_rank, distributed
from tests.support.transports import told

ROWS = torch.arange(1 << 19, dtype=torch.int16).view(2048, 256).view(torch.bfloat16)
"""Sixteen chunks of 64 KiB."""

Split = Callable[[torch.Tensor], Any]


def stepped(whole: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which each hundredth word is another one."""
    words = whole.clone().view(torch.int16)
    words.view(-1)[::100] += 1
    return words.view(torch.bfloat16)


def full(state: Any) -> torch.Tensor:
    """Return the elements that this rank has, bit by bit."""
    own = state["w"]
    own = own.to_local() if isinstance(own, DTensor) else own
    return own.view(torch.int16)


@pytest.mark.asyncio
class TestDeltas:
    """A delta is asked for where the receiver holds every byte of a chunk's base."""

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize(
        ("send", "take", "world"),
        [
            (lambda w: cut(4, whole=w), lambda w: cut(2, whole=w), 2),
            (lambda w: cut(4, whole=w), lambda w: w.clone(), 1),
            (lambda w: cut(4, Shard(1), whole=w), lambda w: w.clone(), 1),
            (
                lambda w: distributed(w, grid(), Shard(0), Shard(1)),
                lambda w: w.clone(),
                1,
            ),
            (
                lambda w: distributed(w, grid(), Replicate(), Shard(0)),
                lambda w: cut(2, whole=w),
                2,
            ),
        ],
        ids=["halves", "rows", "columns", "blocks", "replicas"],
    )
    async def test_another_mesh(
        self, send: Split, take: Split, world: int, direct: bool
    ) -> None:
        """A step that changes little costs little, and the result is exact."""
        new = stepped(ROWS)
        async with shards(lambda _: {"w": send(ROWS)}, keep_base=True) as senders:
            await publish(senders, lambda _: {"w": send(new)}, step=8)
            for rank in range(world):
                with as_rank(rank, world):
                    into, expected = {"w": take(ROWS)}, {"w": take(new)}
                    async with told() as events:
                        await received(
                            joined(senders),
                            into=into,
                            have=True,
                            step=8,
                            direct=direct,
                        )
                    assert torch.equal(full(into), full(expected))
                    (event,) = (each for each in events if each.stop == "recv")
                    assert event.nbytes < full(into).nbytes // 4
                    assert event.nbytes + event.reused == full(into).nbytes

    async def test_no_base(self) -> None:
        """A receiver that holds something else gets every byte."""
        async with shards(
            lambda _: {"w": cut(4, whole=ROWS)}, keep_base=True
        ) as senders:
            new = stepped(ROWS)
            await publish(senders, lambda _: {"w": cut(4, whole=new)}, step=8)
            into = {"w": torch.randn(ROWS.shape).to(torch.bfloat16)}
            await received(joined(senders), into=into, have=True, step=8)
            assert torch.equal(full(into), new.view(torch.int16))

    async def test_a_part_of_a_chunk(self) -> None:
        """Where the receiver holds half of each chunk, all of it is fetched."""
        async with shards(
            lambda _: {"w": cut(4, whole=ROWS)}, keep_base=True
        ) as senders:
            new = stepped(ROWS)
            await publish(senders, lambda _: {"w": cut(4, whole=new)}, step=8)
            with as_rank(1, 2):
                into = {"w": distributed(ROWS, flat(2), Shard(1))}
                expected = {"w": distributed(new, flat(2), Shard(1))}
                async with told() as events:
                    await received(joined(senders), into=into, have=True, step=8)
                assert torch.equal(full(into), full(expected))
            (event,) = (each for each in events if each.stop == "recv")
            assert event.reused == 0
