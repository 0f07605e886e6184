"""What receivers and forked children learn of a sender that fails, or ends."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiockpt.errors import PeerFailedError, TransferTimeoutError, UnsupportedLeafError
from aiockpt.testing import assert_same
from tests.support.serving import Peer, settle
from tests.support.transports import (
    Transport,
    pair,
    port_of,
    receive,
    transport,
    weights,
)

pytestmark = pytest.mark.asyncio


async def failed(sender: Transport, step: int = 1) -> None:
    """Send what cannot travel."""
    with pytest.raises(UnsupportedLeafError):
        await sender.send_checkpoint([1], step, {"bad": object()})


async def test_a_receiver_that_waits_is_told_why_nothing_comes() -> None:
    """At once, and with the path of the leaf; then it may be sent all the same."""
    async with pair() as (sender, receiver):
        waiting = asyncio.ensure_future(receive(sender, receiver, timeout=60))
        await settle(lambda: sender.statistics().waiting > 0)
        await failed(sender)
        with pytest.raises(PeerFailedError, match="bad is a object"):
            await waiting
        await sender.send_checkpoint([1], 1, weights())
        assert_same(await receive(sender, receiver), weights())


async def test_it_is_told_of_a_send_that_had_no_time() -> None:
    """However early that ended."""
    async with pair() as (sender, receiver):
        waiting = asyncio.ensure_future(receive(sender, receiver, timeout=60))
        await settle(lambda: sender.statistics().waiting > 0)
        with pytest.raises(TransferTimeoutError):
            await sender.send_checkpoint([1], 1, weights(), timeout=0)
        with pytest.raises(PeerFailedError, match="timed out after 0 s"):
            await waiting


async def test_what_was_offered_is_still_received() -> None:
    """A send that fails changes nothing for those who ask for another step."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, weights())
        await failed(sender, step=2)
        assert_same(await receive(sender, receiver), weights())


@contextmanager
def child() -> Iterator[None]:
    """Fork a child, which lives until the end of the block."""
    ready, done = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        os.write(ready[1], b"!")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        yield
    finally:
        os.write(done[1], b"!")
        os.waitpid(pid, 0)
        for end in (*ready, *done):
            os.close(end)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads
async def test_a_forked_child_does_not_keep_a_serving_port() -> None:
    """A peer that comes when the parent has gone is refused at once."""
    async with transport() as sender:
        await sender.send_checkpoint([1], 1, weights())
        port = port_of(sender)
        with child():
            await sender.shutdown()
            with socket.socket() as peer:
                assert peer.connect_ex(("127.0.0.1", port))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads
async def test_a_fork_does_not_disturb_the_parent() -> None:
    """Its connections stay, and carry the next receive."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, weights())
        assert_same(await receive(sender, receiver), weights())
        with child():
            await sender.send_checkpoint([1], 2, weights(2.0))
            assert_same(await receive(sender, receiver, 2), weights(2.0))


async def test_a_request_that_is_repeated_gets_the_same_answer() -> None:
    """The first answer may have been lost on its way; and it is counted once."""
    async with transport() as sender:
        with pytest.raises(UnsupportedLeafError):
            await sender.send_checkpoint([1, 2], 1, {"bad": object()})
        token = sender.metadata().partition("#")[2]
        async with Peer(port_of(sender), token=token) as peer:

            async def ask(lease: str) -> int:
                headers = {"Prefer": "wait=0", "Aiockpt-Lease": f"{lease}; ttl=9"}
                answer = await peer.ask("/checkpoint/1/metadata", **headers)
                return answer.status

            first, second, third = (digit * 32 for digit in "123")
            assert [await ask(first) for _ in range(3)] == [424] * 3
            assert await ask(second) == 424
            assert await ask(third) == 404
            assert await ask(first) == 424
