"""Transports whose memory goes out without a copy, and is staged into again."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from aiohttp import web

import aiockpt.http
from aiockpt.http import sending
from aiockpt.http.pages import Pages
from aiockpt.memory import ArenaPool
from aiockpt.testing import assert_same
from aiockpt.wire.http import CHUNKS, VERIFIES_HEADER
from serving import Peer, settle
from transports import MIB, pair, receive, transport, weights

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives its pages"),
]

VERIFIES = {VERIFIES_HEADER: CHUNKS}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What went out in pages: the size of each piece."""
    pieces: list[int] = []
    send = Pages.send

    def noted(pages: Pages, start: int) -> int:
        pieces.append(send(pages, start))
        return pieces[-1]

    monkeypatch.setattr(Pages, "send", noted)
    return pieces


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each arena that came back from a snapshot was spent."""
    seen: list[bool] = []
    give_back = ArenaPool.give_back

    def noted(pool: ArenaPool, arena: Any) -> None:
        seen.append(arena.spent)
        give_back(pool, arena)

    monkeypatch.setattr(ArenaPool, "give_back", noted)
    return seen


@pytest.mark.parametrize("server", ["loop", "process"])
async def test_every_step_arrives_and_memory_is_used_again(
    server: str, sent: list[int], returned: list[bool]
) -> None:
    """Whoever receives has what was sent, though the sender stages on at once."""
    async with (
        transport(server=server) as sender,
        transport(same_host=False) as receiver,
    ):
        template = weights(-1.0, mib=24, count=3)
        for step in range(6):
            state = weights(float(step), mib=24, count=3)
            await sender.send_checkpoint([1], step, state)
            options = {"into": template, "direct": True} if step % 2 else {}
            got = await receive(sender, receiver, step, **options)
            assert_same(got, state)
        await sender.disallow_checkpoint()
        await settle(lambda: len(returned) == 6)
    assert not any(returned)
    if server == "loop":  # that of a process of its own is not seen here
        assert sum(sent) > 6 * 16 * MIB


async def test_a_reader_that_takes_its_time_is_not_overwritten(
    sent: list[int], returned: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the next steps, nor after a retraction: its memory is given up."""
    monkeypatch.setattr(sending, "WORTH", 1)  # all of it lies in the kernel then
    async with pair(stall_timeout=60) as (sender, _):
        await sender.send_checkpoint([1], 1, weights(1.0, mib=1))
        url = urlsplit(sender.address())
        assert url.port is not None
        async with Peer(url.port, token=token_of(sender)) as peer:
            size = await header_of(peer)
            await peer.request("/checkpoint/1/full", Range=f"bytes={size}-", **VERIFIES)
            await settle(lambda: sum(sent) == MIB)
            for step in range(2, 6):
                await sender.send_checkpoint([1], step, weights(7.0, mib=1))
            await sender.disallow_checkpoint()
            await settle(lambda: any(returned))
            for step in range(6, 9):
                await sender.send_checkpoint([1], step, weights(8.0, mib=1))
            body = (await peer.answer()).body
    assert torch.equal(
        torch.frombuffer(bytearray(body), dtype=torch.float32),
        torch.ones(MIB // 4),
    )
    assert returned.count(True) == 1


async def test_a_reader_of_a_process_is_not_overwritten(returned: list[bool]) -> None:
    """It is cut off when all is retracted, and may still read what came."""
    async with transport(server="process", grace=0.1, stall_timeout=60) as sender:
        await sender.send_checkpoint([1], 1, weights(1.0, mib=32))
        url = urlsplit(sender.address())
        assert url.port is not None
        async with Peer(url.port, token=token_of(sender)) as peer:
            size = await header_of(peer)
            await peer.request("/checkpoint/1/full", Range=f"bytes={size}-", **VERIFIES)
            await peer.head()
            await sender.disallow_checkpoint()
            await settle(lambda: any(returned))
            for step in range(6, 9):
                await sender.send_checkpoint([1], step, weights(8.0, mib=32))
            rest = await peer.read_all()
    assert returned.count(True) == 1
    body = rest[: len(rest) & -4]
    assert body
    assert torch.frombuffer(bytearray(body), dtype=torch.float32).eq(1).all()


async def test_a_transport_that_ends_holds_nothing(
    sent: list[int], returned: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it would have held the memory for its reader."""
    monkeypatch.setattr(sending, "WORTH", 1)  # all of it lies in the kernel then
    monkeypatch.setattr("aiockpt.http.pages._PATIENCE", 3600.0)
    async with pair(stall_timeout=60) as (sender, _):
        await sender.send_checkpoint([1], 1, weights(1.0, mib=1))
        url = urlsplit(sender.address())
        assert url.port is not None
        async with Peer(url.port, token=token_of(sender)) as peer:
            size = await header_of(peer)
            await peer.request("/checkpoint/1/full", Range=f"bytes={size}-", **VERIFIES)
            await settle(lambda: sum(sent) == MIB)
            await sender.shutdown()
            await settle(lambda: returned)
    assert returned == [True]


async def test_a_process_that_dies_may_have_sent_pages() -> None:
    """Nothing is staged into what its peers may still read."""
    async with transport(server="process") as sender:
        await sender.send_checkpoint([1], 1, weights(1.0, mib=8))
        process: Any = sender._endpoint.shelf.process  # type: ignore[union-attr]
        offered: Any = sender._offering._offered
        os.kill(process.pid, signal.SIGKILL)
        await settle(lambda: process.restarts)
        assert offered.arena.spent


async def test_an_unverified_download_is_a_copy(sent: list[int]) -> None:
    """Such as that of ``curl``: it may go on when the sender stages again."""
    async with pair() as (sender, _):
        await sender.send_checkpoint([1], 1, weights(1.0, mib=8))
        url = urlsplit(sender.address())
        assert url.port is not None
        async with Peer(url.port, token=token_of(sender)) as peer:
            size = await header_of(peer)
            answer = await peer.ask("/checkpoint/1/full", Range=f"bytes={size}-")
    assert len(answer.body) == 8 * MIB
    assert sent == []


@pytest.mark.parametrize("step", [1, None])
async def test_who_has_a_token_of_its_own_gets_copies(
    sent: list[int], step: int | None
) -> None:
    """It could keep pages, and see in them what later steps are."""
    async with transport() as sender, transport(same_host=False) as receiver:
        await sender.send_checkpoint([1], 1, weights(1.0, mib=8))
        metadata = sender.grant("rank-1", step=step)
        got = await receiver.recv_checkpoint(0, metadata, 1)
        assert_same(got, weights(1.0, mib=8))
        assert sent == []
        assert_same(await receive(sender, receiver), weights(1.0, mib=8))
        assert sum(sent) == 8 * MIB


async def test_in_an_application_there_are_copies(sent: list[int]) -> None:
    """It may have rules of its own who reads which step."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    sender = transport(advertise=f"http://127.0.0.1:{port}/checkpoint/")
    app = web.Application()
    aiockpt.http.setup(app, sender)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    try:
        await sender.send_checkpoint([1], 1, weights(1.0, mib=8))
        async with transport(same_host=False) as receiver:
            assert_same(await receive(sender, receiver), weights(1.0, mib=8))
    finally:
        await runner.cleanup()
    assert sent == []


def token_of(sender: Any) -> str:
    """Return what authorises its receivers."""
    return str(urlsplit(sender.metadata()).fragment)


async def header_of(peer: Peer) -> int:
    """Return how many bytes of the file come before the data segment."""
    answer = await peer.ask("/checkpoint/1/metadata")
    assert answer.status == 200
    return len(answer.body)
