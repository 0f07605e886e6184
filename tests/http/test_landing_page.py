"""What the address that a sender prints answers: what is there, and why not."""

from __future__ import annotations

import asyncio
import json
from html.parser import HTMLParser
from typing import Any

import aiohttp
import pytest
from aiohttp import web

import aiockpt.http
from aiockpt.http.tokens import make_token
from tests.support.proofs import proves
from tests.support.runners import running
from tests.support.serving import TOKEN, Memory, serving
from tests.support.transports import transport, weights

pytestmark = pytest.mark.asyncio

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


class Links(HTMLParser):
    """Collects what a page links to, and which elements it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it."""
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name == "href" and value]


async def test_a_program_gets_json() -> None:
    """What is served, and where it lies from here."""
    memory = Memory(1000)
    async with serving(memory) as site, site.peer() as peer:
        answer = await peer.ask("/checkpoint/")
        for path in json.loads(answer.body)["paths"].values():
            assert (await peer.ask(f"/checkpoint/{path}")).status == 200, path
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["Cache-Control"] == "no-store"
    found = json.loads(answer.body)
    assert found["serving"] == {
        "step": 7,
        "snapshot_id": memory.manifest.snapshot_id,
        "total_bytes": len(memory.file),
    }
    assert TOKEN not in str(answer)


@proves("threat I7")
async def test_a_browser_gets_a_page() -> None:
    """Its links lead to what is served; no script runs in it, and no secret is told."""
    async with serving(Memory(1000)) as site, site.peer() as peer:
        answer = await peer.ask("/checkpoint/", Accept=BROWSER)
        page = Links(answer.body.decode())
        assert page.links
        for link in page.links:
            assert (await peer.ask(f"/checkpoint/{link}")).status == 200, link
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Vary"] == "Accept"
    assert not page.tags & {"script", "style", "img", "link", "form", "iframe"}
    assert TOKEN not in str(answer)


@pytest.mark.parametrize("accept", ["", BROWSER])
async def test_nothing_is_served_yet(accept: str) -> None:
    """That is an answer, too, and it does not wait."""
    async with serving(None) as site, site.peer() as peer:
        headers = {"Accept": accept} if accept else {}
        async with asyncio.timeout(10):
            answer = await peer.ask("/checkpoint/", Prefer="wait=60", **headers)
    assert answer.status == 200
    if accept:
        assert b"Nothing is served" in answer.body
    else:
        assert json.loads(answer.body)["serving"] is None


async def test_an_address_without_its_slash_leads_there() -> None:
    """As people type it; a redirect tells nothing without a token."""
    async with serving(Memory(1000)) as site, site.peer() as peer:
        answer = await peer.ask("/checkpoint")
        assert answer.status == 308
        assert answer.headers["Location"] == "checkpoint/"
        async with aiohttp.ClientSession() as session:
            token = {"Authorization": f"Bearer {TOKEN}"}
            async with session.get(site.url.rstrip("/"), headers=token) as found:
                assert (await found.json())["serving"]["step"] == 7
        async with site.peer(token=None) as stranger:
            assert (await stranger.ask("/checkpoint")).status == 401


async def test_the_newest_has_a_path_that_does_not_change() -> None:
    """``latest/full`` is the file of what is served now, and says which step it is."""
    memory = Memory(1000)
    async with serving(memory) as site, site.peer() as peer:
        full = await peer.ask("/checkpoint/latest/full")
        head = await peer.ask("/checkpoint/latest/full", method="HEAD")
        part = await peer.ask("/checkpoint/latest/full", Range="bytes=5-9")
        header = await peer.ask("/checkpoint/latest/metadata")
        other = await peer.ask("/checkpoint/latest/nonsense")
    assert full.body == memory.file
    assert full.headers["Aiockpt-Step"] == head.headers["Aiockpt-Step"] == "7"
    assert full.headers["ETag"] == memory.etag
    assert (part.status, part.body) == (206, memory.file[5:10])
    assert header.body == memory.manifest.header
    assert other.status == 404


async def test_the_newest_when_there_is_none() -> None:
    """Is a 404 at once."""
    async with serving(None) as site, site.peer() as peer:
        answer = await peer.ask("/checkpoint/latest/full")
    assert answer.status == 404
    assert json.loads(answer.body)["type"] == "tag:aiockpt,2025:step-not-found"


PATHS = ["/checkpoint/", "/checkpoint", "/checkpoint/latest/full", "/checkpoint/7/full"]


@proves("threat I7")
@pytest.mark.parametrize("path", PATHS)
async def test_a_refusal_says_what_was_missing(path: str) -> None:
    """A token, or the right one; for every path alike."""
    other_step = make_token(TOKEN, "rank-3", expires=9e11, step=8)
    ended = make_token(TOKEN, "rank-3", expires=1e9)
    cases = {
        None: "no token was sent: send the header 'Authorization: Bearer TOKEN'",
        "not-the-token": "the token is none of this server's",
        other_step: "step 8 only",
        ended: "the token ended",
    }
    async with serving(Memory(1000)) as site:
        for token, detail in cases.items():
            async with site.peer(token=token) as peer:
                answer = await peer.ask(path)
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert detail in json.loads(answer.body)["detail"]
            assert TOKEN not in str(answer)
            assert "not-the-token" not in str(answer)


async def test_a_page_of_another_site_is_refused() -> None:
    """As for every other path."""
    async with serving(Memory(1000)) as site, site.peer() as peer:
        answer = await peer.ask("/checkpoint/", Origin="http://evil.example")
    assert answer.status == 403


async def test_an_application_of_ones_own() -> None:
    """``setup`` and ``create_app`` answer at their prefix, and only there."""
    app = web.Application()
    app.router.add_get("/", home)
    one, two = (transport(advertise=f"http://h/{name}/") for name in ("main", "sub"))
    aiockpt.http.setup(app, one, "/main")
    app.add_subapp("/sub", aiockpt.http.create_app(two))
    async with running(app) as port:
        await one.send_checkpoint([], 1, weights())
        await two.send_checkpoint([], 2, weights())
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            assert await text(session, "/") == "home"
            for step, sender, path in ((1, one, "/main"), (2, two, "/sub")):
                token = sender.metadata().partition("#")[2]
                found = json.loads(await text(session, f"{path}/", token))
                assert found["serving"]["step"] == step
                latest = json.loads(await text(session, f"{path}/latest", token))
                assert latest == found["serving"]


async def test_a_page_of_the_application_stays() -> None:
    """At its root, for one."""
    app = web.Application()
    app.router.add_get("/", home)
    aiockpt.http.setup(app, transport(advertise="http://h/"), "/")
    async with (
        running(app) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        assert await text(session, "/") == "home"


async def home(_: web.Request) -> web.Response:
    """Be a page of the application itself."""
    return web.Response(text="home")


async def text(session: Any, path: str, token: str = "") -> str:
    """Return what is answered."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with session.get(path, headers=headers) as answer:
        assert answer.status == 200, path
        return await answer.text()
