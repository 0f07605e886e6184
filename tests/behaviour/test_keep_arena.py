"""`keep_arena` uses the memory of one receive again, and never one that is in use."""

from __future__ import annotations

import gc
from contextlib import AsyncExitStack
from fractions import Fraction
from typing import Any

import pytest
import torch

from aiockpt import AiockptError, HTTPTransport
from aiockpt.testing import assert_same
from tests.support.transports import pair, receive, transport

pytestmark = pytest.mark.asyncio


def state(value: float) -> dict[str, torch.Tensor]:
    """Return tensors of one value."""
    return {name: torch.full((50_000,), float(value)) for name in "abc"}


def addresses(received: dict[str, torch.Tensor]) -> set[int]:
    """Return where tensors lie."""
    return {tensor.data_ptr() for tensor in received.values()}


@pytest.mark.parametrize("sources", [1, 3])
async def test_memory_is_used_again_once_it_is_free(sources: int) -> None:
    """Memory of cancelled requests is free, too, whatever their tracebacks keep."""
    async with AsyncExitStack() as stack:
        senders = [await stack.enter_async_context(transport()) for _ in range(sources)]
        receiver = await stack.enter_async_context(transport(keep_arena=True))
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        seen: set[int] = set()
        for step in range(1, 6):
            for sender in senders:
                await sender.send_checkpoint([1], step, state(step))
            metadata = [sender.metadata() for sender in senders]
            received = await receiver.recv_checkpoint(0, metadata, step)
            assert_same(received, state(step))
            seen |= addresses(received)
            del received
        assert len(seen) == 3


@pytest.mark.parametrize("kept", ["tensor", "view", "storage", "array"])
async def test_memory_in_use_is_left_alone(kept: str) -> None:
    """Memory that the caller uses in any way is not reused."""
    async with pair(state=state(1), keep_arena=True) as (sender, receiver):
        first = await receive(sender, receiver)
        held: Any = {
            "tensor": lambda t: t,
            "view": lambda t: t[1:5],
            "storage": lambda t: t.untyped_storage(),
            "array": lambda t: t.numpy(),
        }[kept](first["b"])
        del first
        await sender.send_checkpoint([1], 2, state(2))
        second = await receive(sender, receiver, 2)
        assert_same(second, state(2))
        if kept == "storage":
            held = torch.tensor([]).set_(held, 0, (50_000,), (1,))
        assert set(torch.as_tensor(held).tolist()) == {1.0}


async def test_what_could_not_be_put_together_leaves_sound_memory() -> None:
    """All bytes had come: it is used again, or freed, and not both."""
    async with (
        transport(allow_pickle=True) as sender,
        transport(keep_arena=True) as receiver,
    ):
        await sender.send_checkpoint([1], 1, {**state(1), "half": Fraction(1, 2)})
        for _ in range(2):
            with pytest.raises(AiockptError, match="pickle"):
                await receive(sender, receiver)
        await sender.send_checkpoint([1], 2, state(2))
        assert_same(await receive(sender, receiver, 2), state(2))


async def test_what_was_received_outlives_the_receiver() -> None:
    """Its shutdown frees no memory that the caller uses."""
    async with transport() as sender:
        await sender.send_checkpoint([1], 1, state(1))
        receiver: HTTPTransport[Any] = transport(keep_arena=True)
        received = await receive(sender, receiver)
        await receiver.shutdown()
        assert_same(received, state(1))
