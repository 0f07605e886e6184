"""The status page: what programs get, what anybody gets, and what a browser shows."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aiockpt import Swarm
from tests.support.proofs import proves
from tests.support.servers import TOKEN, Answer, Memory, Site, serving
from tests.wire.test_members import CHUNKS, SAID, A, B, ask, memory, post

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

SWARM = Swarm(slots=2)
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
HOSTILE = "<img src=x onerror=alert(1)>"


async def page(site: Site, token: str | None = None, **headers: str) -> Answer:
    """Open the address as a browser does."""
    async with site.peer(token=token) as peer:
        return await peer.ask("/checkpoint/", Accept=BROWSER, **headers)


async def status(site: Site) -> dict[str, Any]:
    """Ask as a program does."""
    async with site.peer() as peer:
        answer = await peer.ask("/checkpoint/")
    assert TOKEN not in str(answer)
    found: dict[str, Any] = json.loads(answer.body)["status"]
    return found


async def test_the_counters() -> None:
    """The page has the server's counters, also in the middle of a body."""
    size = 16 << 20
    async with serving(Memory(size), send_buffer=4096) as site:
        first = await status(site)
        assert first == {
            "readers": 0,
            "waiting": 0,
            "bytes_sent": 0,
            "requests": 1,
            "refused": 0,
            "swarm": None,
        }
        async with site.peer(token="wrong") as peer:
            assert (await peer.ask("/checkpoint/")).status == 401
        async with site.peer(receive_buffer=4096) as peer:
            await peer.request("/checkpoint/7/full")
            await peer.head()
            assert await peer.read_some(1)
            async with asyncio.timeout(10):
                while not (found := await status(site))["bytes_sent"]:
                    pass
        assert (found["readers"], found["refused"]) == (1, 1)
        assert found["requests"] >= 4
        assert 0 < found["bytes_sent"] < size


async def test_the_members() -> None:
    """The page says what each has, and shows neither leases nor tokens."""
    async with serving(memory(), swarm=SWARM) as site:
        empty = {"chunks": CHUNKS, "given": 0, "members": []}
        assert (await status(site))["swarm"] == empty
        first = await post(site, A, {**SAID, "zone": "rack", "have": 4})
        bad = [json.loads(first.body)["id"]]
        second = {"url": "http://h:10/c", "have": 99, "bad": bad}
        await post(site, B, second, host="127.0.0.2")
        await ask(site, "full", A, Range="bytes=0-200000")
        async with site.peer() as peer:
            answer = await peer.ask("/checkpoint/")
    found = json.loads(answer.body)["status"]["swarm"]
    assert found.pop("given") in (2, 3)  # the header comes before the chunks
    assert found == {
        "chunks": CHUNKS,
        "members": [
            {
                "id": "m1",
                "url": "http://127.0.0.1:9/checkpoint/",
                "zone": "rack",
                "have": 4,
                "complaints": 1,
            },
            {
                "id": "m2",
                "url": "http://127.0.0.2:10/checkpoint/",
                "zone": "",
                "have": CHUNKS,
                "complaints": 0,
            },
        ],
    }
    for hidden in (TOKEN, A[:32], B[:32]):
        assert hidden not in str(answer)


async def test_many_members_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones are shown."""
    monkeypatch.setattr("aiockpt.swarm.endpoint._MAX_MEMBERS_SHOWN", 2)
    async with serving(memory(), swarm=SWARM) as site:
        for digit in "abcde":
            await post(site, f"{digit * 32}; ttl=60", SAID)
        found = (await status(site))["swarm"]
    assert [each["id"] for each in found["members"]] == ["m1", "m2"]
    assert found["more"] == 3


@proves("threat I7")
async def test_the_page_has_no_data() -> None:
    """It is the same with and without a token, whatever is served, byte for byte."""
    held = memory()
    async with serving(held, swarm=SWARM) as site:
        await post(site, A, {**SAID, "zone": "secluded"})
        anybody, reader = await page(site), await page(site, TOKEN)
    async with serving() as site:
        empty = await page(site)
    async with serving(held, token=None, insecure=True) as site:
        insecure = await page(site)
    for answer in (anybody, reader, empty, insecure):
        assert answer.status == 200
        assert answer.body == anybody.body
        fields = dict(answer.headers)
        fields.pop("Date")
        assert fields.keys() == {
            *("Server", "X-Content-Type-Options", "Cache-Control", "Content-Type"),
            *("Content-Security-Policy", "Referrer-Policy", "Vary", "Content-Length"),
        }
        assert fields["Cache-Control"] == "no-store"
        assert fields["Vary"] == "Accept"
        assert fields["Content-Type"] == "text/html; charset=utf-8"
        for hidden in (TOKEN, held.manifest.snapshot_id, "secluded"):
            assert hidden not in str(answer)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/json, text/html;q=0", "application/json"),
        ("text/html; level=1; q=0.0, */*", "application/json"),
        ("text/htmlx", "application/json"),
        ("*/*, TEXT/HTML ;q=0.1", "text/html; charset=utf-8"),
    ],
)
async def test_a_client_may_refuse_the_page(accept: str, kind: str) -> None:
    """A quality of zero refuses it (RFC 9110, 12.4.2)."""
    async with serving(memory()) as site, site.peer() as peer:
        answer = await peer.ask("/checkpoint/", Accept=accept)
    assert answer.headers["Content-Type"] == kind


@proves("threat I7")
async def test_the_policy_lets_only_the_page_itself_run() -> None:
    """The policy has the digests of the page's own scripts and styles."""
    async with serving(memory()) as site:
        answer = await page(site)
    text = answer.body.decode()
    policy = dict(
        each.strip().partition(" ")[::2]
        for each in answer.headers["Content-Security-Policy"].split(";")
    )
    for tag, source in {"style": "style-src", "script": "script-src"}.items():
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        seen = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy.pop(source) == f"'sha256-{seen}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert not re.search(r"innerHTML|document\.write|eval|https?:|\son\w+=", text)


@proves("threat S1")
async def test_only_the_page_is_for_everybody() -> None:
    """No path, method or header of a request gets anything else."""
    async with serving(memory(), swarm=SWARM) as site:
        for token in ("wrong", ""):
            assert (await page(site, token)).status == 401
        async with site.peer(token=None) as peer:
            assert (await peer.ask("/checkpoint/")).status == 401
            for path in ("latest", "latest/full", "7/full", "7/metadata", "7/have"):
                answer = await peer.ask(f"/checkpoint/{path}", Accept=BROWSER)
                assert answer.status == 401, path
            head = await peer.ask("/checkpoint/", method="HEAD", Accept=BROWSER)
            assert (head.status, head.body) == (200, b"")
            moved = await peer.ask("/checkpoint", Accept=BROWSER)
            assert (moved.status, moved.headers["Location"]) == (308, "checkpoint/")
            assert moved.body == b""


async def test_the_audit_log_tells_of_looks_at_debug_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A page that is left open would fill it; refusals are told as ever."""
    caplog.set_level(logging.DEBUG, "aiockpt.audit")
    async with serving(memory(), swarm=SWARM) as site:
        await page(site)
        await status(site)
        await page(site, "wrong")
    levels = [
        (each.levelno, each.args[0].outcome)  # type: ignore[index, union-attr]
        for each in caplog.records
        if each.name == "aiockpt.audit"
    ]
    assert levels == [
        (logging.DEBUG, "status"),
        (logging.DEBUG, "status"),
        (logging.INFO, "refused"),
    ]


# --------------------------------------------------------------------- a real browser


@pytest.fixture(scope="module")
def chromium() -> str:
    """Return a browser; skip where there is none."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is not installed")
    return found


async def shown(chromium: str, place: Path, url: str) -> str:
    """Return the elements of the page after some polls."""
    process = await asyncio.create_subprocess_exec(
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync"),
        *("--disable-background-networking", "--no-proxy-server", "--no-first-run"),
        *(f"--user-data-dir={place}", "--virtual-time-budget=3000", "--dump-dom", url),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(90):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return out.decode().partition("<script>")[0]


@pytest.mark.timeout(120)
@proves("threat I7")
async def test_a_browser_shows_the_members(chromium: str, tmp_path: Path) -> None:
    """The token is in the fragment, and the members' words are shown as text."""
    async with serving(memory(), swarm=SWARM) as site:
        await post(site, A, {**SAID, "zone": HOSTILE, "have": 4})
        evil = "http://h:10/<script>alert(1)</script>/"
        await post(site, B, {"url": evil, "have": CHUNKS})
        text = await shown(chromium, tmp_path, f"{site.url}#{TOKEN}")
        requests = (await status(site))["requests"]
    assert requests >= 6  # two announcements, the page, polls, and this one
    for member in ("m1", "m2"):
        assert f">{member}</td>" in text
    assert 'style="width: 40%' in text
    assert 'class="whole" style="width: 100%' in text
    assert HOSTILE not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert memory().manifest.snapshot_id in text
    assert "B/s" in text


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("fragment", "says"), [("", "needs the"), ("#no", "is not")])
async def test_a_browser_without_the_right_token(
    chromium: str, tmp_path: Path, fragment: str, says: str
) -> None:
    """It says so, and does not ask again."""
    async with serving(memory(), swarm=SWARM) as site:
        text = await shown(chromium, tmp_path, f"{site.url}{fragment}")
        found = await status(site)
    assert says in text.partition('id="says"')[2].partition("</p>")[0]
    assert memory().manifest.snapshot_id not in text
    assert found["refused"] == 1


@pytest.mark.timeout(120)
async def test_a_browser_at_an_insecure_server(chromium: str, tmp_path: Path) -> None:
    """It needs no token."""
    async with serving(memory(), swarm=SWARM, token=None, insecure=True) as site:
        text = await shown(chromium, tmp_path, site.url)
    assert memory().manifest.snapshot_id in text
