"""Members of a swarm that lie, are slow on purpose, or pass on what they were told."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http import HTTPStatus

import aiohttp
import pytest
from aiohttp import TCPConnector, web

from aiockpt import Swarm
from aiockpt.runtime.same_host import format_mark, identity
from tests.support.proofs import proves
from tests.support.servers import running, settle
from tests.support.swarms import (
    CHUNKS,
    SLOW,
    all_of,
    authorized,
    members_of,
    receivers,
    sending,
    sent,
    slow,
    until_members,
)
from tests.support.transports import Events, Transport, transport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

Body = Callable[["Impostor", web.Request], Awaitable[web.StreamResponse]]


class Impostor:
    """A member that announces everything, and then does what it likes.

    Attributes:
        asked: The requests that it got, with their tokens.
        size: How many bytes the file has.
    """

    def __init__(self, body: Body) -> None:
        self.asked: list[tuple[str, str]] = []
        self.size = ""
        self._body = body

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Say that it has everything, or answer a range."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.asked.append((request.path, token))
        if request.path.endswith("have"):
            return web.Response(body=b"\xff" * (CHUNKS // 8))
        return await self._body(self, request)

    def part(self, request: web.Request) -> tuple[int, dict[str, str]]:
        """Return the length and the headers of the range that is wanted."""
        first, last = request.headers["Range"].removeprefix("bytes=").split("-")
        span = f"bytes {first}-{last}/{self.size}"
        headers = {"ETag": request.headers["If-Match"], "Content-Range": span}
        return int(last) - int(first) + 1, headers

    async def announce(self, metadata: str, number: int, url: str, host: str) -> None:
        """Announce it from a loopback address."""
        base = f"{metadata.partition('#')[0]}1/"
        async with aiohttp.ClientSession(
            connector=TCPConnector(local_addr=(host, 0)),
            headers=authorized(metadata, number),
            raise_for_status=True,
        ) as session:
            one = {"Range": "bytes=0-0"}
            async with session.get(f"{base}full", headers=one) as answer:
                self.size = answer.headers["Content-Range"].rpartition("/")[2]
                mark = format_mark(identity() or b"", answer.headers["ETag"].strip('"'))
            said = {"url": url, "have": CHUNKS, "host": mark}
            async with session.post(f"{base}members", json=said):
                pass


async def lie(impostor: Impostor, request: web.Request) -> web.StreamResponse:
    """Send zeros for whatever is asked."""
    length, headers = impostor.part(request)
    return web.Response(status=206, body=bytes(length), headers=headers)


async def trickle(impostor: Impostor, request: web.Request) -> web.StreamResponse:
    """Send a byte now and then, which is no stall."""
    length, headers = impostor.part(request)
    headers["Content-Length"] = str(length)
    response = web.StreamResponse(status=206, headers=headers)
    await response.prepare(request)
    with suppress(ConnectionError):
        while request.transport is not None and not request.transport.is_closing():
            await response.write(b"0")
            await asyncio.sleep(0.1)
    return response


async def stay_silent(_: Impostor, request: web.Request) -> web.StreamResponse:
    """Take the request, and answer nothing."""
    line = request.transport
    await settle(lambda: line is None or line.is_closing(), patience=60)
    return web.Response()


async def have_nothing(_: Impostor, request: web.Request) -> web.StreamResponse:
    """Have nothing of what was announced."""
    return web.Response(status=HTTPStatus.NO_CONTENT)


@asynccontextmanager
async def impostor(
    sender: Transport, body: Body, *, number: int = 15, host: str = "127.0.0.1"
) -> AsyncIterator[Impostor]:
    """Have an impostor join the swarm of a sender."""
    found, app = Impostor(body), web.Application()
    app.router.add_route("*", "/{rest:.*}", found.answer)
    async with running(app, socket.create_server((host, 0))) as server:
        url = f"http://{host}:{server.port}/"
        await found.announce(sender.metadata(), number, url, host)
        yield found


@proves("threat T10", "threat T11")
@pytest.mark.parametrize("body", [lie, have_nothing], ids=["chunks", "bitmap"])
async def test_a_member_that_lies_is_dropped(body: Body, events: Events) -> None:
    """Its bytes are used by nobody, and it is asked for no more.

    One that lacks a chunk may have begun to receive the step anew. Nobody complains.
    """
    async with (
        sending() as sender,
        slow(sender) as url,
        impostor(sender, body, host="127.0.0.2") as liar,
        receivers(2, Swarm(linger=60)) as members,
    ):
        await all_of(members, url)
        if body is lie:  # whoever lingers goes on to report it
            await until_members(sender, complaints=1)
        await asyncio.gather(*(each.shutdown(wait=False) for each in members))
        if body is not lie:
            assert not any(each["complaints"] for each in await members_of(sender))
    dropped = [each for each in events if each.stop == "drop"]
    assert dropped
    ranges = [path for path, _ in liar.asked if path.endswith("full")]
    assert 1 <= len(ranges) <= 2 * len(dropped) + 2


@proves("threat T10")
async def test_a_lie_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report does not wait for the next announcement."""
    monkeypatch.setattr("aiockpt.swarm.tracker.heartbeat", lambda _: 600.0)
    async with (
        sending() as sender,
        slow(sender, SLOW // 20) as url,
        impostor(sender, lie, host="127.0.0.2"),
        receivers(1) as (receiver,),
    ):
        task = asyncio.create_task(receiver.recv_checkpoint(0, url, 1))
        await until_members(sender, complaints=1)
        assert not task.done()
        task.cancel()
        await asyncio.wait({task})


@proves("threat D16")
@pytest.mark.parametrize("body", [trickle, stay_silent], ids=["trickle", "silent"])
async def test_members_that_are_slow_on_purpose_are_dropped(
    body: Body, events: Events
) -> None:
    """Slow members cannot hold all connections to members.

    A chunk is requested from two of them at most, and then from the sender.
    """
    async with (
        sending() as sender,
        slow(sender) as url,
        AsyncExitStack() as stack,
        receivers(2) as members,
    ):
        for number in range(4):
            await stack.enter_async_context(impostor(sender, body, number=number))
        await all_of(members, url)
    dropped = [each for each in events if each.stop == "drop"]
    assert len({each.detail for each in dropped if "much slower" in each.detail}) >= 2
    assert {each.level for each in dropped} == {logging.INFO}


@proves("threat D16")
async def test_a_chunk_is_requested_from_two_silent_members_at_most(
    events: Events,
) -> None:
    """Then the receiver requests it from the sender, and ends."""
    async with (
        sending() as sender,
        slow(sender) as url,
        AsyncExitStack() as stack,
        receivers(1, timeout=120) as members,
    ):
        for number in range(24):
            await stack.enter_async_context(
                impostor(sender, stay_silent, number=number)
            )
        await all_of(members, url)
    source = url.partition("#")[0]
    vain = Counter(
        re.findall(r"too slow with chunk \d+", each.detail)[0]
        for each in events
        if each.stop == "retry" and each.peer != source
    )
    assert 0 < max(vain.values()) <= 2


@proves("threat I9")
async def test_the_token_of_members_opens_one_snapshot_of_members_only() -> None:
    """They never get the token of the source, and theirs does not open the source.

    It does not open what a member serves itself, nor anything later.
    """
    async with (
        sending() as sender,
        slow(sender) as url,
        impostor(sender, lie) as liar,
        receivers(2, Swarm(linger=60)) as members,
        transport() as other,
        aiohttp.ClientSession() as session,
    ):
        await all_of(members, url)
        await members[0].send_checkpoint([], 5, {"other": 1})
        await other.send_checkpoint([], 6, {})
        (token,) = {token for _, token in liar.asked}
        assert token
        assert token not in url

        async def ask(whom: Transport, path: str) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            async with session.get(whom.address() + path, headers=headers) as answer:
                return answer.status

        for path in ("1/full", "1/metadata", "1/have", "latest", "1/members", ""):
            assert (path, await ask(sender, path)) == (path, 401)
        expected = {"1/metadata": 200, "5/metadata": 404, "5/full": 404}
        expected |= {"latest": 401, "latest/full": 404, "": 401}
        assert {path: await ask(members[0], path) for path in expected} == expected
        await members[0].recv_checkpoint(0, other.metadata(), 6)
        assert await ask(members[0], "1/metadata") == HTTPStatus.UNAUTHORIZED


@proves("threat S7")
async def test_an_announcement_cannot_point_elsewhere() -> None:
    """Others connect to the host that it came from."""
    async with sending() as sender, aiohttp.ClientSession() as session:
        metadata, named = sender.metadata(), list[str]()
        for number in range(2):
            async with session.post(
                f"{sender.address()}1/members",
                headers=authorized(metadata, number),
                json={"url": f"http://192.0.2.7:{number + 1}/checkpoint/"},
            ) as answer:
                members = (await answer.json())["members"] if number else []
            named += [each["url"] for each in members]
    assert named == ["http://127.0.0.1:1/checkpoint/"]


@proves("threat I11")
async def test_a_grant_that_lapses_loses_the_token_of_the_swarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members refuse it soon, and go on serving each other."""
    monkeypatch.setattr("aiockpt.http.tokens.CLOCK_SKEW", 0.0)
    monkeypatch.setattr("aiockpt.swarm.tracker.heartbeat", lambda _: 0.5)
    monkeypatch.setattr("aiockpt.swarm.membership._MIN_LEASE_S", 0.3)
    async with (
        sending() as sender,
        receivers(2, Swarm(linger=60)) as (one, two),
        aiohttp.ClientSession() as session,
        slow(sender) as url,
    ):
        await all_of([one, two], url)
        base, _, token = sender.grant("spy", lifetime=5.0).partition("#")

        async def ask(address: str, token: str, **more: str) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {token}", **more}
            async with session.get(f"{address}1/metadata", headers=headers) as got:
                return got.status, got.headers.get("Aiockpt-Swarm", "")

        lease = {"Aiockpt-Lease": f"{7:032x}; ttl=60", "Aiockpt-Swarm": "join"}
        status, of_swarm = await ask(base, token, **lease)
        assert (status, len(of_swarm)) == (HTTPStatus.OK, 43)
        for each in (one, two):
            assert (await ask(each.address(), of_swarm))[0] == HTTPStatus.OK
        async with asyncio.timeout(60):
            for each in (one, two):
                while (await ask(each.address(), of_swarm))[0] != 401:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        assert (await ask(base, token))[0] == HTTPStatus.UNAUTHORIZED
        before = sent(one, two)
        async with receivers(1) as late:
            await all_of(late, url)
        await settle(lambda: sent(one, two) > before)
