"""A receive takes the memory that the guarantees name, and none when it has failed."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from aiockpt import TransportError
from aiockpt.testing import StallAfter, assert_same
from tests.support.memory import forget_the_peak, resident
from tests.support.proofs import proves
from tests.support.servers import settle
from tests.support.transports import (
    MIB,
    HoldBack,
    Transport,
    pair,
    proxied,
    receive,
    through,
    weights,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")

MIB_SENT = 256
COUNT = 64
SLACK = 48 * MIB
"""For ranges under way, for threads, and for what the allocator keeps."""


async def peak(sender: Transport, receiver: Transport, **options: Any) -> int:
    """Return how much memory a receive takes beyond what there is before it."""
    before = forget_the_peak()
    got = await receive(sender, receiver, **options)
    most = resident("VmHWM") - before
    assert_same(got, weights(mib=MIB_SENT, count=COUNT))
    return most


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Free nothing that only the collector would find."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@proves("invariant 3")
@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["fresh", "into", "direct"])
async def test_a_receive_needs_no_more_memory_than_promised(how: str) -> None:
    """One copy of the state dict; with ``direct`` none, whatever its size."""
    options: dict[str, Any] = {}
    if how != "fresh":
        options["into"] = weights(0.0, mib=MIB_SENT, count=COUNT)
    if how == "direct":
        options["direct"] = True
    async with pair(chunk_bytes=4 * MIB) as (sender, receiver):
        await sender.send_checkpoint([], 1, weights(mib=MIB_SENT, count=COUNT))
        await receive(sender, receiver, select=["w0"])  # threads and connections
        most = await peak(sender, receiver, **options)
    assert most <= (0 if how == "direct" else MIB_SENT * MIB) + SLACK


@pytest.mark.asyncio
@pytest.mark.parametrize("template", [False, True])
async def test_what_was_cancelled_takes_no_memory(
    uncollected: None, template: bool
) -> None:
    """Its tracebacks live until the collector runs, and must not keep gigabytes."""
    into = weights(0.0, mib=64) if template else None
    async with pair(chunk_bytes=4 * MIB) as (sender, receiver):
        await sender.send_checkpoint([], 1, weights(mib=64))
        before = resident("VmRSS")
        for _ in range(4):
            hold = HoldBack(free=48 * MIB)
            async with proxied(sender, otherwise=hold) as proxy:
                url = through(proxy, sender)
                call = receiver.recv_checkpoint(0, url, 1, into=into)
                task = asyncio.create_task(call)
                await hold.closed.wait()
                task.cancel()
                await asyncio.wait({task})
                assert task.cancelled()
                del task, call
    assert resident("VmRSS") - before <= 64 * MIB + SLACK


NAMES = [f"w{number}" for number in range(15)]
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "select": {"select": NAMES},
    "function": {"select": lambda path: path != "w15"},
    "select into": {"select": NAMES, "into": True},
    "into": {"into": True},
    "have": {"have": True, "into": True},
}


@pytest.mark.asyncio
@pytest.mark.parametrize("options", OPTIONS)
async def test_memory_goes_though_the_exception_stays(
    uncollected: None, options: str
) -> None:
    """Its traceback refers to every frame that the bytes have passed."""
    given = dict(OPTIONS[options])
    options_of = {"reconnect_timeout": 0, "stall_timeout": 2, "chunk_bytes": 4 * MIB}
    async with pair(**options_of) as (sender, receiver):
        await sender.send_checkpoint([], 1, weights(mib=128, count=16))
        if "into" in given:
            given["into"] = weights(2.0, mib=128, count=16)
        before = resident("VmRSS")
        faults = [StallAfter(24 * MIB)] * 4
        async with proxied(sender, faults=faults, otherwise=StallAfter(0)) as proxy:
            url = through(proxy, sender)
            with pytest.raises(TransportError) as caught:
                await receiver.recv_checkpoint(0, url, 1, **given)
            moved = proxy.statistics().bytes_down
        assert moved > 1.2 * 24 * MIB
        await settle(lambda: resident("VmRSS") - before < 24 * MIB)  # threads unmap it
    assert caught.value.__traceback__
