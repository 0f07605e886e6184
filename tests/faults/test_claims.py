"""Peers that claim gigabytes, or that an answer is coming, and send neither."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import NoReturn

import pytest

import aiockpt
from aiockpt.format.header import build_manifest
from aiockpt.testing import assert_same
from tests.support.headers import entries_of
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.shortages import exhausted_fds
from tests.support.transports import MIB, pair, receive, weights

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc tells"),
]

CLAIMED = 4 << 30
CHUNK = 16 * MIB
ALLOWED = 150  # MiB

RECEIVES = """
import asyncio, sys, torch
from pathlib import Path
from aiockpt import HTTPTransport, Limits, TransportError, Server, Receive

def resident(field):
    text = Path("/proc/self/status").read_text()
    return int(text.partition(field + ":")[2].split()[0]) << 10

async def main():
    limits = Limits(max_bytes=8 << 30)
    async with HTTPTransport(
        stall_timeout=5,
        server=Server(host="127.0.0.1"),
        receive=Receive(reconnect_timeout=0, limits=limits),
    ) as receiver:
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        try:
            await receiver.recv_checkpoint(0, sys.argv[1], 1, timeout=2)
        except TransportError as error:
            print(type(error).__name__, file=sys.stderr)
    print(resident("VmHWM") - before)

asyncio.run(main())
"""


def manifest() -> bytes:
    """Return the header of a checkpoint that nobody has."""
    made = build_manifest(
        step=1,
        chunk_bytes=CHUNK,
        entries=entries_of(("w", "U8", (CLAIMED,), CLAIMED)),
        views=[],
        tree=["tensors", ["w"], [0]],
        digests=["0" * 32] * (CLAIMED // CHUNK),
    )
    return bytes(made.header)


@asynccontextmanager
async def claiming(sends: int | None) -> AsyncIterator[str]:
    """Serve a manifest; of a range the head and so many bytes (None: nothing)."""
    header = manifest()
    total = len(header) + CLAIMED

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, RuntimeError):
            while request := await reader.readuntil(b"\r\n\r\n"):
                first, *_ = request.split(b"\r\n")
                if b"metadata" in first:
                    head = f"Content-Length: {len(header)}\r\nAiockpt-Step: 1\r\n\r\n"
                    writer.write(b"HTTP/1.1 200 OK\r\n" + head.encode() + header)
                elif sends is not None:
                    asked = request.partition(b"bytes=")[2].split(b"\r\n")[0].decode()
                    start, stop = map(int, asked.split("-"))
                    writer.write(
                        b"HTTP/1.1 206 Partial Content\r\n"
                        + f"Content-Length: {stop + 1 - start}\r\n"
                        f"Content-Range: bytes {start}-{stop}/{total}\r\n\r\n".encode()
                        + bytes(sends)
                    )
                await writer.drain()
            await reader.read()
        with suppress(RuntimeError):  # uvloop's, where the client has left
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/checkpoint/"
    finally:
        server.close()
        await server.wait_closed()


@proves("threat D3")
@proves("fault 49")
@pytest.mark.parametrize("sends", [None, 0, MIB], ids=["nothing", "heads", "a MiB"])
async def test_a_claim_of_gigabytes_takes_no_memory(
    record: Record, sends: int | None
) -> None:
    """Nothing is allocated, whether or not the first bytes come."""
    async with claiming(sends) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RECEIVES, url),
            stdout=PIPE,
            stderr=PIPE,
        )
        try:
            async with asyncio.timeout(60):
                said, complaint = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
    assert complaint.split() == [b"TransferTimeoutError"], complaint.decode()
    record.within("memory", int(said) / MIB, ALLOWED, unit=" MiB", slack=1)
    record.ran()


@proves("threat D5")
@proves("fault 51")
@pytest.mark.parametrize("short", ["threads", "descriptors"])
async def test_a_host_that_is_short_is_named(
    record: Record, short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error blames the host, not the peer, and the next receive succeeds."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    async with pair(state=weights(), reconnect_timeout=20) as (sender, receiver):
        since = time.monotonic()
        with ExitStack() as stack:
            caught = stack.enter_context(pytest.raises(aiockpt.errors.StagingError))
            if short == "descriptors":
                stack.enter_context(exhausted_fds(left=0))
            else:
                patch = stack.enter_context(monkeypatch.context())
                patch.setattr(threading, "_start_new_thread", refuse)
            await receive(sender, receiver, into=weights(0.0))
        record.within("to the error", time.monotonic() - since, 0.5)
        assert "ulimit -" in str(caught.value)
        assert_same(await receive(sender, receiver), weights())
        record.ran()
