"""Transports in an application with routes, middlewares, TLS, a proxy, and an end."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

import aiockpt.http
from aiockpt import AiockptError, AuthenticationError, StepNotFoundError
from aiockpt.errors import (
    ClosedError,
    LocalProtocolError,
    PeerUnreachableError,
    RemoteProtocolError,
)
from aiockpt.testing import assert_same
from tests.support.proofs import proves
from tests.support.servers import (
    Peer,
    certified,
    listener,
    reverse_proxy,
    running,
    settle,
)
from tests.support.transports import MIB, Transport, receive, transport, weights
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_blocking")]

PROBLEM = "application/problem+json"
CORS = "Access-Control-Allow-Origin"
EXAMPLE = Path(__file__).parents[2] / "examples" / "embedding.py"
ONE_BODY = 24 * MIB  # no socket holds it, so it is under way until it is read
CHECKPOINT = weights(7.0, mib=2)


@cache
def example() -> Any:
    """Import the example as a module."""
    spec = importlib.util.spec_from_file_location("embedding_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mount(app, sender, how="setup"):
    """Mount a transport at ``/ckpt`` in one of the ways that there are."""
    if how == "setup":
        aiockpt.http.setup(app, sender, prefix="/ckpt")
    elif how == "create_app":
        app.add_subapp("/ckpt", aiockpt.http.create_app(sender))
    else:
        app.add_routes(aiockpt.http.routes(sender, "/ckpt"))


class Mounted:
    """An application with a transport at ``/ckpt``, and where it will listen."""

    def __init__(self, *middlewares, how="setup", path="/ckpt/", **options):
        self.listening = listener()
        self.port = self.listening.getsockname()[1]
        address = f"http://127.0.0.1:{self.port}{path}"
        self.sender: Transport = transport(**{"advertise": address, **options})
        self.app = web.Application(middlewares=middlewares)
        mount(self.app, self.sender, how)

    @property
    def now(self):
        """What the transport's statistics say."""
        return self.sender.statistics()

    def running(self, **options):
        """Run the application."""
        return running(self.app, self.listening, **options)

    def peer(self, **options):
        """Return a connection that reads when it is told to."""
        return Peer(self.port, token=None, **options)


@asynccontextmanager
async def serving(*middlewares, **options):
    """Run an application whose transport offers step 7."""
    mounted = Mounted(*middlewares, **options)
    async with mounted.running(), mounted.sender:
        await mounted.sender.send_checkpoint([], 7, CHECKPOINT)
        yield mounted


class Answer:
    """A whole response."""

    def __init__(self, response, body):
        self.status, self.headers, self.body = response.status, response.headers, body

    @property
    def document(self):
        """The JSON in it."""
        return json.loads(self.body)


@pytest_asyncio.fixture
async def ask():
    """Return a function that asks; underscores in header names stand for hyphens."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def ask(url, method="GET", trust=True, **headers):
            fields = {name.replace("_", "-"): value for name, value in headers.items()}
            async with session.request(
                method, url, headers=fields, ssl=trust, allow_redirects=False
            ) as response:
                return Answer(response, await response.read())

        yield ask


def token_of(sender):
    """Return the token that the metadata of a transport has."""
    return sender.metadata().partition("#")[2]


def bearer(sender):
    """Return the header that a transport asks for."""
    return {"Authorization": f"Bearer {token_of(sender)}"}


async def check_protocol(ask, sender, base, **options):
    """Ask for all that a peer may ask for; ``sender`` offers step 7."""

    async def get(path, **headers):
        return await ask(base + path, **{**options, **bearer(sender), **headers})

    whole = await get("7/full")
    size, tag = len(whole.body), whole.headers["ETag"]
    assert (whole.status, whole.headers["Accept-Ranges"]) == (200, "bytes")
    assert "Content-Encoding" not in whole.headers
    part = await get("7/full", Range="bytes=1000-1999999", If_Match=tag)
    assert (part.status, part.headers["ETag"]) == (206, tag)
    assert part.headers["Content-Range"] == f"bytes 1000-1999999/{size}"
    assert part.body == whole.body[1000:2_000_000]
    head = await get("7/full", method="HEAD")
    assert (head.status, head.headers["Content-Length"]) == (200, str(size))
    same = await get("7/full", If_None_Match=tag)
    assert (same.status, same.headers["ETag"], same.body) == (304, tag, b"")
    for problem, status, kind in (
        (await get("7/full", Range=f"bytes={size}-"), 416, "range"),
        (await get("7/full", If_Match='"other"'), 412, "checkpoint-changed"),
        (await get("9/full", Prefer="wait=0"), 404, "step-not-found"),
        (await get("6/full"), 410, "step-not-found"),
        (await get("7/full", Authorization="Bearer x"), 401, "authentication"),
        (await get("7/full", method="POST"), 405, "blank"),
        (await get("7/full", Origin="https://dashboard.example"), 403, "blank"),
    ):
        assert (problem.status, problem.headers["Content-Type"]) == (status, PROBLEM)
        assert problem.document["status"] == status
        assert problem.document["type"].rpartition(":")[2] == kind
        if status == 416:
            assert problem.headers["Content-Range"] == f"bytes */{size}"
        if status == 410:
            assert problem.document["serving"] == 7


def rendering(spares):
    """Return a middleware that renders every error as examples on the web do."""

    @web.middleware
    async def middleware(request, handler):
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = error
        if response.status < 400 or (spares and aiockpt.http.serves(request)):
            return response
        return web.json_response({"error": response.reason}, status=response.status)

    return middleware


@web.middleware
async def decorating(request, handler):
    """Touch what was answered, ready or not."""
    response = await handler(request)
    response.headers[CORS] = "*"
    if not response.prepared:
        response.set_cookie("visited", "yes")
    return response


@web.middleware
async def compressing(request, handler):
    """Compress whatever comes, whatever the client said."""
    response = await handler(request)
    if not response.prepared:
        response.enable_compression(web.ContentCoding.gzip)
    return response


def giving_up(cut):
    """Return a middleware that once ends the body that is being sent, when told."""

    @web.middleware
    async def middleware(request, handler):
        if "Range" not in request.headers or cut.is_set():
            return await handler(request)
        answer = asyncio.ensure_future(handler(request))
        told = asyncio.ensure_future(cut.wait())
        await asyncio.wait({answer, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if answer.done():
            return await answer
        answer.cancel()
        await asyncio.wait({answer})
        return web.json_response({"error": "too slow"}, status=503)

    return middleware


class TestMiddlewares:
    """The application goes on being itself, and breaks nothing."""

    @pytest.mark.parametrize(
        ("how", "middlewares"),
        [
            ("setup", ()),
            ("create_app", (rendering(spares=True),)),
            ("routes", (decorating,)),
            ("setup", (rendering(spares=True), web.normalize_path_middleware())),
        ],
    )
    async def test_no_middleware_breaks_the_protocol(self, ask, how, middlewares):
        """Ranges, conditions, problem documents and early receives pass through it."""
        mounted = Mounted(*middlewares, how=how)
        sender = mounted.sender
        async with mounted.running(), sender, transport() as receiver:
            early = asyncio.create_task(receive(sender, receiver, 7))
            await settle(lambda: mounted.now.waiting)
            await sender.send_checkpoint([], 7, CHECKPOINT)
            assert_same(await early, CHECKPOINT)
            await check_protocol(ask, sender, sender.address())
            with pytest.raises(StepNotFoundError) as caught:
                await receive(sender, receiver, 6)
            assert (caught.value.step, caught.value.serving) == (6, 7)

    async def test_nothing_is_compressed(self, ask):
        """Neither by a middleware nor by a hook that comes late."""

        async def meddle(_, response):
            response.headers[CORS] = "*"
            response.enable_compression()

        mounted = Mounted(compressing)
        mounted.app.on_response_prepare.append(meddle)
        sender = mounted.sender
        async with mounted.running(), sender, transport() as receiver:
            await sender.send_checkpoint([], 7, {"n": b"small"})
            assert_same(await receive(sender, receiver, 7), {"n": b"small"})
            assert await anext(receiver.steps(sender.metadata())) == 7
            for path, status, method in (
                ("7/full", 200, "GET"),
                ("7/full", 200, "HEAD"),
                ("6/full", 410, "GET"),
                ("latest?after=7", 204, "GET"),
            ):
                headers = {"Prefer": "wait=0", "Accept_Encoding": "gzip"}
                answer = await ask(
                    sender.address() + path, method, **bearer(sender), **headers
                )
                assert answer.status == status
                assert "Content-Encoding" not in answer.headers
                assert status == 204 or "Content-Length" in answer.headers

    async def test_an_auth_middleware_may_ask_for_the_same_token(self):
        """One secret for all of the application, in the same header."""

        @web.middleware
        async def demanding(request, handler):
            if request.headers.get("Authorization") != "Bearer shared":
                raise web.HTTPUnauthorized
            return await handler(request)

        async with serving(demanding, token="shared") as mounted:
            for token, error in (("shared", None), ("wrong", AuthenticationError)):
                async with transport(token=token) as receiver:
                    if error is None:
                        got = await receive(mounted.sender, receiver, 7)
                        assert_same(got, CHECKPOINT)
                        continue
                    with pytest.raises(error):
                        await receiver.recv_checkpoint(0, mounted.sender.address(), 7)

    async def test_a_middleware_that_rewrites_all_errors_is_told_of(self):
        """What the transport said is lost, and the receiver says what it got."""
        async with serving(rendering(spares=False)) as mounted, transport() as receiver:
            assert_same(await receive(mounted.sender, receiver, 7), CHECKPOINT)
            with pytest.raises(RemoteProtocolError, match="aiockpt server"):
                await receive(mounted.sender, receiver, 6)

    async def test_a_middleware_that_gives_up_on_a_body_cuts_it(self):
        """Nothing is appended to half a body, and the receiver fetches the rest."""
        cut, state = asyncio.Event(), weights(mib=24)
        async with reverse_proxy(pause=MIB) as proxy, transport() as receiver:
            mounted = Mounted(giving_up(cut), advertise=proxy.url, chunk_bytes=ONE_BODY)
            proxy.upstream = f"http://127.0.0.1:{mounted.port}/ckpt/"
            async with mounted.running():
                await mounted.sender.send_checkpoint([], 7, state)
                received = asyncio.create_task(receive(mounted.sender, receiver, 7))
                await proxy.paused.wait()
                cut.set()
                await settle(lambda: mounted.now.gone == 1)
                proxy.go_on.set()
                assert_same(await received, state)


class TestPlaces:
    """Transports can be mounted at several prefixes, and share nothing."""

    async def test_what_can_be_mounted_is_served(self):
        """An application needs ``mount`` and ``shutdown`` only, and gets it back."""
        listening = listener()
        port = listening.getsockname()[1]
        sender = transport(advertise=f"http://127.0.0.1:{port}/ckpt/")
        shutdown = AsyncMock(side_effect=sender.shutdown)
        handle = SimpleNamespace(mount=sender.mount, shutdown=shutdown)
        app = web.Application()
        mount(app, handle)
        assert aiockpt.http.get_transport(app) is handle
        async with running(app, listening), transport() as receiver:
            await sender.send_checkpoint([], 7, CHECKPOINT)
            assert_same(await receive(sender, receiver, 7), CHECKPOINT)
        shutdown.assert_awaited_with()

    async def test_two_transports_know_nothing_of_each_other(self, ask):
        """The example: each has its own steps, secret, figures and end."""
        key, listening = example().KEY.decode(), listener()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        app = example().make_app(url)
        model = aiockpt.http.get_transport(app)
        average = aiockpt.http.get_transport(app, example().AVERAGE)
        async with running(app, listening), transport() as receiver:
            await model.send_checkpoint([], 7, CHECKPOINT)
            await average.send_checkpoint([], 3, weights(3.0))
            # Its own routes want its key, and the transports' their token.
            status = await ask(f"{url}/status", X_API_Key=key)
            assert (status.status, status.document) == (200, {"step": 7})
            assert status.headers[CORS]
            for headers in ({}, bearer(model), {"X_API_Key": "\xff"}):
                refused = await ask(f"{url}/status", **headers)
                assert refused.status == 401
                assert refused.document == {"error": "Unauthorized"}
            absent = await ask(f"{url}/nothing", X_API_Key=key)
            assert (absent.status, absent.document) == (404, {"error": "Not Found"})
            refused = await ask(f"{url}/model/7/full", X_API_Key=key)
            assert (refused.status, refused.headers["Content-Type"]) == (401, PROBLEM)
            assert refused.headers[CORS]
            await check_protocol(ask, model, model.address())
            # What opens one of them is nothing to the other.
            assert (await ask(f"{url}/model/latest", **bearer(average))).status == 401
            crossed = model.address() + "#" + average.metadata().partition("#")[2]
            with pytest.raises(AuthenticationError):
                await receiver.recv_checkpoint(0, crossed, 7)
            with pytest.raises(StepNotFoundError) as caught:
                await receive(model, receiver, 3)
            assert caught.value.serving == 7
            assert_same(await receive(average, receiver, 3), weights(3.0))
            await average.disallow_checkpoint()
            assert (model.statistics().step, average.statistics().step) == (7, None)
            await average.shutdown()
            assert_same(await receive(model, receiver, 7), CHECKPOINT)

    async def test_a_host_finds_its_transport_and_keeps_its_pages(self, ask):
        """The first page of a transport is at its prefix, and only there."""

        async def home(request):
            return web.Response(text=repr(aiockpt.http.get_transport(request)))

        app = web.Application()
        app.router.add_get("/", home)
        one, two, root = (transport(advertise=f"http://h/{n}/") for n in ("a", "b", ""))
        aiockpt.http.setup(app, one, "/main")
        app.add_subapp("/sub", aiockpt.http.create_app(two))
        key = web.AppKey("root", Transport)
        aiockpt.http.setup(app, root, "/", app_key=key)
        assert aiockpt.http.get_transport(app) is one
        async with running(app) as host:
            for step, sender, path in ((1, one, "/main"), (2, two, "/sub")):
                await sender.send_checkpoint([], step, weights())
                found = await ask(f"{host.url}{path}/", **bearer(sender))
                latest = await ask(f"{host.url}{path}/latest", **bearer(sender))
                assert found.document["serving"] == latest.document
                assert latest.document["step"] == step
            page = await ask(f"{host.url}/")
            assert page.body == b"<HTTPTransport step=1 readers=0>"

    async def test_a_place_that_is_taken_is_refused(self):
        """A second transport at the same prefix would never be asked or found."""
        app = web.Application()
        aiockpt.http.setup(app, transport(), prefix="/one")
        key = web.AppKey("another", Transport)
        with pytest.raises(LocalProtocolError, match="app_key="):
            aiockpt.http.setup(app, transport(), prefix="/two")
        for prefix in ("/one", "/one/"):
            with pytest.raises(LocalProtocolError, match="/one"):
                aiockpt.http.setup(app, transport(), prefix=prefix, app_key=key)
        aiockpt.http.setup(app, transport(), prefix="/two", app_key=key)

    @pytest.mark.parametrize("prefix", ["/a b", "/\xfc", "/a%20b", "/a?b", "/a#b"])
    async def test_a_place_that_nobody_would_find_is_refused(self, prefix):
        """Below a path that it has to quote, aiohttp answers 404."""
        with pytest.raises(LocalProtocolError, match="prefix"):
            aiockpt.http.setup(web.Application(), transport(), prefix=prefix)
        with pytest.raises(LocalProtocolError, match="prefix"):
            aiockpt.http.routes(transport(), prefix)

    @pytest.mark.parametrize("prefix", ["/-._~!$&'()*+,;=:@", "/{run:[a-z]+}/x", "//"])
    async def test_any_other_place_is_found(self, prefix):
        """Punctuation and variable parts do no harm."""
        listening, app = listener(), web.Application()
        public = prefix.replace("{run:[a-z]+}", "seven")
        port = listening.getsockname()[1]
        sender = transport(advertise=f"http://127.0.0.1:{port}{public}")
        aiockpt.http.setup(app, sender, prefix=prefix)
        async with running(app, listening), sender, transport() as receiver:
            await sender.send_checkpoint([], 7, {"n": 1})
            assert await anext(receiver.steps(sender.metadata())) == 7
            assert await receive(sender, receiver, 7) == {"n": 1}

    async def test_it_opens_no_socket_and_must_be_told_its_address(self):
        """The application listens, and the transport cannot know where."""
        app, sender = web.Application(), transport()
        aiockpt.http.setup(app, sender)
        async with running(app):
            await sender.send_checkpoint([], 1, weights())
            with pytest.raises(LocalProtocolError, match="advertise="):
                sender.metadata()


class TestReverseProxy:
    """The public address is another host's, and has another path."""

    @pytest.mark.parametrize("tls", ["none", "proxy", "both"])
    async def test_peers_find_the_transport_by_the_public_address(
        self, ask, tls, caplog
    ):
        """A peer that trusts the certificate does not notice where TLS ends."""
        server, trust = certified()
        outer, inner = (
            server if tls in which else None for which in ("proxyboth", "both")
        )
        async with reverse_proxy(ssl_context=outer, trust=trust) as proxy:
            mounted = Mounted(advertise=proxy.url)
            assert "unless a proxy changes the path" in caplog.text
            sender = mounted.sender
            async with (
                mounted.running(ssl_context=inner) as host,
                transport(client_ssl_context=trust) as receiver,
                transport() as stranger,
            ):
                proxy.upstream = f"{host.url}/ckpt/"
                await sender.send_checkpoint([], 7, CHECKPOINT)
                await check_protocol(ask, sender, sender.address(), trust=trust)
                assert_same(await receive(sender, receiver, 7), CHECKPOINT)
                if outer is not None:
                    with pytest.raises(RemoteProtocolError, match="ssl_context"):
                        await receive(sender, stranger, 7)
                assert token_of(sender)
                assert token_of(sender) not in "".join(proxy.seen)

    @pytest.mark.parametrize("keeps_host", [True, False])
    async def test_a_transport_without_a_token_answers_to_its_public_name(
        self, keeps_host
    ):
        """A proxy may hand on the name that it was asked for, or its own target's."""
        async with reverse_proxy(keeps_host=keeps_host) as proxy:
            public = proxy.url.replace("127.0.0.1", "localhost")
            async with (
                serving(advertise=public, insecure=True) as mounted,
                transport() as receiver,
            ):
                proxy.upstream = f"http://127.0.0.1:{mounted.port}/ckpt/"
                assert_same(await receive(mounted.sender, receiver, 7), CHECKPOINT)

    async def test_a_restart_behind_the_proxy_is_survived(self):
        """502 is waited out; the successor with the same secret serves the rest."""
        async with (
            reverse_proxy() as proxy,
            transport(token="shared", connections=1) as receiver,
        ):
            options = {"advertise": proxy.url, "token": "shared", "grace": 0}
            first, second = Mounted(**options), Mounted(**options)
            first.listening.close()
            proxy.upstream = f"http://127.0.0.1:{first.port}/ckpt/"
            received = asyncio.create_task(receive(first.sender, receiver, 7))
            await settle(lambda: len(proxy.seen) > 1)
            first.listening, proxy.pause = listener(first.port), 2 * MIB
            state = weights(mib=8)
            async with first.running():
                await first.sender.send_checkpoint([], 7, state)
                await proxy.paused.wait()
            proxy.pause = None
            proxy.go_on.set()
            proxy.upstream = f"http://127.0.0.1:{second.port}/ckpt/"
            async with second.running():
                await second.sender.send_checkpoint([], 7, state)
                assert_same(await received, state)
                assert 0 < second.now.bytes_sent < 8 * MIB, "only what was missing"


class TestEnd:
    """The application ends, and with it what is mounted there."""

    @pytest.mark.parametrize("how", ["setup", "create_app", "routes", "not started"])
    async def test_the_transport_ends_with_the_application(self, how):
        """Unless only its routes were added: then its owner shuts it down."""
        mounted = Mounted(how="setup" if how == "not started" else how)
        if how == "not started":
            runner = web.AppRunner(mounted.app)
            await runner.setup()
            await runner.cleanup()
            mounted.listening.close()
        else:
            async with mounted.running(), transport() as receiver:
                await mounted.sender.send_checkpoint([], 1, weights())
                assert_same(await receive(mounted.sender, receiver), weights())
        if how == "routes":
            await mounted.sender.send_checkpoint([], 2, weights())
            await mounted.sender.shutdown()
        with pytest.raises(ClosedError):
            await mounted.sender.send_checkpoint([], 2, weights())

    async def test_a_receiver_gives_up_a_transport_that_ended_before_its_application(
        self,
    ):
        """The application goes on answering in its place: 503, for ever.

        It does not say when to come back: a receiver would only learn later.
        """
        mounted = Mounted(how="routes", insecure=True)
        async with mounted.running(), mounted.peer() as peer, transport() as receiver:
            metadata = mounted.sender.metadata()
            await mounted.sender.shutdown()
            answer = await peer.ask("/ckpt/7/full")
            kind = json.loads(answer.body)["type"]
            assert (answer.status, kind) == (503, "tag:aiockpt,2025:closing")
            assert "Retry-After" not in answer.headers
            follower = receiver.follow(metadata, reconnect_timeout=0.2)
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(PeerUnreachableError, match="has shut down"):
                    await anext(follower)

    async def test_a_client_that_leaves_is_forgotten(self):
        """The runner of most applications cancels no handler, so it must be noticed."""
        mounted = Mounted(insecure=True)

        def counts():
            return mounted.now.waiting, mounted.now.readers

        async with mounted.running():
            await mounted.sender.send_checkpoint([], 1, weights(mib=24))
            async with (
                mounted.peer() as early,
                mounted.peer() as follower,
                mounted.peer(receive_buffer=4096) as slow,
            ):
                await early.request("/ckpt/9/full", Prefer="wait=30")
                await follower.request("/ckpt/latest?after=1", Prefer="wait=30")
                await slow.request("/ckpt/1/full")
                await settle(
                    lambda: (mounted.now.waiting, mounted.now.readers) == (2, 1)
                )
            await settle(lambda: (mounted.now.waiting, mounted.now.readers) == (0, 0))
            assert mounted.now.gone == 3

    @proves("cell HTTPTransport.shutdown: success")
    @pytest.mark.parametrize("tls", [False, True])
    async def test_readers_get_their_grace(self, tls):
        """The body under way is read to its end, though the application is ending.

        A connection that comes with the end is answered, and delays nothing.
        """
        async with under_way(tls, grace=20) as (host, mounted, proxy, _, received):
            ending = asyncio.create_task(host.end())
            await settle(lambda: mounted.now.step is None)
            late = await connected(host.runner)
            late.write(b"GET /ckpt/6/full HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert mounted.now.readers == 1
            proxy.go_on.set()
            assert_same(await received, weights(mib=24))
            await ending
            late.close()
            await late.wait_closed()

    @pytest.mark.parametrize("tls", [False, True])
    async def test_a_reader_that_hangs_does_not_keep_the_host(self, tls):
        """It is cut after the grace, and tries again; a waiting request is answered."""
        async with under_way(tls, grace=0.1) as running:
            host, mounted, proxy, receiver, received = running
            early = asyncio.create_task(receive(mounted.sender, receiver, 9))
            await settle(lambda: mounted.now.waiting)
            await host.end()
            assert mounted.now.evicted == 1
            asked = len(proxy.seen)
            proxy.go_on.set()
            await settle(lambda: len(proxy.seen) > asked)
            for task in (received, early):
                task.cancel()
            await asyncio.wait({received, early})

    async def test_what_the_application_itself_receives_ends_with_it(self):
        """Its background task learns why, before it is cancelled."""
        mounted, ended = Mounted(), list[type]()

        async def refresh(_):
            async def forever():
                try:
                    await receive(peer, mounted.sender, 9)
                except AiockptError as error:
                    ended.append(type(error))

            task = asyncio.create_task(forever())
            yield
            task.cancel()
            await asyncio.wait({task})

        mounted.app.cleanup_ctx.append(refresh)
        async with transport() as peer:
            async with mounted.running():
                await settle(lambda: peer.statistics().waiting)
            assert ended == [ClosedError]


@asynccontextmanager
async def under_way(tls, **options):
    """Give an application, its transport, and a receive that a proxy has paused."""
    server, trust = certified() if tls else (None, True)
    async with (
        reverse_proxy(pause=MIB, trust=trust) as proxy,
        transport(connections=1) as receiver,
        asyncio.timeout(PATIENCE),
    ):
        mounted = Mounted(chunk_bytes=ONE_BODY, advertise=proxy.url, **options)
        async with mounted.running(ssl_context=server, shutdown_timeout=600) as host:
            proxy.upstream = f"{host.url}/ckpt/"
            await mounted.sender.send_checkpoint([], 7, weights(mib=24))
            received = asyncio.create_task(receive(mounted.sender, receiver, 7))
            await proxy.paused.wait()
            yield host, mounted, proxy, receiver, received


async def connected(runner):
    """Hand an application a connection as if its listener had accepted it."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    await loop.connect_accepted_socket(runner.server, theirs)
    _, writer = await asyncio.open_unix_connection(sock=ours)
    return writer
