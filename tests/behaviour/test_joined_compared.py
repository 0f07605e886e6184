"""Values on which senders of shards must agree, beside shards that are much larger."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiockpt import Limits
from aiockpt.errors import RankValuesError
from aiockpt.testing import CutAfter, assert_same
from tests.support.joined import cut, joined, numbers, proxies, shards, through
from tests.support.transports import MIB, transport

pytestmark = pytest.mark.asyncio

EQUAL = torch.arange(300, dtype=torch.int64)
"""It lies in one chunk with other values."""


def state_of(rank: int) -> dict[str, Any]:
    """Return shards, a value that all ranks have, and one that differs."""
    return {
        "w": cut(4, whole=numbers(4)),
        "equal": EQUAL,
        "own": torch.full((9,), rank),
    }


async def received(metadata: str, name: str, **options: Any) -> torch.Tensor:
    """Receive a value with less memory than the chunks with its copies take."""
    async with transport(limits=Limits(max_bytes=2 * MIB)) as receiver:
        call = receiver.recv_checkpoint(metadata=metadata, select=[name], **options)
        found: torch.Tensor = (await call)[name]
        return found


async def test_equal_values_cost_no_chunk() -> None:
    """Only their bytes are fetched to compare them."""
    async with shards(state_of, chunk_bytes=MIB) as senders:
        assert_same(await received(joined(senders), "equal"), EQUAL)
        sent = [each.statistics().bytes_sent for each in senders]
    assert sorted(sent)[2] < MIB // 8, "three senders are only compared"
    assert max(sent) < 2 * MIB


async def test_other_values_are_found() -> None:
    """The error names those that differ."""
    async with shards(state_of, chunk_bytes=MIB) as senders:
        with pytest.raises(RankValuesError) as caught:
            await received(joined(senders), "own")
        assert [*caught.value.paths] == ["own"]
        found = await received(joined(senders), "own", rank_values=2)
    assert_same(found, torch.full((9,), 2))


async def test_broken_connections_are_made_again() -> None:
    """A range that is compared is asked for again."""
    async with shards(state_of, chunk_bytes=MIB) as senders, proxies(senders) as lines:
        for each in lines:
            each.faults = [CutAfter(1000, reset=True) for _ in range(3)]
        assert_same(await received(through(lines, senders), "equal"), EQUAL)
