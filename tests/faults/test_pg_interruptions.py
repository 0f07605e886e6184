"""A process group interrupted at every await: as before, or plainly broken."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from types import NoneType
from typing import Any

import pytest

from aiockpt import AiockptError, StepNotFoundError
from aiockpt.errors import PeerFailedError, ProcessGroupError
from aiockpt.testing import assert_same, interrupted
from tests.support.groups import Transport, transports
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.transports import weights

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.timeout(120),
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


ENDS = pytest.mark.parametrize(
    ("cut", "stay"), [(send, receive), (receive, send), (fill, send)]
)


@proves(
    "cell PGTransport.send_checkpoint: cancel",
    "cell PGTransport.recv_checkpoint: cancel",
)
@proves("invariant 8")
@proves("fault 25")
@ENDS
async def test_a_cancel_at_every_await(record: Record, cut: Side, stay: Side) -> None:
    """Either the same two ranks go on, or both know at once that they cannot."""
    seen: Counter[bool] = Counter()
    for at in count(step=record.pick(2, 1)):
        async with transports(timeout=30) as made:
            ours, theirs = made if cut is send else reversed(made)
            staying = asyncio.create_task(stay_there(stay, theirs))
            struck = await interrupted(cut(ours, 1), at)
            async with asyncio.timeout(PROMPT):
                if not struck.reached:
                    await asyncio.gather(go_on(cut, ours), staying)
                    break
                assert struck.cancelled, str(struck)
                seen[await settled(ours, cut, staying)] += 1
                record.ran()
    assert seen[True] > 2
    assert cut is receive or seen[False], "while it stages, or loads"


@proves("fault 26")
@ENDS
async def test_a_failure_at_every_await(record: Record, cut: Side, stay: Side) -> None:
    """It is a typed error at this end, and soon one at the other, or none at all."""
    for at in count(step=record.pick(2, 1)):
        async with transports(timeout=30) as made:
            ours, theirs = made if cut is send else reversed(made)
            staying = asyncio.create_task(stay_there(stay, theirs))
            refused = OSError(5, "on purpose")
            struck = await interrupted(cut(ours, 1), at, error=refused)
            assert isinstance(struck.error, AiockptError | NoneType), str(struck)
            async with asyncio.timeout(PROMPT):
                if not struck.reached:
                    await asyncio.gather(go_on(cut, ours), staying)
                    break
                await settled(ours, cut, staying)
                record.ran()
    assert at > 3


async def settled(ours: Transport, cut: Side, staying: asyncio.Task[None]) -> bool:
    """Check that both ends go on, or that both say that they cannot; tell which."""
    if "broken" not in repr(ours):
        await asyncio.gather(go_on(cut, ours), staying)
        return False
    with pytest.raises(ProcessGroupError, match="make a new group"):
        await cut(ours, 2)
    with pytest.raises(ProcessGroupError, match="make a new group"):
        await staying
    return True
