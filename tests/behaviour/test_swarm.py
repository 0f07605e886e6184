"""Receivers of one checkpoint that serve each other: ``HTTPTransport(swarm=...)``."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import signal
import socket
import sys
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anyio
import pytest
import torch
from aiohttp import TCPConnector, web

from aiockpt import Progress, Swarm
from aiockpt.errors import AiockptError, RemoteProtocolError, TransportError
from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.manifest import Outline
from aiockpt.http.client import CheckpointClient, Request
from aiockpt.http.download import Download
from aiockpt.http.peers import Peer
from aiockpt.http.protocol import Lease, Origin, parse_metadata
from aiockpt.http.retry import HostLimitError
from aiockpt.http.store import Publication, Store
from aiockpt.local.server_process import ServerProcess
from aiockpt.memory.arena import Arena
from aiockpt.runtime.same_host import format_mark, identity
from aiockpt.runtime.secrets import Token
from aiockpt.swarm.membership import Membership, watch
from aiockpt.swarm.messages import Announcement
from aiockpt.swarm.relay import Relay, Slots
from aiockpt.testing import Drip, Fault, assert_same
from aiockpt.testing.faults import Pipe
from tests.support.proofs import proves
from tests.support.servers import (
    TOKEN,
    Memory,
    running,
    serving,
    settle,
    tracker_of,
)
from tests.support.transports import (
    CHUNK,
    Transport,
    chunked,
    in_the_middle,
    proxied,
    through,
    told,
    transport,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

STATE = chunked(48)  # 3 MiB
NBYTES, CHUNKS = 48 * CHUNK, 48
SO_MAX_PACING_RATE, UNLIMITED = 47, -1
SLOW = 400_000  # bytes per second of each connection to the source


@asynccontextmanager
async def sending(**options: Any) -> AsyncIterator[Transport]:
    """Offer the state."""
    async with transport(**options) as sender:
        await sender.send_checkpoint([], 1, STATE)
        yield sender


@asynccontextmanager
async def receivers(
    count: int, swarm: Swarm | bool = True, **options: Any
) -> AsyncIterator[list[Transport]]:
    """Make receivers that join."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                transport(swarm=swarm, same_host=False, **options)
            )
            for _ in range(count)
        ]


@asynccontextmanager
async def slow(sender: Transport, rate: int = SLOW) -> AsyncIterator[str]:
    """Give the metadata of a sender with slow connections."""
    async with proxied(sender, otherwise=Drip(rate, burst=8192)) as proxy:
        yield through(proxy, sender)


@asynccontextmanager
async def swarming(
    count: int, swarm: Swarm | bool = True
) -> AsyncIterator[tuple[Transport, list[Transport], str]]:
    """Give a slow sender, receivers that join, and the metadata."""
    async with (
        sending() as sender,
        receivers(count, swarm) as members,
        slow(sender) as url,
    ):
        yield sender, members, url


def relayed(members: list[Transport]) -> int:
    """Return how many bytes the members have sent."""
    return sum(each.statistics().bytes_sent for each in members)


async def all_of(receivers: list[Transport], metadata: str, **options: Any) -> None:
    """Receive with all of them at once, and compare."""
    got = await asyncio.gather(
        *(each.recv_checkpoint(0, metadata, 1, **options) for each in receivers)
    )
    for state in got:
        assert_same(state, STATE)


async def offer_to_join(metadata: str) -> None:
    """Ask for the manifest as a receiver would, so that the next one is invited."""
    base, _, token = metadata.partition("#")
    headers = {
        "Authorization": f"Bearer {token}",
        "Aiockpt-Lease": f"{7:032x}; ttl=60",
        "Aiockpt-Swarm": "join",
    }
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{base}1/metadata", headers=headers) as answer,
    ):
        assert answer.status == HTTPStatus.OK


async def requests_of(swarm: bool) -> int:
    """Return how many requests of a single receiver a sender gets."""
    async with sending() as sender, receivers(1, swarm) as (receiver,):
        await all_of([receiver], sender.metadata())
        assert receiver.statistics().requests == 0
        return sender.statistics().requests


async def test_a_single_receiver_asks_for_nothing_more() -> None:
    """It asks as it does without a swarm."""
    assert await requests_of(swarm=True) == await requests_of(swarm=False)


@pytest.mark.parametrize("count", [2, 5])
async def test_the_source_sends_little_more_than_once(count: int) -> None:
    """The members send the other copies."""
    async with sending() as sender, receivers(count) as members, slow(sender) as url:
        await all_of(members, url)
        sent = sender.statistics().bytes_sent
        relayed = sum(each.statistics().bytes_sent for each in members)
    assert sent < max(1.8, 0.8 * count) * NBYTES  # a busy machine is late
    assert sent + relayed >= count * NBYTES


async def test_a_receive_that_hears_of_nobody_asks_as_without_a_swarm() -> None:
    """The receiver waits for a moment, since another one might have joined."""
    async with sending() as sender, receivers(1) as (receiver,), slow(sender) as url:
        await offer_to_join(url)
        await all_of([receiver], url)
        assert sender.statistics().requests < CHUNKS


async def test_the_first_receiver_joins_when_a_second_one_comes() -> None:
    """The source cuts its long ranges, so that it asks again."""
    large = chunked(512)  # more than the buffers of sockets hold
    nbytes = 512 * CHUNK
    async with transport() as sender, receivers(2) as (first, second):
        await sender.send_checkpoint([], 1, large)
        async with slow(sender, 10 * SLOW) as url, told() as events:
            task, _ = await in_the_middle(
                lambda halfway: first.recv_checkpoint(0, url, 1, progress=halfway),
                lambda: asyncio.sleep(0),
            )
            assert_same(await second.recv_checkpoint(0, url, 1), large)
            assert_same(await task, large)
        assert first.statistics().bytes_sent > nbytes / 20
        assert sender.statistics().bytes_sent < 1.97 * nbytes
        assert sender.statistics().evicted == 0
    assert sum("serves the swarm at" in each.detail for each in events) == 2


async def test_a_template_is_filled() -> None:
    """Members read from the memory that the receive fills."""
    for direct in (False, True):
        async with sending() as sender, receivers(3) as members, slow(sender) as url:
            into = [
                {
                    name: torch.zeros_like(torch.as_tensor(each))
                    for name, each in STATE.items()
                    if name != "n"
                }
                | {"n": 0}
                for _ in members
            ]
            got = await asyncio.gather(
                *(
                    each.recv_checkpoint(0, url, 1, into=template, direct=direct)
                    for each, template in zip(members, into, strict=True)
                )
            )
            for state, template in zip(got, into, strict=True):
                assert state["w0"] is template["w0"]
                assert_same(state, STATE)


@pytest.mark.parametrize("keep_arena", [False, True])
async def test_a_member_with_a_server_process_serves_from_its_own_loop(
    keep_arena: bool,
) -> None:
    """The member serves at a port of its own, and the process may die meanwhile."""
    options: dict[str, Any] = {"process": True, "keep_arena": keep_arena}
    async with (
        sending(process=True) as sender,
        receivers(3, **options) as members,
        slow(sender, 2 * SLOW) as url,
    ):
        tasks = [
            asyncio.create_task(each.recv_checkpoint(0, url, 1)) for each in members
        ]
        await settle(lambda: relayed(members) > 0)
        for each in members:
            server = each._front.server
            assert isinstance(server, ServerProcess)
            assert server.pid is not None
            assert server.statistics().requests == 0
            os.kill(server.pid, signal.SIGKILL)
        for state in await asyncio.gather(*tasks):
            assert_same(state, STATE)
        await all_of(members, url)
        await settle(lambda: relayed(members) > NBYTES)
        into = {name: torch.zeros_like(torch.as_tensor(STATE[name])) for name in STATE}
        got = await members[0].recv_checkpoint(0, url, 1, into={**into, "n": 0})
        assert_same(got, STATE)
        # The sender's process says what it has sent ten times per second.
        await settle(
            lambda: relayed(members) + sender.statistics().bytes_sent >= 7 * NBYTES
        )
        # Each sends checkpoints of its own, too, from its process.
        await members[0].send_checkpoint([1], 2, STATE)
        got = await members[1].recv_checkpoint(0, members[0].metadata(), 2)
        assert_same(got, STATE)


@pytest.mark.parametrize(
    ("advertise", "host"),
    [("localhost", "localhost"), ("http://proxy.example/ckpt/", "127.0.0.1")],
)
async def test_the_address_of_a_member_with_a_server_process(
    advertise: str, host: str
) -> None:
    """Its host is the advertised one, but a proxy's URL leads to the process only."""
    async with (
        told() as events,
        sending() as sender,
        receivers(2, process=True, advertise=advertise) as members,
        slow(sender) as url,
    ):
        await all_of(members, url)
        addresses = {each.address() for each in members}
    found = {
        each.detail.removeprefix("serves the swarm at ")
        for each in events
        if each.detail.startswith("serves the swarm at ")
    }
    assert len(found) == len(members)
    assert not found & addresses
    assert {urlsplit(each).hostname for each in found} == {host}


async def test_a_member_that_asks_for_a_long_range_needs_no_slot() -> None:
    """It would keep one for long; short ranges wait for those that have one."""
    memory = Memory(2 << 20, step=7)
    a, b, c = (digit * 32 for digit in "abc")
    short = {"Range": "bytes=0-119999", "Prefer": "wait=0"}
    async with serving(memory, swarm=Swarm(slots=1)) as site, AsyncExitStack() as stack:
        assert site.store.latest is not None
        for name in (a, b, c):
            site.tracker.announce(
                name, Announcement(f"http://{name}/"), address="", trusts_url=True
            )

        async def ask(name: str, **headers: str) -> int:
            peer = await stack.enter_async_context(site.peer(receive_buffer=4096))
            lease = {"Aiockpt-Lease": f"{name}; ttl=60"}
            await peer.request("/checkpoint/7/full", **lease, **headers)
            return (await peer.head()).status

        found = [await ask(name, **short) for name in (a, b, c)]
        assert found == [206, 206, 503]  # a source has two slots for each of a member
        assert await ask(c, Prefer="wait=0") == HTTPStatus.OK


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces connections")
@pytest.mark.every_loop
async def test_the_rate_limits_only_what_a_member_sends() -> None:
    """Later requests on the same connection are not limited."""
    memory = Memory(1 << 20, step=7)
    wanted = {"Range": "bytes=0-99999"}
    async with serving(memory, swarm=Swarm()) as site, site.peer() as peer:
        relay = Relay(memory.manifest, {}, Slots(2, rate=40e6))
        with closing(Arena(len(memory.data))) as relay.memory:
            relay.tokens = [Token("of-members")]
            for chunk in range(len(memory.manifest.grid)):
                relay.add(chunk)
            site.store.serve_relay(relay)

            def paced() -> int:
                sock = site.connections[0].transport.get_extra_info("socket")
                return int(sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE))

            found = []
            for token in (TOKEN, "of-members", TOKEN):
                answer = await peer.ask(
                    "/checkpoint/7/full", Authorization=f"Bearer {token}", **wanted
                )
                assert answer.status == HTTPStatus.PARTIAL_CONTENT
                found.append(paced())
            assert found == [UNLIMITED, 20_000_000, UNLIMITED]
            await site.store.end_relay(relay)


async def test_senders_that_hold_the_same_are_sources_beside_members() -> None:
    """The members join at the first that invites them."""
    async with sending() as one, sending() as other, receivers(3) as members:
        async with slow(one) as first, slow(other) as second:
            got = await asyncio.gather(
                *(each.recv_checkpoint(0, [first, second], 1) for each in members)
            )
        for state in got:
            assert_same(state, STATE)


async def test_neither_end_needs_to_take_part() -> None:
    """A sender without a swarm, receivers that join none: all of them receive."""
    async with sending(swarm=False) as sender, receivers(2) as members:
        await all_of(members, sender.metadata())
        assert [each.statistics().requests for each in members] == [0, 0]
    async with (
        sending() as sender,
        receivers(1) as ones,
        receivers(1, swarm=False) as no,
    ):
        await all_of([*ones, *no], sender.metadata())
        assert no[0].statistics().requests == 0


# ----------------------------------------------------------------------- its end


async def test_a_member_that_lingers_forgets_the_callback() -> None:
    """What a progress callback refers to may be as large as a model."""

    class Callback:
        def __call__(self, progress: Progress) -> None:
            pass

    async with swarming(2, Swarm(linger=60)) as (_, members, url):
        callbacks = [Callback() for _ in members]
        known = [weakref.ref(each) for each in callbacks]
        await asyncio.gather(
            *(
                each.recv_checkpoint(0, url, 1, progress=callback)
                for each, callback in zip(members, callbacks, strict=True)
            )
        )
        callbacks.clear()
        gc.collect()
        assert [each() for each in known] == [None, None]


async def test_a_member_lingers_and_serves_a_late_one() -> None:
    """The member serves until its time has passed or it receives again."""
    async with swarming(2, Swarm(linger=60)) as (sender, members, url):
        await all_of(members, url)
        async with receivers(1, Swarm(linger=0)) as (late,):
            await all_of([late], url)
        before = sum(each.statistics().bytes_sent for each in members)
        assert before > NBYTES
        # The next receive ends it: nobody is there for the next late one.
        await all_of(members[:1], sender.metadata())
        await all_of(members[1:], sender.metadata())


async def test_what_the_caller_has_changed_is_not_sent() -> None:
    """A member that lingers compares the digests before it sends, and then leaves."""
    async with (
        told() as events,
        sending() as sender,
        receivers(2, Swarm(linger=60)) as members,
        slow(sender) as url,
    ):
        got = await asyncio.gather(
            *(each.recv_checkpoint(0, url, 1) for each in members)
        )
        for state in got:
            for tensor in state.values():
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()
        before = len(events)
        async with receivers(1) as (late,):
            await all_of([late], url)
        given = [each for each in events[before:] if each.stop == "fetch_chunk"]
        assert given
        for each in given:
            assert not (each.nbytes and each.peer in [one.address() for one in members])
        dropped = [each for each in events if each.stop == "drop"]
        asked = {each.peer for each in dropped}
        assert asked
        for each in dropped:  # which is nothing to worry about
            assert each.detail == f"{each.peer} has left the swarm"
            assert each.level == logging.INFO
        await settle(
            lambda: len(tracker_of(sender._front.server)) == len(members) - len(asked)
        )
    assert not any("digest" in each.detail for each in events)


class Mute(Fault):
    """Passes on no bytes unless ``speaks`` is set."""

    def __init__(self) -> None:
        self.speaks = asyncio.Event()
        self.speaks.set()

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Wait until it may speak."""
        await self.speaks.wait()
        await pipe.send(data)


async def test_a_receive_does_not_wait_until_a_silent_sender_knows_the_last_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The goodbye of what lingered goes on beside it."""
    monkeypatch.setattr("aiockpt.swarm.membership._FAREWELL_S", 600.0)
    mute = Mute()
    async with (
        sending() as sender,
        sending() as other,
        receivers(1, Swarm(linger=60)) as (receiver,),
        proxied(sender, otherwise=mute) as proxy,
    ):
        await offer_to_join(sender.metadata())
        await all_of([receiver], through(proxy, sender))
        (member,) = receiver._host.members
        mute.speaks.clear()
        assert member.is_lingering
        await all_of([receiver], other.metadata())
        assert receiver._host.members == {member}
        mute.speaks.set()
        await member.said_goodbye()
        assert not receiver._host.members
        assert len(tracker_of(sender._front.server)) == 0


async def test_a_receive_that_has_everything_does_not_wait_for_a_silent_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says goodbye only for a part of the time that it has left."""
    monkeypatch.setattr("aiockpt.swarm.membership._FAREWELL_S", 600.0)
    mute = Mute()

    def fall_silent(progress: Progress) -> None:
        if progress.chunks_done == CHUNKS:
            mute.speaks.clear()

    async with (
        sending() as sender,
        receivers(1, Swarm(linger=0)) as (receiver,),
        proxied(sender, otherwise=mute) as proxy,
    ):
        await offer_to_join(sender.metadata())
        url = through(proxy, sender)
        await all_of([receiver], url, timeout=8, progress=fall_silent)
        assert len(receiver._host.members) == 1  # it still tries
        mute.speaks.set()


async def test_members_give_what_was_reserved_for_a_source_that_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another source that does not have the step yet does not count."""
    init = Download.__init__

    def reserve(self: Download, *args: Any) -> None:
        init(self, *args)
        self.planner.members.reserved = (1 << CHUNKS) - 1

    async with (
        sending() as sender,
        sending() as empty,
        receivers(1, Swarm(linger=60)) as whole,
        receivers(1, reconnect_timeout=0.3, stall_timeout=3) as (receiver,),
        slow(sender, SLOW // 20) as url,
    ):
        await empty.disallow_checkpoint()
        await offer_to_join(sender.metadata())
        await all_of(whole, sender.metadata())
        monkeypatch.setattr(Download, "__init__", reserve)
        sources = [url, empty.metadata()]
        task = asyncio.create_task(receiver.recv_checkpoint(0, sources, 1))
        await settle(lambda: any(each.known.members for each in receiver._host.members))
        assert relayed(whole) == 0
        await sender.shutdown(wait=False)
        assert_same(await task, STATE)


async def test_two_receives_of_a_transport_are_in_the_swarm() -> None:
    """A request cannot say which of them it is for: it is the first, until its end."""
    async with (
        sending() as sender,
        receivers(2) as (double, single),
        slow(sender) as url,
    ):
        await all_of([double, double, single], url)
        assert sender.statistics().bytes_sent < 2.5 * NBYTES


async def test_a_receive_that_never_begins_leaves_nothing() -> None:
    """No place in a swarm that never was."""
    async with sending() as sender, receivers(1) as (receiver,):
        with pytest.raises(AiockptError):
            await receiver.recv_checkpoint(0, sender.metadata(), 9, timeout=0.1)
        assert not receiver._host.members


@pytest.mark.parametrize("how", ["task", "scope"])
async def test_a_cancel_ends_the_serving(how: str) -> None:
    """The serving ends with cancels of asyncio and with those of anyio."""
    async with sending() as sender, receivers(2) as (first, second):
        async with slow(sender, SLOW // 2) as url:

            async def fetch(halfway: Any) -> None:
                with anyio.move_on_after(2.0 if how == "scope" else None):
                    await first.recv_checkpoint(0, url, 1, progress=halfway)

            other = asyncio.create_task(second.recv_checkpoint(0, url, 1))
            task, _ = await in_the_middle(fetch, lambda: asyncio.sleep(0.2))
            if how == "task":
                task.cancel()
            await asyncio.wait({task})
            assert_same(await other, STATE)
        assert first.statistics().readers == 0


# --------------------------------------------------------------------- failures


async def test_a_new_step_replaces_the_swarm() -> None:
    """Its members keep the old one until they have it, as without a swarm."""
    async with sending() as sender, receivers(2) as members, slow(sender) as url:
        tasks = [
            asyncio.create_task(each.recv_checkpoint(0, url, 1)) for each in members
        ]
        await settle(lambda: any(each.statistics().requests for each in members))
        await sender.send_checkpoint([], 2, {**STATE, "n": 2})
        for state in await asyncio.gather(*tasks):
            assert_same(state, STATE)
        got = await asyncio.gather(
            *(each.recv_checkpoint(0, url, 2) for each in members)
        )
        assert [state["n"] for state in got] == [2, 2]


async def test_a_superseded_snapshot_stays_until_the_next_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a large swarm, that is longer than the stall timeout."""
    monkeypatch.setattr("aiockpt.swarm.tracker.heartbeat", lambda _: 600.0)
    async with sending(stall_timeout=0.3) as sender:
        base, _, token = sender.metadata().partition("#")
        await announce(sender.metadata(), 15, "http://127.0.0.1:9/", "127.0.0.1")
        headers = {
            "Authorization": f"Bearer {token}",
            "Aiockpt-Lease": f"{15:032x}; ttl=60",
        }
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.get(f"{base}1/metadata") as answer:
                assert answer.status == HTTPStatus.OK
            await sender.send_checkpoint([], 2, STATE)
            await asyncio.sleep(1.0)
            async with session.get(f"{base}1/metadata") as answer:
                assert answer.status == HTTPStatus.OK


# ------------------------------------------------------------------------ trust


class Impostor:
    """A member that announces itself, and then does what it likes.

    Attributes:
        asked: The requests that it got, with their tokens.
    """

    def __init__(self, chunks: int, body: Any) -> None:
        self.asked: list[tuple[str, str]] = []
        self._chunks, self._body = chunks, body

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Announce everything, and answer a range."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.asked.append((request.path, token))
        if request.path.endswith("have"):
            return web.Response(body=b"\xff" * (self._chunks // 8))
        return await self._body(request)


async def lie(request: web.Request) -> web.StreamResponse:
    """Send zeros for whatever is asked."""
    first, last = request.headers["Range"].removeprefix("bytes=").split("-")
    length = int(last) - int(first) + 1
    total = request.headers["If-Match"]  # the size is known from the lies below
    headers = {"ETag": total, "Content-Range": f"bytes {first}-{last}/{SIZE[0]}"}
    return web.Response(status=206, body=bytes(length), headers=headers)


async def trickle(request: web.Request) -> web.StreamResponse:
    """Send a byte now and then, which is no stall."""
    first, last = request.headers["Range"].removeprefix("bytes=").split("-")
    headers = {
        "ETag": request.headers["If-Match"],
        "Content-Range": f"bytes {first}-{last}/{SIZE[0]}",
        "Content-Length": str(int(last) - int(first) + 1),
    }
    response = web.StreamResponse(status=206, headers=headers)
    await response.prepare(request)
    with suppress(ConnectionError):
        while request.transport is not None and not request.transport.is_closing():
            await response.write(b"0")
            await asyncio.sleep(0.1)
    return response


async def stay_silent(request: web.Request) -> web.StreamResponse:
    """Take the request, and answer nothing."""
    line = request.transport
    await settle(lambda: line is None or line.is_closing(), patience=60)
    return web.Response()


async def have_nothing(_: web.Request) -> web.StreamResponse:
    """Have nothing of what was announced."""
    return web.Response(status=HTTPStatus.NO_CONTENT)


SIZE = [0]


async def announce(metadata: str, number: int, url: str, host: str) -> str:
    """Announce a member from a loopback address; return its id."""
    base, _, token = metadata.partition("#")
    headers = {
        "Authorization": f"Bearer {token}",
        "Aiockpt-Lease": f"{number:032x}; ttl=60",
    }
    connector = TCPConnector(local_addr=(host, 0))
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        async with session.get(
            f"{base}1/full", headers={"Range": "bytes=0-0"}
        ) as answer:
            SIZE[0] = int(answer.headers["Content-Range"].rpartition("/")[2])
            snapshot_id = answer.headers["ETag"].strip('"')
        mark = format_mark(identity() or b"", snapshot_id)
        said = {"url": url, "have": CHUNKS, "host": mark}
        async with session.post(f"{base}1/members", json=said) as answer:
            assert answer.status == HTTPStatus.OK, await answer.text()
            return str((await answer.json())["id"])


@asynccontextmanager
async def impostor(
    sender: Transport, url: str, body: Any, *, number: int = 15, host: str = "127.0.0.1"
) -> AsyncIterator[Impostor]:
    """Have an impostor join the swarm of a sender."""
    found = Impostor(CHUNKS, body)
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", found.answer)
    listening = socket.create_server((host, 0))
    async with running(app, listening) as server:
        await announce(url, number, f"http://{host}:{server.port}/", host)
        yield found


@proves("threat T10", "threat T11")
@pytest.mark.parametrize("body", [lie, have_nothing], ids=["chunks", "bitmap"])
async def test_a_member_that_lies_is_dropped(body: Any) -> None:
    """Its bytes are used by nobody, and it is asked for no more.

    One that lacks a chunk may have begun to receive the step anew. Nobody complains.
    """
    async with (
        told() as events,
        sending() as sender,
        slow(sender) as url,
        impostor(sender, sender.metadata(), body, host="127.0.0.2") as liar,
        receivers(2) as members,
    ):
        await all_of(members, url)
        await asyncio.gather(*(each.shutdown(wait=False) for each in members))
        assert any(complaints(sender)) == (body is lie)
    dropped = [each for each in events if each.stop == "drop"]
    assert dropped
    ranges = [path for path, _ in liar.asked if path.endswith("full")]
    assert 1 <= len(ranges) <= 2 * len(dropped) + 2


async def test_a_receiver_has_no_descriptor_for_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender gives what they cannot; later, they are asked again."""
    refused = Counter[str]()
    request = CheckpointClient.request

    def limited(self: CheckpointClient, wanted: Any, *args: Any) -> Any:
        kind = wanted.path.rpartition("/")[2]
        if wanted.origin.base_url != source and refused[kind] < 6:
            refused[kind] += 1
            raise HostLimitError("too many open files")
        return request(self, wanted, *args)

    async with sending() as sender, slow(sender) as url, receivers(3) as members:
        source = url.partition("#")[0]
        monkeypatch.setattr(CheckpointClient, "request", limited)
        await all_of(members, url)
    assert refused["have"]


@asynccontextmanager
async def membership_of(
    sender: Transport, receiver: Transport, tracker: str = ""
) -> AsyncIterator[Membership]:
    """Have a receiver join the swarm of a sender, without a download.

    The announcements go to ``tracker``, or to the sender.
    """
    found = Membership(receiver._client, receiver._host)
    found.receives(latest(sender).servable.manifest, {})
    lease = Lease.begin(asyncio.get_running_loop().time() + 60, joins=True)
    origin = replace(parse_metadata(sender.metadata()), lease=lease)
    if tracker:
        origin = replace(origin, base_url=tracker)
    found.join(Peer(origin), Token("of the swarm"))
    try:
        yield found
    finally:
        await found.leave()


def latest(sender: Transport) -> Publication:
    """Return what a sender offers."""
    assert isinstance(sender._store, Store)
    assert sender._store.latest is not None
    return sender._store.latest


def complaints(sender: Transport) -> list[int]:
    """Return how many hosts complained about each member."""
    return [each.complaints for each in tracker_of(sender._front.server).statistics()]


@proves("threat T10")
async def test_a_lie_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report does not wait for the next announcement."""
    monkeypatch.setattr("aiockpt.swarm.tracker.heartbeat", lambda _: 600.0)
    async with (
        sending() as sender,
        slow(sender, SLOW // 20) as url,
        impostor(sender, sender.metadata(), lie, host="127.0.0.2"),
        receivers(1) as (receiver,),
    ):
        task = asyncio.create_task(receiver.recv_checkpoint(0, url, 1))
        await settle(lambda: 1 in complaints(sender), patience=60)
        assert not task.done()
        task.cancel()
        await asyncio.wait({task})


@proves("threat T10")
async def test_a_lie_is_reported_by_a_receiver_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The receiver reports it before it leaves, and the sender's status shows it."""
    monkeypatch.setattr("aiockpt.swarm.tracker.heartbeat", lambda _: 600.0)
    url, host = "http://127.0.0.2:9/", "127.0.0.2"
    async with sending() as sender, receivers(1) as (receiver,):
        name = await announce(sender.metadata(), 15, url, host)
        async with membership_of(sender, receiver) as membership:
            await settle(lambda: len(tracker_of(sender._front.server)) == 2)
            liar = Peer(Origin(url, "token"), member=name)
            membership.drop(liar, RemoteProtocolError("it lies"))
        await membership.said_goodbye()
        base, _, token = sender.metadata().partition("#")
        async with (
            aiohttp.ClientSession() as session,
            session.get(base, headers={"Authorization": f"Bearer {token}"}) as answer,
        ):
            status = (await answer.json())["status"]
    (member,) = status["swarm"]["members"]
    assert name.startswith(f"{member['id']}-")
    assert member["complaints"] == 1


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[" * 60_000,
        b'{"id": "m1", "lease": 6, "members": [{"id": "", "url": "http://h/"}]}',
    ],
    ids=["empty", "deep", "nameless"],
)
async def test_a_source_that_answers_nonsense_is_told_no_more(body: bytes) -> None:
    """The member announces itself no more, and an event says why."""
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.method)
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/1/members", answer)
    async with (
        told() as events,
        sending() as sender,
        running(app) as host,
        receivers(1) as (receiver,),
        membership_of(sender, receiver, f"http://127.0.0.1:{host.port}/"),
    ):
        await settle(lambda: any("no more" in each.detail for each in events))
        (why,) = [each.detail for each in events if "no more" in each.detail]
        assert "sent a malformed answer" in why
        assert asked == ["POST"]


async def test_a_source_that_starts_again_hears_complaints() -> None:
    """Its new ids count, also for members that are known already."""
    said: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        said.append(await request.json())
        url = "http://127.0.0.2:9/checkpoint/"
        member = {"id": f"m1-{min(len(said), 3)}", "url": url}
        return web.json_response({"id": "m2", "lease": 3, "members": [member]})

    app = web.Application()
    app.router.add_post("/1/members", answer)
    async with (
        sending() as sender,
        running(app) as host,
        receivers(1) as (receiver,),
        membership_of(sender, receiver, f"http://127.0.0.1:{host.port}/") as membership,
    ):
        await settle(
            lambda: any(each.member == "m1-3" for each in membership.known.members)
        )
        (liar,) = membership.known.members
        membership.drop(liar, RemoteProtocolError("it lies"))
        await settle(lambda: any(each.get("bad") == ["m1-3"] for each in said))


@pytest.mark.allow_error_logs
async def test_an_error_of_our_own_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receive goes on without a swarm."""

    async def fail(*_: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(Membership, "_announce_always", fail)
    async with (
        told() as events,
        sending() as sender,
        receivers(2) as members,
        slow(sender) as url,
    ):
        await all_of(members, url)
    found = [each for each in events if each.stop == "swarm"]
    assert [each.detail for each in found] == ["in no swarm: RuntimeError('odd')"] * 2
    assert {each.level for each in found} == {logging.ERROR}


async def test_a_liar_comes_back_under_no_other_path() -> None:
    """The tracker refuses it under another path or another id."""
    async with sending() as sender, receivers(1) as (receiver,):
        metadata = sender.metadata()
        bad, good = "http://127.0.0.2:9/", "http://127.0.0.3:9/checkpoint/"
        name = await announce(metadata, 15, bad, "127.0.0.2")
        async with membership_of(sender, receiver) as membership:
            await settle(lambda: membership.known.members)
            (liar,) = membership.known.members
            assert liar.member == name
            membership.drop(liar, RemoteProtocolError("it lies"))
            assert await announce(metadata, 16, f"{bad}more/", "127.0.0.2") != name
            await announce(metadata, 17, good, "127.0.0.3")
            await settle(lambda: membership.known.members)
            assert [each.origin.base_url for each in membership.known.members] == [good]


async def test_members_that_failed_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source need not name a few of them; of the rest it may name each again."""
    monkeypatch.setattr("aiockpt.swarm.membership._AWAY_S", 600.0)
    request, known = CheckpointClient.request, list[int]()

    def record(self: CheckpointClient, said: Request, *args: Any) -> Any:
        if said.method == "POST":
            known.append(len(json.loads(said.body).get("known", ())))
        return request(self, said, *args)

    monkeypatch.setattr(CheckpointClient, "request", record)
    async with sending() as sender, receivers(1) as (receiver,):
        for each in range(1, 25):
            url, host = f"http://127.0.0.{each}:9/", f"127.0.0.{each}"
            await announce(sender.metadata(), each, url, host)
        async with membership_of(sender, receiver) as membership:
            await settle(lambda: len(membership.known.members) >= 12)
            for member in tuple(membership.known.members):
                membership.drop(member, TransportError("gone"))
            before = len(known)
            await settle(lambda: len(known) > before, patience=30)
            assert known[before] == 6
            await settle(lambda: membership.known.members, patience=30)


async def test_a_member_leaves_though_its_complaint_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source learns that it has left, so it names it to nobody."""
    request = CheckpointClient.request

    def fail(self: CheckpointClient, said: Request, *args: Any) -> Any:
        if said.method == "POST":
            raise TransportError("lost")
        return request(self, said, *args)

    async with sending() as sender, receivers(1) as (receiver,):
        async with membership_of(sender, receiver) as membership:
            await settle(lambda: len(tracker_of(sender._front.server)) == 1)
            monkeypatch.setattr(CheckpointClient, "request", fail)
            liar = Peer(Origin("http://127.0.0.2:9/", "token"), member="m9")
            membership.drop(liar, RemoteProtocolError("it lies"))
        await membership.said_goodbye()
        assert len(tracker_of(sender._front.server)) == 0


async def test_a_member_that_had_no_descriptor_announces_itself_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The member tries again, as after a connection that broke."""
    failures, request = [0], CheckpointClient.request

    def fail(self: CheckpointClient, said: Request, *args: Any) -> Any:
        if said.method == "POST" and not failures[0]:
            failures[0] += 1
            raise HostLimitError("too many open files")
        return request(self, said, *args)

    monkeypatch.setattr(CheckpointClient, "request", fail)
    async with (
        sending() as sender,
        receivers(1) as (receiver,),
        membership_of(sender, receiver),
    ):
        await settle(lambda: len(tracker_of(sender._front.server)) == 1, patience=60)
    assert failures == [1]


async def test_records_may_come_together_with_the_bitmap() -> None:
    """A busy receiver reads both at once, and then the end."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b"\x01" + (1).to_bytes(4, "little") + b"\xff" * 4)

    app = web.Application()
    app.router.add_get("/1/have", answer)
    outline = Outline(1, "id", ChunkGrid(2 * CHUNK, CHUNK), ("",) * 2, 0)
    async with running(app) as host, transport(swarm=True) as receiver:
        member = Peer(Origin(f"http://127.0.0.1:{host.port}/", "token"), have=0)
        news = watch(receiver._client, member, outline)
        assert [new async for new in news] == [0b11]


@proves("threat D16")
@pytest.mark.parametrize("body", [trickle, stay_silent], ids=["trickle", "silent"])
async def test_members_that_are_slow_on_purpose_are_dropped(body: Any) -> None:
    """Slow members cannot hold all connections to members."""
    async with (
        told() as events,
        sending() as sender,
        slow(sender) as url,
        AsyncExitStack() as stack,
        receivers(2) as members,
    ):
        for number in range(4):
            who = impostor(sender, url, body, number=number)
            await stack.enter_async_context(who)
        await all_of(members, url)
    dropped = [each for each in events if each.stop == "drop"]
    assert len({each.detail for each in dropped if "much slower" in each.detail}) >= 2
    assert {each.level for each in dropped} == {logging.INFO}


@proves("threat D16")
async def test_a_chunk_is_requested_from_two_silent_members_at_most() -> None:
    """Then the receiver requests it from the sender, and ends."""
    async with (
        told() as events,
        sending() as sender,
        slow(sender) as url,
        AsyncExitStack() as stack,
        receivers(1, timeout=60) as members,
    ):
        for number in range(24):
            who = impostor(sender, url, stay_silent, number=number)
            await stack.enter_async_context(who)
        await all_of(members, url)
    source = url.partition("#")[0]
    vain = Counter(
        re.findall(r"too slow with chunk \d+", each.detail)[0]
        for each in events
        if each.stop == "retry" and each.peer != source
    )
    assert 0 < max(vain.values()) <= 2


@proves("threat I9")
async def test_the_token_of_the_source_never_reaches_a_member() -> None:
    """The members' token does not open the source, either."""
    async with sending() as sender, slow(sender) as url:
        async with impostor(sender, url, lie) as liar, receivers(2) as members:
            await all_of(members, url)
        tokens = {token for _, token in liar.asked}
        assert len(tokens) == 1
        (token,) = tokens
        assert token
        assert token not in url
        async with aiohttp.ClientSession() as session:
            for path in ("1/full", "1/metadata", "1/have", "latest", "1/members", ""):
                async with session.get(
                    f"{sender.address()}{path}",
                    headers={"Authorization": f"Bearer {token}"},
                ) as answer:
                    assert answer.status == HTTPStatus.UNAUTHORIZED


async def test_at_a_member_the_token_opens_one_snapshot_only() -> None:
    """The token does not open what the member serves itself, nor anything later."""
    async with (
        sending() as sender,
        slow(sender) as url,
        impostor(sender, url, lie) as liar,
        receivers(2, Swarm(linger=60)) as members,
        transport() as other,
    ):
        await all_of(members, url)
        await members[0].send_checkpoint([], 5, {"other": 1})
        await other.send_checkpoint([], 6, {})
        (token,) = {token for _, token in liar.asked}

        async def ask(path: str) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            url = f"{members[0].address()}{path}"
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.get(url) as answer,
            ):
                return answer.status

        for path, status in (
            ("1/metadata", HTTPStatus.OK),
            ("5/metadata", HTTPStatus.NOT_FOUND),
            ("5/full", HTTPStatus.NOT_FOUND),
            ("latest", HTTPStatus.UNAUTHORIZED),
            ("latest/full", HTTPStatus.NOT_FOUND),
            ("", HTTPStatus.UNAUTHORIZED),
        ):
            assert (path, await ask(path)) == (path, status)
        await members[0].recv_checkpoint(0, other.metadata(), 6)
        assert await ask("1/metadata") == HTTPStatus.UNAUTHORIZED


@proves("threat S7")
async def test_an_announcement_cannot_point_elsewhere() -> None:
    """Others connect to the host that it came from."""
    async with sending() as sender:
        base, _, token = sender.metadata().partition("#")
        async with aiohttp.ClientSession() as session:
            named: list[Any] = []
            for number in range(2):
                headers = {
                    "Authorization": f"Bearer {token}",
                    "Aiockpt-Lease": f"{number:032x}; ttl=60",
                }
                said = {"url": f"http://192.0.2.7:{number + 1}/checkpoint/"}
                async with session.post(
                    f"{base}1/members", headers=headers, json=said
                ) as answer:
                    named += (await answer.json())["members"] if number else []
    assert [each["url"] for each in named] == ["http://127.0.0.1:1/checkpoint/"]
