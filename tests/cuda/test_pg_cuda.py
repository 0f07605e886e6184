"""From device to device: over gloo, through the host; as NCCL does, on the device."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from aiockpt.testing import assert_same
from tests.support.groups import Transport, moved, transports
from tests.support.loopback import Loopback

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20
A_WHILE = 400_000_000
"""Cycles that a device is kept busy: some 200 ms."""

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


def state(fill: float) -> dict[str, torch.Tensor]:
    """Return tensors on the device, large and small, and some beside them."""
    return {
        "large": torch.full((1 << 20,), fill, device=DEVICE),
        "small": torch.full((3,), fill, device=DEVICE),
        "view": torch.full((64, 64), fill, device=DEVICE)[:, ::2],
        "host": torch.full((1000,), fill),
    }


class TestOverGloo:
    """Through the host memory of both ends."""

    async def test_a_device_s_tensors_arrive(self) -> None:
        """In host memory, without a template."""
        async with transports() as (sender, receiver):
            got = await moved(sender, receiver, state(1.0))
        assert_same(got, {name: tensor.cpu() for name, tensor in state(1.0).items()})

    @pytest.mark.parametrize("direct", [False, True])
    async def test_a_template_on_the_device_is_filled(self, *, direct: bool) -> None:
        """Each tensor where it is."""
        into = state(0.0)
        async with transports() as (sender, receiver):
            await moved(sender, receiver, state(1.0), into=into, direct=direct)
        assert_same(into, state(1.0))


class TestOnTheDevice:
    """As over NCCL, but that one device has both ends."""

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[Transport, Transport, Loopback]]:
        """Give a sender, a receiver, and the sender's group."""
        ours, theirs = Loopback.pair()
        device = torch.device("cuda")
        async with (
            Transport(ours, timeout=30, device=device) as sender,
            Transport(theirs, timeout=30, device=device) as receiver,
        ):
            yield sender, receiver, ours

    async def test_each_tensor_arrives_where_it_was(self) -> None:
        """On the device, or in host memory."""
        async with self.pair() as (sender, receiver, _):
            got = await moved(sender, receiver, state(1.0))
        assert_same(got, state(1.0))
        devices = {name: tensor.device for name, tensor in state(1.0).items()}
        assert {name: tensor.device for name, tensor in got.items()} == devices

    @pytest.mark.parametrize("direct", [False, True])
    async def test_a_template_is_filled(self, *, direct: bool) -> None:
        """Each tensor where it is."""
        into = state(0.0)
        async with self.pair() as (sender, receiver, _):
            got = await moved(sender, receiver, state(1.0), into=into, direct=direct)
        assert got["large"] is into["large"]
        assert_same(into, state(1.0))

    async def test_small_ones_travel_together(self) -> None:
        """Coalesced on the device."""
        small = [torch.full((1000,), float(n), device=DEVICE) for n in range(500)]
        async with self.pair() as (sender, receiver, group):
            assert_same(await moved(sender, receiver, small), small)
            assert len(group.lengths) < 10

    async def test_nothing_comes_to_the_host(self) -> None:
        """Neither end needs memory for the bytes, but for what arrives."""
        weights = {"w": torch.ones(256 * MIB, device=DEVICE)}
        async with self.pair() as (sender, receiver, _):
            await moved(sender, receiver, state(1.0))
            before = _peak_rss()
            torch.cuda.reset_peak_memory_stats(DEVICE)
            held = torch.cuda.memory_allocated(DEVICE)
            got = await moved(sender, receiver, weights)
            assert torch.cuda.max_memory_allocated(DEVICE) - held < (1024 + 256) * MIB
            assert _peak_rss() - before < 200 * MIB
        assert got["w"].device == DEVICE
        assert (got["w"] == 1).all()

    async def test_both_ends_wait_for_their_producers(self) -> None:
        """What was enqueued before is sent, and the template is not written to."""
        weight = torch.zeros(16 * MIB, device=DEVICE)
        into, seen = torch.zeros_like(weight), torch.ones((), device=DEVICE)
        async with self.pair() as (sender, receiver, _):
            torch.cuda._sleep(A_WHILE)
            weight.fill_(7)
            seen.copy_(into.max())
            into.fill_(5)
            await moved(sender, receiver, {"w": weight}, into={"w": into}, direct=True)
            weight.fill_(9)
        assert seen.item() == 0
        assert into.unique().tolist() == [7]

    async def test_what_arrived_may_be_used_on_any_stream(self) -> None:
        """It is there when the receive returns."""
        async with self.pair() as (sender, receiver, _):
            got: Any = await moved(sender, receiver, state(3.0))
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
                assert got["large"].sum().item() == 3 << 20


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
