"""Servers: the package's own, aiohttp applications around one, and nginx in front."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import re
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from aiockpt import Server
from aiockpt.format.chunks import ChunkGrid, digest
from aiockpt.format.header import build_manifest
from aiockpt.http.extension import ServiceExtension
from aiockpt.http.handlers import ServerConfig
from aiockpt.http.listen import open_sockets
from aiockpt.http.server import CheckpointServer
from aiockpt.http.store import Store
from aiockpt.runtime.bridge import Bridge
from aiockpt.swarm.endpoint import SwarmEndpoint
from aiockpt.swarm.tracker import Tracker
from tests.support.headers import entries_of
from tests.support.ports import free_port

TOKEN = "a-token"

CONFIG = ServerConfig(
    options=Server(readers=64),
    token=TOKEN,
    insecure=False,
    stall_timeout=30.0,
    default_wait=0.0,
    max_wait=30.0,
    hosts=frozenset(),
)


def config(*, readers: int = 64, **changes: Any) -> ServerConfig:
    """Return ``CONFIG`` with ``changes``, for so many readers at once."""
    return replace(CONFIG, options=Server(readers=readers), **changes)


class Memory:
    """A servable over one bytearray; counts its references."""

    def __init__(
        self,
        nbytes: int = 1000,
        *,
        step: int = 7,
        chunk_bytes: int = 64 << 10,
        live: bool = False,
        fill: int | None = None,
    ) -> None:
        noise = random.Random(step).randbytes(nbytes)
        self.data = bytearray(noise if fill is None else bytes([fill]) * nbytes)
        self.live = live
        self.arena = None
        self.references = 0
        storage = ("weight", "U8", (nbytes,), nbytes)
        grid = ChunkGrid(nbytes, chunk_bytes)
        ranges = [grid.range(index) for index in range(len(grid))]
        self.manifest = build_manifest(
            step=step,
            chunk_bytes=chunk_bytes,
            entries=entries_of(storage),
            tree=["tensors", ["weight"], [0]],
            digests=[digest([memoryview(self.data)[a:b]]) for a, b in ranges],
        )
        self.have = (1 << len(grid)) - 1

    @property
    def file(self) -> bytes:
        """The file that this is."""
        return bytes(self.manifest.header) + bytes(self.data)

    @property
    def etag(self) -> str:
        return f'"{self.manifest.snapshot_id}"'

    def views(self, start: int, stop: int) -> list[memoryview]:
        return [memoryview(self.data)[start:stop]]

    def acquire(self) -> None:
        self.references += 1

    def release(self) -> None:
        self.references -= 1
        assert self.references >= 0

    def overwrite(self, fill: int) -> None:
        """Do what a trainer does to memory that it believes to be its own again."""
        self.data[:] = bytes([fill]) * len(self.data)


@dataclass
class Site:
    """A running server."""

    server: CheckpointServer
    store: Store
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/checkpoint/"

    @property
    def connections(self) -> list[Any]:
        """The connections that the server has."""
        runner = self.server._runner
        assert runner is not None
        assert runner.server is not None
        return runner.server.connections

    @property
    def tracker(self) -> Tracker:
        """Who is in the swarm of what is published."""
        return tracker_of(self.server)

    def peer(self, **options: Any) -> Peer:
        return Peer(self.port, **options)


def tracker_of(server: Any) -> Tracker:
    """Return who is in the swarm of what a `CheckpointServer` publishes."""
    assert isinstance(server, CheckpointServer)
    assert isinstance(server.extension, SwarmEndpoint)
    assert server.store.latest is not None
    return server.extension.tracker(server.store.latest)


@asynccontextmanager
async def serving(
    memory: Memory | None = None,
    *,
    ssl_context: ssl.SSLContext | None = None,
    send_buffer: int = 0,
    extended: bool = True,
    **changes: Any,
) -> AsyncIterator[Site]:
    """Serve ``memory`` on loopback, with ``CONFIG`` changed by ``changes``.

    With a small ``send_buffer`` the kernel takes little, as if the network were slow.
    Without ``extended``, only plain checkpoints are served.
    """
    options, bridge = config(**changes), Bridge(threads=1, name="serving")
    store, extension = Store(options.options), ServiceExtension()
    if extended:
        extension = SwarmEndpoint(options, bridge, store)
    server = CheckpointServer(options, store, extension, ssl_context=ssl_context)
    sockets = open_sockets("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    if send_buffer:  # those who are accepted inherit it
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    await server.start(sockets)
    try:
        if memory is not None:
            await store.publish(memory, grace=0)
        yield Site(server, store, port)
    finally:
        await server.stop()
        for each in sockets:
            each.close()


@dataclass
class Answer:
    """A response as it came."""

    status: int
    headers: dict[str, str]
    body: bytes


class Peer:
    """One connection over a plain socket, which reads only when told to.

    Args:
        port: Where the server listens.
        receive_buffer: A fixed SO_RCVBUF, so that the server feels a slow reader soon.
        token: What to authorize requests with, if anything.
        host: The loopback address from which it connects.
    """

    def __init__(
        self,
        port: int,
        *,
        receive_buffer: int = 0,
        token: str | None = TOKEN,
        host: str = "127.0.0.1",
    ) -> None:
        self._port = port
        self._token = token
        self._ahead = b""
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.bind((host, 0))
        if receive_buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    async def say(self, raw: bytes) -> None:
        """Send bytes as they are."""
        await asyncio.get_running_loop().sock_sendall(self._socket, raw)

    async def request(self, path: str, *, method: str = "GET", **headers: str) -> None:
        """Send a request; underscores in header names stand for hyphens."""
        fields = {"Host": f"127.0.0.1:{self._port}"}
        if self._token is not None:
            fields["Authorization"] = f"Bearer {self._token}"
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        await self.say("\r\n".join([*lines, "", ""]).encode())

    async def read(self, most: int) -> bytes:
        """Return some bytes, or none at the end; a reset is an end, too."""
        if self._ahead:
            data, self._ahead = self._ahead[:most], self._ahead[most:]
            return data
        try:
            loop = asyncio.get_running_loop()
            return await loop.sock_recv(self._socket, most)
        except ConnectionError:
            return b""

    async def read_some(self, size: int) -> bytes:
        """Return the next ``size`` bytes, or what there is until the end."""
        body = bytearray()
        while len(body) < size and (
            part := await self.read(min(size - len(body), 1 << 20))
        ):
            body += part
        return bytes(body)

    async def read_all(self) -> bytes:
        """Return everything up to the end of the connection."""
        parts = []
        while part := await self.read(1 << 20):
            parts.append(part)
        return b"".join(parts)

    async def head(self) -> Answer:
        """Read a response's head; what follows of the body stays unread."""
        while b"\r\n\r\n" not in self._ahead:
            ahead, self._ahead = self._ahead, b""
            part = await self.read(4096)
            self._ahead = ahead + part
            if not part:
                raise EOFError(f"no response, only {self._ahead!r}")
        head, _, self._ahead = self._ahead.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines)
        return Answer(int(first.split()[1]), fields, b"")

    async def answer(self, *, method: str = "GET") -> Answer:
        """Read one whole response."""
        answer = await self.head()
        size = int(answer.headers.get("Content-Length", "0"))
        if method == "HEAD" or answer.status in (204, 304):
            return answer
        answer.body = await self.read_some(size)
        if len(answer.body) < size:
            raise EOFError(f"{len(answer.body)} of {size} bytes")
        return answer

    async def ask(self, path: str, *, method: str = "GET", **headers: str) -> Answer:
        """Send a request and read its response."""
        await self.request(path, method=method, **headers)
        return await self.answer(method=method)


async def settle(condition: Any, *, patience: float = 30.0) -> None:
    """Wait until ``condition()`` holds, which something is about to bring about."""
    async with asyncio.timeout(patience):
        while not condition():  # noqa: ASYNC110 - any condition, without an event
            await asyncio.sleep(0.005)


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


def own_address() -> str:
    """Return an address of this host that is none of loopback; skip without one."""
    found = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # this sends nothing
        found = probe.getsockname()[0]
    if ipaddress.ip_address(found).is_loopback:
        pytest.skip("this host has no IPv4 address but those of loopback")
    return found


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
    import trustme  # other tests run where it is not installed

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
                data=await request.read() or None,
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
        passed = 0
        try:
            await response.prepare(request)
            async for part in upstream.content.iter_any():
                await response.write(part)
                passed += len(part)
                if self.pause is not None and passed > self.pause:
                    self.paused.set()
                    await self.go_on.wait()
        except (aiohttp.ClientError, ConnectionError):
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
    local: str = "127.0.0.1",
) -> AsyncIterator[ReverseProxy]:
    """Run one on loopback; ``ssl_context`` is its own, ``trust`` for what is behind.

    It names the host that it was asked for only if it ``keeps_host``. It connects to
    what is behind it from the ``local`` address.
    """
    connector = aiohttp.TCPConnector(local_addr=(local, 0))
    async with aiohttp.ClientSession(
        connector=connector, auto_decompress=False
    ) as client:
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
    port, http = free_port(), documented("tuning.md")
    for shown, here in {
        "/var/cache/nginx": str(place),
        "8080": f"127.0.0.1:{port}",
        "http://10.0.0.5:29400/checkpoint/": address,
    }.items():
        assert shown in http
        http = http.replace(shown, here)
    async with nginx(place, http, port):
        yield port
