"""Whatever a state dict may hold arrives exactly as it was sent."""

from __future__ import annotations

import copy
import random
from typing import Any, TypeVar

import pytest
import torch

from aiockpt.state.equality import assert_same
from aiockpt.testing.leaves import LEAVES
from aiockpt.testing.suite.base import Conformance, sample
from aiockpt.transport import CheckpointTransport

__all__ = ["RoundTrips"]

T = TypeVar("T", bound=CheckpointTransport[Any])


class RoundTrips(Conformance[T]):
    """What is received equals what was sent, bit by bit."""

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd tensors
    @pytest.mark.parametrize("kind", LEAVES)
    async def test_a_leaf_arrives_as_it_was_sent(self, kind: str) -> None:
        """Types, bits, strides, flags and shared memory survive."""
        state = {"leaf": LEAVES[kind](), "beside": torch.arange(3)}
        async with self.transports(2) as (sender, receiver):
            assert_same(await self.move(sender, receiver, state), state)

    @pytest.mark.parametrize(
        "state", [None, [], b"bytes", torch.arange(5), {"only": "text"}], ids=repr
    )
    async def test_any_value_may_be_the_whole_state(self, state: object) -> None:
        """A state dict need not be a dict, nor hold a tensor."""
        async with self.transports(2) as (sender, receiver):
            assert_same(await self.move(sender, receiver, state), state)

    async def test_many_small_tensors_arrive(self) -> None:
        """Tensors that share chunks do not get mixed up."""
        state = {f"layer.{n}": torch.full((n % 7,), n) for n in range(2000)}
        async with self.transports(2) as (sender, receiver):
            assert_same(await self.move(sender, receiver, state), state)

    async def test_what_arrives_is_independent(self) -> None:
        """Writing to what was received changes neither the sender's nor another's."""
        state = sample()
        before = copy.deepcopy(state)
        async with self.transports(2) as (sender, receiver):
            first = await self.move(sender, receiver, state)
            first["weight"].zero_()
            second = await self.move(sender, receiver, state)
        assert_same(second, before)
        assert_same(state, before)

    async def test_training_goes_on_from_what_arrived(self) -> None:
        """Model, optimizer, scheduler and random state resume exactly."""
        ours, theirs = _Training(seed=1), _Training(seed=2)
        ours.step()
        async with self.transports(2) as (sender, receiver):
            theirs.load(await self.move(sender, receiver, ours.state_dict()))
        ours.step()
        theirs.step()
        assert_same(theirs.state_dict(), ours.state_dict())


class _Training:
    """A training loop with everything that has a state."""

    def __init__(self, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3])

    def step(self) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(0)
        self.model(torch.randn(2, 4, generator=generator)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": [torch.get_rng_state(), random.getstate()],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"][0])
        random.setstate(state["random"][1])
