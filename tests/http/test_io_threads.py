"""Threads move bytes while a peer keeps up, and the loop does where none is free."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from math import inf
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from aiohttp import ClientPayloadError, ClientSession, web

from aiockpt.errors import ClosedError
from aiockpt.http import body_reader, sockets
from aiockpt.http.body_reader import BodySink, read_body
from aiockpt.http.body_writer import BodySender, Outcome
from aiockpt.http.chunk_run import Place
from aiockpt.http.listen import open_sockets
from aiockpt.http.sockets import IO_THREADS, Turn
from aiockpt.runtime.bridge import Bridge
from tests.support.rangepeer import io_threads, noise
from tests.support.runners import running
from tests.support.serving import Peer, settle

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.every_loop,
    pytest.mark.torch_free,
]

MIB = 1 << 20
BODY = noise(8 * MIB)


class Body:
    """Bytes to send, and the threads that asked for them."""

    nbytes = len(BODY)

    def __init__(self) -> None:
        self.threads: list[int] = []

    def views(self, start: int, stop: int) -> list[memoryview]:
        self.threads.append(threading.get_ident())
        return [memoryview(BODY)[start:stop]]


class Endless(Body):
    """As good as."""

    nbytes = 1 << 50

    def views(self, start: int, stop: int) -> list[memoryview]:
        return super().views(0, min(stop - start, len(BODY)))


class Service:
    """Answers every request with a body of its own."""

    body: type[Body] = Body

    def __init__(self, threads: Bridge) -> None:
        self.threads = threads
        self.bodies: list[Body] = []
        self.sendings: list[BodySender] = []
        self.port = 0
        self.task: asyncio.Task[object] | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body, length = self.body(), {"Content-Length": str(self.body.nbytes)}
        response = web.StreamResponse(headers=length)
        assert request.transport is not None
        sending = BodySender(
            request.transport,
            body.nbytes,
            body.views,
            stall_timeout=30,
            threads=self.threads,
        )
        self.bodies.append(body)
        self.sendings.append(sending)
        self.task = asyncio.current_task()
        await sending.run(request, response)
        return response


@asynccontextmanager
async def serving() -> AsyncIterator[Service]:
    """Serve on loopback."""
    with io_threads() as threads:
        service, app = Service(threads), web.Application()
        app.router.add_get("/", service.handle)
        async with running(app) as service.port:
            yield service


async def get(
    session: ClientSession, port: int, fill: BodySink, threads: Bridge
) -> None:
    """Receive what is answered."""
    url = f"http://127.0.0.1:{port}/"
    async with session.get(url, read_bufsize=MIB) as answer:
        await read_body(answer, fill, threads)


class TestIdleClock:
    """Time without progress, which the loop's own delays do not add to."""

    @pytest.mark.parametrize("timeout", [0.1, 1.0, 3.0, 10.0])
    async def test_a_stall_is_found_half_a_second_late_at_most(
        self, timeout: float
    ) -> None:
        """Also right after some progress."""
        clock, now = sockets.IdleClock(timeout, 0.0), 0.0
        for progress in (1, 2, 3):
            now += clock.period
            assert not clock.has_stalled(progress, now)
        began = now
        while not clock.has_stalled(3, now):
            now += clock.period
        assert timeout - 1e-9 <= now - began <= timeout + 0.5
        assert clock.idle == pytest.approx(now - began)

    async def test_a_late_look_counts_as_two_periods(self) -> None:
        """Whoever blocks the loop does not make a peer look stalled."""
        clock = sockets.IdleClock(8.0, 0.0)
        assert not clock.has_stalled(0, 1000.0)
        assert clock.idle == 2 * clock.period == 0.5

    async def test_an_allowance_counts_before_the_first_progress_only(self) -> None:
        """It is the time that an answer may take."""
        period = 1 / 8
        clock = sockets.IdleClock(1.0, 0.0, allowance=period)
        looks = [clock.has_stalled(0, period * n) for n in range(1, 10)]
        assert looks == [False] * 8 + [True]
        assert not clock.has_stalled(1, 2.0)
        looks = [clock.has_stalled(1, 2.0 + period * n) for n in range(1, 9)]
        assert looks == [False] * 7 + [True]


class TestIOThreads:
    """A bounded number of threads, each for a bounded time."""

    async def test_work_is_done_in_a_thread_and_what_comes_of_it_comes_back(
        self,
    ) -> None:
        """Errors, too."""
        with io_threads() as threads:
            ident = await threads.run(threading.get_ident)
            assert ident != threading.get_ident()
            with pytest.raises(ZeroDivisionError):
                await threads.run(lambda: 1 // 0)
            assert threads.free

    async def test_none_is_free_while_all_are_at_work(self) -> None:
        """Nor once it is closed, which waits for nobody."""
        go = threading.Event()
        threads, turns_taken = Bridge(threads=IO_THREADS, name="test-pump"), 0
        works = []
        while threads.free:
            works.append(asyncio.create_task(threads.run(go.wait)))
            turns_taken += 1
            await asyncio.sleep(0)
        assert 2 <= turns_taken <= 8
        threads.close(wait=False)
        go.set()
        assert all(await asyncio.gather(*works))
        assert not threads.free
        with pytest.raises(ClosedError):
            await threads.run(go.wait)

    async def test_a_turn_ends_and_a_silent_peer_is_not_waited_for(self) -> None:
        """But for a moment, which ends as soon as the peer does something."""
        one, other = socket.socketpair()
        with closing(one), closing(other):
            turn = Turn()
            assert not turn.over
            assert not turn.wait(one, select.POLLIN)
            other.send(b"x")
            assert turn.wait(one, select.POLLIN)
            deadline = time.monotonic() + 30
            while not turn.over:
                assert time.monotonic() < deadline
                time.sleep(0.001)  # noqa: ASYNC251 - as in a thread

    async def test_a_cancel_ends_a_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also one from outside of a scope, and one after another that was survived."""
        monkeypatch.setattr(sockets, "_TURN", inf)
        begun = threading.Event()

        def work(turn: Turn) -> None:
            begun.set()
            while not turn.over:
                time.sleep(0.001)

        async def survive(threads: Bridge) -> None:
            with suppress(asyncio.CancelledError):
                await threads.run(work, Turn())
            again.set()
            await threads.run(work, Turn())

        again = asyncio.Event()
        with io_threads() as threads:
            task = asyncio.create_task(survive(threads))
            assert await asyncio.to_thread(begun.wait, 30)
            begun.clear()
            task.cancel()
            await again.wait()
            assert await asyncio.to_thread(begun.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with anyio.move_on_after(0.05) as scope:
                await threads.run(work, Turn())
            assert scope.cancelled_caught
            assert threads.free


class TestReceiving:
    """A thread digests and receives; the loop takes note."""

    async def test_a_thread_receives_most_and_the_loop_is_told(self) -> None:
        """What is told happens on the loop, after the thread's turn."""
        memory, seen, told = bytearray(len(BODY)), list[int](), list[tuple[int, int]]()

        class Witness:
            def take(self, data: memoryview) -> bool:
                seen.append(threading.get_ident())
                return True

            def placed(self) -> None:
                pass

            def note(self) -> None:
                told.append((threading.get_ident(), fill.filled))

            def place(self) -> Place:
                return Place(None, 0, 0)

        def buffers(start: int, stop: int) -> list[memoryview]:
            return [memoryview(memory)[start:stop]]

        fill = BodySink(buffers, 0, len(BODY), Witness())  # type: ignore[arg-type]
        with io_threads() as threads:
            async with serving() as service, ClientSession() as session:
                await get(session, service.port, fill, threads)
        assert memory == BODY
        assert set(seen) - {threading.get_ident()}
        assert {ident for ident, _ in told} == {threading.get_ident()}
        assert told[-1][1] == len(BODY)

    async def test_more_connections_than_threads_are_received_by_the_loop(
        self,
    ) -> None:
        """None waits for the turn of another."""
        count = 12
        memories = [bytearray(len(BODY)) for _ in range(count)]
        with io_threads() as threads:
            free, run = list[bool](), threads.run

            async def noted(*call: Any) -> None:
                free.append(threads.free)
                await run(*call)

            threads.run = noted  # type: ignore[assignment, method-assign]

            def filling(memory: bytearray) -> BodySink:
                return BodySink(lambda a, b: [memoryview(memory)[a:b]], 0, len(BODY))

            fills = [filling(memory) for memory in memories]
            async with serving() as service, ClientSession() as session:
                gets = [get(session, service.port, fill, threads) for fill in fills]
                await asyncio.gather(*gets)
        assert all(memory == BODY for memory in memories)
        assert all(free)

    async def test_a_cancelled_receive_does_not_go_on_to_the_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However fast the peer is, and however long a turn may take."""
        monkeypatch.setattr(sockets, "_TURN", inf)
        body = 1 << 50
        memory = bytearray(8 * MIB)

        async def answer(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % body)
            with suppress(ConnectionError):
                while True:
                    writer.write(BODY)
                    await writer.drain()
            writer.close()
            gone.set()

        def again(start: int, stop: int) -> list[memoryview]:
            return [memoryview(memory)[: stop - start]]

        gone = asyncio.Event()
        fill = BodySink(again, 0, body)
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        with io_threads() as threads:
            async with server, ClientSession() as session:
                port = server.sockets[0].getsockname()[1]
                task = asyncio.create_task(get(session, port, fill, threads))
                await settle(lambda: fill.filled > 4 * len(BODY))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await gone.wait()
            assert threads.free

    async def test_a_run_that_fails_ends_the_receive(self) -> None:
        """With its own error, whether a thread or the loop receives."""

        class Failing:
            noted = 0

            def take(self, data: memoryview) -> bool:
                return True

            def placed(self) -> None:
                pass

            def note(self) -> None:
                self.noted += 1
                if self.noted == 2:
                    raise ZeroDivisionError

            def place(self) -> Place:
                return Place(None, 0, 0)

        memory = bytearray(len(BODY))
        fill = BodySink(
            lambda a, b: [memoryview(memory)[a:b]],
            0,
            len(BODY),
            Failing(),  # type: ignore[arg-type]
        )
        with io_threads() as threads:
            async with serving() as service, ClientSession() as session:
                with pytest.raises(ZeroDivisionError):
                    await get(session, service.port, fill, threads)

    async def test_several_buffers_are_received_into_at_once(self) -> None:
        """None of them is small; small ones share a scratch."""
        sizes = [100_000, 64 << 10, 70_000, 10, 10, 200_000]
        memories = [bytearray(size) for size in sizes]
        total, source = sum(sizes), noise(sum(sizes))
        fill = BodySink(
            lambda *_: [memoryview(memory) for memory in memories], 0, total
        )
        assert [*map(len, fill.next_buffers())] == sizes[:3]
        at = 0
        while fill.remaining:
            count = 0
            for room in fill.next_buffers():
                piece = source[at + count : at + count + min(len(room), 150_000)]
                room[: len(piece)] = piece
                count += len(piece)
            fill.advance(count)
            at += count
        fill.close()
        assert b"".join(memories) == source

    async def test_where_a_descriptor_is_short_the_loop_receives(
        self, monkeypatch
    ) -> None:
        """Receiving needs none beside that of the connection."""
        monkeypatch.setattr(body_reader, "duplicate", lambda _: None)
        memory = bytearray(len(BODY))
        fill = BodySink(lambda a, b: [memoryview(memory)[a:b]], 0, len(BODY))
        with io_threads() as threads:
            async with serving() as service, ClientSession() as session:
                await get(session, service.port, fill, threads)
        assert memory == BODY

    @pytest.mark.parametrize("pause", [0.002, 0.015, 0.06])
    async def test_a_peer_that_trickles_is_waited_for(self, pause: float) -> None:
        """By a thread for a moment, and then by the loop."""
        pieces = [BODY[at : at + 700_000] for at in range(0, len(BODY), 700_000)]

        async def answer(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8388608\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
            writer.close()
            await writer.wait_closed()
            closed.set()

        memory = bytearray(len(BODY))
        fill = BodySink(lambda a, b: [memoryview(memory)[a:b]], 0, len(BODY))
        closed = asyncio.Event()
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        with io_threads() as threads:
            async with server, ClientSession() as session:
                port = server.sockets[0].getsockname()[1]
                await get(session, port, fill, threads)
                await closed.wait()
        assert memory == BODY


class TestSending:
    """A thread sends while the peer reads."""

    async def test_a_thread_sends_most(self) -> None:
        """It asks for the memory itself."""
        async with serving() as service, Peer(service.port) as peer:
            assert (await peer.ask("/")).body == BODY
            (body,) = service.bodies
            await settle(lambda: service.sendings[0].outcome is Outcome.SENT)
        assert set(body.threads) - {threading.get_ident()}

    async def test_a_cancelled_sending_does_not_go_on_to_the_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However fast the peer reads, and however long a turn may take."""
        monkeypatch.setattr(sockets, "_TURN", inf)
        async with serving() as service, ClientSession() as session:
            service.body = Endless
            async with session.get(f"http://127.0.0.1:{service.port}/") as answer:

                async def read_on() -> None:
                    async for _ in answer.content.iter_any():
                        if service.sendings[0].sent > 4 * len(BODY):
                            assert service.task is not None
                            service.task.cancel()

                with pytest.raises(ClientPayloadError):
                    await read_on()
            assert service.sendings[0].outcome is Outcome.GONE
            assert service.threads.free

    async def test_an_evicted_sending_ends_though_its_peer_keeps_up(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its memory is wanted, however long a turn may take."""
        monkeypatch.setattr(sockets, "_TURN", inf)

        def read_on(port: int) -> None:
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", port)) as peer,
            ):
                peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                while peer.recv(MIB):
                    pass

        async with serving() as service:
            service.body = Endless
            reader = threading.Thread(target=read_on, args=(service.port,))
            reader.start()
            await settle(
                lambda: service.sendings and service.sendings[0].sent > 4 * MIB
            )
            service.sendings[0].evict()
            await settle(lambda: not reader.is_alive())
            assert service.sendings[0].outcome is Outcome.EVICTED

    async def test_peers_that_do_not_read_keep_no_thread_from_others(self) -> None:
        """However many there are."""
        async with serving() as service, AsyncExitStack() as stack:
            for _ in range(12):
                slow = Peer(service.port, receive_buffer=4096)
                await stack.enter_async_context(slow)
                await slow.request("/")
                await slow.head()
            async with Peer(service.port) as fast:
                for _ in range(3):
                    assert (await fast.ask("/")).body == BODY
            threads = {ident for body in service.bodies[12:] for ident in body.threads}
            assert threads - {threading.get_ident()}
            for sending in service.sendings:
                sending.evict()

    async def test_where_no_thread_may_begin_the_loop_sends(self) -> None:
        """A service that closes its threads first still ends what it sends."""
        async with serving() as service, Peer(service.port) as peer:
            service.threads.close()
            assert (await peer.ask("/")).body == BODY
            assert set(service.bodies[0].threads) == {threading.get_ident()}


def congestion_control(sock: socket.socket) -> bytes:
    """Return the name."""
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0")


def transport_over(sock: socket.socket, peer: str) -> Any:
    """Return as much of a transport as is looked at; its peer has that address."""
    known = {"socket": sock, "peername": (peer, 1), "sockname": ("127.0.0.1", 2)}
    return SimpleNamespace(is_closing=lambda: False, get_extra_info=known.get)


@pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"), reason="this system offers no choice"
)
class TestCongestionControl:
    """Who begins with BBR is paced for ever; so nobody does who need not."""

    @pytest.fixture
    def accepted(self):
        """Give a connection that a socket of ours has accepted."""
        (listening,) = open_sockets("127.0.0.1", 0)
        address = listening.getsockname()
        with closing(listening), socket.create_connection(address) as peer:
            sock, _ = listening.accept()
            with closing(sock), closing(peer):
                yield sock

    async def test_a_connection_begins_with_the_classic_one(self, accepted) -> None:
        """Before it is known where the peer is."""
        assert congestion_control(accepted) == b"reno"
        transport = transport_over(accepted, "127.0.0.1")
        sockets.tune(transport, dead_after=1, began_classic=True)
        assert congestion_control(accepted) == b"reno"

    async def test_a_peer_on_another_host_gets_the_systems(self, accepted) -> None:
        """The classic one is three to fifteen times slower where packets are lost."""
        with socket.socket() as fresh:
            expected = congestion_control(fresh)
        transport = transport_over(accepted, "192.0.2.1")
        sockets.tune(transport, dead_after=1, began_classic=True)
        assert congestion_control(accepted) == expected

    async def test_without_a_descriptor_to_ask_with_it_stays(
        self, accepted, monkeypatch
    ) -> None:
        """A host that is short of them still serves."""

        def refuse(*_: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        transport = transport_over(accepted, "192.0.2.1")
        monkeypatch.setattr(socket, "socket", refuse)
        sockets.tune(transport, dead_after=1, began_classic=True)
        monkeypatch.undo()
        assert congestion_control(accepted) == b"reno"

    async def test_an_applications_own_choice_stays(self, accepted) -> None:
        """Its sockets may listen with reno because it wants that."""
        transport = transport_over(accepted, "192.0.2.1")
        sockets.tune(transport, dead_after=1, began_classic=False)
        assert congestion_control(accepted) == b"reno"
