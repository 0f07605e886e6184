"""A sender that shares nothing with the package's server, and what fetches from it.

At the end: several of the package's servers with one checkpoint, and a fetch from them.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from aiohttp import ClientSession, web

from aiockpt import Auth, Limits, Receive, TransferEvent, add_hook
from aiockpt.errors import AiockptError
from aiockpt.format.chunks import digest
from aiockpt.format.header import build_manifest
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http import body_reader, manifests
from aiockpt.http.client import CheckpointClient
from aiockpt.http.download import Download
from aiockpt.http.peers import Peer, Peers
from aiockpt.http.problems import PeerBusy, to_problem
from aiockpt.http.protocol import Origin
from aiockpt.http.retry import OnRetry
from aiockpt.http.sockets import IO_THREADS
from aiockpt.memory.arena import Memory as PlainMemory
from aiockpt.runtime.bridge import Bridge
from aiockpt.testing import Fault, FaultProxy
from aiockpt.transfer.source import OnProgress, PlainDestination
from tests.support import servers
from tests.support.headers import entries_of
from tests.support.servers import running

Client: TypeAlias = CheckpointClient
"""What `receiver` gives, for tests that hand it on."""
Meddle = Callable[["RangePeer", web.Request], Awaitable[web.StreamResponse | None]]

STEP = 7
CHUNK = 64 << 10
CHUNKS = 48
TOKEN = "s3cret-capability"


@contextmanager
def io_threads() -> Iterator[Bridge]:
    """Give the threads that one end moves bytes with; wait for none of them."""
    threads = Bridge(threads=IO_THREADS, name="test-io")
    try:
        yield threads
    finally:
        threads.close(wait=False)


def noise(size: int, *, seed: int = 0) -> bytes:
    """Return bytes that differ wherever they are looked at."""
    return random.Random(seed).randbytes(size)


def describe(segment: bytes, *, step: int = STEP, chunk_bytes: int = 0) -> Manifest:
    """Return the manifest of one tensor of bytes."""
    size = len(segment)
    chunk_bytes = chunk_bytes or -(-max(size, 1) // 64) * 64
    slices = range(0, size, chunk_bytes)
    return build_manifest(
        step=step,
        chunk_bytes=chunk_bytes,
        entries=entries_of(*[("weight", "U8", (size,), size)] if size else []),
        tree=["dict", ["weight"], [["tensor", 0]]] if size else None,
        digests=[digest([segment[start : start + chunk_bytes]]) for start in slices],
    )


@dataclass
class RangePeer:
    """Serves one checkpoint from memory with aiohttp, and remembers who asked what.

    ``meddle`` may answer a request in place of the normal handler, or return None.
    """

    segment: bytes
    manifest: Manifest
    meddle: Meddle | None = None
    port: int = 0
    scheme: str = "http"
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    clients: set[object] = field(default_factory=set)

    @property
    def base_url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/checkpoint/"

    def source(self, token: str | None = None, *, port: int = 0) -> Origin:
        return Origin(
            self.base_url.replace(str(self.port), str(port or self.port)), token
        )

    def ranges(self) -> list[str]:
        return [headers["Range"] for _, headers in self.requests if "Range" in headers]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path, dict(request.headers)))
        assert request.transport is not None
        self.clients.add(request.transport.get_extra_info("peername"))
        if self.meddle is not None:
            answer = await self.meddle(self, request)
            if answer is not None:
                return answer
        return self.answer(request)

    def answer(self, request: web.Request) -> web.Response:
        headers = {
            "ETag": f'"{self.manifest.snapshot_id}"',
            "Aiockpt-Step": str(self.manifest.step),
        }
        if request.path.endswith("/metadata"):
            return web.Response(body=self.manifest.header, headers=headers)
        if request.headers.get("If-Match") not in (None, headers["ETag"]):
            return web.Response(status=412)
        head = bytes(self.manifest.header)
        first, last = map(
            int, request.headers["Range"].removeprefix("bytes=").split("-")
        )
        size = len(head) + len(self.segment)
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        start, stop = (max(at - len(head), 0) for at in (first, last + 1))
        body = head[first : last + 1] + self.segment[start:stop]
        return web.Response(status=206, body=body, headers=headers)


def refusing(*errors: Exception) -> Meddle:
    """Answer the first requests with these errors."""
    left = list(errors)

    async def meddle(_: RangePeer, __: web.Request) -> web.StreamResponse | None:
        if not left:
            return None
        problem = to_problem(left.pop(0))
        return web.Response(
            status=problem.status, headers=problem.headers, body=problem.body
        )

    return meddle


def busy(retry_after: float | None = None) -> Exception:
    """Return what a peer raises that has too many readers, for `refusing`."""
    return PeerBusy(retry_after=retry_after)


@asynccontextmanager
async def serving(
    segment: bytes,
    *,
    step: int = STEP,
    chunk_bytes: int = 0,
    meddle: Meddle | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> AsyncIterator[RangePeer]:
    """Serve a segment on a port of its own."""
    manifest = describe(segment, step=step, chunk_bytes=chunk_bytes)
    peer = RangePeer(segment, manifest, meddle)
    async with serving_peer(peer, ssl_context=ssl_context):
        yield peer


@asynccontextmanager
async def serving_peer(
    peer: RangePeer, *, ssl_context: ssl.SSLContext | None = None
) -> AsyncIterator[RangePeer]:
    """Let a peer serve on a port of its own, whatever its manifest says."""
    app = web.Application()
    app.router.add_get("/checkpoint/{tail:.*}", peer.handle)
    peer.scheme = "https" if ssl_context else "http"
    async with running(app, ssl_context=ssl_context) as host:
        peer.port = host.port
        yield peer


class Memory:
    """A target: a run of bytes, in one piece or in many, that knows its progress."""

    def __init__(self, size: int, *, pieces: Sequence[int] = ()) -> None:
        self.content = bytearray(size)
        self._cuts = sorted({0, size, *pieces})
        self.bytes = self.chunks = 0
        self.errors: list[AiockptError] = []

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        cuts = [start, *(cut for cut in self._cuts if start < cut < stop), stop]
        view = memoryview(self.content)
        return [view[a:b] for a, b in pairwise(cuts)]

    def check(self, start: int, stop: int) -> None:
        pass

    def count(self, nbytes: int, chunks: int) -> None:
        self.bytes += nbytes
        self.chunks += chunks


@asynccontextmanager
async def receiver(
    session: ClientSession | None = None,
    *,
    fast_path: bool = True,
    max_concurrency: int = 2,
    stall_timeout: float = 5.0,
    reconnect_timeout: float = 0.0,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    **trust: Any,
) -> AsyncIterator[Client]:
    """Give a client that is in a hurry; its bodies may come the portable way."""
    bridge = Bridge(threads=1, name="test-client")
    client = CheckpointClient(
        Receive(
            limits=limits,
            connections=max_concurrency,
            reconnect_timeout=reconnect_timeout,
            session=session,
        ),
        Auth(token=token, client_ssl_context=ssl_context, **trust),
        stall_timeout=stall_timeout,
        bridge=bridge,
    )
    known = body_reader._KNOWN_SYSTEM
    body_reader._KNOWN_SYSTEM = known and fast_path
    try:
        yield client
    finally:
        body_reader._KNOWN_SYSTEM = known
        await client.aclose()
        await bridge.aclose(timeout=5)


async def fetch(
    client: Client,
    peer: RangePeer,
    memory: Memory | None = None,
    *,
    port: int = 0,
    token: str | None = None,
) -> Memory:
    """Fetch all chunks of a peer, through ``port`` if given."""
    memory = memory or Memory(len(peer.segment))
    await fetch_chunks(
        client,
        peer.source(token, port=port),
        peer.manifest.outline,
        memory,
        range(len(peer.manifest.grid)),
        on_progress=memory.count,
        on_retry=memory.errors.append,
    )
    return memory


async def fetch_chunks(
    client: Client,
    source: Origin,
    outline: Outline,
    memory: PlainMemory,
    chunks: Sequence[int],
    *,
    on_progress: OnProgress,
    on_retry: OnRetry | None = None,
) -> None:
    """Fetch chunks from one peer; see `Download` for the options."""
    peers = Peers(client, [Peer(source, has_checkpoint=True)], on_retry)
    target = PlainDestination(memory)
    await Download(peers, outline, target, chunks, on_progress).run()


async def fetch_manifest(
    client: Client,
    source: Origin,
    step: int = STEP,
    *,
    deadline: float | None = None,
    on_retry: OnRetry | None = None,
) -> Manifest:
    """Return the manifest of a step, with time enough unless a deadline is given."""
    deadline = soon() if deadline is None else deadline
    reply = await manifests.fetch_manifest(
        client, source, step, deadline=deadline, on_retry=on_retry
    )
    return reply.manifest


async def fetch_latest(
    client: Client, peer: RangePeer, *, port: int = 0
) -> tuple[int, str]:
    """Return the step that a peer serves, and its snapshot's id."""
    found = await manifests.fetch_latest(client, peer.source(port=port))
    return found.step, found.snapshot_id


def soon(seconds: float = 10.0) -> float:
    """Return a deadline in loop time."""
    return asyncio.get_running_loop().time() + seconds


FAR = 3600.0
"""Seconds that no test lasts: whatever waits for them has failed."""


class Lies(Fault):
    """A fault: the last byte of each run of a body is wrong, and heads are not."""

    async def forward(self, pipe: Any, data: bytes, at: int) -> None:
        """Leave what may be a head, or a manifest, alone."""
        if at + len(data) > CHUNK // 2 and len(data) > CHUNK // 16:
            data = data[:-1] + bytes([data[-1] ^ 1])
        await pipe.send(data)


class Late(Fault):
    """Nothing comes for some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def forward(self, pipe: Any, data: bytes, at: int) -> None:
        """Hold back the first bytes."""
        if at == 0:
            await asyncio.sleep(self.seconds)
        await pipe.send(data)


def checkpoint(**options: Any) -> servers.Memory:
    """Return the checkpoint that all replicas hold, or one that differs."""
    return servers.Memory(CHUNKS * CHUNK - 100, **{"step": STEP, **options})


@asynccontextmanager
async def replicas(
    *held: servers.Memory, **options: Any
) -> AsyncIterator[list[servers.Site]]:
    """Serve each of these."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(servers.serving(memory, **options))
            for memory in held
        ]


@asynccontextmanager
async def behind(
    site: servers.Site, fault: Fault | None = None
) -> AsyncIterator[FaultProxy]:
    """Put a proxy before a server, and something wrong with all its connections."""
    async with FaultProxy("127.0.0.1", site.port, otherwise=fault) as proxy:
        yield proxy


def source(at: servers.Site | FaultProxy, token: str | None = servers.TOKEN) -> Origin:
    """Return what names a server, or a proxy before one."""
    return Origin(f"http://127.0.0.1:{at.port}/checkpoint/", token)


class Fetch:
    """A fetch of everything from several sources, and what was told meanwhile.

    Attributes:
        under_way: Set when an eighth has come.
    """

    def __init__(self, client: Client, sources: Sequence[Origin]) -> None:
        self.peers = Peers.at(client, sources, self.note)
        self.urls = [each.base_url for each in sources]
        self.target = Memory(0)
        self.under_way = asyncio.Event()
        self.events: list[TransferEvent] = []

    async def run(self, *, step: int = STEP, chunks: Sequence[int] = ()) -> bytearray:
        """Return the data segment."""
        remove = add_hook(self.events.append)
        try:
            self.peers.deadline = asyncio.get_running_loop().time() + FAR
            reply = await self.peers.manifest(step)
            manifest = reply.manifest
            self.target = Memory(manifest.segment_bytes)
            await Download(
                self.peers,
                manifest.outline,
                PlainDestination(self.target),
                chunks or range(len(manifest.grid)),
                self.count,
            ).run()
        finally:
            remove()
        return self.target.content

    def note(self, error: AiockptError) -> None:
        """Be told of an error that is followed by another attempt."""
        self.target.errors.append(error)

    def count(self, nbytes: int, chunks: int) -> None:
        """Be the fetch's ``on_progress``."""
        self.target.count(nbytes, chunks)
        if self.target.bytes >= len(self.target.content) / 8:
            self.under_way.set()

    @property
    def given(self) -> list[int]:
        """How many bytes each source gave."""
        return [*self.peers.given().values()]

    def dropped(self) -> dict[int, str]:
        """Return which sources were dropped, and why."""
        found = [event for event in self.events if event.stop == "drop"]
        assert len({event.peer for event in found}) == len(found)
        return {self.urls.index(event.peer): event.detail for event in found}

    def check(self, memory: servers.Memory) -> None:
        """Compare the bytes, and what was counted, with a checkpoint."""
        assert self.target.content == memory.data
        assert self.target.bytes == sum(self.given) == len(memory.data)
        assert self.target.chunks == len(memory.manifest.grid)
