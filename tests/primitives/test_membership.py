"""A member of a swarm: what it announces, complains about, and survives."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from aiockpt import Progress, Swarm
from aiockpt.errors import RemoteProtocolError, TransportError
from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.manifest import Outline
from aiockpt.http.client import CheckpointClient, Request
from aiockpt.http.download import Download
from aiockpt.http.peers import Peer
from aiockpt.http.protocol import Lease, Origin, parse_metadata
from aiockpt.http.retry import HostLimitError
from aiockpt.http.store import Store
from aiockpt.runtime.same_host import format_mark, identity
from aiockpt.runtime.secrets import Token
from aiockpt.swarm.membership import Membership, watch
from aiockpt.testing import Fault, assert_same
from tests.support.proofs import proves
from tests.support.servers import running, settle
from tests.support.swarms import (
    CHUNKS,
    SLOW,
    STATE,
    all_of,
    authorized,
    members_of,
    offer_to_join,
    places,
    receivers,
    sending,
    sent,
    slow,
    until_members,
)
from tests.support.transports import (
    CHUNK,
    Events,
    Transport,
    proxied,
    through,
    told,
    transport,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]


@asynccontextmanager
async def membership_of(
    sender: Transport, receiver: Transport, tracker: str = ""
) -> AsyncIterator[Membership]:
    """Have a receiver join the swarm of a sender, without a download.

    The announcements go to ``tracker``, or to the sender.
    """
    assert isinstance(sender._store, Store)
    assert sender._store.latest is not None
    found = Membership(receiver._client, receiver._host)
    found.receives(sender._store.latest.servable.manifest, {})
    lease = Lease.begin(asyncio.get_running_loop().time() + 60, joins=True)
    origin = replace(parse_metadata(sender.metadata()), lease=lease)
    if tracker:
        origin = replace(origin, base_url=tracker)
    found.join(Peer(origin), Token("of the swarm"))
    try:
        yield found
    finally:
        await found.leave()


@asynccontextmanager
async def member_of(answer: Any) -> AsyncIterator[Membership]:
    """Have a receiver join the swarm of a source whose tracker answers so."""
    app = web.Application()
    app.router.add_route("*", "/1/members", answer)
    async with (
        sending() as sender,
        running(app) as host,
        receivers(1) as (receiver,),
        membership_of(sender, receiver, f"http://127.0.0.1:{host.port}/") as found,
    ):
        yield found


async def announce(sender: Transport, number: int, path: str = "") -> tuple[str, str]:
    """Announce a member at ``127.0.0.NUMBER``; return its id and its URL."""
    host, base = f"127.0.0.{number}", f"{sender.address()}1/"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(local_addr=(host, 0)),
        headers=authorized(sender.metadata(), number + 1000 * bool(path)),
        raise_for_status=True,
    ) as session:
        one = {"Range": "bytes=0-0"}
        async with session.get(f"{base}full", headers=one) as answer:
            mark = format_mark(identity() or b"", answer.headers["ETag"].strip('"'))
        url = f"http://{host}:9/{path}"
        said = {"url": url, "have": CHUNKS, "host": mark}
        async with session.post(f"{base}members", json=said) as answer:
            return (await answer.json())["id"], url


LIE = RemoteProtocolError("it lies")


# ------------------------------------------------------------------- its announcements


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

    async with told() as events, member_of(answer):
        await settle(lambda: any("no more" in each.detail for each in events))
        (why,) = [each.detail for each in events if "no more" in each.detail]
        assert "sent a malformed answer" in why
        assert asked == ["POST"]


async def test_a_source_that_starts_again_hears_complaints() -> None:
    """Its new ids count, also for members that are known already."""
    said: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        if request.method != "POST":  # it leaves
            return web.Response()
        said.append(await request.json())
        url = "http://127.0.0.2:9/checkpoint/"
        member = {"id": f"m1-{min(len(said), 3)}", "url": url}
        return web.json_response({"id": "m2", "lease": 3, "members": [member]})

    async with member_of(answer) as membership:
        known = membership.known
        await settle(
            lambda: any(each.member == "m1-3" for each in known.members), patience=60
        )
        (liar,) = known.members
        membership.drop(liar, LIE)
        await settle(
            lambda: any(each.get("bad") == ["m1-3"] for each in said), patience=60
        )


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
    found = [each.detail for each in events if each.stop == "swarm"]
    assert found == ["in no swarm: RuntimeError('odd')"] * 2


@proves("threat T10")
async def test_a_lie_is_reported_by_a_receiver_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The receiver reports it before it leaves, and the sender's status shows it."""
    monkeypatch.setattr("aiockpt.swarm.tracker.heartbeat", lambda _: 600.0)
    async with sending() as sender, receivers(1) as (receiver,):
        name, url = await announce(sender, 2)
        async with membership_of(sender, receiver) as membership:
            await until_members(sender, 2)
            membership.drop(Peer(Origin(url, "token"), member=name), LIE)
        await membership.said_goodbye()
        (member,) = await members_of(sender)
    assert name.startswith(f"{member['id']}-")
    assert member["complaints"] == 1


async def test_a_liar_comes_back_under_no_other_path() -> None:
    """The tracker refuses it under another path or another id."""
    async with sending() as sender, receivers(1) as (receiver,):
        name, _ = await announce(sender, 2)
        async with membership_of(sender, receiver) as membership:
            known = membership.known
            await settle(lambda: known.members)
            assert [each.member for each in known.members] == [name]
            membership.drop(known.members[0], LIE)
            again, _ = await announce(sender, 2, "more/")
            assert again != name
            name, _ = await announce(sender, 3)
            await settle(lambda: known.members, patience=60)
            assert [each.member for each in known.members] == [name]


async def test_members_that_failed_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source need not name a few of them; of the rest it may name each again."""
    monkeypatch.setattr("aiockpt.swarm.membership._AWAY_S", 600.0)
    asked = posts(monkeypatch, lambda _: None)
    async with sending() as sender, receivers(1) as (receiver,):
        for number in range(1, 25):
            await announce(sender, number)
        async with membership_of(sender, receiver) as membership:
            known = membership.known
            await settle(lambda: len(known.members) >= 12, patience=60)
            for member in tuple(known.members):
                membership.drop(member, TransportError("gone"))
            before = len(asked)
            await settle(lambda: len(asked) > before, patience=60)
            assert len(asked[before]["known"]) == 6
            await settle(lambda: known.members, patience=60)


async def test_through_a_tunnel_nobody_is_told_of_another_hosts_loopback(
    monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    """The source takes both ends of a tunnel for its own host."""
    identities = iter([b"one", b"two"])
    monkeypatch.setattr("aiockpt.swarm.membership.identity", lambda: next(identities))
    async with (
        sending() as sender,
        receivers(2, Swarm(linger=60)) as members,
        slow(sender) as url,
    ):
        await all_of(members, url)
        assert sent(*members) == 0
    assert len(places(events)) == 2
    assert not [each for each in events if each.level > 20]


# ------------------------------------------------------------ requests that fail


def posts(
    monkeypatch: pytest.MonkeyPatch, refuse: Callable[[int], Exception | None]
) -> list[Any]:
    """Return what members announce from now on; ``refuse`` may have it fail."""
    request, asked = CheckpointClient.request, list[Any]()

    def record(self: CheckpointClient, said: Request, *args: Any) -> Any:
        if said.method == "POST":
            asked.append(json.loads(said.body))
            if error := refuse(len(asked)):
                raise error
        return request(self, said, *args)

    monkeypatch.setattr(CheckpointClient, "request", record)
    return asked


async def test_a_member_leaves_though_its_complaint_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source learns that it has left, so it names it to nobody."""
    async with sending() as sender, receivers(1) as (receiver,):
        async with membership_of(sender, receiver) as membership:
            await until_members(sender, 1)
            posts(monkeypatch, lambda _: TransportError("lost"))
            membership.drop(Peer(Origin("http://127.0.0.2:9/", ""), member="m9"), LIE)
        await membership.said_goodbye()
        assert not await members_of(sender)


async def test_a_member_that_had_no_descriptor_announces_itself_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The member tries again, as after a connection that broke."""
    limit = HostLimitError("too many open files")
    asked = posts(monkeypatch, lambda count: limit if count == 1 else None)
    async with (
        sending() as sender,
        receivers(1) as (receiver,),
        membership_of(sender, receiver),
    ):
        await until_members(sender, 1)
    assert len(asked) > 1


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


# -------------------------------------------------------------------------- its end


class Mute(Fault):
    """Passes on no bytes unless ``speaks`` is set."""

    def __init__(self) -> None:
        self.speaks = asyncio.Event()
        self.speaks.set()

    async def forward(self, pipe: Any, data: bytes, at: int) -> None:
        """Wait until it may speak."""
        await self.speaks.wait()
        await pipe.send(data)


async def test_nobody_waits_until_a_silent_sender_knows_the_last_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The goodbye of what lingered goes on beside the next receive.

    A receive that has all says goodbye for a part of the time that it has left.
    """
    monkeypatch.setattr("aiockpt.swarm.membership._FAREWELL_S", 600.0)
    mute = Mute()

    def fall_silent(progress: Progress) -> None:
        if progress.chunks_done == CHUNKS:
            mute.speaks.clear()

    async with (
        sending() as sender,
        sending() as other,
        receivers(1, Swarm(linger=60)) as (lingering,),
        receivers(1, Swarm(linger=0)) as (brief,),
        proxied(sender, otherwise=mute) as proxy,
    ):
        url = through(proxy, sender)
        await offer_to_join(sender.metadata())
        await all_of([lingering], url)
        (member,) = lingering._host.members
        mute.speaks.clear()
        assert member.is_lingering
        await all_of([lingering], other.metadata())
        assert lingering._host.members == {member}
        mute.speaks.set()
        await member.said_goodbye()
        assert not lingering._host.members
        assert not await members_of(sender)
        await all_of([brief], url, timeout=12, progress=fall_silent)
        assert len(brief._host.members) == 1  # it still tries
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
        await settle(
            lambda: any(each.known.members for each in receiver._host.members),
            patience=60,
        )
        assert sent(*whole) == 0
        await sender.shutdown(wait=False)
        assert_same(await task, STATE)


async def test_a_superseded_snapshot_stays_until_the_next_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a large swarm, that is longer than the stall timeout."""
    monkeypatch.setattr("aiockpt.swarm.tracker.heartbeat", lambda _: 600.0)
    async with sending(stall_timeout=0.3) as sender:
        await announce(sender, 15)
        headers = authorized(sender.metadata(), 15)
        url = f"{sender.address()}1/metadata"
        async with aiohttp.ClientSession(headers=headers) as session:
            for step in (2, None):
                async with session.get(url) as answer:
                    assert answer.status == 200
                if step is not None:
                    await sender.send_checkpoint([], step, STATE)
                    await asyncio.sleep(1.0)
