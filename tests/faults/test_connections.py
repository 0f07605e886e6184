"""Connections break, stall, drip and lie: the right bytes arrive, or a typed error."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from aiockpt import AiockptError, IntegrityError
from aiockpt.errors import TransferTimeoutError
from aiockpt.testing import (
    CutAfter,
    Drip,
    Fault,
    FaultProxy,
    FlipBit,
    StallAfter,
    assert_same,
)
from tests.support.faultpeers import next_faults, noise
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.transports import MIB, Transport, pair, proxied, through, transport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

CHUNK = MIB
HEADS = 8 << 10
"""Bytes that answers of one transfer may have beside the chunks."""


async def down(proxy: FaultProxy, receiver: Transport, url: str) -> tuple[int, object]:
    """Receive through a proxy; return the bytes that this took, and what came."""
    before = proxy.statistics().bytes_down
    got = await receiver.recv_checkpoint(0, url, 1)
    return proxy.statistics().bytes_down - before, got


@proves("fault 5")
async def test_one_reset_per_connection_costs_a_chunk_each(record: Record) -> None:
    """What had arrived before a reset is not fetched again."""
    chance = record.chance()
    state, size = noise(32), 32 * MIB
    async with pair(chunk_bytes=CHUNK, connections=4) as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
        async with proxied(sender) as proxy:
            url = through(proxy, sender)
            for _ in record.part_of(range(40), few=3):
                await proxy.cut_all()
                cuts = [chance.randrange(HEADS, size // 5) for _ in range(4)]
                next_faults(proxy, *(CutAfter(at, reset=True) for at in cuts))
                came, got = await down(proxy, receiver, url)
                assert_same(got, state)
                extra = max(came - size - HEADS, 0) / 4 / CHUNK
                record.within("extra", extra, 1, unit=" chunks per connection")
                record.ran()


async def used_up(
    proxy: FaultProxy, receiver: Transport, url: str, state: object, record: Record
) -> None:
    """Receive, 16 at a time, until every fault of a proxy has had its turn."""

    async def work() -> None:
        while proxy.statistics().connections < len(proxy.faults):
            assert_same(await receiver.recv_checkpoint(0, url, 1), state)

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(work())
    record.ran(len(proxy.faults))


@proves("fault 7", "threat T1")
@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
async def test_an_answer_may_end_after_any_byte(record: Record, reset: bool) -> None:
    """It goes on from there, on another connection."""
    state = noise(200 / MIB)
    async with pair(reconnect_timeout=60, timeout=100) as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
        async with proxied(sender) as proxy:
            url = through(proxy, sender)
            await receiver.recv_checkpoint(0, url, 1)
            whole = proxy.statistics().bytes_down
            await proxy.cut_all()
            points = record.part_of(range(whole + 1), few=60)
            next_faults(proxy, *(CutAfter(at, reset=reset) for at in points))
            await used_up(proxy, receiver, url, state, record)


@proves("fault 8", "threat T1", "invariant 1")
async def test_one_inverted_bit_is_never_accepted(record: Record) -> None:
    """In a body it costs its chunk again; in a head it may be an error."""
    state, size, chunk = noise(1), MIB, 64 << 10
    options = {"stall_timeout": 0.3, "reconnect_timeout": 5, "connections": 1}
    seeds = iter(record.part_of(range(1000), few=60))

    async def work(sender: Transport) -> None:
        async with transport(**options) as receiver, proxied(sender) as proxy:
            url = through(proxy, sender)
            for seed in seeds:
                await proxy.cut_all()
                chance = random.Random(seed)
                flip = FlipBit(chance.randrange(size + 2000), bit=chance.randrange(8))
                next_faults(proxy, flip)
                try:
                    came, got = await down(proxy, receiver, url)
                except AiockptError:
                    record.note("some heads: typed error")
                else:
                    assert_same(got, state)
                    if flip.at > HEADS:
                        extra = (came - size - HEADS) / chunk
                        record.within("extra", extra, 1, unit=" chunks")
                record.ran()

    async with transport(chunk_bytes=chunk) as sender:
        await sender.send_checkpoint([], 1, state)
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(work(sender))


@proves("fault 9")
async def test_memory_that_differs_from_its_manifest_is_told(record: Record) -> None:
    """The same chunk is asked for three times, and named; other memory is untouched."""
    chance = record.chance()
    async with pair(zero_copy=True, insecure=True) as (sender, receiver):
        for _ in record.part_of(range(100), few=5):
            state = noise(2)
            await sender.send_checkpoint([], 1, state)
            at = chance.randrange(2 * MIB)
            state["weight"][at] ^= 1 << chance.randrange(8)
            asked = sender.statistics().requests
            into = {"weight": noise(2, step=2)["weight"]}
            with pytest.raises(IntegrityError) as caught:
                await receiver.recv_checkpoint(0, sender.metadata(), 1, into=into)
            assert caught.value.chunk == at // (64 << 10)
            assert caught.value.url in sender.address()
            assert_same(into, noise(2, step=2))
            requests = sender.statistics().requests - asked
            record.within("requests", requests, 1 + 4 + 2 * 2, unit="")
            record.ran()


@proves("fault 10", "threat D12", "invariant 4")
async def test_a_deadline_holds_however_slowly_bytes_drip(record: Record) -> None:
    """Every drop is progress, so no stall timeout ends it."""
    chance = record.chance()
    async with pair(stall_timeout=0.5) as (sender, receiver):
        await sender.send_checkpoint([], 1, noise(16))
        async with proxied(sender, otherwise=Drip(20_000, burst=500)) as proxy:
            for _ in record.part_of(range(8), few=1):
                timeout = chance.uniform(0.5, 2.5)
                since = time.monotonic()
                with pytest.raises(TransferTimeoutError):
                    await receiver.recv_checkpoint(
                        0, through(proxy, sender), 1, timeout
                    )
                took = time.monotonic() - since
                record.within("beyond the deadline", took - timeout, 0.5)
                record.ran()


@proves("fault 12")
async def test_two_of_four_connections_stall_for_ever(record: Record) -> None:
    """The others go on, and what the two had is fetched once they are given up."""
    chance, stall = record.chance(), 1.0
    state = noise(record.pick(64, 200))  # long enough to be compared
    async with pair(chunk_bytes=CHUNK, connections=4, stall_timeout=stall) as (
        sender,
        receiver,
    ):
        await sender.send_checkpoint([], 1, state)
        async with proxied(sender) as proxy:
            url = through(proxy, sender)
            for _ in record.part_of(range(10), few=1):
                clean = await timed(receiver, url, state)
                await proxy.cut_all()
                stalls = [StallAfter(chance.randrange(HEADS, 4 * MIB)) for _ in "12"]
                next_faults(proxy, stalls[0], Fault(), stalls[1], Fault())
                took = await timed(receiver, url, state)
                times = (took - stall) / clean
                record.within(
                    "beyond the stall timeout", times, 1.2, unit=" clean times"
                )
                record.ran()


async def timed(receiver: Transport, url: str, state: object) -> float:
    """Receive; return the seconds that this took."""
    since = time.monotonic()
    got = await receiver.recv_checkpoint(0, url, 1)
    took = time.monotonic() - since
    assert_same(got, state)
    return took
