"""The handlers inside somebody else's application, whose options are not ours."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from aiockpt.http.handlers import CheckpointService, routes
from aiockpt.http.store import Store
from serving import CONFIG, Memory, Peer, settle

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

BIG = 3_000_000


@asynccontextmanager
async def hosting(app: web.Application, **options: Any) -> AsyncIterator[int]:
    """Run a host application with options that its owner chose; yield its port."""
    options = {"access_log": None, "shutdown_timeout": 60} | options
    runner = web.AppRunner(app, **options)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listening).start()
    try:
        yield listening.getsockname()[1]
    finally:
        async with asyncio.timeout(10):
            await runner.cleanup()


@pytest.fixture
def store() -> Store:
    """Return what both sides of a test share."""
    return Store()


@pytest.fixture
def service(store) -> CheckpointService:
    """Return the handlers over the store."""
    return CheckpointService(store, CONFIG)


def attach(app: web.Application, service: CheckpointService, prefix: str) -> None:
    """Put the handlers into a host application, as an embedder does."""
    app.add_routes(routes(service, prefix))

    async def close(_: web.Application) -> None:
        service.close()

    app.on_shutdown.append(close)


async def hello(_: web.Request) -> web.Response:
    """Be a route of the host."""
    return web.Response(text="hello")


@web.middleware
async def meddle(request, handler):
    """Do what host applications do: look at it, rename it, compress it."""
    response = await handler(request)
    response.headers["X-Host"] = "was here"
    if not response.prepared:
        response.enable_compression()
    return response


async def test_a_host_application_keeps_its_own_routes(store, service):
    """One prefix is ours, the rest is the host's."""
    app = web.Application()
    app.router.add_get("/", hello)
    attach(app, service, "/models/checkpoint")
    memory = Memory(BIG)
    await store.publish(memory, grace=0)
    async with hosting(app) as port, Peer(port) as peer:
        assert (await peer.ask("/")).body == b"hello"
        answer = await peer.ask("/models/checkpoint/7/full")
        assert answer.body == memory.file
        assert (await peer.ask("/models/checkpoint/latest")).status == 200
        assert (await peer.ask("/healthz")).status == 404


async def test_a_sub_application_serves_below_its_mount(store, service):
    """``add_subapp`` needs nothing from its parent."""
    app, inner = web.Application(), web.Application()
    attach(inner, service, "")
    app.add_subapp("/ckpt", inner)
    memory = Memory(BIG)
    await store.publish(memory, grace=0)
    async with hosting(app) as port, Peer(port) as peer:
        assert (await peer.ask("/ckpt/7/full")).body == memory.file
        assert (await peer.ask("/ckpt/latest")).status == 200


async def test_two_transports_live_in_one_application():
    """Each has its store, its prefix and its token."""
    app = web.Application()
    memories = [Memory(BIG, step=1), Memory(BIG, step=2)]
    for name, memory in zip(("a", "b"), memories, strict=True):
        store = Store()
        await store.publish(memory, grace=0)
        config = replace(CONFIG, token=name)
        attach(app, CheckpointService(store, config), f"/{name}")
    async with hosting(app) as port:
        async with Peer(port, token="a") as peer:
            assert (await peer.ask("/a/1/full")).body == memories[0].file
            assert (await peer.ask("/b/2/full")).status == 401
        async with Peer(port, token="b") as peer:
            assert (await peer.ask("/b/2/full")).body == memories[1].file


@pytest.mark.parametrize("encoding", ["identity", "gzip, deflate"])
async def test_middlewares_of_the_host_do_no_harm(store, service, encoding):
    """Big bodies go out as they are, whatever the host does to responses."""
    app = web.Application(middlewares=[meddle], client_max_size=1)
    attach(app, service, "/checkpoint")
    memory = Memory(BIG)
    await store.publish(memory, grace=0)
    async with hosting(app) as port, Peer(port) as peer:
        for _ in range(2):
            answer = await peer.ask("/checkpoint/7/full", Accept_Encoding=encoding)
            assert answer.body == memory.file


async def test_hooks_of_the_host_do_no_harm(store, service):
    """A hook may touch a response when its headers are made already."""

    async def meddle_late(_: web.Request, response: web.StreamResponse) -> None:
        response.headers["X-Host"] = "was here"
        response.enable_compression()

    app = web.Application()
    app.on_response_prepare.append(meddle_late)
    attach(app, service, "/checkpoint")
    memory = Memory(BIG)
    await store.publish(memory, grace=0)
    async with hosting(app) as port, Peer(port) as peer:
        answer = await peer.ask("/checkpoint/7/full")
        assert answer.body == memory.file


async def test_guards_do_not_depend_on_the_host(store, service):
    """An application without any middleware is as safe as our own server."""
    app = web.Application()
    attach(app, service, "/checkpoint")
    await store.publish(Memory(BIG), grace=0)
    async with hosting(app) as port, Peer(port, token=None) as peer:
        assert (await peer.ask("/checkpoint/7/full")).status == 401
        assert (await peer.ask("/checkpoint/7/full", method="POST")).status == 401


async def test_a_waiting_client_that_leaves_is_noticed(service):
    """Without the runner's handler cancellation, too."""
    app = web.Application()
    attach(app, service, "/checkpoint")
    async with hosting(app, handler_cancellation=False) as port:
        async with Peer(port) as peer:
            await peer.request("/checkpoint/9/full", Prefer="wait=30")
            await settle(lambda: service.statistics().waiting == 1)
        await settle(lambda: service.statistics().waiting == 0)
        assert service.statistics().gone == 1


async def test_a_client_that_leaves_in_the_middle_is_noticed(store, service):
    """The reader's hold on the memory ends with its connection."""
    app = web.Application()
    attach(app, service, "/checkpoint")
    memory = Memory(64 << 20)
    await store.publish(memory, grace=0)
    async with hosting(app, handler_cancellation=False) as port:
        async with Peer(port, receive_buffer=4096) as peer:
            await peer.request("/checkpoint/7/full")
            await peer.head()
            assert memory.references == 2
        await settle(lambda: memory.references == 1)
        assert service.statistics().gone == 1


async def test_the_host_shuts_down_without_waiting_for_our_clients(store, service):
    """A client that waits or hangs does not keep the host's process alive."""
    app = web.Application()
    attach(app, service, "/checkpoint")
    await store.publish(Memory(64 << 20), grace=0)
    async with AsyncExitStack() as stay:  # longer than the host, whose exit has a limit
        async with hosting(app, shutdown_timeout=60) as port:
            peer = Peer(port, receive_buffer=4096)
            slow = await stay.enter_async_context(peer)
            early = await stay.enter_async_context(Peer(port))
            await slow.request("/checkpoint/7/full")
            await early.request("/checkpoint/9/full", Prefer="wait=30")
            counts = service.statistics
            await settle(lambda: counts().readers == counts().waiting == 1)
        assert (await early.answer()).status == 503
    assert service.statistics().evicted == 1


async def test_a_service_that_is_closed_does_not_say_when_to_come_back():
    """It will not be there: whoever is told to wait would only learn that later."""
    store = Store()
    service = CheckpointService(store, CONFIG)
    app = web.Application()
    attach(app, service, "/checkpoint")
    async with hosting(app) as port, Peer(port) as peer:
        service.close()
        answer = await peer.ask("/checkpoint/7/full")
        kind = json.loads(answer.body)["type"]
        assert (answer.status, kind) == (503, "tag:aiockpt,2025:closing")
        assert "Retry-After" not in answer.headers
