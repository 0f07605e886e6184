"""Threads receive while a peer keeps up, and the loop does where none is free."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import threading
import time
from contextlib import asynccontextmanager, closing, suppress
from math import inf
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from aiohttp import ClientSession

from aiockpt.http import body_reader, sockets
from aiockpt.http.body_reader import BodySink, read_body
from aiockpt.http.chunk_run import Arrived
from aiockpt.http.listen import open_sockets
from aiockpt.http.sockets import Turn
from tests.support.rangepeer import io_threads, noise
from tests.support.servers import settle

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.every_loop,
    pytest.mark.torch_free,
    pytest.mark.usefixtures("no_blocking"),
]

BODY = noise(8 << 20)


class TestIdleClock:
    """Time without progress, to which delays of the loop itself do not add."""

    @pytest.mark.parametrize("timeout", [0.1, 1.0, 3.0, 10.0])
    async def test_a_stall_is_found_half_a_second_late_at_most(self, timeout):
        """A stall is found in time, also right after some progress."""
        clock, now = sockets.IdleClock(timeout, 0.0), 0.0
        for progress in (1, 2, 3):
            now += clock.period
            assert not clock.has_stalled(progress, now)
        began = now
        while not clock.has_stalled(3, now):
            now += clock.period
        assert timeout - 1e-9 <= now - began <= timeout + 0.5
        assert clock.idle == pytest.approx(now - began)

    async def test_a_late_look_counts_as_two_periods(self):
        """Code that blocks the loop does not make a peer look stalled."""
        clock = sockets.IdleClock(8.0, 0.0)
        assert not clock.has_stalled(0, 1000.0)
        assert clock.idle == 2 * clock.period == 0.5

    async def test_an_allowance_counts_before_the_first_progress_only(self):
        """It is the time that an answer may take."""
        period = 1 / 8
        clock = sockets.IdleClock(1.0, 0.0, allowance=period)
        looks = [clock.has_stalled(0, period * n) for n in range(1, 10)]
        assert looks == [False] * 8 + [True]
        assert not clock.has_stalled(1, 2.0)
        looks = [clock.has_stalled(1, 2.0 + period * n) for n in range(1, 9)]
        assert looks == [False] * 7 + [True]


class TestTurns:
    """A bounded number of threads, each for a bounded time."""

    async def test_a_turn_ends_and_a_silent_peer_is_not_waited_for(self, monkeypatch):
        """The thread waits for a moment at most, or until the peer does something."""
        monkeypatch.setattr(sockets, "_MAX_TURN_S", 0.05)
        one, other = socket.socketpair()
        with closing(one), closing(other):
            turn = Turn()
            assert not turn.over
            assert not turn.wait(one, select.POLLIN)
            other.send(b"x")
            assert turn.wait(one, select.POLLIN)
            await settle(lambda: turn.over)

    async def test_a_cancel_ends_a_turn(self, monkeypatch):
        """A second cancel ends it, too, and so does that of a cancel scope."""
        monkeypatch.setattr(sockets, "_MAX_TURN_S", inf)
        begun, again = threading.Event(), asyncio.Event()

        def work(turn):
            begun.set()
            while not turn.over:
                time.sleep(0.001)

        async def survive(threads):
            with suppress(asyncio.CancelledError):
                await threads.run(work, Turn())
            again.set()
            await threads.run(work, Turn())

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


@asynccontextmanager
async def sending(*pieces, pause=0.0, length=0):
    """Answer a request with pieces; with a greater ``length`` again and again."""
    size = sum(map(len, pieces))
    tasks: list[Any] = []

    async def answer(reader, writer):
        tasks.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % (length or size))
        with suppress(ConnectionError):
            for _ in range(max(1, length // size)):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause)
        with suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        await asyncio.wait(tasks)


async def get(url, fill, threads):
    """Receive what is answered."""
    async with (
        ClientSession() as session,
        session.get(url, read_bufsize=1 << 20) as answer,
    ):
        await read_body(answer, fill, threads)


def filling(memory, run=None):
    """Return what receives a body into memory."""

    def buffers(start, stop):
        return [memoryview(memory)[start:stop]]

    return BodySink(buffers, 0, len(BODY), run)


class Witness:
    """A run of chunks that notes the threads in which it is told of them."""

    def __init__(self, fails_at=0):
        self.seen, self.told, self.noted, self._fails_at = set(), set(), 0, fails_at

    def digest(self, data):
        self.seen.add(threading.get_ident())
        return True

    def mark_stored(self):
        """Be told that a part was stored."""

    def verify_stored(self):
        self.told.add(threading.get_ident())
        self.noted += 1
        if self.noted == self._fails_at:
            raise ZeroDivisionError

    def arrived(self):
        return Arrived(None, 0, 0)


class TestReceiving:
    """A thread receives and digests; the loop takes note."""

    async def test_a_thread_receives_most_and_the_loop_is_told(self):
        """The loop is told after each turn, and a failed run ends the receive."""
        here, memory, run = {threading.get_ident()}, bytearray(len(BODY)), Witness()
        with io_threads() as threads:
            async with sending(BODY) as url:
                await get(url, filling(memory, run), threads)
            assert memory == BODY
            assert run.seen - here
            assert run.told == here
            async with sending(BODY) as url:
                with pytest.raises(ZeroDivisionError):
                    await get(url, filling(memory, Witness(fails_at=2)), threads)

    async def test_more_connections_than_threads_are_received_by_the_loop(
        self, monkeypatch
    ):
        """No connection waits for the turn of another."""
        memories, free = [bytearray(len(BODY)) for _ in range(12)], []
        with io_threads() as threads:
            run = threads.run

            async def noted(*call):
                free.append(threads.free)
                await run(*call)

            monkeypatch.setattr(threads, "run", noted)
            async with sending(BODY) as url:
                gets = [get(url, filling(memory), threads) for memory in memories]
                await asyncio.gather(*gets)
        assert all(memory == BODY for memory in memories)
        assert all(free)

    async def test_a_cancelled_receive_does_not_go_on_to_the_end(self, monkeypatch):
        """It ends soon, however fast the peer is."""
        monkeypatch.setattr(sockets, "_MAX_TURN_S", inf)
        memory, endless = bytearray(len(BODY)), 1 << 50

        def again(start, stop):
            return [memoryview(memory)[: stop - start]]

        fill = BodySink(again, 0, endless)
        with io_threads() as threads:
            async with sending(BODY, length=endless) as url:
                task = asyncio.create_task(get(url, fill, threads))
                await settle(lambda: fill.filled > 2 * len(BODY))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert threads.free

    @pytest.mark.parametrize("pause", [0.0, 0.002, 0.015, 0.06])
    async def test_a_peer_that_trickles_is_waited_for(self, pause, monkeypatch):
        """A thread waits for a moment, and then the loop, without a descriptor."""
        if not pause:
            monkeypatch.setattr(body_reader, "duplicate", lambda _: None)
        pieces = [BODY[at : at + 1_100_000] for at in range(0, len(BODY), 1_100_000)]
        memory = bytearray(len(BODY))
        with io_threads() as threads:
            async with sending(*pieces, pause=pause) as url:
                await get(url, filling(memory), threads)
        assert memory == BODY


@pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"), reason="this system offers no choice"
)
class TestCongestionControl:
    """A connection that begins with BBR is paced for ever; none does without need."""

    @pytest.mark.parametrize(
        ("peer", "classic", "short", "expected"),
        [
            ("127.0.0.1", True, False, "reno"),
            ("192.0.2.1", True, False, "the system's"),
            ("192.0.2.1", True, True, "reno"),
            ("192.0.2.1", False, False, "reno"),  # an application's own choice
        ],
    )
    async def test_a_peer_on_another_host_gets_the_systems(
        self, peer, classic, short, expected, monkeypatch
    ):
        """A connection begins with reno, before it is known where the peer is."""

        def chosen(sock):
            name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            return name.rstrip(b"\0").decode()

        def refuse(*_):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with socket.socket() as fresh:
            systems = chosen(fresh)
        (listening,) = open_sockets("127.0.0.1", 0)
        address = listening.getsockname()
        with closing(listening), socket.create_connection(address) as client:
            accepted, _ = listening.accept()
            with closing(accepted), closing(client), monkeypatch.context() as patch:
                assert chosen(accepted) == "reno"
                known = {"socket": accepted, "peername": (peer, 1)}
                known["sockname"] = ("127.0.0.1", 2)
                transport: Any = SimpleNamespace(
                    is_closing=lambda: False, get_extra_info=known.get
                )
                if short:  # of descriptors to ask the system with
                    patch.setattr(socket, "socket", refuse)
                sockets.tune(transport, dead_after=1, began_classic=classic)
                patch.undo()
                assert chosen(accepted) == (systems if "system" in expected else "reno")
