"""A cancel at every await: nothing has happened, or the group is plainly broken."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

from aiockpt import PeerFailedError, ProcessGroupError, StepNotFoundError
from aiockpt.testing import assert_same
from groups import Transport, transports
from suspensions import cut_at
from transports import weights

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.allow_leaks("threads", "fds"),  # the waits that nothing ends
]

PROMPT = 5.0
"""Seconds in which the other end hears of it; its own deadline is much later."""

Side = Callable[[Transport, int], Coroutine[Any, Any, None]]


def state(step: int) -> dict[str, Any]:
    """Return what is sent as a step: several chunks."""
    return weights(float(step), mib=0.2, count=2)


async def send(ours: Transport, step: int) -> None:
    """Send a step."""
    await ours.send_checkpoint([1], step, state(step))


async def receive(ours: Transport, step: int) -> None:
    """Receive it."""
    assert_same(await ours.recv_checkpoint(0, "", step), state(step))


async def fill(ours: Transport, step: int) -> None:
    """Receive it into a template."""
    into = state(0)
    await ours.recv_checkpoint(0, "", step, into=into)
    assert_same(into, state(step))


async def go_on(side: Side, ours: Transport) -> None:
    """Move the second step; the other end may still be at the first."""
    with suppress(PeerFailedError, StepNotFoundError):
        return await side(ours, 2)
    return await side(ours, 2)


async def stay_there(side: Side, ours: Transport) -> None:
    """Be the end that is not cancelled; the other one may never get to the first."""
    with suppress(PeerFailedError, StepNotFoundError):
        await side(ours, 1)
    await go_on(side, ours)


@pytest.mark.parametrize(
    ("cut", "stay"), [(send, receive), (receive, send), (fill, send)]
)
async def test_a_cancel_at_every_await(cut: Side, stay: Side) -> None:
    """Either the same two ranks go on, or both know at once that they cannot."""
    seen: Counter[bool] = Counter()
    for at in count():
        async with transports(timeout=30) as made:
            ours, theirs = made if cut is send else reversed(made)
            staying = asyncio.create_task(stay_there(stay, theirs))
            call = await cut_at(at, cut(ours, 1))
            assert call.task is not None
            async with asyncio.timeout(PROMPT):
                if not call.reached:
                    await asyncio.gather(go_on(cut, ours), staying)
                    break
                assert call.task.cancelled(), call.task
                broken = "broken" in repr(ours)
                seen[broken] += 1
                if broken:
                    with pytest.raises(ProcessGroupError, match="make a new group"):
                        await cut(ours, 2)
                    with pytest.raises(ProcessGroupError, match="make a new group"):
                        await staying
                else:
                    await asyncio.gather(go_on(cut, ours), staying)
    assert seen[True] > 5
    assert cut is receive or seen[False] > 1, "while it stages, or loads"
