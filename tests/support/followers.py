"""A trainer that publishes step after step, and receivers that follow it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from aiockpt import StepNotFoundError
from tests.support.transports import Transport, transport

TOKEN = "both-know-it"
MIB = 1 << 20


def state_of(step: int, mib: int = 1) -> dict[str, Any]:
    """Return a state dict, every number of which is its step."""
    return {"w": torch.full((mib * MIB // 4,), float(step)), "step": step}


def check(step: int, state: dict[str, Any]) -> None:
    """Raise if a state dict is not wholly that of its step."""
    assert state["step"] == step
    low, high = state["w"].aminmax()
    assert low == high == step, "the state is torn"


async def publish(sender: Transport, step: int, mib: int = 1) -> None:
    """Publish the state of a step."""
    await sender.send_checkpoint([], step, state_of(step, mib))


async def soon(follower: AsyncIterator[Any]) -> Any:
    """Return what a follower gets next, which must not take long."""
    async with asyncio.timeout(20):
        return await anext(follower)


class Trainer:
    """Publishes a step after the other, some of them during each receive."""

    def __init__(self, sender: Transport, *, mib: int) -> None:
        self.every = 0.0
        self._sender = sender
        self._mib = mib
        self._step = 0

    async def publish(self) -> None:
        """Publish the next step."""
        self._step += 1
        await publish(self._sender, self._step, self._mib)

    async def measure(self, metadata: str) -> None:
        """Find out how often to publish: machines and lines differ."""
        await self.publish()
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with transport() as receiver:
            await receiver.recv_checkpoint(0, metadata, self._step)
        self.every = (loop.time() - began) / 2

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Publish in the background."""

        async def train() -> None:
            while True:
                await self.publish()
                await asyncio.sleep(self.every)

        task = asyncio.create_task(train())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()


async def attempts(sender: Transport, metadata: str, count: int) -> int:
    """Receive the newest step ``count`` times; return how many of these ended."""
    done = 0
    async with transport() as receiver:
        steps = receiver.steps(metadata)
        for _ in range(count):
            step = await soon(steps)
            try:
                state = await receiver.recv_checkpoint(0, metadata, step)
            except StepNotFoundError:
                continue
            check(step, state)
            done += 1
    return done
