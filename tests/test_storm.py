"""Everything at once, with cancels and faults anywhere: nothing wrong ever arrives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest
import torch

from aiockpt import AiockptError
from aiockpt.testing import (
    CutAfter,
    Drip,
    FaultProxy,
    FlipBit,
    Refuse,
    StallAfter,
    assert_same,
)
from tests.support.transports import Transport, port_of, receive, transport

pytestmark = pytest.mark.asyncio

UNTOUCHED = 10**6


def state(step: int) -> dict[str, Any]:
    """Return a state dict of several chunks that says which step it is."""
    weight = torch.full((40_000,), float(step))
    sparse = torch.full((300,), step)[::5]
    return {"weight": weight, "tied": weight[5:], "sparse": sparse, "step": step}


class Storm:
    """A sender and receivers that do what a seed says."""

    def __init__(self, seed: int, sender: Transport, proxy: FaultProxy) -> None:
        self.random = random.Random(seed)
        self.step = 0
        self._sender = sender
        port = port_of(sender)
        self._url = sender.metadata().replace(str(port), str(proxy.port))
        proxy.faults = [self._fault() for _ in range(1000)]

    def _fault(self) -> Any:
        at = self.random.randrange(400_000)
        kinds = [CutAfter(at), CutAfter(at, reset=True), StallAfter(at), FlipBit(at)]
        kinds += [Refuse(), Drip(rate=3e6, burst=20_000)]
        return self.random.choice([*kinds, *(Drip(rate=1e9, burst=1 << 20),) * 3])

    async def train(self, rounds: int) -> None:
        """Send, change, withdraw; be interrupted now and then."""
        for _ in range(rounds):
            match self.random.randrange(4):
                case 0 | 1:
                    self.step += 1
                    live = state(self.step)
                    await self._perhaps(
                        self._sender.send_checkpoint([], self.step, live, 1)
                    )
                    live["weight"].fill_(-1)
                    live["sparse"].fill_(-1)
                case 2:
                    await self._perhaps(self._sender.disallow_checkpoint())
                case _:
                    await asyncio.sleep(self.random.random() * 0.02)

    async def heal(self, receiver: Transport) -> None:
        """Receive some step again and again, and check whatever arrives."""
        while True:
            step = max(0, self.step + self.random.choice([-1, 0, 0, 0, 1]))
            into = state(UNTOUCHED) if self.random.random() < 0.5 else None
            got = await self._perhaps(
                receiver.recv_checkpoint(0, self._url, step, 0.2, into=into)
            )
            if got is not None:
                assert_same(got, state(step))
            elif into is not None and into["weight"][0] == UNTOUCHED:
                assert_same(into, state(UNTOUCHED))
            elif into is not None:  # it was filled when the cancel came: wholly
                assert_same(into | {"step": step}, state(step))
            await asyncio.sleep(0)

    async def _perhaps(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return what a call returns, unless it fails or is cancelled first."""
        task = asyncio.create_task(call)
        try:
            if self.random.random() < 0.4:
                for _ in range(self.random.randrange(300)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait({task})
        finally:  # the storm may be over meanwhile
            task.cancel()
            await asyncio.wait({task})
            failed = None if task.cancelled() else task.exception()
        if failed is not None and not isinstance(failed, AiockptError):
            raise failed
        return None if failed or task.cancelled() else task.result()


@pytest.mark.parametrize("seed", range(6))
async def test_a_storm_leaves_nothing_wrong(seed: int) -> None:
    """Whatever arrives is one whole step; afterwards everything works."""
    options: dict[str, Any] = {"grace": [0, 0.05, 1][seed % 3], "stall_timeout": 0.5}
    async with (
        transport(**options) as sender,
        transport(connections=1) as one,
        transport() as two,
        FaultProxy("127.0.0.1", port_of(sender)) as proxy,
    ):
        storm = Storm(seed, sender, proxy)
        healers = [asyncio.create_task(storm.heal(each)) for each in (one, two, sender)]
        await storm.train(rounds=25)
        for healer in healers:
            healer.cancel()
        for healer in healers:
            with suppress(asyncio.CancelledError):
                await healer
        await sender.send_checkpoint([], storm.step + 1, state(storm.step + 1))
        got = await receive(sender, one, storm.step + 1)
        assert_same(got, state(storm.step + 1))
