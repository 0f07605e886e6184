"""A free connection takes over what a much slower one has not received yet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web

from aiockpt.errors import (
    PeerUnreachableError,
    RemoteProtocolError,
    TransferStalledError,
)
from aiockpt.events import TransferEvent, add_hook
from aiockpt.testing.faults import (
    BlackHole,
    CutAfter,
    Drip,
    Fault,
    FaultProxy,
    FlipBit,
    Pipe,
    Refuse,
    StallAfter,
)
from tests.support.rangepeer import Memory, RangePeer, fetch, noise, receiver, serving

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


@pytest.mark.parametrize("parallel", [2, 4])
@pytest.mark.parametrize(
    "slow", [SLOWEST, StallAfter(0), StallAfter(3 * CHUNK + 10)], ids=repr
)
@movers
async def test_one_slow_connection_is_overtaken(fast_path, slow, parallel) -> None:
    """Another one brings what it lacks, and next to nothing comes twice."""
    async with (
        serving(SEGMENT, chunk_bytes=CHUNK) as peer,
        proxy_to(peer, slow) as proxy,
        receiver(
            fast_path=fast_path, max_concurrency=parallel, stall_timeout=FAR
        ) as client,
    ):
        with events() as told:
            check(await fetch(client, peer, port=proxy.port))
        assert proxy.statistics().bytes_down <= len(SEGMENT) + CHUNK + HEADS
    assert overtaken(told) == 1
    assert {(event.stop, event.step) for event in told} == {("retry", 7)}


async def test_two_slow_connections_are_overtaken() -> None:
    """Of four, by a lane each."""
    async with (
        serving(SEGMENT, chunk_bytes=CHUNK) as peer,
        proxy_to(peer, SLOWEST, StallAfter(CHUNK)) as proxy,
        receiver(max_concurrency=4, stall_timeout=FAR) as client,
    ):
        with events() as told:
            check(await fetch(client, peer, port=proxy.port))
    assert overtaken(told) == 2


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


async def test_connections_that_are_equally_slow_are_left_alone() -> None:
    """No byte is asked for twice."""
    async with (
        serving(SEGMENT, chunk_bytes=CHUNK) as peer,
        proxy_to(peer, then=Drip(500_000, burst=10_000)) as proxy,
        receiver(max_concurrency=4) as client,
    ):
        check(await fetch(client, peer, port=proxy.port))
        assert proxy.statistics().bytes_down <= len(SEGMENT) + HEADS
    assert len(peer.ranges()) == 8


async def test_a_single_connection_has_no_rival() -> None:
    """Where only one may be made, however slow it is."""
    async with (
        serving(SEGMENT, chunk_bytes=CHUNK) as peer,
        proxy_to(peer, Drip(2e6, burst=20_000)) as proxy,
        receiver(max_concurrency=1) as client,
    ):
        check(await fetch(client, peer, port=proxy.port))
        assert proxy.statistics().connections == 1
    assert len(peer.ranges()) == 2


class TestTheConnectionThatTakesOver:
    """It may be as bad as the first, or worse."""

    async def test_if_it_is_silent_the_peer_has_stalled(self) -> None:
        """A run is not passed around for ever."""
        slow = Drip(250_000, burst=5000)
        async with (
            serving(SEGMENT, chunk_bytes=CHUNK, meddle=one_request_each) as peer,
            proxy_to(peer, slow, *[Fault()] * 3, then=BlackHole()) as proxy,
            receiver(stall_timeout=0.5, reconnect_timeout=0.5) as client,
        ):
            with pytest.raises((TransferStalledError, PeerUnreachableError)):
                await fetch(client, peer, port=proxy.port)

    async def test_if_it_is_refused_the_answer_is_the_error(self) -> None:
        """It is asked for three times, as anything else."""

        async def refuse(peer: RangePeer, request: web.Request) -> web.Response:
            if len(peer.ranges()) > 4:
                return web.Response(status=418)
            return peer.answer(request)

        async with (
            serving(SEGMENT, chunk_bytes=CHUNK, meddle=refuse) as peer,
            proxy_to(peer, Drip(250_000, burst=5000)) as proxy,
            receiver() as client,
        ):
            with pytest.raises(RemoteProtocolError, match="418"):
                await fetch(client, peer, port=proxy.port)

    async def test_if_it_is_slower_all_comes_nevertheless(self) -> None:
        """And each byte that was received counts."""
        slow, slower = Drip(250_000, burst=5000), Drip(100_000, burst=2000)
        async with (
            serving(SEGMENT, chunk_bytes=CHUNK, meddle=one_request_each) as peer,
            proxy_to(peer, slow, *[Fault()] * 3, then=slower) as proxy,
            receiver() as client,
        ):
            check(await fetch(client, peer, port=proxy.port))
            assert proxy.statistics().bytes_down <= len(SEGMENT) + 4 * CHUNK

    @movers
    async def test_if_it_stalls_later_it_is_overtaken_itself(self, fast_path) -> None:
        """It is a straggler as any other then."""
        stall = StallAfter(2 * CHUNK)
        async with (
            serving(SEGMENT, chunk_bytes=CHUNK, meddle=one_request_each) as peer,
            proxy_to(peer, SLOWEST, *[Fault()] * 3, stall, stall) as proxy,
            receiver(fast_path=fast_path, stall_timeout=FAR) as client,
        ):
            with events() as told:
                check(await fetch(client, peer, port=proxy.port))
        assert overtaken(told) == 3

    async def test_if_it_breaks_later_its_lane_goes_on(self) -> None:
        """The first one is gone by then."""
        async with (
            serving(SEGMENT, chunk_bytes=CHUNK, meddle=one_request_each) as peer,
            proxy_to(peer, SLOWEST, *[Fault()] * 3, CutAfter(2 * CHUNK)) as proxy,
            receiver(stall_timeout=FAR) as client,
        ):
            with events() as told:
                check(await fetch(client, peer, port=proxy.port))
        assert overtaken(told) == 1


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


class TestCancelled:
    """Nothing is left, and nothing is written any more."""

    async def stop(self, task: asyncio.Task[Memory], memory: Memory) -> None:
        """Cancel a fetch, and see that its memory is the caller's again."""
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left = bytes(memory.content)
        await asyncio.sleep(0.05)
        assert memory.content == left

    async def test_while_the_second_connection_is_asked(self) -> None:
        """Both end."""
        memory = Memory(len(SEGMENT))
        async with (
            serving(SEGMENT, chunk_bytes=CHUNK, meddle=one_request_each) as peer,
            proxy_to(peer, SLOWEST, *[Fault()] * 3, then=BlackHole()) as proxy,
            receiver(stall_timeout=FAR) as client,
        ):
            task = asyncio.create_task(fetch(client, peer, memory, port=proxy.port))
            while proxy.statistics().connections < 5:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
            await self.stop(task, memory)

    @movers
    async def test_when_it_has_overtaken(self, fast_path) -> None:
        """The first one has ended already."""
        memory, slow = Memory(len(SEGMENT)), Drip(100_000, burst=2000)
        async with (
            serving(SEGMENT, chunk_bytes=CHUNK, meddle=one_request_each) as peer,
            proxy_to(peer, SLOWEST, *[Fault()] * 3, then=slow) as proxy,
            receiver(fast_path=fast_path, stall_timeout=FAR) as client,
        ):
            with events() as told:
                task = asyncio.create_task(fetch(client, peer, memory, port=proxy.port))
                while not overtaken(told):  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.01)
                await self.stop(task, memory)


async def test_a_peer_that_is_gone_is_an_error_still() -> None:
    """Of the straggler, which nobody could overtake."""
    async with (
        serving(SEGMENT, chunk_bytes=CHUNK, meddle=one_request_each) as peer,
        proxy_to(peer, SLOWEST, *[Fault()] * 3, then=Refuse()) as proxy,
        receiver(stall_timeout=0.5) as client,
    ):
        task = asyncio.create_task(fetch(client, peer, port=proxy.port))
        while proxy.statistics().connections < 5:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        proxy.refuse()
        await proxy.cut_all()
        with pytest.raises(PeerUnreachableError):
            await task


@pytest.mark.parametrize("seed", range(4))
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
