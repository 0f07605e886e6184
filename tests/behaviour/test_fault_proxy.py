"""The fault proxy does to a connection what the fault's name says, and counts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiockpt.testing import (
    Answer,
    BlackHole,
    CutAfter,
    Delay,
    Drip,
    Drop,
    Fault,
    FaultProxy,
    FlipBit,
    Refuse,
    StallAfter,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

SPEECH = bytes(range(256)) * 4


@asynccontextmanager
async def speaker() -> AsyncIterator[int]:
    """Serve a speech to whoever says a word, on a port."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(100):
            writer.write(SPEECH)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def proxied(
    *faults: Fault, otherwise: Fault | None = None
) -> AsyncIterator[FaultProxy]:
    """Give a proxy in front of a speaker."""
    async with (
        speaker() as port,
        FaultProxy("127.0.0.1", port, faults=faults, otherwise=otherwise) as proxy,
    ):
        yield proxy


async def listen_to(proxy: FaultProxy, *, enough: int = len(SPEECH) + 1) -> bytes:
    """Ask for the speech; return what arrives until it ends or is enough."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    heard = b""
    try:
        writer.write(b"speak")
        while len(heard) < enough and (data := await reader.read(100)):
            heard += data
    finally:
        writer.close()
    return heard


async def test_connections_are_counted_and_each_has_its_own_fault() -> None:
    """Faults go by the order of connections; the last word has ``otherwise``."""
    async with proxied(Fault(), CutAfter(1), otherwise=CutAfter(2)) as proxy:
        assert await listen_to(proxy) == SPEECH
        now = proxy.statistics()
        assert now[:1] + now[2:] == (1, len(SPEECH), len(b"speak"))
        assert repr(proxy) == f"<FaultProxy port={proxy.port} connections=1>"
        assert [len(await listen_to(proxy)) for _ in range(3)] == [1, 2, 2]


FLIPPED = bytes([SPEECH[300] ^ 1 << 7])


@pytest.mark.parametrize(
    ("fault", "heard"),
    [
        (CutAfter(0), b""),
        (CutAfter(255), SPEECH[:255]),
        (CutAfter(len(SPEECH)), SPEECH),
        (FlipBit(300, bit=7), SPEECH[:300] + FLIPPED + SPEECH[301:]),
        (Drop(100, 50), SPEECH[:100] + SPEECH[150:]),
        (Answer(b"SSH-2.0-OpenSSH_9.9\r\n"), b"SSH-2.0-OpenSSH_9.9\r\n"),
    ],
    ids=repr,
)
async def test_what_is_heard_and_then_the_end(fault: Fault, heard: bytes) -> None:
    """Every byte that the fault does not name arrives."""
    async with proxied(fault) as proxy:
        assert await listen_to(proxy) == heard


@pytest.mark.parametrize("fault", [CutAfter(10, reset=True), Refuse()], ids=repr)
async def test_a_reset_is_an_error_and_no_end(fault: Fault) -> None:
    """Within the answer, or before anything was read."""
    async with proxied(fault) as proxy:
        with pytest.raises(ConnectionResetError):
            await listen_to(proxy)


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [(Drip(10_000, burst=100), len(SPEECH) / 10_000), (Delay(0.1), 0.1)],
    ids=repr,
)
async def test_what_is_late_takes_its_time(fault: Fault, seconds: float) -> None:
    """A rate of 10 kB/s needs 0.1 s for 1 kB; of what is delayed all comes."""
    async with proxied(fault) as proxy:
        start = asyncio.get_running_loop().time()
        assert await listen_to(proxy) == SPEECH
        assert asyncio.get_running_loop().time() - start >= seconds * 0.9


async def test_stall_leaves_the_connection_open_and_silent() -> None:
    """After the count there is neither a byte nor an end."""
    async with proxied(StallAfter(5)) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"speak")
        assert await reader.readexactly(5) == SPEECH[:5]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read(1)
        assert proxy.statistics().open == 1
        writer.close()


async def test_black_hole_takes_everything_and_gives_nothing() -> None:
    """The server hears nothing; the hole is gone when the client is."""
    async with proxied(BlackHole()) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(bytes(1 << 20))
        await writer.drain()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read(1)
        assert proxy.statistics().bytes_down == 0
        writer.close()
        async with asyncio.timeout(10):
            while proxy.statistics().open:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.001)


async def test_peer_can_go_and_come_back_on_the_same_port() -> None:
    """Nobody else gets the port in between."""
    async with proxied() as proxy:
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await listen_to(proxy)
        with socket.socket() as other:
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", proxy.port))
            await proxy.listen()
            assert await listen_to(proxy) == SPEECH
            await proxy.aclose()
            await proxy.aclose()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", proxy.port))
            other.listen()


async def test_all_connections_can_be_cut_at_once() -> None:
    """Whatever they are doing, every client is reset."""
    async with proxied(StallAfter(5), StallAfter(5)) as proxy:
        pairs = [
            await asyncio.open_connection("127.0.0.1", proxy.port) for _ in range(2)
        ]
        for reader, writer in pairs:
            writer.write(b"speak")
            await reader.readexactly(5)
        await proxy.cut_all()
        for reader, writer in pairs:
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
            writer.close()
        assert proxy.statistics().open == 0


async def test_proxy_without_a_server_resets_its_clients() -> None:
    """A server that is gone is a reset, not a silence."""
    async with FaultProxy("127.0.0.1", 1) as proxy:
        with pytest.raises(ConnectionResetError):
            await listen_to(proxy)
