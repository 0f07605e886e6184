"""What a transport offers, to whom, and until when."""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Any, TypeVar

import pytest
import torch

from aiockpt.errors import StepNotFoundError, TransferTimeoutError, UnsupportedLeafError
from aiockpt.state.equality import assert_same
from aiockpt.testing.suite.base import PROMPT, Conformance, sample, turn
from aiockpt.transport import CheckpointTransport

__all__ = ["Offers"]

T = TypeVar("T", bound=CheckpointTransport[Any])


class Offers(Conformance[T]):
    """For a transport whose checkpoint stays offered until it is disallowed."""

    async def test_metadata_is_short_and_stays_the_same(self) -> None:
        """It is there before the first send, and works for the whole life."""
        async with self.transports(2) as (sender, receiver):
            early = sender.metadata()
            await self.send(sender, sample())
            assert sender.metadata() == early
            assert 0 < len(early) < 1024
            await receiver.recv_checkpoint(0, early, 1, self.timeout)

    async def test_a_receive_that_comes_first_waits(self) -> None:
        """It gets the checkpoint as soon as that is sent."""
        state = sample()
        async with self.transports(2) as (sender, receiver):
            early = asyncio.create_task(self.receive(sender, receiver))
            await turn()
            await self.send(sender, state)
            assert_same(await early, state)

    async def test_a_receive_waits_for_its_step(self) -> None:
        """An older step that is offered meanwhile is not what it asked for."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(1), step=1)
            early = asyncio.create_task(self.receive(sender, receiver, step=2))
            await turn()
            await self.send(sender, sample(2), step=2)
            assert_same(await early, sample(2))

    async def test_nobody_needs_to_be_named(self) -> None:
        """The list of receivers may be empty."""
        async with self.transports(2) as (sender, receiver):
            await sender.send_checkpoint([], 1, sample(), self.timeout)
            assert_same(await self.receive(sender, receiver), sample())

    async def test_a_new_step_takes_the_place_of_the_old(self) -> None:
        """The old one is refused at once, and the error says what is served."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(1), step=1)
            await self.send(sender, sample(2), step=2)
            assert_same(await self.receive(sender, receiver, step=2), sample(2))
            with pytest.raises(StepNotFoundError) as caught:
                await self.receive(sender, receiver, step=1)
            assert (caught.value.step, caught.value.serving) == (1, 2)

    async def test_the_same_step_may_be_sent_again(self) -> None:
        """Its new content takes the place of the old."""
        async with self.transports(2) as (sender, receiver):
            for seed in (1, 2, 2):
                await self.send(sender, sample(seed), step=7)
                assert_same(await self.receive(sender, receiver, step=7), sample(seed))

    async def test_steps_may_go_back(self) -> None:
        """A job that rolled back offers an older step again."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(9), step=9)
            await self.send(sender, sample(3), step=3)
            assert_same(await self.receive(sender, receiver, step=3), sample(3))

    async def test_several_receivers_get_it_at_once(self) -> None:
        """None disturbs another, nor a second call of the same transport."""
        async with self.transports(4) as (sender, *receivers):
            calls = [self.receive(sender, receiver) for receiver in receivers * 2]
            tasks = [asyncio.create_task(call) for call in calls]
            await self.send(sender, sample())
            for task in tasks:
                assert_same(await task, sample())

    async def test_a_receiver_that_leaves_disturbs_nobody(self) -> None:
        """The others get theirs."""
        async with self.transports(3) as (sender, leaver, stayer):
            await self.send(sender, sample())
            leaving = asyncio.create_task(self.receive(sender, leaver))
            staying = asyncio.create_task(self.receive(sender, stayer))
            await turn()
            leaving.cancel()
            assert_same(await staying, sample())
            await asyncio.wait({leaving})

    async def test_the_state_may_change_after_the_send(self) -> None:
        """What is received is what it was when it was sent."""
        state = sample()
        sent = copy.deepcopy(state)
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, state)
            for value in (state["weight"], state["bias"], state["sparse view"]):
                value.zero_()
            state["nested"].append("late")
            assert_same(await self.receive(sender, receiver), sent)

    async def test_an_unsupported_leaf_is_named(self) -> None:
        """The send fails with its path, and what was offered stays offered."""
        bad = {"model": {"layers": [torch.ones(2), object()]}}
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(), step=1)
            with pytest.raises(UnsupportedLeafError) as caught:
                await self.send(sender, bad, step=2)
            assert caught.value.path == "model.layers[1]"
            assert "object" in str(caught.value)
            assert_same(await self.receive(sender, receiver, step=1), sample())

    async def test_nothing_is_served_after_disallow(self) -> None:
        """A receive waits for the next send, and gets that."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(1))
            await sender.disallow_checkpoint()
            with pytest.raises(TransferTimeoutError):
                await self.receive(sender, receiver, timeout=0.2)
            await self.send(sender, sample(2))
            assert_same(await self.receive(sender, receiver), sample(2))

    async def test_disallow_is_idempotent_and_cheap(self) -> None:
        """It may be called on every step, also by those who never sent."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample())
            await self.receive(sender, receiver)
            started = time.monotonic()
            for transport in (sender, receiver) * 50:
                await transport.disallow_checkpoint()
            assert time.monotonic() - started < PROMPT
