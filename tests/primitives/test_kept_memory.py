"""The memory that a receiver with ``keep_arena`` keeps beside what it returns."""

from __future__ import annotations

import gc

import pytest
import torch

from aiockpt import TransportError
from aiockpt.memory.arena import ArenaPool
from aiockpt.testing import StallAfter, assert_same
from tests.support.transports import pair, proxied, receive, through

pytestmark = pytest.mark.asyncio


def state(value: float) -> dict[str, torch.Tensor]:
    """Return tensors of one value."""
    return {name: torch.full((50_000,), float(value)) for name in "abc"}


@pytest.mark.parametrize("have", [None, True])
async def test_a_template_is_filled_by_way_of_it(have: bool | None) -> None:
    """Without `direct`, the bytes pass through memory that is kept, too."""
    async with pair(keep_arena=True) as (sender, receiver):
        template = state(0)
        warm: ArenaPool = receiver._defaults.warm  # type: ignore[assignment]
        used = set()
        gc.collect()
        gc.disable()
        try:
            for step in range(1, 4):
                await sender.send_checkpoint([1], step, state(step))
                await receive(sender, receiver, step, into=template, have=have)
                assert_same(template, state(step))
                [arena] = warm.free
                used.add(arena)
        finally:
            gc.enable()
        assert len(used) == 1
        assert arena.nbytes >= 600_000


async def test_what_a_failed_receive_had_is_not_used_again() -> None:
    """The memory of a failed receive is dropped, since a thread may still write."""
    async with pair(keep_arena=True, reconnect_timeout=0) as (sender, receiver):
        await sender.send_checkpoint([1], 1, state(1))
        async with proxied(sender, otherwise=StallAfter(200_000)) as proxy:
            with pytest.raises(TransportError):
                await receiver.recv_checkpoint(0, through(proxy, sender), 1, timeout=2)
        gc.collect()
        warm: ArenaPool = receiver._defaults.warm  # type: ignore[assignment]
        assert not warm.free
        assert_same(await receive(sender, receiver), state(1))
