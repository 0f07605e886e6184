"""A state that cannot be sent: its own error at the sender, whoever is not there."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest
import torch

from aiockpt.errors import PeerFailedError, TransferTimeoutError, UnsupportedLeafError
from aiockpt.testing import assert_same
from aiockpt.testing.conformance.transports import sample
from tests.support.groups import Transport, gloo_groups, moved, transports
from tests.support.proofs import proves

pytestmark = pytest.mark.asyncio

BAD: dict[str, Any] = {"layers": [torch.ones(2), object()]}
LIMIT = 20.0
PROMPT = LIMIT / 2


async def refused(
    sender: Transport, ranks: list[int], step: int = 1, timeout: float = LIMIT
) -> UnsupportedLeafError:
    """Send what cannot be sent; return the error."""
    started = time.monotonic()
    with pytest.raises(UnsupportedLeafError) as caught:
        await sender.send_checkpoint(ranks, step, BAD, timeout)
    assert time.monotonic() - started < PROMPT
    return caught.value


async def test_a_receiver_that_is_not_there() -> None:
    """The error comes at once, and the group is well."""
    async with transports(timeout=LIMIT) as (sender, receiver):
        error = await refused(sender, [1])
        assert error.path == "layers[1]"
        assert "broken" not in repr(sender)
        assert_same(await moved(sender, receiver, sample(), step=2), sample())


@proves("cell PGTransport.send_checkpoint: error")
async def test_a_receiver_that_comes_later_for_that_step() -> None:
    """It is told why, and may receive again."""
    async with transports(timeout=LIMIT) as (sender, receiver):
        await refused(sender, [1])
        gc.collect()
        with pytest.raises(PeerFailedError, match=r"UnsupportedLeafError.*layers") as e:
            await receiver.recv_checkpoint(0, "", 1)
        assert e.value.rank == 0
        assert_same(await moved(sender, receiver, sample()), sample())


async def test_a_receiver_that_waits_for_an_earlier_step() -> None:
    """A sender does not go back: that step is not going to come."""
    async with transports(timeout=LIMIT) as (sender, receiver):
        await refused(sender, [1], step=5)
        with pytest.raises(PeerFailedError, match="layers"):
            await receiver.recv_checkpoint(0, "", 4)


async def test_many_that_nobody_has_heard_of() -> None:
    """A receiver that comes for a later step is not bothered with them."""
    async with transports(timeout=LIMIT) as (sender, receiver):
        for step in range(30):
            await refused(sender, [1], step)
        assert_same(await moved(sender, receiver, sample(), step=30), sample())
        assert_same(await moved(sender, receiver, sample(1), step=31), sample(1))


async def test_only_some_receivers_are_there() -> None:
    """They do not wait for their deadlines either."""
    async with transports(3, timeout=LIMIT) as (sender, first, second):
        receiving = asyncio.create_task(first.recv_checkpoint(0, "", 1))
        await asyncio.sleep(0.05)
        await refused(sender, [1, 2])
        async with asyncio.timeout(PROMPT):
            with pytest.raises(PeerFailedError, match="layers"):
                await receiving
        sending = sender.send_checkpoint([1, 2], 2, sample())
        got = await asyncio.gather(
            first.recv_checkpoint(0, "", 2), second.recv_checkpoint(0, "", 2), sending
        )
        assert_same(got[:2], [sample(), sample()])


async def test_a_transport_that_is_gone() -> None:
    """Its word to a receiver outlives it, with the group."""
    sending, receiving = await gloo_groups(2)
    async with Transport(sending, timeout=LIMIT) as sender:
        await refused(sender, [1])
    del sender
    gc.collect()
    async with (
        Transport(sending, timeout=LIMIT) as sender,
        Transport(receiving, timeout=LIMIT) as receiver,
    ):
        with pytest.raises(PeerFailedError, match="layers"):
            await receiver.recv_checkpoint(0, "", 1)
        assert_same(await moved(sender, receiver, sample()), sample())


@pytest.mark.allow_leaks("threads", "fds")  # a send that has timed out
async def test_behind_a_send_that_waits() -> None:
    """The deadline ends the wait for the turn; the error is that of the state."""
    async with transports(timeout=LIMIT) as (sender, _):
        waiting = asyncio.create_task(sender.send_checkpoint([1], 1, sample(), 1.5))
        await asyncio.sleep(0.3)
        error = await refused(sender, [1], 2, timeout=0.3)
        assert "could not be told" in "".join(error.__notes__)
        with pytest.raises(TransferTimeoutError):
            await waiting


async def test_the_own_rank_is_refused() -> None:
    """A process cannot be at both ends; it would wait for itself."""
    async with transports(timeout=LIMIT) as (first, second):
        for transport, rank in ((first, 0), (second, 1)):
            with pytest.raises(ValueError, match=f"^{rank} is this process's own rank"):
                await transport.send_checkpoint([rank], 1, sample())
            with pytest.raises(ValueError, match=f"^{rank} is this process's own rank"):
                await transport.recv_checkpoint(rank, "", 1)
        assert_same(await moved(first, second, sample()), sample())
