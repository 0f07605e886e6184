"""Something else answers in the place of the sender, or of the leader of a host."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aiockpt.errors import TransferTimeoutError, TransportError
from aiockpt.testing import Answer, CutAfter, Fault, assert_same
from aiockpt.vllm import HostMirror
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.transports import (
    chunked,
    pair,
    proxied,
    receive,
    through,
    transport,
    weights_of,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(600)]

ANSWERS = [
    b"502 Bad Gateway",
    b"503 Service Unavailable",
    b"503 Later\r\nRetry-After: 30",
    b"504 Gateway Timeout",
]


def saying(answer: bytes) -> Fault:
    """Answer so, whatever is asked."""
    return Answer(b"HTTP/1.1 " + answer + b"\r\nContent-Length: 0\r\n\r\n")


@proves("fault 74")
@pytest.mark.parametrize("when", ["before", "in the middle", "following"])
async def test_a_proxy_answers_for_a_sender_that_is_gone(
    record: Record, when: str
) -> None:
    """It gives no sign of the sender's life; the sender's own answers do."""
    state, limit = chunked(24), record.pick(0.3, 2.0)
    waiting: Awaitable[Any]
    for answer in record.pick(ANSWERS[:1], ANSWERS):
        async with (
            pair(reconnect_timeout=limit, connections=2) as (sender, receiver),
            proxied(sender, otherwise=saying(answer)) as proxy,
        ):
            await sender.send_checkpoint([], 1, state)
            metadata = through(proxy, sender)
            if when == "in the middle":
                proxy.faults = [CutAfter(200_000), CutAfter(200_000)]
            if when == "following":
                waiting = anext(receiver.steps(metadata, reconnect_timeout=limit))
            else:
                waiting = receiver.recv_checkpoint(0, metadata, 1, 300)
            began = time.monotonic()
            with pytest.raises(TransportError, match="answered HTTP"):
                await waiting
            late = time.monotonic() - began - limit
            record.within("beyond the reconnect timeout", late, 3.0)
            proxy.faults, proxy.otherwise = [], Fault()
            assert_same(await receive(sender, receiver), state)
        record.ran()


@asynccontextmanager
async def mirroring(metadata: str, place: Path) -> AsyncIterator[HostMirror]:
    """Run a mirror as another process would."""
    mirror = HostMirror(metadata, place=place)
    task = asyncio.create_task(mirror.run())
    try:
        yield mirror
    finally:
        task.cancel()
        await asyncio.wait([task])


SAID: list[bytes | None] = [None, b"\xff\xfe", b"http://[::1", b"ftp://h/", b"x" * 9999]


@proves("fault 75")
async def test_something_else_has_the_place_of_a_hosts_leader(
    record: Record, tmp_path: Path
) -> None:
    """What waits gets an error or its step, and the next leader is followed."""
    greeter = await asyncio.start_server(_greet, "127.0.0.1", 0)
    port = greeter.sockets[0].getsockname()[1]
    async with greeter, transport() as sender:
        await sender.send_checkpoint([], 1, weights_of(1))
        for number, said in enumerate(record.pick(SAID[:2], SAID)):
            place = tmp_path / str(number)
            async with mirroring(sender.metadata(), place) as mirror:
                await mirror.wait_for(1, 60)
                (name,) = os.listdir(place)
            with (place / name).open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(said or b"http://127.0.0.1:%d/checkpoint/" % port)
                file.flush()
                async with mirroring(sender.metadata(), place) as mirror:
                    began = time.monotonic()
                    with pytest.raises(TransferTimeoutError):
                        await mirror.wait_for(1, 0.5)
                    late = time.monotonic() - began - 0.5
                    record.within("beyond the deadline", late, 0.5)
                    os.unlink(place / name)
                    assert_same(await mirror.wait_for(1, 60), weights_of(1))
            record.ran()


async def _greet(_: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
    await writer.drain()
    writer.close()
