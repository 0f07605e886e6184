"""Slots bound how many bodies are sent at a time, and slow bodies cannot hold them."""

from __future__ import annotations

import asyncio

import pytest

from aiockpt.http.problems import PeerBusy
from aiockpt.http.tuning import SlowAfter
from aiockpt.swarm import relay
from aiockpt.swarm.relay import Slots
from tests.support.servers import settle

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]


NBYTES = 4096


async def is_free(slots: Slots, *, wait: float) -> bool:
    """Return whether a slot becomes free in so many seconds."""
    try:
        async with slots.take(NBYTES, wait=wait):
            return True
    except PeerBusy:
        return False


async def test_what_is_always_slow_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow line, only the first bodies free their slots before they end."""
    monkeypatch.setattr(relay, "_SLOW_BODY", SlowAfter(5.0, 1.0, unknown_s=0.1))
    slots, never, begun = Slots(1), asyncio.Event(), 0

    async def hold() -> None:
        nonlocal begun
        async with slots.take(1 << 20, wait=10):
            begun += 1
            await never.wait()

    first = asyncio.create_task(hold())
    second = asyncio.create_task(hold())  # begins as soon as the first no longer counts
    await settle(lambda: begun == 2)
    assert not await is_free(slots, wait=0)
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert await is_free(slots, wait=0)


async def test_a_body_may_take_as_long_as_its_rate_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else more bodies would be sent than the rate of all is divided by."""
    monkeypatch.setattr(relay, "_SLOW_BODY", SlowAfter(5.0, 1.0, unknown_s=0.1))
    slots = Slots(1, rate=NBYTES / 60)
    async with slots.take(NBYTES, wait=0):
        assert not await is_free(slots, wait=0.5)
    assert await is_free(slots, wait=0)


async def test_readers_that_are_always_slow_starve_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They cannot make it usual to hold a slot for ever longer."""
    monkeypatch.setattr(relay, "_SLOW_BODY", SlowAfter(5.0, 0.01, unknown_s=0.01))
    slots, never = Slots(2), asyncio.Event()
    async with asyncio.TaskGroup() as group:

        async def hold() -> None:
            async with slots.take(NBYTES, wait=600):
                if not never.is_set():
                    group.create_task(hold())  # four of them always wait
                await never.wait()

        for _ in range(6):
            group.create_task(hold())
        await asyncio.sleep(0)  # they come first
        for _ in range(20):
            assert not await is_free(slots, wait=0)
            async with slots.take(NBYTES, wait=20) as sent:
                sent()
        never.set()


async def test_only_a_body_that_was_sent_tells_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that was refused behind its slot took no time at all."""
    monkeypatch.setattr(relay, "_SLOW_BODY", SlowAfter(5.0, 0.01, unknown_s=10.0))
    slots = Slots(1)
    for is_sent in (False, True):
        async with slots.take(NBYTES, wait=0) as sent:
            if is_sent:
                sent()
        async with slots.take(NBYTES, wait=0):
            assert await is_free(slots, wait=5 if is_sent else 0.5) is is_sent


async def test_a_bounded_number_of_requests_waits() -> None:
    """The next one is told to come back later."""
    slots = Slots(1)
    async with slots.take(NBYTES, wait=0):
        waiting = [asyncio.create_task(is_free(slots, wait=60)) for _ in range(1000)]
        await asyncio.sleep(0)
        with pytest.raises(PeerBusy) as refused:
            async with slots.take(NBYTES, wait=60):
                pass
        assert refused.value.retry_after == 1
    assert all(await asyncio.gather(*waiting))
    assert await is_free(slots, wait=0)
