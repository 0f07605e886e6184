"""One slow connection does not hold up a receive, whatever is received into what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiockpt.testing import Drip, Fault, assert_same
from tests.support.transports import Transport, pair, proxied, through

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

SLOWEST = Drip(1000, burst=100)
"""For what a lane has in hand it takes minutes."""


def noise(seed: int) -> dict[str, Any]:
    """Return 16 tensors of 256 KiB each."""
    generator = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randn(1 << 16, generator=generator) for n in range(16)}


async def overtaking(sender: Transport, receiver: Transport, **options: Any) -> Any:
    """Receive, while the second connection and the third one drip."""
    faults = [Fault(), SLOWEST, SLOWEST]
    async with proxied(sender, faults=faults) as proxy:
        url = through(proxy, sender)
        got = await receiver.recv_checkpoint(0, url, 1, 100.0, **options)
        assert proxy.statistics().connections > 2
        return got


async def test_fresh_tensors() -> None:
    """They have every byte."""
    async with pair(connections=4) as (sender, receiver):
        await sender.send_checkpoint([], 1, noise(1))
        assert_same(await overtaking(sender, receiver), noise(1))


@pytest.mark.parametrize("direct", [False, True])
async def test_a_template(direct: bool) -> None:
    """It is filled as ever, and by one writer at a time."""
    mine = noise(2)
    async with pair(connections=4) as (sender, receiver):
        await sender.send_checkpoint([], 1, noise(1))
        await overtaking(sender, receiver, into=mine, direct=direct)
    assert_same(mine, noise(1))


async def test_a_selection() -> None:
    """Nothing else is fetched for it."""
    wanted = [f"w{n}" for n in range(4, 12)]
    async with pair(connections=4) as (sender, receiver):
        await sender.send_checkpoint([], 1, noise(1))
        got = await overtaking(sender, receiver, select=wanted)
    assert_same(got, {name: noise(1)[name] for name in wanted})


async def test_what_is_there_already() -> None:
    """It is not fetched, by nobody."""
    mine = noise(1)
    for n in range(4, 12):
        mine[f"w{n}"] += 1
    async with pair(connections=4) as (sender, receiver):
        await sender.send_checkpoint([], 1, noise(1))
        await overtaking(sender, receiver, into=mine, have=True)
    assert_same(mine, noise(1))
