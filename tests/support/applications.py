"""Applications of aiohttp on loopback, and reverse proxies before them, as nginx."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import aiohttp
import pytest
import trustme
from aiohttp import web
from yarl import URL

from tests.support.serving import settle

__all__ = [
    "Host",
    "ReverseProxy",
    "cached",
    "certified",
    "documented",
    "listener",
    "listening_port",
    "nginx",
    "reverse_proxy",
    "running",
]

_TURNS = 10  # of the loop, in which an accepted socket becomes a connection, and ends


@dataclass
class Host:
    """A running application."""

    runner: web.AppRunner
    url: str

    @property
    def port(self) -> int:
        """Return the port on which it listens."""
        return int(self.url.rsplit(":", 1)[1])

    async def end(self) -> None:
        """Stop it, connections that come in that moment included.

        aiohttp and asyncio forget a socket that was accepted just before the listener
        was closed, which a client that retries brings about now and then.
        """
        server = self.runner.server
        await self.runner.cleanup()
        for _ in range(_TURNS):
            await asyncio.sleep(0)
            for late in [] if server is None else server.connections:
                late.force_close()


def listener(port: int = 0) -> socket.socket:
    """Return a socket that listens on loopback."""
    return socket.create_server(("127.0.0.1", port))


@asynccontextmanager
async def running(
    app: web.Application,
    listening: socket.socket | None = None,
    *,
    ssl_context: ssl.SSLContext | None = None,
    shutdown_timeout: float = 0.1,
    send_buffer: int = 0,
) -> AsyncIterator[Host]:
    """Run an application on loopback; leave nothing of it behind.

    With a small ``send_buffer`` the kernel takes little of what it sends.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=shutdown_timeout)
    await runner.setup()
    listening = listening or listener()
    if send_buffer:  # accepted sockets inherit it
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    scheme = "https" if ssl_context else "http"
    host = Host(runner, f"{scheme}://127.0.0.1:{listening.getsockname()[1]}")
    try:
        await web.SockSite(runner, listening, ssl_context=ssl_context).start()
        yield host
    finally:
        await host.end()


@cache
def certified() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a context for servers on 127.0.0.1, and one for clients that trust it."""
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


# Of one connection, and not of the message (RFC 9110 section 7.6.1).
HOP_BY_HOP = ("Connection", "Keep-Alive", "TE", "Trailer", "Transfer-Encoding")
PATH = "/outside/app/"


@dataclass
class ReverseProxy:
    """Passes on what is below ``/outside/app/`` to ``upstream``.

    Attributes:
        upstream: The URL of an application, with a slash at its end; it may change.
        url: The public address of what is there.
        seen: The request lines that a log of the proxy would have.
        pause: Hold back what comes after so many bytes of a body.
        paused: Set when a body is held back.
        go_on: Lets it go on.
    """

    upstream: str
    client: aiohttp.ClientSession
    trust: ssl.SSLContext | bool
    keeps_host: bool
    url: str = ""
    seen: list[str] = field(default_factory=list)
    pause: int | None = None
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer as the server behind it does."""
        self.seen.append(f"{request.method} {request.raw_path}")
        headers = request.headers.copy()
        for name in (*HOP_BY_HOP, *(() if self.keeps_host else ("Host",))):
            headers.pop(name, None)
        headers["X-Forwarded-For"] = request.remote or ""
        headers["X-Forwarded-Proto"] = request.scheme
        target = self.upstream + request.raw_path.removeprefix(PATH)
        try:
            upstream = await self.client.request(
                request.method,
                URL(target, encoded=True),
                headers=headers,
                allow_redirects=False,
                ssl=self.trust,
            )
        except aiohttp.ClientError:
            return web.Response(status=502, text="<h1>502 Bad Gateway</h1>")
        async with upstream:
            return await self._pass_on(request, upstream)

    async def _pass_on(
        self, request: web.Request, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        headers = upstream.headers.copy()
        for name in HOP_BY_HOP:
            headers.pop(name, None)
        response = web.StreamResponse(status=upstream.status, headers=headers)
        await response.prepare(request)
        passed = 0
        try:
            async for part in upstream.content.iter_any():
                await response.write(part)
                passed += len(part)
                if self.pause is not None and passed > self.pause:
                    self.paused.set()
                    await self.go_on.wait()
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()  # or a half body would pass for a whole one
        return response


@asynccontextmanager
async def reverse_proxy(
    upstream: str = "",
    *,
    ssl_context: ssl.SSLContext | None = None,
    trust: ssl.SSLContext | bool = True,
    keeps_host: bool = False,
    pause: int | None = None,
) -> AsyncIterator[ReverseProxy]:
    """Run one on loopback; ``ssl_context`` is its own, ``trust`` for what is behind.

    It names the host that it was asked for only if it ``keeps_host``.
    """
    async with aiohttp.ClientSession(auto_decompress=False) as client:
        proxy = ReverseProxy(upstream, client, trust, keeps_host, pause=pause)
        app = web.Application()
        app.router.add_route("*", f"{PATH}{{tail:.*}}", proxy.handle)
        async with running(app, ssl_context=ssl_context) as host:
            proxy.url = f"{host.url}{PATH}"
            try:
                yield proxy
            finally:
                proxy.go_on.set()


DOCS = Path(__file__).parents[2] / "docs" / "howto"
MAIN = """
daemon off; master_process off; pid {place}/pid; error_log {place}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log {place}/access.log;
    client_body_temp_path {place}/body; proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/fastcgi; uwsgi_temp_path {place}/uwsgi;
    scgi_temp_path {place}/scgi;
    {http}
}}
"""


def documented(page: str) -> str:
    """Return the configuration that a page shows."""
    found = re.search(r"```nginx\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def listening_port() -> int:
    """Return a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@asynccontextmanager
async def nginx(place: Path, http: str, port: int) -> AsyncIterator[Path]:
    """Run nginx in the foreground; skip where it is not installed."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found is None:
        pytest.skip("nginx is not installed")
    config = place / "nginx.conf"
    config.write_text(MAIN.format(place=place, http=http))
    process = await asyncio.create_subprocess_exec(
        *(found, "-p", place, "-c", config, "-e", place / "error.log"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )

    def is_there() -> bool:
        assert process.returncode is None, (place / "error.log").read_text()
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    try:
        await settle(is_there)
        yield place / "access.log"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def cached(place: Path, address: str) -> AsyncIterator[int]:
    """Run the documented cache in front of a sender; give its port."""
    port, http = listening_port(), documented("tuning.md")
    for shown, here in {
        "/var/cache/nginx": str(place),
        "8080": f"127.0.0.1:{port}",
        "http://10.0.0.5:29400/checkpoint/": address,
    }.items():
        assert shown in http
        http = http.replace(shown, here)
    async with nginx(place, http, port):
        yield port
