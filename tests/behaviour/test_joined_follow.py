"""Followers of several senders get each step whole, while these publish on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import torch

from aiockpt.errors import TransportError
from aiockpt.http import follow as following
from tests.support.joined import cut, joined, shards, states
from tests.support.transports import MIB, Transport, soon, transport

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("no_blocking"),
]

EVERY = 0.2
"""Seconds between two steps."""
SECONDS = 3.0
ELEMENTS = MIB // 4


def empty() -> dict[str, Any]:
    """Return the full tensors of a state that is no step's."""
    return {"w": torch.zeros(ELEMENTS // 64, 64), "v": torch.zeros(7), "step": 0}


class Job:
    """Four ranks, each of which publishes its part of each step by its own clock."""

    def __init__(self, senders: Sequence[Transport], *, skew: float) -> None:
        self.step = 0
        self.last: int | None = None
        """The step after which nothing is published, once that is known."""
        self._senders, self._skew = senders, skew
        self._parts = states(
            lambda _: {
                name: cut(4, whole=each) if name != "step" else 0
                for name, each in empty().items()
            }
        )
        self._chance = random.Random(5)

    async def publish(self) -> None:
        """Publish the next step, by all ranks at about the same time."""
        self.step += 1
        late = [self._chance.uniform(0, self._skew) for _ in self._senders]
        await asyncio.gather(*map(self._publish, range(len(late)), late))

    async def _publish(self, rank: int, late: float) -> None:
        step, part = self.step, self._parts[rank]
        await asyncio.sleep(late)
        for name in ("w", "v"):
            part[name]._local_tensor.fill_(step)
        part["step"] = step
        await self._senders[rank].send_checkpoint([], step, part)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Publish in the background."""

        async def train() -> None:
            loop = asyncio.get_running_loop()
            due = loop.time()
            while True:
                due += EVERY
                await asyncio.sleep(max(due - loop.time(), 0))
                await self.publish()

        task = asyncio.create_task(train())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()


def whole(step: int, state: dict[str, Any]) -> None:
    """Raise if any element is of another step."""
    assert state["step"] == step
    for name in ("w", "v"):
        low, high = state[name].aminmax()
        assert low == high == step, f"{name} has elements of {low} and {high}"


async def follow(metadata: str, how: str, job: Job) -> list[int]:
    """Follow to the last step; return the steps, each of which came whole."""
    options: dict[str, Any] = {} if how == "anew" else {"into": empty()}
    if how == "prepare":
        options |= {"prepare": True, "have": True}
    seen: list[int] = []
    async with (
        transport() as receiver,
        aclosing(receiver.follow(metadata, **options)) as steps,
    ):
        while not seen or seen[-1] != job.last:
            found: Any = await soon(steps)
            if how == "prepare":
                found = found.step, await found.apply_async()
            step, state = found
            whole(step, state)
            seen.append(step)
    return seen


@pytest.mark.parametrize("skew", [0.0, 0.1])
async def test_three_followers_of_four_senders(skew: float) -> None:
    """No state is torn, no step comes twice, and the last step reaches everyone."""
    async with shards() as senders:
        job = Job(senders, skew=skew)
        await job.publish()
        followers = [
            asyncio.create_task(follow(joined(senders), how, job))
            for how in ("anew", "into", "prepare")
        ]
        async with job.training():
            await asyncio.sleep(SECONDS)
        job.last = job.step + 1
        await job.publish()
        every = await asyncio.gather(*followers)
    for seen in every:
        assert seen == sorted(set(seen))
        assert len(seen) >= 2


async def test_steps_of_senders_that_publish_one_after_another() -> None:
    """The highest step of any sender is given, once."""
    async with shards() as senders, transport() as receiver:
        parts = states(lambda rank: {"n": rank})
        steps = receiver.steps(joined(senders))
        waiting = asyncio.ensure_future(soon(steps))
        for step in (3, 4):
            for rank, sender in enumerate(senders):
                await sender.send_checkpoint([], step, parts[rank])
                if not rank:
                    assert await waiting == step
            waiting = asyncio.ensure_future(soon(steps))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await senders[2].send_checkpoint([], 9, parts[2])
        assert await waiting == 9


async def test_a_follower_survives_a_sender_that_is_away() -> None:
    """It goes on with the next step that all of them have."""
    async with shards() as senders, transport(reconnect_timeout=1) as receiver:
        job = Job(senders, skew=0)
        await job.publish()
        async with aclosing(receiver.follow(joined(senders))) as steps:
            assert (await soon(steps))[0] == 1
            await senders[1].disallow_checkpoint()
            waiting = asyncio.ensure_future(soon(steps))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await job.publish()
            step, state = await waiting
            assert step == 2
            whole(step, state)


async def test_a_sender_that_is_gone_delays_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are asked again and again, though it never answers."""
    monkeypatch.setattr(following, "_NEWS_WAIT_S", 0.2)
    async with shards() as senders, transport() as receiver:
        job = Job(senders, skew=0)
        await job.publish()
        steps = receiver.steps(joined(senders))
        assert await soon(steps) == 1
        await senders[2].shutdown(wait=False)
        waiting = asyncio.ensure_future(soon(steps))
        await asyncio.sleep(1)  # several rounds without news
        await senders[0].send_checkpoint([], 2, {"n": 2})
        assert await waiting == 2


async def test_a_sender_is_given_up_over_several_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timeout counts from its last answer, not from that of the others."""
    monkeypatch.setattr(following, "_NEWS_WAIT_S", 0.2)
    async with shards() as senders, transport() as receiver:
        job = Job(senders, skew=0)
        await job.publish()
        steps = receiver.steps(joined(senders), reconnect_timeout=1.5)
        assert await soon(steps) == 1
        await senders[2].shutdown(wait=False)
        with pytest.raises(TransportError):
            await soon(steps)


async def test_a_cancelled_wait_loses_no_step() -> None:
    """After a cancel at any moment, the step was given or is still to come."""
    async with shards() as senders, transport() as receiver:
        job = Job(senders, skew=0)
        await job.publish()
        for turns in range(0, 60, 3):
            steps = receiver.steps(joined(senders))
            task = asyncio.ensure_future(anext(steps))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            given = await soon(steps) if task.cancelled() else task.result()
            assert given == 1
