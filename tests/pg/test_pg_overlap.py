"""What has arrived is digested while the rest still comes."""

from __future__ import annotations

import threading

import pytest
import torch

from aiockpt import Progress
from aiockpt.pg.messages import Channel
from tests.support.groups import moved, transports, watch_leaving

pytestmark = pytest.mark.asyncio

MIB = 1 << 20
MESSAGES = 12  # fewer than are under way at once
DEADLINE = 20.0


async def test_a_chunk_is_verified_before_the_last_one_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A receiver that digests everything at the end is told of none until then."""
    seen = threading.Event()
    left: list[int] = []
    told: list[bool] = []

    def hold_the_last_one(_: Channel, message: torch.Tensor) -> None:
        left.append(message.nbytes)
        if len(left) == MESSAGES:
            told.append(seen.wait(DEADLINE))

    def on_progress(progress: Progress) -> None:
        if progress.chunks_done:
            seen.set()

    watch_leaving(monkeypatch, hold_the_last_one)
    state = {"w": torch.ones(MESSAGES * 16 * MIB, dtype=torch.uint8)}
    into = {"w": torch.zeros_like(state["w"])}
    async with transports(timeout=3 * DEADLINE, chunk_bytes=16 * MIB) as (sender, heir):
        await moved(sender, heir, state, into=into, direct=True, progress=on_progress)
    assert told == [True]
    assert torch.equal(into["w"], state["w"])
