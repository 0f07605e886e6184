"""The sender's memory is staged into again as soon as its readers have their copies."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.support.proofs import proves
from tests.support.serving import Peer, settle
from tests.support.transports import Transport, transport, weights

pytestmark = pytest.mark.asyncio

NBYTES = 4 << 20  # a thread sends a body of this size
LATE = 128 << 10  # bytes that are read late: kernels buffer much more, but not alike
STEPS = 6
VERIFIES = {"Aiockpt-Verifies": "chunks"}  # earlier versions sent pages to who said so


@proves("threat T8")
@pytest.mark.parametrize("fields", [{}, VERIFIES], ids=["curl", "verifies"])
async def test_what_a_slow_local_reader_was_sent_never_changes(
    fields: dict[str, str],
) -> None:
    """It reads late, when others have been staged into the same memory."""
    async with transport(stall_timeout=60) as sender:
        await sender.send_checkpoint([1], 0, filled(1.0))
        memory = [arena_of(sender)]
        async with reader_of(sender) as peer:
            size = len((await peer.ask("/checkpoint/0/metadata")).body)
            await peer.request("/checkpoint/0/full", Range=f"bytes={size}-", **fields)
            await settle(lambda: sender.statistics().readers)
            # The kernel has the rest when the reader has taken some of it.
            read = await first_of(peer, sender)
            for step in range(1, STEPS):
                await sender.send_checkpoint([1], step, filled(1.0 + step))
                memory.append(arena_of(sender))
            read += await peer.read_some(NBYTES - len(read))
    body = torch.frombuffer(bytearray(read), dtype=torch.float32)
    assert torch.equal(body, filled(1.0)["w0"])
    assert len({id(arena) for arena in memory}) <= 2, "memory was not used again"


async def first_of(peer: Peer, sender: Transport) -> bytes:
    """Read slowly, until the sender has handed over the rest to the kernel."""
    await peer.head()
    read = b""
    while sender.statistics().readers:
        assert len(read) < NBYTES - LATE, "the sender still has some"
        read += await peer.read(64 << 10)
        await asyncio.sleep(0.02)
    return read


def reader_of(sender: Transport) -> Peer:
    """Return a connection that reads when it is told to."""
    url, token = urlsplit(sender.address()), urlsplit(sender.metadata()).fragment
    assert url.port is not None
    return Peer(url.port, token=token)


def filled(fill: float) -> dict[str, Any]:
    """Return one tensor of a number."""
    return weights(fill, mib=NBYTES >> 20)


def arena_of(sender: Transport) -> Any:
    """Return the memory of what is offered."""
    return sender._offered.arena  # type: ignore[union-attr]
