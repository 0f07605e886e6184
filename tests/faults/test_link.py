"""A link between two networks goes down, or is long and lossy."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aiockpt import TransportError
from tests.support.faultpeers import noise, running, said
from tests.support.matrix import Record
from tests.support.network import Link
from tests.support.proofs import proves
from tests.support.servers import settle
from tests.support.shortages import FaultUnavailableError
from tests.support.transports import MIB, Halfway, transport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

STREAMS = Path(__file__).parents[1] / "support" / "network.py"


@asynccontextmanager
async def link(**options: Any) -> AsyncIterator[Link]:
    """Make a link, or skip with the reason."""
    async with AsyncExitStack() as stack:
        try:
            made = await stack.enter_async_context(Link(**options))
        except FaultUnavailableError as error:
            pytest.skip(str(error))
        yield made


@proves("fault 6")
async def test_both_ends_of_a_link_that_is_down_give_up(record: Record) -> None:
    """No packet tells them; each has its own stall timeout."""
    stall = 1.0
    for _ in record.part_of(range(4), few=1):
        async with link() as way, AsyncExitStack() as stack:
            with way.far.entered():
                sends = transport(host=way.far_address, stall_timeout=stall)
                await stack.enter_async_context(sends)
            await sends.send_checkpoint([], 1, noise(64))
            with way.near.entered():
                gets = transport(stall_timeout=stall, reconnect_timeout=0)
                receiver = await stack.enter_async_context(gets)
                halfway = Halfway()
                fetch = receiver.recv_checkpoint(
                    0, sends.metadata(), 1, progress=halfway
                )
                receiving = asyncio.create_task(fetch)
                await halfway.reached.wait()
                way.cut()
                since = time.monotonic()
                with pytest.raises(TransportError):
                    await receiving
                took = time.monotonic() - since
            record.within("receiver: beyond the stall timeout", took - stall, 0.5)
            await settle(lambda sends=sends: sends.statistics().readers == 0)
            took = time.monotonic() - since
            record.within("sender: beyond the stall timeout", took - stall, 0.5)
        record.ran()


async def raw(way: Link, mib: int, streams: int) -> float:
    """Return the bytes per second of so many raw TCP streams over a link."""
    with way.far.entered():
        serving = await create_subprocess_exec(
            *(sys.executable, STREAMS, "serve", way.far_address), stdout=PIPE
        )
    try:
        port = await said(serving)
        with way.near.entered():
            fetching = await create_subprocess_exec(
                *(sys.executable, STREAMS, "fetch", way.far_address, port),
                *(str(mib * MIB // streams), str(streams)),
                stdout=PIPE,
            )
        took = float(await said(fetching))
        await fetching.communicate()
    finally:
        serving.kill()
        await serving.communicate()
    return mib * MIB / took


async def ours(way: Link, mib: int, streams: int) -> float:
    """Return the bytes per second of one transfer of so many ranges over a link."""
    with way.far.entered():
        serving = running("send", mib=mib, host=way.far_address)
        process = await serving.__aenter__()
    try:
        url = await said(process)
        with way.near.entered():
            getting = running("receive", url=url, max_concurrency=streams)
            receiver = await getting.__aenter__()
        try:
            assert await said(receiver) == "ready"
            assert receiver.stdin is not None
            receiver.stdin.write(b"\n")
            start, end = json.loads(await said(receiver))
        finally:
            await getting.__aexit__(None, None, None)
    finally:
        await serving.__aexit__(None, None, None)
    return float(mib * MIB / (end - start))


@proves("fault 11")
async def test_a_long_lossy_way_is_used_as_well_as_raw_streams_do(
    record: Record,
) -> None:
    """Eight ranges at a time against eight streams, turn by turn."""
    mib, streams = record.pick(2, 24), 8
    raws: list[float] = []
    mine: list[float] = []
    async with link(delay=0.05, jitter=0.01, loss=0.01) as way:
        for turn in range(record.pick(1, 4)):
            order = [(raw, raws), (ours, mine)]
            for measure, rates in order[:: 1 if turn % 2 else -1]:
                rates.append(await measure(way, mib, streams))
            record.ran()
    fair = statistics.median(mine) / statistics.median(raws)
    record.at_least("rate", fair, 0.8, unit=" of raw TCP streams")
    record.note(f"raw: {statistics.median(raws) / 1e6:.1f} MB/s")
