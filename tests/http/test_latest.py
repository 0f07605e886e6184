"""``latest?after=STEP``: a request that waits for news, and what it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.support.serving import Memory, Peer, Site, serving, settle

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

PATH = "/checkpoint/latest"
LONG = "wait=30"


@asynccontextmanager
async def waiting(site: Site, query: str) -> AsyncIterator[Peer]:
    """Give a peer whose request for news is waiting."""
    async with site.peer() as peer:
        await peer.request(f"{PATH}?{query}", Prefer=LONG)
        await settle(lambda: site.server.counters().server.waiting == 1)
        yield peer


async def test_a_newer_step_is_told_at_once():
    """Whoever has an older one need not wait."""
    memory = Memory(1000, step=7)
    async with serving(memory) as site, site.peer() as peer:
        for query in ("after=6", "after=0", "after=6&unknown=1"):
            answer = await peer.ask(f"{PATH}?{query}", Prefer=LONG)
            assert answer.status == 200
            assert json.loads(answer.body) == {
                "step": 7,
                "snapshot_id": memory.manifest.snapshot_id,
                "total_bytes": len(memory.file),
            }
            assert answer.headers["ETag"] == memory.etag
            assert answer.headers["Aiockpt-Step"] == "7"
            assert answer.headers["Cache-Control"] == "no-store"


async def test_the_wait_ends_with_the_next_publication():
    """Also if it is not the step after; one of an older step is no news."""
    async with serving(Memory(1000, step=7)) as site, waiting(site, "after=7") as peer:
        await site.store.publish(Memory(1000, step=6), grace=0)
        await site.store.publish(Memory(1000, step=9), grace=0)
        answer = await peer.answer()
    assert (answer.status, json.loads(answer.body)["step"]) == (200, 9)


async def test_of_two_publications_the_newest_is_told():
    """What nobody can fetch any more is no news."""
    async with serving() as site, waiting(site, "after=1") as peer:
        await site.store.publish(Memory(1000, step=2), grace=0)
        await site.store.publish(Memory(1000, step=3), grace=0)
        assert json.loads((await peer.answer()).body)["step"] == 3


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_no_news_is_an_answer_without_content(method):
    """It says what is served instead, and is no error."""
    async with serving(Memory(1000, step=7)) as site, site.peer() as peer:
        for after in (7, 8, 10**18):
            path = f"{PATH}?after={after}"
            answer = await peer.ask(path, method=method, Prefer="wait=0.05")
            assert (answer.status, answer.body) == (204, b"")
            assert answer.headers["Aiockpt-Step"] == "7"
            assert answer.headers["Cache-Control"] == "no-store"
            assert "Content-Length" not in answer.headers
        assert site.server.counters().server.refused == 0


async def test_nothing_at_all_is_no_news_either():
    """The answer then names no step."""
    async with serving() as site, site.peer() as peer:
        answer = await peer.ask(f"{PATH}?after=7", Prefer="wait=0")
    assert answer.status == 204
    assert "Aiockpt-Step" not in answer.headers


@pytest.mark.parametrize(
    "query",
    ["after=", "after=-1", "after=x", "after=07", "after=1.0", "after=%201",
     "after=1e3", "after=10000000000000000000", "after=1&after=2", "after=%D9%A1"],
)  # fmt: skip
async def test_a_step_that_is_none_is_refused(query):
    """As everywhere, a step is a plain decimal number."""
    async with serving(Memory(1000)) as site, site.peer() as peer:
        answer = await peer.ask(f"{PATH}?{query}", Prefer=LONG)
    assert answer.status == 400
    assert json.loads(answer.body)["type"] == "tag:aiockpt,2025:bad-request"


async def test_who_may_not_read_is_not_told():
    """The token is asked for before anything else."""
    async with serving(Memory(1000)) as site, site.peer(token=None) as peer:
        assert (await peer.ask(f"{PATH}?after=1")).status == 401


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"Prefer": "wait=3600"}, {"max_wait": 0.05}),
        ({}, {"default_wait": 0.05}),
        ({"Prefer": "wait=0"}, {"default_wait": 3600.0}),
    ],
)
async def test_the_server_bounds_the_wait(fields, changes):
    """As that of an early request: by its own limit, or by its default."""
    async with serving(Memory(1000, step=7), **changes) as site, site.peer() as peer:
        answer = await peer.ask(f"{PATH}?after=7", **fields)
    assert answer.status == 204


async def test_a_retraction_ends_the_wait():
    """What the waiting client knows of is gone; it is told that nothing is served."""
    async with serving(Memory(1000, step=7)) as site, waiting(site, "after=7") as peer:
        await site.store.retract(grace=0)
        answer = await peer.answer()
        assert answer.status == 204
        assert "Aiockpt-Step" not in answer.headers


async def test_news_that_is_retracted_at_once_is_not_told():
    """Whoever is told of a step could fetch it at that moment."""
    async with serving() as site, waiting(site, "after=7") as peer:
        await site.store.publish(Memory(1000, step=8), grace=0)
        await site.store.retract(grace=0)
        assert (await peer.answer()).status == 204


async def test_a_retraction_of_nothing_disturbs_nobody():
    """A trainer may call it on every step, long before it first publishes."""
    async with serving() as site, waiting(site, "after=0") as peer:
        for _ in range(3):
            await site.store.retract(grace=0)
            await asyncio.sleep(0.02)
        await site.store.publish(Memory(1000, step=1), grace=0)
        assert json.loads((await peer.answer()).body)["step"] == 1


async def test_closing_ends_the_wait():
    """Whoever waits is told to come back, and the server does not wait for it."""
    async with serving(Memory(1000, step=7)) as site:
        async with waiting(site, "after=7") as peer:
            async with asyncio.timeout(5):
                await site.store.close()
                answer = await peer.answer()
        assert answer.status == 503
        assert json.loads(answer.body)["type"] == "tag:aiockpt,2025:closing"


async def test_the_server_stops_under_those_who_wait():
    """It neither hangs nor leaves a task."""
    async with serving(Memory(1000, step=7)) as site:
        async with waiting(site, "after=7") as peer:
            async with asyncio.timeout(10):
                await site.server.stop()
                await peer.read_all()
        assert site.server.counters().server.waiting == 0


async def test_a_waiting_request_costs_its_handler_only():
    """What aiohttp makes for each request is all: no task of ours, and no thread."""
    count = 50
    async with serving(Memory(1000, step=7)) as site, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(site.peer()) for _ in range(count)]
        for peer in peers:
            await peer.ask(PATH)
        threads = threading.active_count()
        for peer in peers:
            await peer.request(f"{PATH}?after=7", Prefer=LONG)
        await settle(lambda: site.server.counters().server.waiting == count)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert len(others) <= 2 * count  # one for its connection, one for its handler
        assert all("RequestHandler" in repr(task.get_coro()) for task in others)
        assert threading.active_count() == threads
        await site.store.publish(Memory(1000, step=8), grace=0)
        answers = [await peer.answer() for peer in peers]
    assert [answer.status for answer in answers] == [200] * count
