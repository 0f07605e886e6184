"""Of several sources one is left: it is asked as if it had been alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from aiockpt import TransferEvent, add_hook
from tests.support.rangepeer import (
    FAR,
    Client,
    Fetch,
    Meddle,
    RangePeer,
    noise,
    receiver,
)
from tests.support.rangepeer import serving as peer
from tests.support.servers import settle

pytestmark = [
    pytest.mark.usefixtures("no_blocking"),
    pytest.mark.asyncio,
    pytest.mark.torch_free,
    pytest.mark.timeout(120),
]

CHUNK = 1 << 16
CHUNKS = 128
SEGMENT = noise(CHUNKS * CHUNK)
SOURCES = 9
MOST = 8
"""Connections that one source may have; each of nine has three."""

HANGS = 60.0
"""Seconds after which a receive that should have ended is said to hang."""


def leaving(number: int) -> Meddle:
    """Return who has gone on, lies or breaks off, some answers later than others."""

    async def meddle(peer: RangePeer, request: web.Request) -> web.Response | None:
        if len(peer.ranges()) <= number // 2:
            return None
        answer = peer.answer(request)
        if number % 3 == 0:
            return web.Response(status=412)
        if number % 3 == 1:
            answer.body = bytes(len(answer.body))  # type: ignore[arg-type]
        else:
            assert request.transport is not None
            request.transport.abort()
        return answer

    return meddle


class Stalls:
    """One of its answers stalls after half a chunk, for ever.

    Args:
        number: Which one.

    Attributes:
        asked: All ranges, in order.
    """

    def __init__(self, number: int = -1) -> None:
        self.asked: list[tuple[int, int]] = []
        self._number = number

    async def meddle(
        self, peer: RangePeer, request: web.Request
    ) -> web.StreamResponse | None:
        """Stall, or have the normal handler answer."""
        if "Range" not in request.headers:
            return None
        number = len(self.asked)
        self.asked.append((request.http_range.start, request.http_range.stop))
        await self.ready()
        if number != self._number:
            return None
        whole = peer.answer(request)
        assert isinstance(whole.body, bytes)
        answer = web.StreamResponse(status=whole.status, headers=whole.headers)
        answer.content_length = len(whole.body)
        await answer.prepare(request)
        await answer.write(whole.body[: CHUNK // 2])
        line = request.transport
        assert line is not None
        await settle(line.is_closing, patience=HANGS)
        return answer

    async def ready(self) -> None:
        """Answer at once."""


class Last(Stalls):
    """The one that is left: it answers when the others are gone, and not before.

    It waits until it is asked for as much at a time as a single source would be.

    Attributes:
        early: How many ranges were asked for when the last other one went.
        alone: Set then.
        most: How many requests waited at a time.
    """

    def __init__(self, number: int = -1) -> None:
        super().__init__(number)
        self.early = 0
        self.alone = asyncio.Event()
        self.most = 0
        self._waiting = 0
        self._gone = 0
        self._all = asyncio.Event()

    def hear(self, event: TransferEvent) -> None:
        """Be a hook of events."""
        self._gone += event.stop == "drop"
        if self._gone == SOURCES - 1 and not self.alone.is_set():
            self.early = len(self.asked)
            self.alone.set()

    async def ready(self) -> None:
        """Wait for the others to go, and for the requests."""
        self._waiting += 1
        self.most = max(self.most, self._waiting)
        if self._waiting == MOST:
            self._all.set()
        await self.alone.wait()
        await self._all.wait()
        self._waiting -= 1


@asynccontextmanager
async def nine(client: Client, last: Last) -> AsyncIterator[Fetch]:
    """Give a fetch from nine sources, of which the one in the middle stays."""
    meddles = [leaving(number) for number in range(SOURCES - 1)]
    meddles.insert(4, last.meddle)
    async with AsyncExitStack() as stack:
        peers = [
            await stack.enter_async_context(
                peer(SEGMENT, chunk_bytes=CHUNK, meddle=meddle)
            )
            for meddle in meddles
        ]
        stack.callback(add_hook(last.hear))
        yield Fetch(client, [each.source() for each in peers])


def check(fetch: Fetch) -> None:
    """Compare the bytes, and what was counted."""
    assert fetch.target.content == SEGMENT
    assert fetch.target.bytes == sum(fetch.given) == len(SEGMENT)
    assert fetch.target.chunks == CHUNKS


def overtaken(fetch: Fetch) -> int:
    """Return how many stragglers were stopped."""
    return sum("another connection has it" in event.detail for event in fetch.events)


async def test_it_gets_all_connections_and_goes_on_with_what_it_has_in_hand() -> None:
    """Nothing that it was asked for is asked for again."""
    last = Last()
    async with receiver(max_concurrency=MOST) as client, nine(client, last) as fetch:
        async with asyncio.timeout(HANGS):
            await fetch.run()
    check(fetch)
    assert len(fetch.dropped()) == SOURCES - 1
    assert last.most == MOST
    assert last.early == 3
    for start, stop in last.asked[: last.early]:
        assert sum(a < stop and start < b for a, b in last.asked) == 1


@pytest.mark.parametrize("number", [0, 5], ids=["early", "late"])
async def test_one_stalled_connection_is_overtaken(number: int) -> None:
    """One that it had before, or has since; what came is not asked for again."""
    last = Last(number)
    async with (
        receiver(max_concurrency=MOST, stall_timeout=FAR) as client,
        nine(client, last) as fetch,
    ):
        async with asyncio.timeout(HANGS):
            await fetch.run()
    check(fetch)
    assert overtaken(fetch) == 1
    assert last.most == MOST
    start, stop = last.asked[number]
    again = [each for each in last.asked if start <= each[0] < stop]
    assert again == [(start, stop), (start + CHUNK // 2, stop)]


async def test_one_that_has_not_joined_is_no_help() -> None:
    """What stalls is overtaken by another connection of the same source."""
    silence, stalls = asyncio.Event(), Stalls(0)

    async def silent(_: RangePeer, request: web.Request) -> None:
        await silence.wait()

    async with (
        peer(SEGMENT, chunk_bytes=CHUNK, meddle=stalls.meddle) as one,
        peer(SEGMENT, chunk_bytes=CHUNK, meddle=silent) as other,
        receiver(stall_timeout=FAR, reconnect_timeout=FAR) as client,
    ):
        fetch = Fetch(client, [one.source(), other.source()])
        async with asyncio.timeout(HANGS):
            await fetch.run()
        silence.set()  # or its handler would outlive the test
    check(fetch)
    assert fetch.dropped() == {}
    assert not fetch.given[1]
