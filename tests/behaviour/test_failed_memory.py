"""A receive that failed keeps no memory, however long its exception is kept."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.testing import StallAfter
from tests.support.transports import MIB, pair, proxied, through, weights

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc tells"),
]

MIB_SENT = 128
COUNT = 16
SLACK = 24 * MIB


def resident() -> int:
    """Return the bytes of memory that this process has now."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) << 10


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"select": [f"w{number}" for number in range(COUNT - 1)]},
        {"select": lambda path: path != "w0"},
        {"select": [f"w{number}" for number in range(COUNT - 1)], "into": True},
        {"into": True},
        {"have": True, "into": True},
    ],
    ids=["whole", "select", "function", "select into", "into", "have"],
)
async def test_memory_goes_though_the_exception_stays(options: dict[str, Any]) -> None:
    """Its traceback refers to every frame that the bytes have passed."""
    async with pair(reconnect_timeout=0, chunk_bytes=4 * MIB) as (sender, receiver):
        await sender.send_checkpoint([], 1, weights(mib=MIB_SENT, count=COUNT))
        if options.get("into"):
            options = {**options, "into": weights(2.0, mib=MIB_SENT, count=COUNT)}
        enough = int(0.3 * MIB_SENT) * MIB
        faults = [StallAfter(enough)] * 4
        gc.collect()
        before = resident()
        gc.disable()
        try:
            async with proxied(sender, faults=faults, otherwise=StallAfter(0)) as proxy:
                url = through(proxy, sender)
                with pytest.raises(aiockpt.TransportError) as caught:
                    await receiver.recv_checkpoint(0, url, 1, timeout=3, **options)
                moved = proxy.statistics().bytes_down
            for _ in range(40):
                if resident() - before < SLACK:
                    break
                await asyncio.sleep(0.05)  # threads unmap it
            grown = resident() - before
        finally:
            gc.enable()
        assert moved > 1.2 * SLACK
        assert grown < SLACK, f"{grown / MIB:.0f} MiB beside {caught.value!r}"
