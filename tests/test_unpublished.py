"""A step that is still being staged is not there yet, for any kind of receiver."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiockpt import StepNotFoundError
from aiockpt.errors import PeerFailedError, StagingError
from aiockpt.format.header import decode_header
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.testing import assert_same
from tests.support.holding import Copies
from tests.support.serving import Peer, settle
from tests.support.transports import MIB, Transport, pair, port_of, receive, transport

pytestmark = pytest.mark.asyncio


def state() -> dict[str, Any]:
    """Return a state dict of 16 chunks, every element another one."""
    return {"w": torch.arange(MIB // 8, dtype=torch.float64)}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Return what stops each staging after 10 of the 16 chunks."""
    made = Copies(monkeypatch, after=MIB * 10 // 16)
    yield made
    made.go()


def sending(sender: Transport) -> asyncio.Task[None]:
    """Start to send step 1."""
    return asyncio.create_task(sender.send_checkpoint([1], 1, state()))


async def test_a_plain_request_finds_nothing_until_it_is_published(
    copies: Copies,
) -> None:
    """Also one that names the header of a draft that let receivers read earlier."""
    async with transport() as sender:
        async with Peer(port_of(sender), token=sender._credentials.token) as peer:
            send = sending(sender)
            await settle(lambda: copies.waiting)
            for what in ("metadata", "full", "0"):
                answer = await peer.ask(
                    f"/checkpoint/1/{what}",
                    Prefer="wait=0",
                    **{"Aiockpt-Unsealed": "accept"},
                )
                assert answer.status == 404
            copies.go()
            await send
            answer = await peer.ask(
                "/checkpoint/1/metadata", **{"Aiockpt-Unsealed": "accept"}
            )
        assert answer.status == 200
        assert "Aiockpt-Unsealed" not in answer.headers
        manifest = decode_header(answer.body, limits=Limits())
        assert isinstance(manifest, Manifest)
        assert answer.headers["ETag"] == f'"{manifest.snapshot_id}"'


async def test_a_receiver_gets_no_byte_until_it_is_published(copies: Copies) -> None:
    """It waits, and gets all of it then."""
    async with pair() as (sender, receiver):
        send = sending(sender)
        early = asyncio.create_task(receive(sender, receiver))
        await settle(lambda: copies.waiting and sender.statistics().waiting > 0)
        assert sender.statistics().bytes_sent == 0
        copies.go()
        await send
        assert_same(await early, state())


async def test_a_receiver_that_waits_is_told_of_a_copy_that_fails(
    copies: Copies,
) -> None:
    """At once, with the reason."""
    async with pair() as (sender, receiver):
        send = sending(sender)
        early = asyncio.create_task(receive(sender, receiver))
        await settle(lambda: copies.waiting and sender.statistics().waiting > 0)
        copies.go(OSError("no such device"))
        with pytest.raises(StagingError):
            await send
        with pytest.raises(PeerFailedError, match="no such device"):
            await early


async def test_a_receiver_that_waits_is_told_of_a_send_that_is_cancelled(
    copies: Copies,
) -> None:
    """A send whose deadline passes ends in the same way."""
    async with pair() as (sender, receiver):
        send = sending(sender)
        early = asyncio.create_task(receive(sender, receiver))
        await settle(lambda: copies.waiting and sender.statistics().waiting > 0)
        send.cancel()
        copies.go()
        with pytest.raises(asyncio.CancelledError):
            await send
        with pytest.raises(PeerFailedError, match="cut short"):
            await early


async def test_a_withdrawal_does_not_wait_for_the_staging(copies: Copies) -> None:
    """A receiver that waits for the step gets it from a later send."""
    async with pair() as (sender, receiver):
        send = sending(sender)
        early = asyncio.create_task(receive(sender, receiver))
        await settle(lambda: copies.waiting and sender.statistics().waiting > 0)
        await sender.disallow_checkpoint()
        assert not send.done()
        copies.go()
        with pytest.raises(StepNotFoundError):
            await send
        assert not early.done()
        await sending(sender)
        assert_same(await early, state())
