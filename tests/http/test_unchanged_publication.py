"""A publication whose tensors are those of the publication before it says so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from aiockpt.events import TransferEvent, add_hook
from tests.support.transports import transport

pytestmark = pytest.mark.asyncio


def state(step: int, fill: float = 1.0) -> dict[str, Any]:
    """Return a state dict whose plain value says the step."""
    return {"step": step, "weight": torch.full((1000,), fill)}


@pytest.mark.parametrize("server", ["loop", "process"])
async def test_it_warns_with_both_steps(
    caplog: pytest.LogCaptureFixture, server: Any
) -> None:
    """Also after a retraction; the same step again is no warning."""
    events: list[TransferEvent] = []
    remove = add_hook(events.append)
    try:
        async with transport(
            timeout=30, process=server == "process", chunk_bytes=16 << 20
        ) as sender:
            await sender.send_checkpoint([1], 1, state(1))
            await sender.send_checkpoint([1], 1, state(1))
            assert not [each for each in caplog.records if "same bytes" in each.message]
            await sender.send_checkpoint([1], 2, state(2))
            await sender.disallow_checkpoint()
            await sender.send_checkpoint([1], 3, state(3))
            await sender.send_checkpoint([1], 4, state(4, fill=2.0))
    finally:
        remove()
    published = [each for each in events if each.stop == "publish"]
    assert [each.unchanged for each in published] == [False, True, True, True, False]
    warned = [each.level == logging.WARNING for each in published]
    assert warned == [False, False, True, True, False]
    lines = [
        each.getMessage() for each in caplog.records if each.levelname == "WARNING"
    ]
    assert len(lines) == 2
    for line, steps in zip(lines, [(2, 1), (3, 2)], strict=True):
        assert all(f"step {step}" in line for step in steps)


async def test_a_state_without_tensors_says_nothing() -> None:
    """There is nothing that should have changed."""
    events: list[TransferEvent] = []
    remove = add_hook(events.append)
    try:
        async with transport(timeout=30, chunk_bytes=16 << 20) as sender:
            for step in (1, 2):
                await sender.send_checkpoint([1], step, {"step": 1})
    finally:
        remove()
    assert not any(each.unchanged for each in events)
