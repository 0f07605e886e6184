"""A free connection takes over what a much slower one has not received yet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web

from aiockpt import TransferEvent, add_hook
from aiockpt.errors import (
    PeerUnreachableError,
    TransferStalledError,
)
from aiockpt.testing import (
    BlackHole,
    CutAfter,
    Drip,
    Fault,
    FaultProxy,
    FlipBit,
    StallAfter,
)
from aiockpt.testing.faults import Pipe
from tests.support.proofs import proves
from tests.support.rangepeer import Memory, RangePeer, fetch, noise, receiver, serving
from tests.support.servers import settle
from tests.support.steps import counted_steps

pytestmark = [
    pytest.mark.usefixtures("no_blocking"),
    pytest.mark.asyncio,
    pytest.mark.torch_free,
    pytest.mark.timeout(120),
]

movers = pytest.mark.parametrize("fast_path", [True, False], ids=["direct", "portable"])

CHUNK = 1 << 16
SEGMENT = noise(32 * CHUNK)
HEADS = 8 << 10
"""Bytes that the heads of all answers of a transfer have at most."""

FAR = 3600.0
"""Seconds that no test lasts: whatever waits for them has failed."""

SLOWEST = Drip(1000, burst=100)
"""For a run of 512 KiB it takes more than eight minutes."""


async def one_request_each(peer: RangePeer, request: web.Request) -> web.Response:
    """Close every connection after its answer."""
    answer = peer.answer(request)
    answer.force_close()
    return answer


@contextmanager
def events() -> Iterator[list[TransferEvent]]:
    """Collect what is told meanwhile."""
    told: list[TransferEvent] = []
    remove = add_hook(told.append)
    try:
        yield told
    finally:
        remove()


def proxy_to(peer: RangePeer, *faults: Fault, then: Fault | None = None) -> FaultProxy:
    """Return a proxy whose first connections have these faults."""
    return FaultProxy("127.0.0.1", peer.port, faults=faults, otherwise=then)


def check(memory: Memory) -> None:
    """Compare the bytes, and what was counted."""
    assert memory.content == SEGMENT
    assert (memory.bytes, memory.chunks) == (len(SEGMENT), 32)


def overtaken(told: Iterable[TransferEvent]) -> int:
    """Return how many stragglers were stopped."""
    return sum("another connection has it" in event.detail for event in told)


async def test_a_straggler_that_is_stopped_while_a_thread_receives_lied_not() -> None:
    """What the thread has received counts; the rest is asked for from there on."""
    segment = noise(32 << 20)  # for runs that are worth a thread
    async with (
        serving(segment, chunk_bytes=1 << 20) as peer,
        proxy_to(peer, Drip(300_000, burst=1500)) as proxy,
        receiver(max_concurrency=2, stall_timeout=FAR) as client,
    ):
        memory = await fetch(client, peer, port=proxy.port)
    assert memory.content == segment
    assert memory.bytes == len(segment)
    assert not memory.errors


@proves("threat D19")
async def test_connections_without_work_sleep() -> None:
    """Only one idle connection looks whether the busy one has become slow."""
    found = []
    for parallel in (2, 32):
        async with (
            serving(noise(CHUNK), chunk_bytes=CHUNK) as peer,
            proxy_to(peer, then=StallAfter(HEADS)) as proxy,
            receiver(max_concurrency=parallel, stall_timeout=FAR) as client,
        ):
            task = asyncio.create_task(fetch(client, peer, port=proxy.port))
            await settle(lambda peer=peer: peer.ranges())
            await asyncio.sleep(0.1)
            with counted_steps() as steps:
                await asyncio.sleep(0.5)
            found.append(steps.count)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    few, many = found
    assert many < 2 * few


class TestTheConnectionThatTakesOver:
    """It may be as bad as the first, or worse."""

    @pytest.mark.parametrize(
        ("slow", "then", "stops"),
        [
            (Drip(250_000, burst=5000), [Drip(100_000, burst=2000)], 0),
            (SLOWEST, [StallAfter(2 * CHUNK), StallAfter(2 * CHUNK)], 3),
            (SLOWEST, [CutAfter(2 * CHUNK)], 1),
        ],
        ids=["slower", "stalls", "breaks"],
    )
    async def test_all_comes_nevertheless(self, slow, then, stops) -> None:
        """It is a straggler as any other then."""
        async with (
            serving(SEGMENT, chunk_bytes=CHUNK, meddle=one_request_each) as peer,
            proxy_to(peer, slow, *[Fault()] * 3, *then) as proxy,
            receiver(stall_timeout=FAR) as client,
        ):
            with events() as told:
                check(await fetch(client, peer, port=proxy.port))
            assert proxy.statistics().bytes_down <= len(SEGMENT) + 8 * CHUNK
        assert overtaken(told) >= stops

    async def test_if_it_is_silent_the_peer_has_stalled(self) -> None:
        """A run is not passed around for ever."""
        slow = Drip(250_000, burst=5000)
        async with (
            serving(SEGMENT, chunk_bytes=CHUNK, meddle=one_request_each) as peer,
            proxy_to(peer, slow, *[Fault()] * 3, then=BlackHole()) as proxy,
            receiver(stall_timeout=0.3, reconnect_timeout=0.3) as client,
        ):
            with pytest.raises((TransferStalledError, PeerUnreachableError)):
                await fetch(client, peer, port=proxy.port)


class _BadThenSilent(Fault):
    """One bit is wrong, and then nothing comes any more."""

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Do both."""
        wrong = _Collected()
        await FlipBit(CHUNK).forward(wrong, data, at)  # type: ignore[arg-type]
        await StallAfter(3 * CHUNK).forward(pipe, bytes(wrong.data), at)


class _Collected:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.data = bytearray()

    async def send(self, data: bytes) -> None:
        """Keep it."""
        self.data += data


@movers
async def test_what_the_straggler_got_wrong_is_fetched_again(fast_path) -> None:
    """Its successor finds out, and blames the peer."""
    async with (
        serving(SEGMENT, chunk_bytes=CHUNK) as peer,
        proxy_to(peer, _BadThenSilent()) as proxy,
        receiver(fast_path=fast_path, stall_timeout=FAR) as client,
    ):
        memory = await fetch(client, peer, port=proxy.port)
    check(memory)
    assert ["has digest" in str(error) for error in memory.errors] == [True]


@pytest.mark.parametrize("then", [BlackHole(), Drip(100_000, burst=2000)], ids=repr)
@movers
async def test_a_cancel_leaves_the_memory_to_the_caller(fast_path, then) -> None:
    """The cancel comes while the second connection is asked, or has overtaken."""
    memory = Memory(len(SEGMENT))
    async with (
        serving(SEGMENT, chunk_bytes=CHUNK, meddle=one_request_each) as peer,
        proxy_to(peer, SLOWEST, *[Fault()] * 3, then=then) as proxy,
        receiver(fast_path=fast_path, stall_timeout=FAR) as client,
    ):
        with events() as told:
            task = asyncio.create_task(fetch(client, peer, memory, port=proxy.port))
            asked = isinstance(then, BlackHole)
            await settle(
                lambda: proxy.statistics().connections > 4 if asked else overtaken(told)
            )
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        left = bytes(memory.content)
        await asyncio.sleep(0.02)
        assert memory.content == left


@pytest.mark.parametrize("seed", range(2))
@movers
async def test_whatever_connections_do_every_byte_comes_once(fast_path, seed) -> None:
    """Faults of all kinds, in any order, and few bytes more than needed."""
    chance = random.Random(seed)
    kinds = (
        lambda: StallAfter(chance.randrange(8 * CHUNK)),
        lambda: CutAfter(chance.randrange(8 * CHUNK)),
        lambda: Drip(chance.choice([1000, 100_000]), burst=100),
        lambda: FlipBit(chance.randrange(HEADS, 8 * CHUNK)),
        Fault,
    )
    faults = [chance.choice(kinds)() for _ in range(8)]
    async with (
        serving(SEGMENT, chunk_bytes=CHUNK) as peer,
        proxy_to(peer, *faults) as proxy,
        receiver(
            fast_path=fast_path,
            max_concurrency=4,
            stall_timeout=2,
            reconnect_timeout=20,
        ) as client,
    ):
        check(await fetch(client, peer, port=proxy.port))
