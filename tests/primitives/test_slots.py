"""Slots bound how many bodies are sent at a time, and slow bodies cannot hold them."""

from __future__ import annotations

import asyncio

import pytest

from aiockpt.http.problems import PeerBusy
from aiockpt.http.relay import Slots

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]


async def is_free(slots: Slots, *, wait: float) -> bool:
    """Return whether a slot becomes free in so many seconds."""
    try:
        async with slots.take(wait=wait):
            return True
    except PeerBusy:
        return False


async def test_what_is_always_slow_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow line, only the first bodies free their slots before they end."""
    monkeypatch.setattr("aiockpt.http.relay._AT_FIRST", 0.1)
    slots, never = Slots(1), asyncio.Event()

    async def hold() -> None:
        async with slots.take(wait=10):
            await never.wait()

    first = asyncio.create_task(hold())
    second = asyncio.create_task(hold())  # begins as soon as the first no longer counts
    await asyncio.sleep(0.5)
    assert not await is_free(slots, wait=0)
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert await is_free(slots, wait=0)


async def test_a_body_may_take_as_long_as_its_rate_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else more bodies would be sent than the rate of all is divided by."""
    monkeypatch.setattr("aiockpt.http.relay._AT_FIRST", 0.1)
    slots = Slots(1)
    async with slots.take(wait=0, least=60):
        assert not await is_free(slots, wait=0.5)
    assert await is_free(slots, wait=0)
