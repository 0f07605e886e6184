"""The public embedding API: a transport inside an application of somebody else."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

import aiockpt.http
from aiockpt import HTTPTransport
from aiockpt.errors import ClosedError, LocalProtocolError
from aiockpt.testing import assert_same
from tests.support.proofs import proves
from tests.support.serving import Peer, settle
from tests.support.transports import MIB, Transport, receive, transport, weights

pytestmark = pytest.mark.asyncio


def listener() -> tuple[socket.socket, int]:
    """Return a socket that listens, and its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    return listening, listening.getsockname()[1]


@asynccontextmanager
async def running(
    app: web.Application, listening: socket.socket
) -> AsyncIterator[web.AppRunner]:
    """Run an application with the patience for connections that aiohttp has."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=60)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    try:
        yield runner
    finally:
        async with asyncio.timeout(10):
            await runner.cleanup()


def mounted(port: int, path: str = "/checkpoint/", **options: Any) -> Transport:
    """Return a transport that an application on ``port`` serves."""
    return transport(advertise=f"http://127.0.0.1:{port}{path}", **options)


@web.middleware
async def suspicious(request: web.Request, handler: Any) -> web.StreamResponse:
    """Do what hosts do: count, and mark what goes out."""
    response: web.StreamResponse = await handler(request)
    if not response.prepared:
        response.headers["X-Host"] = "was here"
    return response


async def step_of(request: web.Request) -> web.Response:
    """Be a route of the host that wants to know the transport."""
    served = aiockpt.http.get_transport(request)
    return web.Response(text=repr(served))


class TestSetup:
    """One line in an application that is there already."""

    async def test_it_serves_beside_routes_and_middlewares_of_the_host(self) -> None:
        """The receiver notices no difference, and the host finds the transport."""
        listening, port = listener()
        app = web.Application(middlewares=[suspicious])
        app.router.add_get("/", step_of)
        sender = mounted(port)
        aiockpt.http.setup(app, sender)
        assert aiockpt.http.get_transport(app) is sender
        async with running(app, listening), transport() as receiver:
            await sender.send_checkpoint([], 1, weights())
            assert_same(await receive(sender, receiver), weights())
            async with Peer(port, token=None) as peer:
                home = await peer.ask("/")
                assert home.body == b"<HTTPTransport step=1 readers=0>"
                assert home.headers["X-Host"] == "was here"
                assert (await peer.ask("/checkpoint/1/full")).status == 401
            assert sender.statistics().refused == 1

    async def test_a_second_transport_takes_another_prefix_and_key(self) -> None:
        """Each has its state and its secret."""
        listening, port = listener()
        app = web.Application()
        key = web.AppKey("second", HTTPTransport[Any])
        one, two = mounted(port, "/one/"), mounted(port, "/models/two/")
        aiockpt.http.setup(app, one, prefix="/one")
        aiockpt.http.setup(app, two, prefix="/models/two/", app_key=key)
        assert aiockpt.http.get_transport(app) is one
        assert aiockpt.http.get_transport(app, key) is two
        async with running(app, listening), transport() as receiver:
            await one.send_checkpoint([], 1, weights(1.0))
            await two.send_checkpoint([], 1, weights(2.0))
            assert_same(await receive(one, receiver), weights(1.0))
            assert_same(await receive(two, receiver), weights(2.0))

    async def test_it_opens_no_socket_and_must_be_told_its_address(self) -> None:
        """The application listens, and the transport cannot know where."""
        listening, _ = listener()
        app = web.Application()
        sender = transport()
        aiockpt.http.setup(app, sender)
        async with running(app, listening):
            await sender.send_checkpoint([], 1, weights())
            with pytest.raises(LocalProtocolError, match="advertise="):
                sender.metadata()


class TestHost:
    """What a host application does to all its responses, and what its clients do."""

    async def test_a_hook_that_comes_late_does_no_harm(self) -> None:
        """It touches a response whose headers are made already."""

        async def meddle(_: web.Request, response: web.StreamResponse) -> None:
            response.headers["X-Host"] = "was here"
            response.enable_compression()

        listening, port = listener()
        app = web.Application()
        app.on_response_prepare.append(meddle)
        sender = mounted(port)
        aiockpt.http.setup(app, sender)
        async with running(app, listening), transport() as receiver:
            await sender.send_checkpoint([], 1, weights())
            assert_same(await receive(sender, receiver), weights())

    async def test_a_client_that_leaves_is_forgotten(self) -> None:
        """The runner of most applications cancels no handler, so it must be noticed."""
        listening, port = listener()
        app = web.Application()
        sender = mounted(port, insecure=True)
        aiockpt.http.setup(app, sender)
        now = sender.statistics
        async with running(app, listening):
            await sender.send_checkpoint([], 1, weights(mib=64))
            async with (
                Peer(port, token=None) as early,
                Peer(port, token=None) as follower,
                Peer(port, token=None, receive_buffer=4096) as slow,
            ):
                await early.request("/checkpoint/9/full", Prefer="wait=30")
                await follower.request("/checkpoint/latest?after=1", Prefer="wait=30")
                await slow.request("/checkpoint/1/full")
                await settle(lambda: (now().waiting, now().readers) == (2, 1))
            await settle(lambda: (now().waiting, now().readers) == (0, 0))
            assert now().gone == 3

    async def test_a_transport_that_has_ended_does_not_say_when_to_come_back(
        self,
    ) -> None:
        """A receiver that is told to wait would only learn later that it is gone."""
        listening, port = listener()
        app = web.Application()
        sender = mounted(port, insecure=True)
        app.add_routes(aiockpt.http.routes(sender))
        async with running(app, listening), Peer(port, token=None) as peer:
            await sender.shutdown()
            answer = await peer.ask("/checkpoint/7/full")
        kind = json.loads(answer.body)["type"]
        assert (answer.status, kind) == (503, "tag:aiockpt,2025:closing")
        assert "Retry-After" not in answer.headers


class TestSubApplication:
    """``create_app`` for ``add_subapp``."""

    async def test_it_serves_below_its_mount_and_ends_with_its_parent(self) -> None:
        """Its parent does nothing else for it."""
        listening, port = listener()
        app = web.Application()
        sender = mounted(port, "/ckpt/")
        app.add_subapp("/ckpt", aiockpt.http.create_app(sender))
        async with running(app, listening), transport() as receiver:
            await sender.send_checkpoint([], 1, weights())
            assert_same(await receive(sender, receiver), weights())
        with pytest.raises(ClosedError):
            sender.metadata()


class TestRoutes:
    """The plain routes, whose lifetime is the host's business."""

    async def test_the_transport_outlives_the_application(self) -> None:
        """Nobody shuts it down but its owner."""
        listening, port = listener()
        sender = mounted(port)
        app = web.Application()
        app.add_routes(aiockpt.http.routes(sender))
        async with running(app, listening), transport() as receiver:
            await sender.send_checkpoint([], 1, weights())
            assert_same(await receive(sender, receiver), weights())
        await sender.send_checkpoint([], 2, weights())
        await sender.shutdown()


class TestLifetime:
    """The application's end."""

    async def test_the_transport_ends_with_the_application(self) -> None:
        """Also where the application never started to listen."""
        for listens in (True, False):
            listening, port = listener()
            app = web.Application()
            sender = mounted(port)
            aiockpt.http.setup(app, sender)
            if listens:
                async with running(app, listening):
                    await sender.send_checkpoint([], 1, weights())
            else:
                runner = web.AppRunner(app)
                await runner.setup()
                await runner.cleanup()
                listening.close()
            with pytest.raises(ClosedError):
                await sender.send_checkpoint([], 2, weights())

    @proves("cell HTTPTransport.shutdown: success")
    async def test_readers_get_their_grace(self) -> None:
        """A receive that began before the end comes to its own."""
        listening, port = listener()
        app = web.Application()
        sender = mounted(port, grace=20, insecure=True)
        aiockpt.http.setup(app, sender)
        peer = Peer(port, token=None, receive_buffer=4096)
        async with running(app, listening) as runner, peer:
            await sender.send_checkpoint([], 1, weights(mib=16))
            await peer.request("/checkpoint/1/full", Connection="close")
            await peer.head()
            ending = asyncio.create_task(runner.cleanup())
            await asyncio.sleep(0.05)
            assert len(await peer.read_all()) > 16 * MIB
            await ending

    async def test_who_hangs_or_waits_does_not_keep_the_host(self) -> None:
        """A reader is evicted after the grace, a waiting request is answered."""
        listening, port = listener()
        app = web.Application()
        sender = mounted(port, grace=0.1, insecure=True)
        aiockpt.http.setup(app, sender)
        slow = Peer(port, token=None, receive_buffer=4096)
        async with slow, Peer(port, token=None) as early:
            async with running(app, listening) as runner:
                await sender.send_checkpoint([], 1, weights(mib=16))
                await slow.request("/checkpoint/1/full")
                await slow.head()
                await early.request("/checkpoint/9/full", Prefer="wait=30")
                await asyncio.sleep(0.05)
                started = time.monotonic()
                await runner.cleanup()
                assert time.monotonic() - started < 3
            assert (await early.answer()).status == 503
