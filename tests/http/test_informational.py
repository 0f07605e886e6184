"""A peer that says for ever that it will answer (HTTP 1xx) is refused at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from socket import create_server, socket

import pytest

import aiockpt
from aiockpt import RemoteProtocolError
from aiockpt.testing import FaultProxy, assert_same
from aiockpt.testing.faults import Fault, Pipe
from transports import pair, proxied, through, transport, weights

pytestmark = pytest.mark.asyncio

CONTINUE = b"HTTP/1.1 102 Processing\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\n" + b"Link: </a>\r\n" * 20 + b"\r\n"


@contextmanager
def flooding(piece: bytes, *, pause: float = 0.0, asked: bool = True) -> Iterator[int]:
    """Send a piece again and again over every connection, from threads; give the port.

    Args:
        piece: What is sent.
        pause: Seconds between two of them.
        asked: Wait for the request first.
    """
    over = threading.Event()
    threads: list[threading.Thread] = []

    def flood(sock: socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(0.2)
            if asked:
                sock.recv(65536)
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    sock.sendall(piece)
                time.sleep(pause)

    def accept() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                sock, _ = server.accept()
                thread = threading.Thread(target=flood, args=(sock,))
                threads.append(thread)
                thread.start()

    with create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            for thread in threads:
                thread.join()


@asynccontextmanager
async def stalls() -> AsyncIterator[list[float]]:
    """Measure for how long the loop stands still."""
    found = [0.0]

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            found[0] = max(found[0], time.monotonic() - before - 0.005)

    task = asyncio.create_task(watch())
    yield found
    task.cancel()


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "unasked"])
@pytest.mark.parametrize("piece", [CONTINUE * 4000, HINTS * 400, CONTINUE])
async def test_a_flood_ends_the_receive_and_leaves_the_loop_alone(
    piece: bytes, asked: bool
) -> None:
    """Long before its deadline, and as the fault of the peer that it is."""
    with flooding(piece, asked=asked) as port:
        async with transport(reconnect_timeout=0, token="t") as receiver:
            url = f"http://127.0.0.1:{port}/checkpoint/"
            async with stalls() as longest:
                since = time.monotonic()
                with pytest.raises(aiockpt.AiockptError) as caught:
                    await receiver.recv_checkpoint(0, url, 1, timeout=5)
                took = time.monotonic() - since
    assert isinstance(caught.value, RemoteProtocolError), caught.value
    assert str(port) in str(caught.value)
    assert took < 3
    assert longest[0] < 0.25, "the loop stood still"


async def test_a_slow_flood_is_no_sign_of_life() -> None:
    """The stall timeout ends it, as it ends silence; the deadline otherwise."""
    with flooding(CONTINUE, pause=0.05) as port:
        async with transport(reconnect_timeout=0, stall_timeout=1) as receiver:
            url = f"http://127.0.0.1:{port}/checkpoint/#t"
            since = time.monotonic()
            with pytest.raises(aiockpt.TransportError):
                await receiver.recv_checkpoint(0, url, 1, timeout=2)
            assert time.monotonic() - since < 4


class Announcing(Fault):
    """Puts informational answers in front of the first answer of a connection."""

    def __init__(self, piece: bytes, size: int) -> None:
        self._piece, self._size = piece, size

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Send them in small pieces, and then what was to be sent."""
        if at == 0:
            for start in range(0, len(self._piece), self._size):
                await pipe.send(self._piece[start : start + self._size])
                await asyncio.sleep(0)
        await pipe.send(data)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("piece", [CONTINUE, CONTINUE * 3 + HINTS, b"\r\n" + CONTINUE])
async def test_a_few_of_them_are_allowed(piece: bytes, size: int) -> None:
    """However they arrive: a proxy may send some, and HTTP allows it."""
    async with pair(num_chunks=2) as (sender, receiver):
        await sender.send_checkpoint([], 1, weights(mib=4))
        proxy: FaultProxy
        async with proxied(sender, otherwise=Announcing(piece, size)) as proxy:
            for _ in range(2):
                got = await receiver.recv_checkpoint(0, through(proxy, sender), 1)
                assert_same(got, weights(mib=4))
