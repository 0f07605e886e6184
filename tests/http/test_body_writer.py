"""What is promised about a body's memory and its peer, on both ways of sending."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trustme
from aiohttp import web

from aiockpt.http import body_writer as module
from aiockpt.http.body_writer import BodySender, Outcome
from aiockpt.runtime.bridge import Bridge
from tests.support.proofs import proves
from tests.support.rangepeer import io_threads
from tests.support.runners import running
from tests.support.serving import Peer, settle

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.every_loop,
    pytest.mark.torch_free,
]

OLD, NEW = 0xAA, 0x55


class Memory:
    """A body in memory that its owner overwrites as soon as it believes it may."""

    def __init__(self, nbytes: int, piece: int = 0) -> None:
        self.data = bytearray([OLD]) * nbytes
        self._piece = piece or nbytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def views(self, start: int, stop: int) -> list[memoryview]:
        cuts = [*range(start, stop, self._piece), stop]
        view = memoryview(self.data)
        return [view[a:b] for a, b in itertools.pairwise(cuts)]

    def overwrite(self) -> None:
        self.data[:] = bytes([NEW]) * len(self.data)


class Stage:
    """A server whose every response is one body, sent the way under test."""

    threads: Bridge | None = None

    def __init__(self, body: Memory, *, stall_timeout: float) -> None:
        self.body = body
        self.stall_timeout = stall_timeout
        self.port = 0
        self.sendings: list[BodySender] = []
        self.tasks: list[asyncio.Task | None] = []
        self.overwrite_at_the_end = True
        self.on_start: Callable[[BodySender], None] = lambda _: None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        length = {"Content-Length": str(self.body.nbytes)}
        response = web.StreamResponse(headers=length)
        assert request.transport is not None
        sending = BodySender(
            request.transport,
            self.body.nbytes,
            self.body.views,
            stall_timeout=self.stall_timeout,
            threads=Stage.threads,
        )
        self.sendings.append(sending)
        self.tasks.append(asyncio.current_task())
        self.on_start(sending)
        try:
            await sending.run(request, response)
        finally:
            if self.overwrite_at_the_end:
                self.body.overwrite()
        return response

    @property
    def outcome(self) -> Outcome | None:
        return self.sendings[-1].outcome if self.sendings else None


@pytest.fixture(params=["threads", "socket", "portable"])
def way(request, monkeypatch):
    """Send on the socket, with threads or without, or as if there were none."""
    with io_threads() as threads:
        if request.param == "portable":
            monkeypatch.setattr(module, "duplicate", lambda _: None)
        elif request.param == "threads":
            monkeypatch.setattr(module, "MIN_TURN_BYTES", 1)
            monkeypatch.setattr(Stage, "threads", threads)
        yield request.param


@asynccontextmanager
async def staged(
    body: Memory,
    *,
    stall_timeout: float = 30.0,
    ssl_context: ssl.SSLContext | None = None,
    send_buffer: int = 0,
) -> AsyncIterator[Stage]:
    """Run a server for ``body``."""
    stage = Stage(body, stall_timeout=stall_timeout)
    app = web.Application()
    app.router.add_get("/", stage.handle)
    how = running(app, ssl_context=ssl_context, send_buffer=send_buffer)
    async with how as stage.port:
        yield stage


def only_old(body: bytes) -> bool:
    """Whether nothing that was written later is in it."""
    return body.count(OLD) == len(body)


@pytest.mark.parametrize("nbytes", [1, 1000, 64 << 10, (1 << 20) + 1, 5_000_001])
@pytest.mark.parametrize("piece", [0, 4096])
async def test_a_body_arrives_whole(way, nbytes, piece):
    """Whatever its size, and in however many pieces it lies."""
    if piece and nbytes < piece:
        pytest.skip("one piece")
    async with staged(Memory(nbytes, piece)) as stage, Peer(stage.port) as peer:
        answer = await peer.ask("/")
        assert len(answer.body) == nbytes
        assert only_old(answer.body)
        await settle(lambda: stage.outcome is Outcome.SENT)


async def test_small_pieces_are_not_asked_for_again_and_again(way):
    """The work grows with the number of pieces, not with its square."""
    asked = []

    class Counting(Memory):
        def views(self, start: int, stop: int) -> list[memoryview]:
            asked.append(stop - start)
            return super().views(start, stop)

    body = Counting(800_000, piece=16)
    async with staged(body) as stage, Peer(stage.port) as peer:
        assert only_old((await peer.ask("/")).body)
        await settle(lambda: stage.outcome is Outcome.SENT)
    assert sum(asked) < 4 * body.nbytes


async def test_the_connection_is_in_step_afterwards(way):
    """One connection carries body after body."""
    async with staged(Memory(300_000)) as stage, Peer(stage.port) as peer:
        stage.overwrite_at_the_end = False
        for _ in range(20):
            assert only_old((await peer.ask("/")).body)


async def test_bodies_asked_for_at_once_do_not_mix(way):
    """A response waits until the one before it has left the buffers."""
    async with (
        staged(Memory(100_000), send_buffer=4096) as stage,
        Peer(stage.port, receive_buffer=4096) as peer,
    ):
        stage.overwrite_at_the_end = False
        for _ in range(20):
            await peer.request("/")
        for _ in range(20):
            assert only_old((await peer.answer()).body)


async def test_memory_is_free_as_soon_as_the_sending_ends(way):
    """What is written into the memory after the response is not in the response."""
    # The kernel takes little, so much is still to be sent when the last slice, which
    # is so short that a response would not wait for it by itself, is written.
    async with (
        staged(Memory((512 << 10) + 40_000), send_buffer=4096) as stage,
        Peer(stage.port, receive_buffer=4096) as peer,
    ):
        for _ in range(3):
            stage.body.data[:] = bytes([OLD]) * stage.body.nbytes
            answer = await peer.ask("/")
            assert len(answer.body) == stage.body.nbytes
            assert only_old(answer.body)
            await settle(lambda: stage.body.data[0] == NEW)


async def test_memory_is_free_after_an_eviction(way):
    """Nothing that is written after an eviction reaches the evicted peer."""
    async with staged(Memory(64 << 20)) as stage:
        async with Peer(stage.port, receive_buffer=4096) as peer:
            await peer.request("/")
            await peer.head()
            stage.sendings[0].evict()
            stage.sendings[0].evict()
            await settle(lambda: stage.body.data[0] == NEW)
            rest = await peer.read_all()
        assert only_old(rest)
        assert len(rest) < stage.body.nbytes
        assert stage.outcome is Outcome.EVICTED


async def test_memory_is_free_after_a_stall(way):
    """A peer that reads nothing is aborted, and gets none of the new bytes."""
    async with staged(Memory(64 << 20), stall_timeout=0.3) as stage:
        async with Peer(stage.port, receive_buffer=4096) as peer:
            await peer.request("/")
            await peer.head()
            await settle(lambda: stage.body.data[0] == NEW)
            rest = await peer.read_all()
        assert only_old(rest)
        assert len(rest) < stage.body.nbytes
        assert stage.outcome is Outcome.STALLED


async def test_memory_is_free_after_a_cancel(way):
    """A cancelled handler leaves no writer behind, and no half response."""
    async with staged(Memory(64 << 20)) as stage:
        async with Peer(stage.port, receive_buffer=4096) as peer:
            await peer.request("/")
            await peer.head()
            assert stage.tasks[0] is not None
            stage.tasks[0].cancel()
            await settle(lambda: stage.body.data[0] == NEW)
            rest = await peer.read_all()
        assert only_old(rest)
        assert len(rest) < stage.body.nbytes


async def test_an_eviction_before_the_first_byte_sends_nothing(way):
    """Who is evicted while the headers are on their way gets no body."""
    async with staged(Memory(1 << 20)) as stage, Peer(stage.port) as peer:
        stage.on_start = BodySender.evict
        await peer.request("/")
        assert OLD not in await peer.read_all()
        assert stage.outcome is Outcome.EVICTED


async def test_a_peer_that_leaves_is_no_error(way):
    """A lost client is an outcome; nothing is raised or logged."""
    async with staged(Memory(64 << 20)) as stage:
        async with Peer(stage.port, receive_buffer=4096) as peer:
            await peer.request("/")
            await peer.head()
        await settle(lambda: stage.outcome is Outcome.GONE)


async def test_a_slow_peer_is_not_a_stalled_one():
    """Progress is what the peer takes, however little; the total takes as long."""
    async with staged(Memory(6 << 20), stall_timeout=0.4) as stage:
        async with Peer(stage.port, receive_buffer=64 << 10) as peer:
            await peer.request("/")
            head = await peer.head()
            left = int(head.headers["Content-Length"])
            loop = asyncio.get_running_loop()
            slow_until = loop.time() + 2.0
            while loop.time() < slow_until:
                left -= len(await peer.read(32 << 10))
                await asyncio.sleep(0.05)  # what makes it slow
            assert only_old(await peer.read_some(left))
        await settle(lambda: stage.outcome is Outcome.SENT)


async def test_a_blocked_loop_does_not_pass_for_a_stalled_peer():
    """Time in which the watch could see nothing is no stall."""
    async with (
        staged(Memory(16 << 20), stall_timeout=0.4) as stage,
        Peer(stage.port, receive_buffer=4096) as peer,
    ):
        await peer.request("/")
        await peer.head()
        await settle(lambda: stage.sendings[0]._clock.idle > 0)
        time.sleep(0.8)  # noqa: ASYNC251 - what somebody else's code may do
        assert only_old(await peer.read_some(16 << 20))
        await settle(lambda: stage.outcome is Outcome.SENT)


@pytest.mark.allow_error_logs
async def test_memory_that_fails_ends_the_connection(way):
    """A bug in the owner of the memory is an error, never a truncated success."""

    class Broken(Memory):
        def views(self, start: int, stop: int) -> list[memoryview]:
            if start > 1 << 20:
                raise RuntimeError("no memory here")
            return super().views(start, min(stop, start + 100_000))

    async with staged(Broken(4 << 20)) as stage, Peer(stage.port) as peer:
        await peer.request("/")
        head = await peer.head()
        assert head.status == 200
        assert len(await peer.read_all()) < 4 << 20


async def test_the_loop_stays_live_while_a_fast_peer_drains():
    """Other callbacks run between two slices."""
    async with staged(Memory(32 << 20)) as stage, Peer(stage.port) as peer:
        await peer.request("/")
        turns = 0
        reading = asyncio.create_task(peer.answer())
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        assert only_old((await reading).body)
        assert turns >= 16


@pytest.fixture
def tls() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a server and of a client that trusts it."""
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


@proves("threat T7")
async def test_tls_encrypts_every_byte(tls):
    """Where there is TLS, nothing goes around it."""
    server, client = tls
    async with staged(Memory(5_000_001), ssl_context=server) as stage:
        stage.overwrite_at_the_end = False
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", stage.port, ssl=client, limit=1 << 20
        )
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            assert only_old(await reader.readexactly(stage.body.nbytes))
        writer.close()
        await writer.wait_closed()


async def test_a_stalled_tls_peer_is_aborted(tls):
    """TLS changes nothing about patience."""
    server, client = tls
    body = Memory(64 << 20)
    async with staged(body, ssl_context=server, stall_timeout=0.3) as stage:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", stage.port, ssl=client, limit=1024
        )
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # it reads, too
        await settle(lambda: stage.outcome is Outcome.STALLED)
        writer.transport.abort()
        await settle(lambda: body.data[0] == NEW)
