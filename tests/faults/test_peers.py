"""A peer is killed or stands still: the other end notices, and lets go."""

from __future__ import annotations

import asyncio
import signal
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from aiockpt import TransportError
from aiockpt.testing import FaultProxy, assert_same
from tests.support.faultpeers import (
    TOKEN,
    At,
    Line,
    noise,
    running,
    said,
    sender,
    share,
)
from tests.support.matrix import Record
from tests.support.ports import free_port
from tests.support.proofs import proves
from tests.support.servers import settle
from tests.support.transports import MIB, Transport, transport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

CHUNK = MIB
SIZE = 64  # MiB
FEW = 2  # connections: what a signal stops must not lie in their buffers already


@proves("fault 1")
async def test_a_killed_sender_is_noticed_at_once(record: Record) -> None:
    """Every connection breaks; nothing answers any more."""
    for seed in record.part_of(range(8), few=1):
        async with (
            sender(mib=SIZE, chunk_bytes=CHUNK) as peer,
            transport(token=TOKEN, reconnect_timeout=0, connections=FEW) as receiver,
        ):
            at = At(share(seed), peer.process.kill)
            with pytest.raises(TransportError):
                await receiver.recv_checkpoint(0, peer.url, 1, progress=at)
            record.within("to the error", time.monotonic() - at.since, 0.2)
        record.ran()


@proves("fault 2")
async def test_a_sender_that_comes_back_finishes_the_transfer(record: Record) -> None:
    """The same state has the same identity: what had arrived is kept."""
    expected = noise(SIZE)
    for seed in record.part_of(range(4), few=1):
        async with (
            sender(mib=SIZE, chunk_bytes=CHUNK, port=free_port()) as peer,
            FaultProxy("127.0.0.1", peer.port) as proxy,
            transport(
                token=TOKEN, timeout=60, reconnect_timeout=30, connections=FEW
            ) as receiver,
        ):
            url = peer.url.replace(str(peer.port), str(proxy.port))
            at = At(share(seed), peer.process.kill)
            fetch = receiver.recv_checkpoint(0, url, 1, progress=at)
            receiving = asyncio.create_task(fetch)
            await peer.process.wait()
            await asyncio.sleep(1)
            async with sender(mib=SIZE, chunk_bytes=CHUNK, port=peer.port):
                assert_same(await receiving, expected)
            extra = proxy.statistics().bytes_down - SIZE * MIB
        record.within(
            "fetched again", extra / CHUNK / FEW, 1, unit=" chunks per connection"
        )
        record.ran()


@proves("fault 3")
async def test_a_sender_that_stands_still_for_a_while_is_waited_for(
    record: Record,
) -> None:
    """Its pause is longer than the stall timeout, and shorter than the patience."""
    pause = record.pick(1.0, 4.0)
    async with (
        sender(mib=SIZE, chunk_bytes=CHUNK) as peer,
        transport(token=TOKEN, timeout=60, stall_timeout=pause / 2) as receiver,
    ):
        at = At(0.2, lambda: peer.signal(signal.SIGSTOP))
        fetch = receiver.recv_checkpoint(0, peer.url, 1, progress=at)
        receiving = asyncio.create_task(fetch)
        await settle(lambda: at.since > 0)
        await asyncio.sleep(pause)
        peer.signal(signal.SIGCONT)
        assert_same(await receiving, noise(SIZE))
        record.within("in all", time.monotonic() - at.since, pause + 4)
    record.ran()


@asynccontextmanager
async def sources(count: int, *, mib: int) -> AsyncIterator[tuple[list[str], Process]]:
    """Start senders of the same bytes, each behind a line; give the last process."""
    urls = []
    async with AsyncExitStack() as stack:
        for _ in range(count):
            peer = await stack.enter_async_context(sender(mib=mib, chunk_bytes=CHUNK))
            proxy = FaultProxy("127.0.0.1", peer.port, otherwise=Line(50e6))
            await stack.enter_async_context(proxy)
            urls.append(proxy.url("/checkpoint/"))
        yield urls, peer.process


@proves(
    "fault 40",
    "cell HTTPTransport.recv_checkpoint, metadata=[...]: the other one dies",
)
async def test_two_of_three_sources_finish_what_the_third_began(record: Record) -> None:
    """Beside what two take that nothing happens to."""
    mib = record.pick(16, 192)
    expected = noise(mib)

    async def take(urls: list[str], progress: At | None = None) -> float:
        async with transport(token=TOKEN) as receiver:
            since = time.monotonic()
            got = await receiver.recv_checkpoint(0, urls, 1, progress=progress)
            took = time.monotonic() - since
        assert_same(got, expected)
        record.ran()
        return took

    for _ in record.part_of(range(6), few=1):
        async with sources(2, mib=mib) as (urls, _):
            clean = await take(urls)
        async with sources(3, mib=mib) as (urls, last):
            kill = At(0.5, last.kill)
            struck = await take(urls, kill)
        assert kill.since
        record.within("time", struck / clean, 1.3, unit=" clean times with two")


@asynccontextmanager
async def struck(
    sends: Transport, number: signal.Signals
) -> AsyncIterator[tuple[float, int]]:
    """Start a receiver; once the signal has hit it, give when, and what it reads."""
    options = {"url": sends.address(), "signal": number, "max_concurrency": 8}
    async with running("receive", **options) as process:
        assert await said(process) == "ready"
        assert process.stdin is not None
        process.stdin.write(b"\n")
        assert await said(process) == "now"
        yield time.monotonic(), sends.statistics().readers


@proves("fault 4")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_sender_lets_go_of_a_receiver_that_is_gone(
    record: Record, number: signal.Signals
) -> None:
    """Killed, it is gone at once; standing still, after the stall timeout."""
    async with transport(token=TOKEN, chunk_bytes=CHUNK, stall_timeout=1) as sends:
        await sends.send_checkpoint([], 1, noise(SIZE))
        for _ in record.part_of(range(4), few=1):
            async with struck(sends, number) as (since, _):
                await settle(lambda: sends.statistics().readers == 0)
                took = time.monotonic() - since
            record.within("beyond the stall timeout", took - 1, 0.5)
            record.ran()


@proves("fault 4")
async def test_a_receiver_that_stands_still_delays_the_trainer_by_the_grace(
    record: Record,
) -> None:
    """`disallow_checkpoint` returns; the memory is the trainer's again."""
    held, state = 0, noise(SIZE)
    async with transport(token=TOKEN, chunk_bytes=CHUNK, grace=0.5) as sends:
        for attempt in record.part_of(range(20), few=20):
            if attempt >= record.pick(3, 5) and held:
                break  # it was caught in the middle of a body
            await sends.send_checkpoint([], 1, state)
            async with struck(sends, signal.SIGSTOP) as (since, readers):
                await sends.disallow_checkpoint()
                took = time.monotonic() - since
            held += readers
            assert sends.statistics().readers == 0
            record.within("beyond the grace", took - 0.5, 0.1)
            record.ran()
    assert held, "none of them was in the middle of anything"
