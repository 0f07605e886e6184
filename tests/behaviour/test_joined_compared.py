"""Values on which senders of shards must agree, beside shards that are much larger."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiockpt import Limits
from aiockpt.errors import RankValuesError
from aiockpt.http import joined as joined_source
from aiockpt.testing import CutAfter, assert_same
from tests.support.joined import (
    cut,
    joined,
    numbers,
    proxies,
    received,
    shards,
    through,
)
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


@pytest.fixture(autouse=True)
def large_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every chunk for a large one, so that parts of chunks are compared."""
    monkeypatch.setattr(joined_source, "_SMALL_READ_BYTES", 0)


async def test_equal_values_cost_no_chunk() -> None:
    """Only their bytes are fetched to compare them."""
    async with shards(state_of, chunk_bytes=MIB) as senders:
        before = [each.statistics().bytes_sent for each in senders]
        found = await received(joined(senders), select=["equal"])
        sent = [
            each.statistics().bytes_sent - start
            for each, start in zip(senders, before, strict=True)
        ]
    assert_same(found, {"equal": EQUAL})
    assert sorted(sent)[2] < MIB // 8, "three senders are only compared"
    assert max(sent) < 2 * MIB


async def test_other_values_are_found() -> None:
    """The error names those that differ, and no other one."""
    async with shards(state_of, chunk_bytes=MIB) as senders:
        with pytest.raises(RankValuesError) as caught:
            await received(joined(senders))
        found = await received(joined(senders), rank_values=2)
    assert [*caught.value.paths] == ["own"]
    assert_same(found["own"], torch.full((9,), 2))
    assert_same(found["w"], numbers(4))


async def test_a_receiver_with_little_memory() -> None:
    """Chunks of a sender that exceed the limit are not fetched to be compared."""
    limits = Limits(max_bytes=2 * MIB)
    async with (
        shards(state_of, chunk_bytes=MIB) as senders,
        transport(limits=limits) as receiver,
    ):
        call = receiver.recv_checkpoint(metadata=joined(senders), select=["equal"])
        assert_same(await call, {"equal": EQUAL})


async def test_broken_connections_are_made_again() -> None:
    """A range that is compared is asked for again."""
    async with shards(state_of, chunk_bytes=MIB) as senders, proxies(senders) as lines:
        for each in lines:
            each.faults = [CutAfter(1000, reset=True) for _ in range(3)]
        found = await received(through(lines, senders), select=["equal"])
    assert_same(found, {"equal": EQUAL})
