"""A checkpoint in plain memory, a server for it, and a peer that obeys word by word."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from aiockpt.format.chunks import ChunkGrid, digest
from aiockpt.format.header import build_manifest
from aiockpt.http.handlers import ServerConfig
from aiockpt.http.listen import open_sockets
from aiockpt.http.options import Server
from aiockpt.http.server import CheckpointServer
from aiockpt.http.store import Store
from aiockpt.runtime.bridge import Bridge
from tests.support.headers import entries_of

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

    def peer(self, **options: Any) -> Peer:
        return Peer(self.port, **options)


@asynccontextmanager
async def serving(
    memory: Memory | None = None,
    *,
    ssl_context: ssl.SSLContext | None = None,
    send_buffer: int = 0,
    **changes: Any,
) -> AsyncIterator[Site]:
    """Serve ``memory`` on loopback, with ``CONFIG`` changed by ``changes``.

    With a small ``send_buffer`` the kernel takes little, as if the network were slow.
    """
    bridge = Bridge(threads=1, name="serving")
    server = CheckpointServer(config(**changes), bridge, ssl_context=ssl_context)
    store = server.store
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
    """

    def __init__(
        self, port: int, *, receive_buffer: int = 0, token: str | None = TOKEN
    ) -> None:
        self._port = port
        self._token = token
        self._ahead = b""
        self._socket = socket.socket()
        self._socket.setblocking(False)
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


async def settle(condition: Any, *, patience: float = 10.0) -> None:
    """Wait until ``condition()`` holds, which something is about to bring about."""
    async with asyncio.timeout(patience):
        while not condition():  # noqa: ASYNC110 - any condition, without an event
            await asyncio.sleep(0.005)
