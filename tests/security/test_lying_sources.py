"""A source that names hosts of its choice as members of its swarm, and how often."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from aiockpt.http import setup
from aiockpt.testing import assert_same
from tests.support.proofs import proves
from tests.support.servers import own_address, running
from tests.support.transports import chunked, told, transport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

CHUNKS = 24
STATE = chunked(CHUNKS)
DELAY = 0.2  # seconds for which the source thinks about a request
TOKEN = "x" * 43
HAVE = (
    "HTTP/1.1 200 OK\r\nETag: {etag}\r\nTransfer-Encoding: chunked\r\n\r\n"
    f"{CHUNKS // 8:x}\r\n"
)
PART = (
    "HTTP/1.1 206 OK\r\nETag: {etag}\r\nContent-Range: bytes {first}-{last}/{size}\r\n"
    "Content-Length: {length}\r\n\r\n"
)
PLAIN = "HTTP/1.1 {status} No\r\nRetry-After: 0\r\n{more}Content-Length: 0\r\n\r\n"


class Victim:
    """A service of somebody else, at every loopback address.

    Attributes:
        port: Where it listens.
        requests: The methods and paths that it got.
        size: Bytes of the checkpoint's file.
    """

    def __init__(self, behaviour: str) -> None:
        self.port = self.size = 0
        self.requests: list[str] = []
        self._behaviour = behaviour

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer the requests of one connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.requests.append(head.partition(" HTTP")[0])
                writer.write(self._answer(head))
                await writer.drain()
                if self._behaviour == "cut" and "/full" in head:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, head: str) -> bytes:
        if self._behaviour == "gone":
            return PLAIN.format(status=404, more="").encode()
        if self._behaviour == "redirect":
            where = f"Location: http://127.0.0.1:{self.port}/elsewhere\r\n"
            return PLAIN.format(status=307, more=where).encode()
        fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
        etag = fields["If-Match"]
        if "/have" in head:
            return HAVE.format(etag=etag).encode() + b"\xff" * (CHUNKS // 8) + b"\r\n"
        if self._behaviour == "busy":
            return PLAIN.format(status=503, more="").encode()
        first, last = map(int, fields["Range"].removeprefix("bytes=").split("-"))
        length = last - first + 1
        part = PART.format(
            etag=etag, first=first, last=last, size=self.size, length=length
        )
        return part.encode() + bytes(1 if self._behaviour == "cut" else length)


@asynccontextmanager
async def victim(behaviour: str) -> AsyncIterator[Victim]:
    """Run one."""
    found = Victim(behaviour)
    server = await asyncio.start_server(found.serve, "0.0.0.0", 0)
    async with server:
        found.port = server.sockets[0].getsockname()[1]
        yield found


@asynccontextmanager
async def lying(
    target: Victim, urls: Iterator[str], host: str = "127.0.0.1"
) -> AsyncIterator[tuple[str, list[float]]]:
    """Run a source that names 64 of these URLs in each answer.

    Gives its metadata, and the times of the announcements that it gets.
    """
    posts, loop = list[float](), asyncio.get_running_loop()
    numbers = itertools.count(1)

    async def invite(request: web.Request, response: web.StreamResponse) -> None:
        if request.method == "GET" and response.status < 300:
            response.headers["Aiockpt-Swarm"] = TOKEN
        if found := re.search(r"/(\d+)", response.headers.get("Content-Range", "")):
            target.size = int(found[1])

    @web.middleware
    async def name(request: web.Request, handler: Callable[..., Any]) -> Any:
        if not request.path.endswith("/members"):
            await asyncio.sleep(DELAY)
            return await handler(request)
        posts.append(loop.time())
        named = [
            {"id": f"m{next(numbers)}", "url": url}
            for url in itertools.islice(urls, 64)
        ]
        return web.json_response({"id": "m0", "lease": 0.1, "members": named})

    app = web.Application(middlewares=[name])
    app.on_response_prepare.append(invite)
    sender = transport(advertise="http://sender/checkpoint/")
    setup(app, sender, "/checkpoint")
    async with running(app, socket.create_server((host, 0))) as site, sender:
        await sender.send_checkpoint([], 1, STATE)
        place = f"{host}:{site.port}"
        yield sender.metadata().replace("sender", place), posts


@proves("threat D24")
@pytest.mark.parametrize("behaviour", ["gone", "busy", "wrong", "cut", "redirect"])
async def test_a_source_cannot_make_a_receiver_flood_others(behaviour: str) -> None:
    """Neither with announcements, nor with requests to those that it names.

    And nothing is asked for but what members have, at the path that all members have.
    """
    loop = asyncio.get_running_loop()
    async with victim(behaviour) as target:
        urls = (
            f"http://127.1.{n >> 8 & 255}.{n & 255}:{target.port}/checkpoint/"
            for n in itertools.count(1)
        )
        async with (
            lying(target, urls) as (url, posts),
            transport(swarm=True, same_host=False, connections=2) as receiver,
        ):
            began = loop.time()
            assert_same(await receiver.recv_checkpoint(0, url, 1, timeout=60), STATE)
            seconds = loop.time() - began
    assert 3 <= len(posts) <= 7 + 2 * seconds
    assert 24 <= len(target.requests) <= 200 + 40 * seconds
    assert {*target.requests} <= {"GET /checkpoint/1/have", "GET /checkpoint/1/full"}


@proves("threat S8")
async def test_a_receiver_does_not_ask_its_own_host_for_a_source_elsewhere() -> None:
    """No spelling of the host or path makes it do so."""
    async with victim("gone") as target:
        port = target.port
        bad = [
            f"http://127.0.0.1:{port}/checkpoint/",
            f"http://127.9.9.9:{port}/checkpoint/",
            f"http://[::1]:{port}/checkpoint/",
            f"http://[::ffff:127.0.0.1]:{port}/checkpoint/",
            f"http://localhost:{port}/checkpoint/",
            f"http://a.localhost:{port}/checkpoint/",
            f"http://2130706433:{port}/checkpoint/",
            f"http://127.1:{port}/checkpoint/",
            f"http://0x7f.1:{port}/checkpoint/",
            f"http://0.0.0.0:{port}/checkpoint/",
            f"http://[::]:{port}/checkpoint/",
            f"http://[fe80::1]:{port}/checkpoint/",
            f"http://[fe80::1%25lo]:{port}/checkpoint/",
            f"http://169.254.1.1:{port}/checkpoint/",
            f"http://224.0.0.1:{port}/checkpoint/",
            f"http://x@{own_address()}:{port}/checkpoint/",
            f"ftp://{own_address()}:{port}/checkpoint/",
            f"http://{own_address()}:{port}/admin/checkpoint/",
            f"http://{own_address()}:{port}/checkpoint",
            f"http://{own_address()}:{port}/checkpoint/?",
            f"http://{own_address()}:{port}/checkpoint/#",
            f"http://{own_address()}:{port}/",
        ]
        async with (
            told() as events,
            lying(target, itertools.cycle(bad), own_address()) as (url, posts),
            transport(swarm=True, same_host=False, connections=2) as receiver,
        ):
            assert_same(await receiver.recv_checkpoint(0, url, 1, timeout=60), STATE)
        assert posts
        assert not target.requests
    refused = [each.detail for each in events if "does not ask" in each.detail]
    assert len(refused) == 1
    assert "its host is a loopback address" in refused[0]


async def test_members_at_another_address_are_asked() -> None:
    """So the test above refuses members because of their address."""
    async with victim("gone") as target:
        good = f"http://{own_address()}:{target.port}/checkpoint/"
        async with (
            lying(target, itertools.repeat(good), own_address()) as (url, _),
            transport(swarm=True, same_host=False, connections=2) as receiver,
        ):
            assert_same(await receiver.recv_checkpoint(0, url, 1, timeout=60), STATE)
        assert target.requests
