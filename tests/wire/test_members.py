"""The swarm over HTTP: invitations, announcements, and what a complete server has."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

import pytest

from aiockpt import Swarm
from aiockpt.http.tokens import swarm_token
from aiockpt.memory.arena import Arena
from aiockpt.runtime.secrets import Token
from aiockpt.swarm.relay import Relay, Slots
from tests.support.proofs import proves
from tests.support.servers import TOKEN, Answer, Memory, Site, serving, settle

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

SWARM = Swarm(slots=2)
A, B, C = (f"{digit * 32}; ttl=60" for digit in "abc")
CHUNKS = 10
SO_MAX_PACING_RATE, UNLIMITED = 47, -1


def memory() -> Memory:
    """Return a checkpoint of ten chunks."""
    return Memory(CHUNKS * (64 << 10))


async def ask(
    site: Site, path: str, lease: str | None = None, *, joins: bool = True, **more: str
) -> Answer:
    """Ask as a receiver that can join."""
    headers = dict(more)
    if lease is not None:
        headers["Aiockpt-Lease"] = lease
    if joins:
        headers["Aiockpt-Swarm"] = "join"
    async with site.peer() as peer:
        return await peer.ask(f"/checkpoint/7/{path}", **headers)


async def post(
    site: Site,
    lease: str | None,
    said: Any,
    *,
    method: str = "POST",
    path: str = "/checkpoint/7/members",
    host: str = "127.0.0.1",
    **headers: str,
) -> Answer:
    """Announce a member from a loopback address."""
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    if lease is not None:
        headers["Aiockpt-Lease"] = lease
    async with site.peer(host=host) as peer:
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: 127.0.0.1",
            f"Authorization: Bearer {TOKEN}",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        await peer.say("\r\n".join([*lines, "", ""]).encode() + body)
        return await peer.answer()


SAID = {"url": "http://127.0.0.1:9/checkpoint/"}


async def test_a_receiver_that_is_alone_is_told_nothing() -> None:
    """A receiver that is alone, or cannot join, gets no invitation."""
    async with serving(memory(), swarm=SWARM) as site:
        for _ in range(2):
            assert "Aiockpt-Swarm" not in (await ask(site, "metadata", A)).headers
        assert "Aiockpt-Swarm" not in (await ask(site, "full", B, joins=False)).headers
        assert "Aiockpt-Swarm" not in (await ask(site, "full", A)).headers
        assert "Aiockpt-Swarm" not in (await ask(site, "full")).headers
    async with serving(memory(), swarm=None) as site:
        for lease in (A, B, A):
            assert "Aiockpt-Swarm" not in (await ask(site, "metadata", lease)).headers


async def test_two_receivers_are_invited() -> None:
    """The first one with its next request."""
    held = memory()
    token = swarm_token(TOKEN, held.manifest.snapshot_id)
    async with serving(held, swarm=SWARM) as site:
        await ask(site, "metadata", A)
        second = await ask(site, "metadata", B)
        first = await ask(site, "full", A)
        for answer in (first, second):
            assert answer.headers["Aiockpt-Swarm"] == token
        await ask(site, "metadata", A.replace("60", "0"))
        assert "Aiockpt-Swarm" not in (await ask(site, "full", B)).headers


async def test_members_are_named_and_leave() -> None:
    """The tracker answers with those that it knows."""
    async with serving(memory(), swarm=SWARM) as site:
        first = await post(site, A, {**SAID, "zone": "rack", "have": 4})
        assert first.status == 200
        found = json.loads((await post(site, B, SAID)).body)
        assert found["members"] == [
            {
                "id": json.loads(first.body)["id"],
                "url": "http://127.0.0.1:9/checkpoint/",
                "zone": "rack",
                "have": 4,
            }
        ]
        assert found["lease"] == 6
        assert 0 <= found["next"] < CHUNKS
        assert (await post(site, A, b"", method="DELETE")).status == 204
        assert "members" not in json.loads((await post(site, B, SAID)).body)


async def test_a_member_is_told_what_nobody_has() -> None:
    """Each answer says it, until everything was given once."""
    size = 64 << 10
    async with serving(memory(), swarm=SWARM) as site:
        assert site.store.latest is not None
        head = len(site.store.latest.servable.manifest.header)
        await ask(site, "metadata", A)
        wanted = json.loads((await post(site, A, SAID)).body)["next"]
        seen = set[int]()
        while wanted is not None:
            assert wanted not in seen
            seen.add(wanted)
            first = head + wanted * size
            answer = await ask(
                site, "full", A, Range=f"bytes={first}-{first + size - 1}"
            )
            assert answer.status == 206
            named = answer.headers.get("Aiockpt-Next-Chunk")
            wanted = None if named is None else int(named)
        assert len(seen) == CHUNKS
        again = json.loads((await post(site, A, {**SAID, "have": CHUNKS})).body)
        assert "next" not in again


async def test_a_receive_that_begins_alone_finds_nothing_given() -> None:
    """Those that got the chunks are gone."""
    async with serving(memory(), swarm=SWARM) as site:
        for first, second in ((A, B), (B, A)):
            await ask(site, "metadata", first)
            assert "next" in json.loads((await post(site, first, SAID)).body)
            await ask(site, "full", first)
            await ask(site, "metadata", second)
            assert "next" not in json.loads((await post(site, second, SAID)).body)
            for each in (first, second):
                await post(site, each, b"", method="DELETE")
                await ask(site, "metadata", each.replace("60", "0"))


@proves("threat D17")
async def test_a_body_holds_its_slot_until_it_has_left() -> None:
    """The kernel could take it as a whole. One that takes too long no longer counts."""
    wanted = {"Range": "bytes=0-119999", "Aiockpt-Swarm": "join"}
    one = Swarm(slots=1)  # for the source, two
    async with serving(Memory(2 << 20), swarm=one) as site, AsyncExitStack() as stack:
        for lease in (A, B, C):
            await ask(site, "metadata", lease)
        quick = await ask(site, "full", C, Range="bytes=0-119999")
        assert quick.status == 206  # now the source knows how long a body takes
        for lease in (A, B):
            peer = await stack.enter_async_context(site.peer(receive_buffer=4096))
            await peer.request("/checkpoint/7/full", **wanted, Aiockpt_Lease=lease)
            assert (await peer.head()).status == 206
        refused = await ask(site, "full", C, Range="bytes=0-119999", Prefer="wait=0")
        assert refused.status == 503
        assert refused.headers["Retry-After"] == "0"
        for path in ("metadata", "full"):  # a manifest and long ranges need no slot
            answer = await ask(site, path, C, Prefer="wait=0")
            assert answer.status == 200
        later = await ask(site, "full", C, Range="bytes=0-119999", Prefer="wait=20")
        assert later.status == 206


@pytest.mark.parametrize(
    ("said", "lease", "headers", "status"),
    [
        (SAID, None, {}, 400),
        ({}, A, {}, 400),
        (b"nonsense", A, {}, 400),
        ({"url": "ftp://x/"}, A, {}, 400),
        ({**SAID, "have": -1}, A, {}, 400),
        ({**SAID, "zone": "z" * 65}, A, {}, 400),
        ({**SAID, "bad": ["m1"] * 17}, A, {}, 400),
        ({**SAID, "bad": [""]}, A, {}, 400),
        ({"url": "http://x/" + "y" * 600}, A, {}, 400),
        ({**SAID, "local": "host.example"}, A, {}, 400),
        ({**SAID, "more": "x" * 9000}, A, {}, 400),
        (SAID, A, {"If-Match": '"other"'}, 412),
        (SAID, A, {"Authorization": "Bearer no"}, 401),
    ],
)
@proves("threat D14")
async def test_a_bad_announcement(
    said: Any, lease: str | None, headers: dict[str, str], status: int
) -> None:
    """It is refused, and leaves nothing."""
    async with serving(memory(), swarm=SWARM) as site:
        if "Authorization" in headers:
            async with site.peer(token="no") as peer:
                answer = await peer.ask("/checkpoint/7/members", method="POST")
        else:
            answer = await post(site, lease, said, **headers)
        assert answer.status == status
        assert site.store.latest is not None
        assert not len(site.tracker)


async def test_where_there_is_no_swarm() -> None:
    """404; and only two methods have a meaning."""
    async with serving(memory(), swarm=None) as site:
        assert (await post(site, A, SAID)).status == 404
    async with serving(memory(), swarm=SWARM) as site:
        assert (await ask(site, "members", A)).status == 405
        answer = await post(site, A, SAID, path="/checkpoint/7/full")
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
        path = "/checkpoint/8/members"
        assert (await post(site, A, SAID, path=path)).status == 404


async def test_a_server_that_nothing_extends_knows_no_swarm() -> None:
    """It answers and shows what is its own, whatever its options say of swarms."""
    async with serving(memory(), swarm=SWARM, extended=False) as site:
        for lease in (A, B, A):
            for path in ("metadata", "full"):
                answer = await ask(site, path, lease)
                assert answer.status == 200
                assert "Aiockpt-Swarm" not in answer.headers
        for path in ("have", "members"):
            assert (await ask(site, path, A)).status == 404
        assert (await post(site, A, SAID)).status == 405
        async with site.peer() as peer:
            found = json.loads((await peer.ask("/checkpoint/")).body)
        assert found["status"]["swarm"] is None


@asynccontextmanager
async def relaying(site: Site, chunks: Iterable[int]) -> AsyncIterator[dict[str, str]]:
    """Serve these chunks of a receive; give the headers of a request to it."""
    held = memory()
    relay = Relay(held.manifest, {}, Slots(2))
    relay.tokens = [Token("of-members")]
    with closing(Arena(len(held.data))) as relay.memory:
        for chunk in chunks:
            relay.add(chunk)
        site.store.serve_relay(relay)
        try:
            yield {"Authorization": f"Bearer {relay.tokens[0]}"}
        finally:
            await site.store.end_relay(relay)


@pytest.mark.parametrize(
    ("path", "status"), [("full", 416), ("3", 200), ("4", 204), ("metadata", 200)]
)
async def test_a_member_says_what_it_would_send(path: str, status: int) -> None:
    """``HEAD`` has the status of a ``GET``, also for what it lacks."""
    async with (
        serving(swarm=SWARM) as site,
        relaying(site, [3]) as headers,
        site.peer() as peer,
    ):
        for method in ("HEAD", "GET"):
            path = f"/checkpoint/7/{path.rpartition('/')[2]}"
            answer = await peer.ask(path, method=method, **headers)
            assert answer.status == status


@asynccontextmanager
async def lending(
    site: Site,
) -> AsyncIterator[tuple[Memory, Relay, memoryview, Any]]:
    """Serve a receive of two large chunks; give its memory, and a slow reader."""
    held = Memory(16 << 20, chunk_bytes=8 << 20)
    relay = Relay(held.manifest, {}, Slots(2))
    relay.tokens = [Token("of-members")]
    with closing(Arena(len(held.data))) as relay.memory:
        (memory,) = relay.memory.buffers(0, len(held.data))
        memory[:] = held.data
        for chunk in (0, 1):
            relay.add(chunk)
        site.store.serve_relay(relay)
        try:
            async with site.peer(receive_buffer=4096, token=relay.tokens[0]) as peer:
                yield held, relay, memory, peer
        finally:
            memory.release()
            await site.store.end_relay(relay)


@proves("threat T14")
async def test_a_member_sends_what_it_has_compared() -> None:
    """Its owner may change the memory at any moment, also during a body."""
    async with serving(swarm=SWARM) as site, lending(site) as found:
        held, relay, memory, peer = found
        async with site.store.unread(relay):
            relay.lend()
        await peer.request("/checkpoint/7/0")
        assert (await peer.head()).status == 200
        memory[:] = bytes(len(memory))
        assert await peer.read_some(8 << 20) == held.data[: 8 << 20]
        assert not relay.ended
        for status in (404, 401):  # it leaves, and says that it has nothing any more
            assert (await peer.ask("/checkpoint/7/1")).status == status


@proves("threat T14")
async def test_a_body_ends_before_the_memory_is_lent() -> None:
    """What had come of it is right. The rest comes from a copy."""
    async with serving(swarm=SWARM) as site, lending(site) as found:
        held, relay, memory, peer = found
        await peer.request("/checkpoint/7/0")
        assert (await peer.head()).status == 200
        some = await peer.read_some(100_000)
        async with asyncio.timeout(20):
            async with site.store.unread(relay):
                relay.lend()
        memory[:] = bytes(len(memory))
        some += await peer.read_all()
        assert 0 < len(some) < 8 << 20
        assert some == held.data[: len(some)]


@proves("threat T14")
async def test_a_request_that_waits_while_the_memory_is_lent_asks_again() -> None:
    """It was let in before; the next one gets a copy."""
    async with serving(swarm=SWARM) as site, lending(site) as found:
        held, relay, memory, peer = found
        share = site.store.relay_of(relay.tokens[0])
        assert share is not None
        async with site.store.unread(relay):
            await peer.request("/checkpoint/7/0")
            await settle(lambda: share.lock.statistics().waiting_readers == 1)
            relay.lend()
        answer = await peer.answer()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "0")
        await peer.request("/checkpoint/7/0")
        assert (await peer.head()).status == 200
        memory[:] = bytes(len(memory))
        assert await peer.read_some(8 << 20) == held.data[: 8 << 20]


@proves("threat D18")
async def test_one_host_leaves_streams_for_others() -> None:
    """One host gets at most half of a member's streams."""
    async with (
        serving(swarm=SWARM) as site,
        relaying(site, [3]) as headers,
        AsyncExitStack() as stack,
    ):

        async def watch(host: str) -> int:
            peer = await stack.enter_async_context(site.peer(host=host))
            await peer.request("/checkpoint/7/have", **headers)
            return (await peer.head()).status

        found = Counter([await watch("127.0.0.1") for _ in range(40)])
        assert found == {200: 32, 503: 8}
        assert await watch("127.0.0.2") == 200


async def test_a_member_that_asks_for_a_long_range_needs_no_slot() -> None:
    """It would keep one for long; short ranges wait for those that have one."""
    leases = [f"{digit * 32}; ttl=60" for digit in "abc"]
    short = {"Range": "bytes=0-119999", "Prefer": "wait=0"}
    large = Memory(2 << 20)
    async with serving(large, swarm=Swarm(slots=1)) as site, AsyncExitStack() as stack:
        for port, each in enumerate(leases, 1):
            said = {"url": f"http://127.0.0.1:{port}/checkpoint/"}
            assert (await post(site, each, said)).status == 200

        async def get(lease: str, **headers: str) -> int:
            peer = await stack.enter_async_context(site.peer(receive_buffer=4096))
            headers["Aiockpt-Lease"] = lease
            await peer.request("/checkpoint/7/full", **headers)
            return (await peer.head()).status

        # A source has two slots for each of a member.
        assert [await get(each, **short) for each in leases] == [206, 206, 503]
        assert await get(leases[2], Prefer="wait=0") == 200


@pytest.mark.every_loop
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces connections")
async def test_the_rate_limits_only_what_a_member_sends() -> None:
    """Later requests on the same connection are not limited."""
    relay = Relay(memory().manifest, {}, Slots(2, rate=40e6))
    relay.tokens = [Token("of-members")]
    async with serving(memory(), swarm=SWARM) as site, site.peer() as peer:
        with closing(Arena(CHUNKS * (64 << 10))) as relay.memory:
            for chunk in range(CHUNKS):
                relay.add(chunk)
            site.store.serve_relay(relay)
            found = []
            for token in (TOKEN, "of-members", TOKEN):
                wanted = {"Authorization": f"Bearer {token}", "Range": "bytes=0-99999"}
                assert (await peer.ask("/checkpoint/7/full", **wanted)).status == 206
                sock = site.connections[0].transport.get_extra_info("socket")
                found.append(sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE))
            assert found == [UNLIMITED, 20_000_000, UNLIMITED]
            await site.store.end_relay(relay)


async def test_a_complete_server_has_everything() -> None:
    """It says so in the form in which members do."""
    async with serving(memory(), swarm=SWARM) as site:
        answer = await ask(site, "have", A)
    assert (answer.status, answer.body) == (200, b"\xff\x03")
