"""A receive takes the memory that the guarantees name, at its fullest."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

import pytest

from aiockpt.testing import assert_same
from tests.support.proofs import proves
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


def resident(field: str) -> int:
    """Return the bytes of memory that this process has, or has had at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def forget_the_peak() -> int:
    """Return how much memory this process has now; its peak starts from there."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


async def peak(sender: Transport, receiver: Transport, **options: Any) -> int:
    """Return how much memory a receive takes beyond what there is before it."""
    before = forget_the_peak()
    got = await receive(sender, receiver, **options)
    most = resident("VmHWM") - before
    assert_same(got, weights(mib=MIB_SENT, count=COUNT))
    return most


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
async def test_what_was_cancelled_takes_no_memory(template: bool) -> None:
    """Its tracebacks live until the collector runs, and must not keep gigabytes."""
    into = weights(0.0, mib=64) if template else None
    gc.collect()
    gc.disable()
    try:
        async with pair(chunk_bytes=4 * MIB) as (sender, receiver):
            await sender.send_checkpoint([], 1, weights(mib=64))
            before = resident("VmRSS")
            for _ in range(4):
                hold = HoldBack(free=48 * MIB)
                async with proxied(sender, otherwise=hold) as proxy:
                    task = asyncio.create_task(
                        receiver.recv_checkpoint(
                            0, through(proxy, sender), 1, into=into
                        )
                    )
                    await hold.closed.wait()
                    task.cancel()
                    await asyncio.wait({task})
                    assert task.cancelled()
                    del task
        assert resident("VmRSS") - before <= 64 * MIB + SLACK
    finally:
        gc.enable()
