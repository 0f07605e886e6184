"""What is promised about a body's memory and its peer, on every way of sending."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from math import inf

import pytest
from aiohttp import web

from aiockpt.http import body_writer, sockets
from aiockpt.http.body_writer import BodySender, Outcome
from aiockpt.runtime.bridge import Bridge
from tests.support.proofs import proves
from tests.support.rangepeer import io_threads
from tests.support.servers import Peer, certified, running, settle

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.every_loop,
    pytest.mark.torch_free,
    pytest.mark.usefixtures("no_blocking"),
]

OLD, NEW = 0xAA, 0x55
LARGE = 12 << 20  # more than the kernel takes for a peer that does not read


class Body:
    """A body in memory that its owner overwrites as soon as it believes it may."""

    def __init__(self, nbytes: int, piece: int = 0, repeat: int = 1) -> None:
        self.data = bytearray([OLD]) * nbytes
        self.nbytes = nbytes * repeat
        self.asked = 0
        self.threads: set[int] = set()
        self._piece = piece or nbytes

    def views(self, start: int, stop: int) -> list[memoryview]:
        self.asked += stop - start
        self.threads.add(threading.get_ident())
        if self.nbytes > len(self.data):
            start, stop = 0, min(stop - start, len(self.data))
        cuts = [*range(start, stop, self._piece), stop]
        return [memoryview(self.data)[a:b] for a, b in itertools.pairwise(cuts)]

    @property
    def overwritten(self) -> bool:
        return self.data[0] == NEW

    @property
    def elsewhere(self) -> bool:
        """Whether another thread than the loop's has sent of it."""
        return bool(self.threads - {threading.get_ident()})


class Stage:
    """A server whose every response is the body, sent the way under test."""

    threads: Bridge | None = None

    def __init__(self, body: Body, stall_timeout: float, overwrites: bool) -> None:
        self.body, self.overwrites = body, overwrites
        self.stall_timeout = stall_timeout
        self.port = 0
        self.sendings: list[BodySender] = []
        self.tasks: list[asyncio.Task | None] = []
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
            if self.overwrites:
                self.body.data[:] = bytes([NEW]) * len(self.body.data)
        return response

    @property
    def outcome(self) -> Outcome | None:
        return self.sendings[-1].outcome if self.sendings else None

    @property
    def sent(self) -> int:
        return self.sendings[-1].sent if self.sendings else 0

    def cancel(self) -> None:
        assert self.tasks[-1] is not None
        self.tasks[-1].cancel()


@pytest.fixture
def threads(monkeypatch):
    """Send with threads."""
    with io_threads() as made:
        monkeypatch.setattr(Stage, "threads", made)
        yield made


@pytest.fixture(params=["threads", "socket", "portable"])
def way(request, monkeypatch):
    """Send on the socket, with threads or without, or as if there were none."""
    if request.param == "portable":
        monkeypatch.setattr(body_writer, "duplicate", lambda _: None)
    elif request.param == "threads":
        monkeypatch.setattr(body_writer, "MIN_TURN_BYTES", 1)
        request.getfixturevalue("threads")
    return request.param


@asynccontextmanager
async def staged(
    body: Body,
    *,
    stall_timeout: float = 30.0,
    overwrites: bool = True,
    ssl_context: ssl.SSLContext | None = None,
    send_buffer: int = 0,
) -> AsyncIterator[Stage]:
    """Run a server for ``body``."""
    stage, app = Stage(body, stall_timeout, overwrites), web.Application()
    app.router.add_get("/", stage.handle)
    how = running(app, ssl_context=ssl_context, send_buffer=send_buffer)
    async with how as host:
        stage.port = host.port
        yield stage


def only_old(body: bytes) -> bool:
    """Whether nothing that was written later is in it."""
    return body.count(OLD) == len(body)


@pytest.mark.parametrize(
    ("nbytes", "piece"),
    [(1, 0), (1000, 0), (64 << 10, 4096), ((1 << 20) + 1, 0), (5_000_001, 4096),
     (800_000, 16)],
)  # fmt: skip
async def test_a_body_arrives_whole(way, nbytes, piece):
    """A body of any size arrives.

    The work grows with its pieces, not with their square.
    """
    body = Body(nbytes, piece)
    async with staged(body) as stage, Peer(stage.port) as peer:
        answer = await peer.ask("/")
        assert len(answer.body) == nbytes
        assert only_old(answer.body)
        await settle(lambda: stage.outcome is Outcome.SENT)
    assert body.asked < 4 * nbytes


async def test_memory_is_free_as_soon_as_the_sending_ends(way):
    """What is written into the memory after the response is not in the response."""
    # The kernel takes little, so much is still to be sent when the last slice, which
    # is so short that a response would not wait for it by itself, is written.
    async with (
        staged(Body((512 << 10) + 40_000), send_buffer=4096) as stage,
        Peer(stage.port, receive_buffer=4096) as peer,
    ):
        for _ in range(3):
            stage.body.data[:] = bytes([OLD]) * stage.body.nbytes
            answer = await peer.ask("/")
            assert len(answer.body) == stage.body.nbytes
            assert only_old(answer.body)
            await settle(lambda: stage.body.overwritten)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ("evict", Outcome.EVICTED),
        ("stall", Outcome.STALLED),
        ("cancel", Outcome.GONE),
        ("leave", Outcome.GONE),
    ],
)
async def test_memory_is_free_once_a_sending_was_cut(way, end, outcome):
    """The peer gets nothing that is written later; nothing is raised or logged."""
    stall_timeout = 0.2 if end == "stall" else 30.0
    async with staged(Body(LARGE), stall_timeout=stall_timeout) as stage:
        async with Peer(stage.port, receive_buffer=4096) as peer:
            await peer.request("/")
            await peer.head()
            if end == "evict":
                stage.sendings[0].evict()
                stage.sendings[0].evict()
            elif end == "cancel":
                stage.cancel()
            elif end == "leave":
                peer.close()
            await settle(lambda: stage.body.overwritten)
            if end != "leave":
                rest = await peer.read_all()
                assert only_old(rest)
                assert len(rest) < stage.body.nbytes
        assert stage.outcome is outcome


async def test_an_eviction_before_the_first_byte_sends_nothing(way):
    """A peer that is evicted while the headers are on their way gets no body."""
    async with staged(Body(1 << 20)) as stage, Peer(stage.port) as peer:
        stage.on_start = BodySender.evict
        await peer.request("/")
        assert OLD not in await peer.read_all()
        assert stage.outcome is Outcome.EVICTED


async def test_a_slow_peer_is_not_a_stalled_one():
    """Progress is what the peer takes, however little, however long it takes."""
    body = Body(6 << 20)
    async with staged(body, stall_timeout=0.3, send_buffer=4096) as stage:
        async with Peer(stage.port, receive_buffer=64 << 10) as peer:
            await peer.request("/")
            left = int((await peer.head()).headers["Content-Length"])
            for _ in range(25):
                left -= len(await peer.read(32 << 10))
                await asyncio.sleep(0.03)  # what makes it slow
            assert only_old(await peer.read_some(left))
        await settle(lambda: stage.outcome is Outcome.SENT)


@pytest.mark.allow_error_logs
async def test_memory_that_fails_ends_the_connection(way):
    """A bug in the owner of the memory is an error, never a truncated success."""

    class Broken(Body):
        def views(self, start: int, stop: int) -> list[memoryview]:
            if start > 1 << 20:
                raise RuntimeError("no memory here")
            return super().views(start, min(stop, start + 100_000))

    async with staged(Broken(4 << 20)) as stage, Peer(stage.port) as peer:
        await peer.request("/")
        assert (await peer.head()).status == 200
        assert len(await peer.read_all()) < 4 << 20


async def test_the_loop_stays_live_while_a_fast_peer_drains():
    """The loop runs other callbacks between two slices."""
    async with staged(Body(LARGE)) as stage, Peer(stage.port) as peer:
        turns, reading = 0, asyncio.create_task(peer.ask("/"))
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        assert only_old((await reading).body)
        assert turns >= 16


@proves("threat T7")
async def test_tls_encrypts_every_byte(threads):
    """No byte bypasses TLS, and a peer that does not read is aborted."""
    server, client = certified()
    get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    async with staged(Body(5_000_001), ssl_context=server, overwrites=False) as stage:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", stage.port, ssl=client, limit=1 << 20
        )
        for _ in range(2):
            writer.write(get)
            await reader.readuntil(b"\r\n\r\n")
            assert only_old(await reader.readexactly(stage.body.nbytes))
        writer.close()
        await writer.wait_closed()
    async with staged(Body(LARGE), ssl_context=server, stall_timeout=0.2) as stage:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", stage.port, ssl=client, limit=1024
        )
        writer.write(get)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # it reads, too
        await settle(lambda: stage.outcome is Outcome.STALLED)
        writer.transport.abort()
        await settle(lambda: stage.body.overwritten)


class TestThreads:
    """A thread sends while the peer reads."""

    async def test_a_thread_sends_most(self, threads):
        """A thread sends the body; the loop sends it if no thread may begin."""
        body = Body(8 << 20)
        async with staged(body, overwrites=False) as stage, Peer(stage.port) as peer:
            assert only_old((await peer.ask("/")).body)
            assert body.elsewhere
            threads.close(wait=False)
            body.threads.clear()
            assert only_old((await peer.ask("/")).body)
            assert not body.elsewhere

    @pytest.mark.parametrize("end", ["evict", "cancel"])
    async def test_a_sending_ends_though_its_peer_keeps_up(
        self, threads, end, monkeypatch
    ):
        """Its memory is wanted, however long a turn may take."""
        monkeypatch.setattr(sockets, "_MAX_TURN_S", inf)

        def read_on(port: int) -> None:
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", port)) as peer,
            ):
                peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                while peer.recv(1 << 20):
                    pass

        async with staged(Body(8 << 20, repeat=1 << 27)) as stage:
            reader = threading.Thread(target=read_on, args=(stage.port,))
            reader.start()
            await settle(lambda: stage.sent > 8 << 20)
            if end == "evict":
                stage.sendings[0].evict()
            else:
                stage.cancel()
            await settle(lambda: not reader.is_alive())
            evicted = stage.outcome is Outcome.EVICTED
            assert evicted is (end == "evict")
            assert threads.free

    async def test_peers_that_do_not_read_keep_no_thread_from_others(self, threads):
        """Any number of such peers leaves the threads to others."""
        body = Body(8 << 20)
        async with (
            staged(body, overwrites=False) as stage,
            AsyncExitStack() as stack,
        ):
            for _ in range(12):
                slow = Peer(stage.port, receive_buffer=4096)
                await stack.enter_async_context(slow)
                await slow.request("/")
                await slow.head()
            body.threads.clear()
            async with Peer(stage.port) as fast:
                for _ in range(3):
                    assert only_old((await fast.ask("/")).body)
            assert body.elsewhere
            for sending in stage.sendings:
                sending.evict()
