"""Transports in an application that has middlewares, TLS, a proxy, and an end."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

import aiockpt.http
from aiockpt import AiockptError, AuthenticationError, StepNotFoundError
from aiockpt.errors import ClosedError, LocalProtocolError, RemoteProtocolError
from aiockpt.http.protocol import parse_metadata
from aiockpt.testing import assert_same
from tests.support import hosting_process
from tests.support.hosting import Host, certified, example, running, running_example
from tests.support.hosting_process import MIB_OFFERED
from tests.support.reverseproxy import reverse_proxy
from tests.support.serving import settle
from tests.support.transports import (
    MIB,
    Transport,
    receive,
    transport,
    weights,
)

pytestmark = pytest.mark.asyncio

PROBLEM = "application/problem+json"
HOSTING = Path(hosting_process.__file__)
CORS = "Access-Control-Allow-Origin"


def bearer(sender: Transport) -> dict[str, str]:
    """Return the header that a transport asks for."""
    return {"Authorization": f"Bearer {parse_metadata(sender.metadata()).token}"}


class Answer:
    """A whole response, with what is asked of all of them."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        self.status, self.headers, self.body = response.status, response.headers, body

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.body)


class Client:
    """Asks an application, as its peers and its users do."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def ask(
        self, url: str, *, method: str = "GET", trust: Any = True, **headers: str
    ) -> Answer:
        """Return the answer; underscores in header names stand for hyphens."""
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.request(
            method, url, headers=fields, ssl=trust, allow_redirects=False
        ) as response:
            return Answer(response, await response.read())


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    """Return somebody who asks."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield Client(session)


async def check_protocol(client: Client, sender: Transport, base: str, **options: Any):
    """Ask for everything that a peer may ask for; ``sender`` offers step 7."""
    mine = bearer(sender)

    async def ask(path: str, **headers: Any) -> Answer:
        return await client.ask(base + path, **{**options, **mine, **headers})

    whole = await ask("7/full")
    size, tag = len(whole.body), whole.headers["ETag"]
    assert (whole.status, whole.headers["Accept-Ranges"]) == (200, "bytes")
    assert "Content-Encoding" not in whole.headers
    part = await ask("7/full", Range="bytes=1000-1999999", If_Match=tag)
    assert (part.status, part.headers["ETag"]) == (206, tag)
    assert part.headers["Content-Range"] == f"bytes 1000-1999999/{size}"
    assert part.body == whole.body[1000:2_000_000]
    head = await ask("7/full", method="HEAD")
    assert (head.status, head.headers["Content-Length"]) == (200, str(size))
    same = await ask("7/full", If_None_Match=tag)
    assert (same.status, same.headers["ETag"], same.body) == (304, tag, b"")
    for problem, status, kind in (
        (await ask("7/full", Range=f"bytes={size}-"), 416, "range"),
        (await ask("7/full", If_Match='"other"'), 412, "checkpoint-changed"),
        (await ask("9/full", Prefer="wait=0"), 404, "step-not-found"),
        (await ask("6/full"), 410, "step-not-found"),
        (await ask("7/full", Authorization="Bearer x"), 401, "authentication"),
        (await ask("7/full", method="POST"), 405, ""),
        (await ask("7/full", method="OPTIONS"), 405, ""),
        (await ask("7/full", Origin="https://dashboard.example"), 403, ""),
    ):
        assert (problem.status, problem.headers["Content-Type"]) == (status, PROBLEM)
        assert problem.document["status"] == status
        assert problem.document["type"].rpartition(":")[2] == (kind or "blank")
    unmet = await ask("7/full", Range=f"bytes={size}-")
    assert unmet.headers["Content-Range"] == f"bytes */{size}"
    assert (await ask("6/full")).document["serving"] == 7


@web.middleware
async def rendering(request: web.Request, handler: Any) -> web.StreamResponse:
    """Render every error of the application, and none of a transport."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)
    if response.status < 400 or aiockpt.http.serves(request):
        return response
    return web.json_response({"error": response.reason}, status=response.status)


@web.middleware
async def rendering_all(request: web.Request, handler: Any) -> web.StreamResponse:
    """Render every error whatever it is, as examples on the web do."""
    response = await handler(request)
    if response.status < 400:
        return response
    return web.json_response({"error": response.reason}, status=response.status)


@web.middleware
async def decorating(request: web.Request, handler: Any) -> web.StreamResponse:
    """Touch what has been answered, ready or not: headers, cookies, compression."""
    response = await handler(request)
    response.headers[CORS] = "*"
    if not response.prepared:
        response.set_cookie("visited", "yes")
    return response


@web.middleware
async def compressing(request: web.Request, handler: Any) -> web.StreamResponse:
    """Compress whatever comes, whatever the client said."""
    response: web.StreamResponse = await handler(request)
    if not response.prepared:
        response.enable_compression(web.ContentCoding.gzip)
    return response


async def offering(host: Host) -> None:
    """Offer step 7 in the first transport, and 3 in the second."""
    await host.model.send_checkpoint([], 7, weights(7.0, mib=3))
    await host.average.send_checkpoint([], 3, weights(3.0, mib=3))


def demanding(credential: str) -> Any:
    """Return a middleware that lets in who shows this."""

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != credential:
            return web.Response(status=401, text="<h1>Who are you?</h1>")
        response: web.StreamResponse = await handler(request)
        return response

    return middleware


def mount(app: web.Application, sender: Transport, how: str) -> None:
    """Mount a transport at ``/ckpt`` in one of the ways that there are."""
    if how == "setup":
        aiockpt.http.setup(app, sender, prefix="/ckpt")
    elif how == "create_app":
        app.add_subapp("/ckpt", aiockpt.http.create_app(sender))
    else:
        app.add_routes(aiockpt.http.routes(sender, "/ckpt"))


def listening_on(base: str) -> socket.socket:
    """Return a socket that listens where another one did."""
    port = urlsplit(base).port
    assert port is not None
    return socket.create_server(("127.0.0.1", port))


def refuses(port: int) -> bool:
    """Tell whether nobody listens there any more."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


@asynccontextmanager
async def process(script: Path, *arguments: str) -> AsyncIterator[Process]:
    """Run a Python program that finds this package, and see to its end."""
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        script,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def connected(runner: web.AppRunner) -> asyncio.StreamWriter:
    """Hand an application a connection as if its listener had accepted it."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    assert runner.server is not None
    await loop.connect_accepted_socket(runner.server, theirs)
    _, writer = await asyncio.open_unix_connection(sock=ours)
    return writer


def giving_up(cut: asyncio.Event) -> Any:
    """Return a middleware that ends the body which is being sent when told, once."""

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        answer = asyncio.ensure_future(handler(request))
        told = asyncio.ensure_future(cut.wait())
        if "Range" not in request.headers or cut.is_set():
            told.cancel()
        await asyncio.wait({answer, told}, return_when=asyncio.FIRST_COMPLETED)
        if told.cancel() or told.cancelled() or answer.done():
            return await answer
        answer.cancel()
        await asyncio.wait({answer})
        return web.json_response({"error": "too slow"}, status=503)

    return middleware


def listener(tls: ssl.SSLContext | None = None) -> tuple[socket.socket, str]:
    """Return a socket that listens, and what a transport at ``/ckpt`` advertises."""
    listening = socket.create_server(("127.0.0.1", 0))
    scheme = "https" if tls else "http"
    return listening, f"{scheme}://127.0.0.1:{listening.getsockname()[1]}/ckpt/"


class TestRoutesAndMiddlewares:
    """The application goes on being itself."""

    async def test_its_own_routes_are_guarded_and_rendered_by_it(self, client) -> None:
        """Its key opens them, a transport's token does not."""
        key = example().KEY.decode()
        async with running_example() as host:
            await offering(host)
            status = await client.ask(f"{host.url}/status", X_API_Key=key)
            assert (status.status, status.document) == (200, {"step": 7})
            assert status.headers[CORS]
            for headers in ({}, bearer(host.model), {"X_API_Key": "\xff"}):
                refused = await client.ask(f"{host.url}/status", **headers)
                assert refused.status == 401
                assert refused.document == {"error": "Unauthorized"}
            absent = await client.ask(f"{host.url}/nothing", X_API_Key=key)
            assert (absent.status, absent.document) == (404, {"error": "Not Found"})

    async def test_the_checkpoint_routes_are_not(self, client) -> None:
        """They want their own credentials, and answer in their own way."""
        key = example().KEY.decode()
        async with running_example() as host:
            await offering(host)
            base = f"{host.url}/model/"
            refused = await client.ask(f"{base}7/full", X_API_Key=key)
            assert (refused.status, refused.headers["Content-Type"]) == (401, PROBLEM)
            assert refused.headers["WWW-Authenticate"] == "Bearer"
            assert refused.headers[CORS]
            await check_protocol(client, host.model, base)

    @pytest.mark.parametrize(
        "middlewares",
        [
            (),
            (rendering,),
            (decorating,),
            (rendering, decorating),
            (web.normalize_path_middleware(),),
        ],
        ids=lambda each: "+".join(m.__name__ for m in each) or "none",
    )
    @pytest.mark.parametrize("how", ["setup", "create_app", "routes"])
    async def test_no_middleware_breaks_the_protocol(
        self, client, how: str, middlewares: Any
    ) -> None:
        """Ranges, conditions, problem documents and streams pass through it."""
        listening, base = listener()
        sender = transport(advertise=base)
        app = web.Application(middlewares=middlewares)
        mount(app, sender, how)
        async with running(app, listening), sender, transport() as receiver:
            await sender.send_checkpoint([], 7, weights(7.0, mib=3))
            await check_protocol(client, sender, base)
            found = await receive(sender, receiver, 7)
            assert_same(found, weights(7.0, mib=3))

    async def test_an_application_that_compresses_everything_does_not_do_so_here(
        self, client
    ) -> None:
        """Small bodies, problems and answers without content stay what they are."""
        listening, base = listener()
        sender = transport(advertise=base)
        app = web.Application(middlewares=[compressing])
        mount(app, sender, "setup")
        async with running(app, listening), sender, transport() as receiver:
            early = asyncio.create_task(receive(sender, receiver, 7))
            await settle(lambda: sender.statistics().waiting)
            await sender.send_checkpoint([], 7, {"n": b"small"})
            assert_same(await early, {"n": b"small"})
            assert await anext(receiver.steps(sender.metadata())) == 7
            gzip = {**bearer(sender), "Accept_Encoding": "gzip"}
            for path, status, method in (
                ("7/full", 200, "GET"),
                ("7/full", 200, "HEAD"),
                ("6/full", 410, "GET"),
                ("latest?after=7", 204, "GET"),
            ):
                headers = {**gzip, "Prefer": "wait=0"}
                answer = await client.ask(base + path, method=method, **headers)
                assert answer.status == status
                assert "Content-Encoding" not in answer.headers
                assert status == 204 or "Content-Length" in answer.headers

    async def test_an_early_receive_waits_behind_middlewares(self) -> None:
        """That there is no such step yet reaches the peer as the transport says it."""
        async with running_example() as host, transport() as receiver:
            early = asyncio.create_task(receive(host.model, receiver, 7))
            await settle(lambda: host.model.statistics().requests)
            await offering(host)
            assert_same(await early, weights(7.0, mib=3))
            with pytest.raises(StepNotFoundError) as caught:
                await receive(host.model, receiver, 6)
            assert (caught.value.step, caught.value.serving) == (6, 7)

    async def test_a_middleware_that_rewrites_all_errors_is_told_of(self) -> None:
        """What the transport said is lost, and the receiver says what it got."""
        listening, base = listener()
        sender = transport(advertise=base)
        app = web.Application(middlewares=[rendering_all])
        mount(app, sender, "setup")
        async with running(app, listening), transport() as receiver:
            await sender.send_checkpoint([], 7, weights(mib=3))
            assert_same(await receive(sender, receiver, 7), weights(mib=3))
            with pytest.raises(RemoteProtocolError, match="aiockpt server"):
                await receive(sender, receiver, 6)

    async def test_an_auth_middleware_may_ask_for_the_same_token(self, client) -> None:
        """One secret for all of the application, in the same header."""
        listening, base = listener()
        sender = transport(advertise=base, token="shared")
        app = web.Application(middlewares=[demanding("Bearer shared")])
        mount(app, sender, "setup")
        async with running(app, listening):
            await sender.send_checkpoint([], 7, weights())
            unmet = await client.ask(
                f"{base}7/full", Authorization="Bearer shared", Range="bytes=9999999-"
            )
            assert (unmet.status, unmet.headers["Content-Type"]) == (416, PROBLEM)
            async with transport(token="shared") as receiver:
                assert_same(await receive(sender, receiver, 7), weights())
            async with transport(token="wrong") as receiver:
                with pytest.raises(AuthenticationError):
                    await receive(sender, receiver, 7)

    async def test_a_middleware_that_gives_up_on_a_body_cuts_it(self) -> None:
        """Nothing is appended to half a body, and the receiver fetches the rest."""
        cut = asyncio.Event()
        async with reverse_proxy(pause=MIB) as proxy, transport() as receiver:
            listening, proxy.upstream = listener()
            sender = transport(advertise=proxy.url, chunk_bytes=64 * MIB)
            app = web.Application(middlewares=[giving_up(cut)])
            mount(app, sender, "setup")
            async with running(app, listening):
                await sender.send_checkpoint([], 7, weights(mib=64))
                received = asyncio.create_task(receive(sender, receiver, 7))
                await proxy.paused.wait()
                cut.set()
                await settle(lambda: sender.statistics().gone == 1)
                proxy.go_on.set()
                assert_same(await received, weights(mib=64))


class TestTLS:
    """The application's certificate is the transports'."""

    async def test_receivers_need_to_trust_it(self, client) -> None:
        """And get the same protocol and the same bytes as without."""
        server, trust = certified()
        async with running_example(ssl_context=server) as host:
            await offering(host)
            base = host.model.address()
            assert base == f"{host.url}/model/"
            assert base.startswith("https:")
            await check_protocol(client, host.model, base, trust=trust)
            async with transport(client_ssl_context=trust) as receiver:
                assert_same(await receive(host.model, receiver, 7), weights(7.0, mib=3))
                found = await receive(host.average, receiver, 3)
                assert_same(found, weights(3.0, mib=3))
            async with transport() as receiver:
                with pytest.raises(RemoteProtocolError, match="ssl_context"):
                    await receive(host.model, receiver, 7)


class TestReverseProxy:
    """The public address is another host's, and has another path."""

    @pytest.mark.parametrize("tls", ["none", "proxy", "both"])
    async def test_peers_find_the_transports_by_the_public_address(
        self, client, tls: str
    ) -> None:
        """Where TLS ends is nothing that they notice."""
        server, trust = certified()
        inner = {"ssl_context": server} if tls == "both" else {}
        outer = None if tls == "none" else server
        async with (
            reverse_proxy(ssl_context=outer, trust=trust) as proxy,
            running_example(public=proxy.url, **inner) as host,
            transport(client_ssl_context=trust) as receiver,
        ):
            proxy.upstream = f"{host.url}/"
            await offering(host)
            base = host.model.address()
            assert base == f"{proxy.url}model/"
            await check_protocol(client, host.model, base, trust=trust)
            assert_same(await receive(host.model, receiver, 7), weights(7.0, mib=3))
            assert_same(await receive(host.average, receiver, 3), weights(3.0, mib=3))
            token = parse_metadata(host.model.metadata()).token
            assert token is not None
            assert token not in "".join(proxy.seen)

    async def test_a_transport_without_a_token_answers_to_its_public_name(self) -> None:
        """A proxy may hand on the name that it was asked for, or its own target's."""
        for keeps_host in (True, False):
            async with reverse_proxy(keeps_host=keeps_host) as proxy:
                listening, proxy.upstream = listener()
                public = proxy.url.replace("127.0.0.1", "localhost")
                sender = transport(advertise=public, insecure=True)
                app = web.Application()
                mount(app, sender, "setup")
                async with running(app, listening), transport() as receiver:
                    await sender.send_checkpoint([], 7, weights())
                    assert_same(await receive(sender, receiver, 7), weights())

    async def test_what_the_proxy_says_by_itself_is_waited_out(self) -> None:
        """502 while the application is away is no answer of the application."""
        async with reverse_proxy() as proxy, transport(token="shared") as receiver:
            listening, proxy.upstream = listener()
            listening.close()
            sender = transport(advertise=proxy.url, token="shared")
            early = asyncio.create_task(receive(sender, receiver, 7))
            await settle(lambda: len(proxy.seen) > 1)
            app = web.Application()
            mount(app, sender, "setup")
            port = listening_on(proxy.upstream)
            async with running(app, port):
                await sender.send_checkpoint([], 7, weights())
                assert_same(await early, weights())

    async def test_a_restart_behind_the_proxy_is_survived(self) -> None:
        """The successor with the same bytes and the same secret serves the rest."""
        async with reverse_proxy() as proxy:
            listening, proxy.upstream = listener()
            app = web.Application()
            options = {"advertise": proxy.url, "token": "shared", "grace": 0}
            first = transport(**options)
            mount(app, first, "setup")
            receiver = transport(token="shared", connections=1)
            async with receiver:
                async with running(app, listening):
                    await first.send_checkpoint([], 7, weights(mib=16))
                    metadata = first.metadata()
                    proxy.pause = 4 * MIB
                    received = asyncio.create_task(
                        receiver.recv_checkpoint(0, metadata, 7)
                    )
                    await proxy.paused.wait()
                proxy.pause = None
                proxy.go_on.set()
                app, second = web.Application(), transport(**options)
                mount(app, second, "setup")
                async with running(app, listening_on(proxy.upstream)):
                    await second.send_checkpoint([], 7, weights(mib=16))
                    assert_same(await received, weights(mib=16))
                    sent = second.statistics().bytes_sent
                    assert 0 < sent < 16 * MIB, "it fetched only what was missing"


class TestTwoTransports:
    """They share an application, and nothing else."""

    async def test_neither_sees_the_others_steps_or_secrets(self, client) -> None:
        """What opens one is nothing to the other."""
        async with running_example() as host, transport() as receiver:
            await offering(host)
            latest = f"{host.url}/model/latest"
            answer = await client.ask(latest, **bearer(host.model))
            assert answer.document["step"] == 7
            refused = await client.ask(latest, **bearer(host.average))
            assert refused.status == 401
            crossed = host.model.metadata().partition("#")[0]
            crossed += "#" + host.average.metadata().partition("#")[2]
            with pytest.raises(AuthenticationError):
                await receiver.recv_checkpoint(0, crossed, 7)
            with pytest.raises(StepNotFoundError) as caught:
                await receive(host.model, receiver, 3)
            assert caught.value.serving == 7

    async def test_what_one_does_leaves_the_other_alone(self) -> None:
        """It may retract, count and end while the other serves."""
        async with running_example() as host, transport() as receiver:
            await offering(host)
            await host.average.disallow_checkpoint()
            assert_same(await receive(host.model, receiver, 7), weights(7.0, mib=3))
            model, average = host.model.statistics(), host.average.statistics()
            assert (model.step, average.step) == (7, None)
            assert model.requests > average.requests == 0
            await host.average.shutdown()
            assert_same(await receive(host.model, receiver, 7), weights(7.0, mib=3))

    async def test_a_place_that_is_taken_is_refused(self) -> None:
        """A second one at the same prefix would never be asked, or never be found."""
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
    async def test_a_place_that_nobody_would_find_is_refused(self, prefix: str) -> None:
        """Below a path that it has to quote, aiohttp answers 404."""
        with pytest.raises(LocalProtocolError, match="prefix"):
            aiockpt.http.setup(web.Application(), transport(), prefix=prefix)
        with pytest.raises(LocalProtocolError, match="prefix"):
            aiockpt.http.routes(transport(), prefix)

    @pytest.mark.parametrize("prefix", ["/-._~!$&'()*+,;=:@", "/{run:[a-z]+}/x", "//"])
    async def test_any_other_place_is_found(self, prefix: str) -> None:
        """Punctuation and variable parts do no harm."""
        listening, base = listener()
        public = prefix.replace("{run:[a-z]+}", "seven")
        sender = transport(advertise=base.replace("/ckpt/", public))
        app = web.Application()
        aiockpt.http.setup(app, sender, prefix=prefix)
        async with running(app, listening), sender, transport() as receiver:
            await sender.send_checkpoint([], 7, {"n": 1})
            assert await anext(receiver.steps(sender.metadata())) == 7
            assert await receive(sender, receiver, 7) == {"n": 1}


class TestShutdown:
    """The application ends while a checkpoint is on its way."""

    @pytest.mark.parametrize("tls", [False, True])
    async def test_a_receive_that_is_under_way_gets_its_grace(self, tls: bool) -> None:
        """The application waits for the body that it is at, here the only one."""
        server, trust = certified() if tls else (None, True)
        proxied = reverse_proxy(pause=MIB, trust=trust)
        async with proxied as proxy, transport() as receiver:
            listening, proxy.upstream = listener(server)
            one = 64 * MIB
            sender = transport(advertise=proxy.url, grace=20, chunk_bytes=one)
            app = web.Application()
            mount(app, sender, "setup")
            async with running(app, listening, ssl_context=server) as host:
                await sender.send_checkpoint([], 7, weights(mib=64))
                received = asyncio.create_task(receive(sender, receiver, 7))
                await proxy.paused.wait()
                ending = asyncio.create_task(host.runner.cleanup())
                await settle(lambda: sender.statistics().step is None)
                assert sender.statistics().readers == 1
                proxy.go_on.set()
                assert_same(await received, weights(mib=64))
                await ending

    @pytest.mark.parametrize("tls", [False, True])
    async def test_a_receive_that_hangs_is_cut_and_says_so(self, tls: bool) -> None:
        """The application ends with the grace, and not with the peer."""
        server, trust = certified() if tls else (None, True)
        async with reverse_proxy(pause=MIB, trust=trust) as proxy:
            listening, proxy.upstream = listener(server)
            one = 64 * MIB  # no socket holds it, so it is under way at the end
            sender = transport(advertise=proxy.url, grace=0.1, chunk_bytes=one)
            app = web.Application()
            mount(app, sender, "setup")
            async with transport(connections=1) as receiver:
                async with running(app, listening, ssl_context=server):
                    await sender.send_checkpoint([], 7, weights(mib=64))
                    received = asyncio.create_task(receive(sender, receiver, 7))
                    await proxy.paused.wait()
                    assert sender.statistics().readers
                assert sender.statistics().evicted
                asked = len(proxy.seen)
                proxy.go_on.set()
                await settle(lambda: len(proxy.seen) > asked)  # it tries again
                received.cancel()
                await asyncio.wait({received})

    async def test_a_connection_that_comes_with_the_end_does_not_delay_it(self) -> None:
        """It is made after aiohttp has told the others, and is closed when answered.

        One that is made while aiohttp tells them, and has no task yet, is never heard
        by aiohttp: the receiver has only one, which has brought a request by then.
        """
        one = transport(connections=1)
        async with reverse_proxy(pause=MIB) as proxy, one as receiver:
            listening, proxy.upstream = listener()
            sender = transport(
                advertise=proxy.url, grace=1, insecure=True, chunk_bytes=64 * MIB
            )
            app = web.Application()
            mount(app, sender, "setup")
            async with running(app, listening, shutdown_timeout=60) as host:
                await sender.send_checkpoint([], 7, weights(mib=64))
                received = asyncio.create_task(receive(sender, receiver, 7))
                await proxy.paused.wait()
                started = time.monotonic()
                ending = asyncio.create_task(host.runner.cleanup())
                await settle(lambda: sender.statistics().step is None)
                late = await connected(host.runner)
                late.write(b"GET /ckpt/6/full HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await ending
                assert time.monotonic() - started < 30, "aiohttp waits for 60 s"
                late.close()
                await late.wait_closed()
            received.cancel()
            await asyncio.wait({received})

    @pytest.mark.timeout(120)  # a process imports torch
    async def test_a_process_that_is_asked_to_end_ends_well(self) -> None:
        """SIGTERM: the body under way comes to its end, then ``run_app`` returns."""
        async with (
            reverse_proxy(pause=MIB) as proxy,
            transport(token="shared", timeout=60) as receiver,
            process(HOSTING, proxy.url, "shared") as hosting,
        ):
            assert hosting.stdout is not None
            port = int(await hosting.stdout.readline())
            proxy.upstream = f"http://127.0.0.1:{port}/ckpt/"
            received = asyncio.create_task(receiver.recv_checkpoint(0, proxy.url, 7))
            await proxy.paused.wait()
            hosting.terminate()
            await settle(lambda: refuses(port))
            ended = hosting.returncode
            assert ended is None
            proxy.go_on.set()
            assert_same(await received, weights(mib=MIB_OFFERED))
            output, errors = await hosting.communicate()
            assert (hosting.returncode, output) == (0, b"ended\n")
            (warning,) = errors.splitlines()  # a proxy is why it is none
            assert b"unless a proxy changes the path" in warning

    async def test_what_the_application_itself_receives_ends_with_it(self) -> None:
        """Its background task learns why, before it is cancelled."""
        listening, base = listener()
        mine = transport(advertise=base)
        ended: list[BaseException] = []

        async def refresh(_: web.Application) -> AsyncIterator[None]:
            async def forever() -> None:
                try:
                    await receive(peer, mine, 9)
                except AiockptError as error:
                    ended.append(error)

            task = asyncio.create_task(forever())
            yield
            task.cancel()
            await asyncio.wait({task})

        app = web.Application()
        app.cleanup_ctx.append(refresh)
        mount(app, mine, "setup")
        async with transport() as peer:
            async with running(app, listening):
                await settle(lambda: peer.statistics().waiting)
            assert [type(error) for error in ended] == [ClosedError]
