"""Followers of several senders get each step whole, while these publish on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
import torch

from tests.support.joined import cut, joined, shards, states
from tests.support.transports import MIB, Transport, soon, transport

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("no_blocking"),
]

EVERY = 0.2
"""Seconds between two steps."""
LAST = 10
"""The step after which nothing is published."""


def empty() -> dict[str, Any]:
    """Return the full tensors of a state that is no step's."""
    return {"w": torch.zeros(MIB // 256, 64), "v": torch.zeros(7), "step": 0}


async def publish(
    senders: Sequence[Transport], step: int, chance: random.Random | None = None
) -> None:
    """Publish a step of all ranks, together or each a moment later than others."""

    def part(_: int) -> dict[str, Any]:
        w, v = (cut(4, whole=empty()[name] + step) for name in "wv")
        return {"w": w, "v": v, "step": step}

    async def send(sender: Transport, state: Any, late: float) -> None:
        await asyncio.sleep(late)
        await sender.send_checkpoint([], step, state)

    late = [chance.uniform(0, 0.1) if chance else 0.0 for _ in senders]
    await asyncio.gather(*map(send, senders, states(part), late))


def check(step: int, state: dict[str, Any]) -> None:
    """Raise if any element is of another step."""
    assert state["step"] == step
    for name in "wv":
        low, high = state[name].aminmax()
        assert low == high == step, f"{name} has elements of {low} and {high}"


async def follow(metadata: str, how: str) -> list[int]:
    """Follow to the last step; return the steps, each of which came whole."""
    options: dict[str, Any] = {} if how == "anew" else {"into": empty()}
    if how == "prepare":
        options |= {"prepare": True, "have": True}
    seen: list[int] = []
    async with (
        transport() as receiver,
        aclosing(receiver.follow(metadata, **options)) as steps,
    ):
        while LAST not in seen:
            found: Any = await soon(steps)
            if how == "prepare":
                found = found.step, await found.apply_async()
            check(*found)
            seen.append(found[0])
    return seen


@pytest.mark.parametrize(
    "skewed", [pytest.param(False, marks=pytest.mark.nightly), True]
)
async def test_three_followers_of_four_senders(skewed: bool) -> None:
    """No state is torn, no step comes twice, and the last step reaches everyone."""
    chance = random.Random(5) if skewed else None
    async with shards() as senders:
        await publish(senders, 1)
        followers = [
            asyncio.create_task(follow(joined(senders), how))
            for how in ("anew", "into", "prepare")
        ]
        for step in range(2, LAST + 1):
            await asyncio.sleep(EVERY)
            await publish(senders, step, chance)
        for seen in await asyncio.gather(*followers):
            assert seen == sorted({*seen})


async def test_a_follower_survives_a_sender_that_is_away() -> None:
    """It goes on with the next step that all of them have."""
    async with shards() as senders, transport(reconnect_timeout=1) as receiver:
        await publish(senders, 1)
        async with aclosing(receiver.follow(joined(senders))) as steps:
            assert (await soon(steps))[0] == 1
            await senders[1].disallow_checkpoint()
            waiting = asyncio.ensure_future(soon(steps))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await publish(senders, 2)
            check(*await waiting)
