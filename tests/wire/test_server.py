"""What the server answers over HTTP: statuses, headers, ranges, conditions, waits."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import http_parser

from aiockpt import make_token
from aiockpt.errors import ClosedError, LocalProtocolError
from tests.support.proofs import proves
from tests.support.servers import CONFIG, TOKEN, Memory, serving, settle

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.torch_free,
    pytest.mark.usefixtures("no_blocking"),
]

BIG = 300_000  # more than the limit of small bodies
LARGE = 16 << 20  # more than the kernel buffers for a reader that does not read


def kind_of(answer):
    """Return the kind of problem that an answer tells of."""
    return json.loads(answer.body)["type"].rpartition(":")[2]


async def test_metadata_full_and_chunks_are_the_file():
    """Each resource is a cut of one file; HEAD answers as GET does, without a body."""
    memory = Memory(BIG)
    header = memory.manifest.header
    wholes = {
        "7/metadata": header,
        "7/full": memory.file,
        "7/2": bytes(memory.data[2 << 16 : 3 << 16]),
        "latest/full": memory.file,
        "latest/metadata": header,
    }
    async with serving(memory) as site, site.peer() as peer:
        for path, whole in wholes.items():
            answer = await peer.ask(f"/checkpoint/{path}")
            assert (answer.status, answer.body) == (200, whole)
            fields = answer.headers
            assert fields["ETag"] == memory.etag
            assert fields["Content-Length"] == str(len(whole))
            assert fields["Accept-Ranges"] == "bytes"
            assert fields["Aiockpt-Step"] == "7"
            assert fields["X-Content-Type-Options"] == "nosniff"
            assert fields["Server"] == "aiockpt"
            if path.startswith("7"):
                assert fields["Cache-Control"] == "no-cache, no-transform"
            if path == "7/2":
                digest = memory.manifest.digests[2]
                assert fields["Aiockpt-Digest"] == f"xxh3-128={digest}"
            for ranged in ({}, {"Range": "bytes=0-9"}, {"Range": "bytes=-0"}):
                head = await peer.ask(f"/checkpoint/{path}", method="HEAD", **ranged)
                assert head.status == 200
                assert head.headers["Content-Length"] == str(len(whole))
                assert "Content-Range" not in head.headers
        missing = await peer.ask("/checkpoint/8/full", method="HEAD")
    assert missing.status == 404
    assert memory.references == 0


RANGES = [
    ("bytes=10-10", 206, (10, 11)), ("bytes=100-", 206, (100, None)),
    ("bytes=-5", 206, (-5, None)), ("bytes=0-99999999999", 206, (0, None)),
    ("bytes=9-5", 200, (0, None)), ("bytes=0-4,6-9", 200, (0, None)),
    ("items=0-4", 200, (0, None)), ("bytes=-0", 416, None),
    ("bytes=99999999-", 416, None),
]  # fmt: skip


@pytest.mark.parametrize("path", ["metadata", "full", "1"])
async def test_ranges_follow_rfc_9110(path):
    """One satisfiable range is honoured, an empty one is 416, others are ignored."""
    memory = Memory(BIG)
    chunk = bytes(memory.data[1 << 16 : 2 << 16])
    wholes = {"metadata": memory.manifest.header, "full": memory.file, "1": chunk}
    whole = wholes[path]
    async with serving(memory) as site, site.peer() as peer:
        for value, status, cut in RANGES:
            answer = await peer.ask(f"/checkpoint/7/{path}", Range=value)
            said = answer.headers.get("Content-Range")
            assert answer.status == status, value
            if cut is None:
                assert said == f"bytes */{len(whole)}"
                continue
            start, stop, _ = slice(*cut).indices(len(whole))
            assert answer.body == whole[start:stop], value
            expected = f"bytes {start}-{stop - 1}/{len(whole)}"
            assert said == (expected if status == 206 else None)


CONDITIONS = [
    ({"If_Match": "{etag}"}, 206), ({"If_Match": '"other", {etag}'}, 206),
    ({"If_Match": "*"}, 206), ({"If_Match": '"other"'}, 412),
    ({"If_Match": "W/{etag}"}, 412), ({"If_None_Match": "{etag}"}, 304),
    ({"If_None_Match": "W/{etag}"}, 304), ({"If_None_Match": "*"}, 304),
    ({"If_None_Match": '"other"'}, 206), ({"If_Range": "{etag}"}, 206),
    ({"If_None_Match": '"other", W/{etag}'}, 304), ({"If_None_Match": "other"}, 206),
    ({"If_Range": '{etag}, "other"'}, 200), ({"If_Range": "*"}, 200),
    ({"If_Match": '"other"', "If_None_Match": "{etag}"}, 412),
    ({"If_Range": '"other"'}, 200), ({"If_Range": "W/{etag}"}, 200),
    ({"If_Range": "Sat, 01 Jan 2000 00:00:00 GMT"}, 200),
]  # fmt: skip


async def test_conditions_follow_rfc_9110():
    """If-Match and If-Range compare strongly, If-None-Match weakly, in this order."""
    memory = Memory(1000)
    async with serving(memory) as site, site.peer() as peer:
        for conditions, status in CONDITIONS:
            sent = {name: v.format(etag=memory.etag) for name, v in conditions.items()}
            answer = await peer.ask("/checkpoint/7/full", Range="bytes=0-9", **sent)
            assert answer.status == status, conditions
            if status == 304:
                assert answer.headers["ETag"] == memory.etag
                assert "Content-Length" not in answer.headers
            if status == 412:
                actual = json.loads(answer.body)["actual"]
                assert actual == memory.manifest.snapshot_id
                assert answer.headers["ETag"] == memory.etag
        other = await peer.ask("/checkpoint/latest/full", If_Match='"other"')
        assert (other.status, other.headers["ETag"]) == (412, memory.etag)
        assert (await peer.ask("/checkpoint/7/full")).body == memory.file  # in step


async def test_what_is_not_there_is_a_problem_document():
    """The client learns what is served instead."""
    async with serving(Memory(1000)) as site, site.peer() as peer:
        for path, status, facts in [
            ("8/full", 404, {"step": 8, "serving": 7}),
            ("6/full", 410, {"step": 6, "serving": 7}),
            ("7/1", 404, {}),
            ("7/99999999999999999999999", 404, {}),
            ("7/-1", 404, {}),
            ("07/full", 404, {}),
            ("x/full", 404, {}),
            ("latest/nonsense", 404, {}),
            ("7/..%2f..%2fetc%2fpasswd", 404, {}),
        ]:
            answer = await peer.ask(f"/checkpoint/{path}")
            assert answer.status == status, path
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert answer.headers["Cache-Control"] == "no-store"
            document = json.loads(answer.body)
            assert document.items() >= {"status": status, **facts}.items()


@proves("threat I8")
async def test_health_is_told_to_anybody_and_tells_nothing():
    """A probe has no token. It learns that the server runs, and not what it runs on."""
    async with serving(Memory(1000)) as site, site.peer(token=None) as peer:
        health = await peer.ask("/healthz")
        lost = await peer.ask("/somewhere/else")
    assert (health.status, health.body) == (200, b"ok\n")
    assert lost.status == 404
    for answer in (health, lost):
        text = repr(answer).lower()
        assert "python" not in text
        assert "aiohttp" not in text
        assert "7" not in answer.body.decode()


async def test_only_get_and_head_are_answered():
    """There is nothing to change here, and nothing for scripts of other sites."""
    async with serving(Memory(1000)) as site, site.peer() as peer:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            for path in ("7/full", "latest"):
                answer = await peer.ask(f"/checkpoint/{path}", method=method)
                assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
                assert not any(h.startswith("Access-Control") for h in answer.headers)


# ------------------------------------------------------------------------- who may read


async def test_the_wrong_token_is_refused():
    """Without the token nobody reads, or learns whether there is anything."""
    wrong = ["", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x",
             f"Basic {TOKEN}", TOKEN, "Bearer \xe9"]  # fmt: skip
    async with serving(Memory(1000)) as site, site.peer(token=None) as peer:
        for fields in ({}, *({"Authorization": each} for each in wrong)):
            for path in ("7/full", "latest", "latest?after=1", "99/full"):
                for method in ("GET", "POST"):
                    answer = await peer.ask(
                        f"/checkpoint/{path}", method=method, **fields
                    )
                    assert answer.status == 401
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    assert TOKEN not in repr(answer)
        right = {"Authorization": f"bEARER {TOKEN}"}  # RFC 9110 section 11.1
        assert (await peer.ask("/checkpoint/latest", **right)).status == 200


@proves("threat I7")
async def test_a_refusal_says_what_was_missing():
    """It asks for a token, or for the right one, at every path alike."""
    other_step = make_token(TOKEN, "rank-3", expires=9e11, step=8)
    ended = make_token(TOKEN, "rank-3", expires=1e9)
    cases = {
        None: "no token was sent: send the header 'Authorization: Bearer TOKEN'",
        "not-the-token": "the token is not this server's",
        other_step: "step 8 only",
        ended: "the token expired",
    }
    async with serving(Memory(1000)) as site:
        for token, detail in cases.items():
            async with site.peer(token=token) as peer:
                for path in ("/", "", "/latest/full", "/7/full"):
                    answer = await peer.ask(f"/checkpoint{path}")
                    assert answer.status == 401
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    assert detail in json.loads(answer.body)["detail"]
                    assert TOKEN not in str(answer)
                    assert "not-the-token" not in str(answer)


@proves("threat S6")
async def test_pages_of_other_sites_are_refused():
    """A browser that visits a bad page is no way in, with a token or without."""
    async with serving(Memory(1000)) as site, site.peer() as peer:
        for path, accept in (
            ("/checkpoint/7/full", "*/*"),
            ("/checkpoint/", "*/*"),
            ("/checkpoint/", "text/html"),
        ):
            for fields in (
                {"Origin": "https://evil.example"},
                {"Origin": "null"},
                {"Sec_Fetch_Site": "cross-site"},
                {"Sec_Fetch_Site": "same-site"},
            ):
                answer = await peer.ask(path, Accept=accept, **fields)
                assert answer.status == 403
            for source in ("none", "same-origin"):
                answer = await peer.ask(path, Accept=accept, Sec_Fetch_Site=source)
                assert answer.status == 200


@proves("threat S6")
async def test_an_insecure_server_answers_only_to_its_names():
    """A page whose name was rebound to our address still sends its own name."""
    hosts = frozenset({"node-17"})
    options: dict[str, Any] = {"token": None, "insecure": True, "hosts": hosts}
    mine = ["127.0.0.1", "127.0.0.1:1234", "[::1]:80", "localhost:80", "LOCALHOST.",
            "node-17:4000"]  # fmt: skip
    async with serving(Memory(1000), **options) as site, site.peer(token=None) as peer:
        for host in (*mine, "evil.example", "127.0.0.1.evil.example", ""):
            answer = await peer.ask("/checkpoint/7/full", Host=host)
            assert answer.status == (200 if host in mine else 421), host


async def test_without_any_way_to_tell_readers_apart_it_does_not_start():
    """Leaving out the token is not the same as asking for an open server."""
    with pytest.raises(LocalProtocolError, match="insecure=True"):
        replace(CONFIG, token=None)


# ----------------------------------------------------------------------- the first page


async def test_a_program_gets_json():
    """It says what is served, and at which paths from here."""
    memory = Memory(1000)
    async with serving(memory) as site, site.peer() as peer:
        answer = await peer.ask("/checkpoint/")
        found = json.loads(answer.body)
        for path in found["paths"].values():
            assert (await peer.ask(f"/checkpoint/{path}")).status == 200, path
        latest = await peer.ask("/checkpoint/latest")
        moved = await peer.ask("/checkpoint")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert answer.headers["Cache-Control"] == latest.headers["Cache-Control"]
    assert answer.headers["Cache-Control"] == "no-store"
    assert json.loads(latest.body) == found["serving"]
    assert found["serving"] == {
        "step": 7,
        "snapshot_id": memory.manifest.snapshot_id,
        "total_bytes": len(memory.file),
    }
    assert TOKEN not in str(answer)
    assert (moved.status, moved.headers["Location"]) == (308, "checkpoint/")


async def test_nothing_is_served_yet():
    """The first answer says so at once; the newest step is not found."""
    async with serving() as site, site.peer() as peer, asyncio.timeout(10):
        plain = await peer.ask("/checkpoint/", Prefer="wait=60")
        latest = await peer.ask("/checkpoint/latest")
        full = await peer.ask("/checkpoint/latest/full")
    assert plain.status == 200
    assert json.loads(plain.body)["serving"] is None
    for answer in (latest, full):
        assert (answer.status, kind_of(answer)) == (404, "step-not-found")


# ----------------------------------------------------------------------------- waiting


def waiting_at(site):
    """Return how many requests wait."""
    return site.server.statistics().waiting


@asynccontextmanager
async def waiting(site, path):
    """Give a peer whose request waits."""
    async with site.peer() as peer:
        await peer.request(f"/checkpoint/{path}", Prefer="wait=30")
        await settle(lambda: waiting_at(site) == 1)
        yield peer


@proves("cell HTTPTransport.start: the other one dies")
async def test_a_client_that_leaves_while_it_waits_is_forgotten():
    """Nothing is kept for a client that is gone; one that stays gets its step."""
    memory = Memory(BIG, step=9)
    async with serving() as site:
        async with waiting(site, "9/full"):
            pass
        await settle(lambda: waiting_at(site) == 0)
        async with waiting(site, "9/full") as peer:
            await site.store.publish(memory, grace=0)
            assert (await peer.answer()).body == memory.file
        assert waiting_at(site) == 0


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"Prefer": "wait=3600"}, {"max_wait": 0.05}),
        ({}, {"default_wait": 0.05}),
        ({"Prefer": "wait=0"}, {"default_wait": 3600.0}),
    ],
)
async def test_the_server_bounds_the_wait(fields, changes):
    """The shorter of two limits counts; without a preference the server's default."""
    async with serving(Memory(1000), **changes) as site, site.peer() as peer:
        assert (await peer.ask("/checkpoint/9/full", **fields)).status == 404
        assert (await peer.ask("/checkpoint/latest?after=7", **fields)).status == 204


async def test_a_newer_step_is_told_at_once():
    """A client that has an older step need not wait."""
    memory = Memory(1000)
    async with serving(memory) as site, site.peer() as peer:
        for query in ("after=6", "after=0", "after=6&unknown=1"):
            answer = await peer.ask(f"/checkpoint/latest?{query}", Prefer="wait=30")
            assert (answer.status, json.loads(answer.body)["step"]) == (200, 7)
            assert answer.headers["ETag"] == memory.etag
            assert answer.headers["Aiockpt-Step"] == "7"
            assert answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("first", "published", "told"),
    [(7, [6, 9], 9), (None, [8, 9], 9), (None, ["retract", "retract", 8], 8)],
)
async def test_the_wait_ends_with_the_next_publication(first, published, told):
    """It ends with the newest step, and not with a retraction of nothing."""
    memory = None if first is None else Memory(1000, step=first)
    async with serving(memory) as site, waiting(site, "latest?after=7") as peer:
        for step in published:
            if step == "retract":
                await site.store.retract(grace=0)
            else:
                await site.store.publish(Memory(1000, step=step), grace=0)
        answer = await peer.answer()
    assert (answer.status, json.loads(answer.body)["step"]) == (200, told)


@pytest.mark.parametrize("news", [False, True])
async def test_a_retraction_ends_the_wait(news):
    """Nothing can be fetched any more, so no step is told."""
    memory = None if news else Memory(1000)
    async with serving(memory) as site, waiting(site, "latest?after=7") as peer:
        if news:
            await site.store.publish(Memory(1000, step=8), grace=0)
        await site.store.retract(grace=0)
        answer = await peer.answer()
        assert answer.status == 204
        assert "Aiockpt-Step" not in answer.headers


async def test_no_news_is_an_answer_without_content():
    """It says what is served instead, if anything, and counts as no refusal."""
    async with serving() as site, site.peer() as peer:
        for step in (None, "7"):
            for method in ("GET", "HEAD"):
                for after in (7, 10**18):
                    path = f"/checkpoint/latest?after={after}"
                    answer = await peer.ask(path, method=method, Prefer="wait=0.01")
                    assert (answer.status, answer.body) == (204, b"")
                    assert answer.headers.get("Aiockpt-Step") == step
                    assert "Content-Length" not in answer.headers
            await site.store.publish(Memory(1000), grace=0)
        assert site.server.statistics().refused == 0


async def test_a_step_that_is_none_is_refused():
    """A step is a plain decimal number, as everywhere."""
    async with serving(Memory(1000)) as site, site.peer() as peer:
        for value in ("", "-1", "x", "07", "1.0", "%201", "1e3", "1" + "0" * 19,
                      "1&after=2", "%D9%A1"):  # fmt: skip
            answer = await peer.ask(f"/checkpoint/latest?after={value}")
            assert (answer.status, kind_of(answer)) == (400, "bad-request")


async def test_closing_ends_the_wait():
    """A client that waits is told to come back; the server does not wait for it."""
    async with serving(Memory(1000)) as site, asyncio.timeout(10):
        async with waiting(site, "latest?after=7") as peer:
            await site.store.close()
            answer = await peer.answer()
        assert (answer.status, kind_of(answer)) == (503, "closing")


# -------------------------------------------------------- connections, readers, the end


async def test_pipelined_requests_are_answered_in_order():
    """A client need not wait for one answer before it asks for the next."""
    memory = Memory(1 << 20)
    async with (
        serving(memory, send_buffer=4096) as site,
        site.peer(receive_buffer=4096) as peer,
    ):
        paths = ("0", "1", "full", "2", "nonsense", "metadata", "full")
        for path in paths:
            await peer.request(f"/checkpoint/7/{path}")
        answers = [await peer.answer() for _ in paths]
    chunks = [bytes(memory.data[n << 16 : (n + 1) << 16]) for n in range(3)]
    assert [answer.body for answer in answers[:4]] == [
        *chunks[:2],
        memory.file,
        chunks[2],
    ]
    assert answers[4].status == 404
    assert answers[5].body == memory.manifest.header
    assert answers[6].body == memory.file


async def test_http_1_0_gets_the_body_and_the_end():
    """The oldest clients work, too."""
    memory = Memory(BIG)
    async with serving(memory) as site, site.peer() as peer:
        credential = f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
        await peer.say(b"GET /checkpoint/7/full HTTP/1.0\r\n" + credential)
        whole = await peer.read_all()
    assert whole.endswith(memory.file)
    assert len(whole) - len(memory.file) < 1000


async def test_too_many_readers_are_asked_to_come_back():
    """Admission is bounded; HEAD and errors need none."""
    async with serving(Memory(LARGE), readers=1) as site:
        async with site.peer(receive_buffer=4096) as slow, site.peer() as peer:
            await slow.request("/checkpoint/7/full")
            await settle(lambda: site.server.statistics().readers == 1)
            refused = await peer.ask("/checkpoint/7/full", Prefer="wait=0")
            head = await peer.ask("/checkpoint/7/full", method="HEAD")
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert head.status == 200
        await settle(lambda: site.server.statistics().readers == 0)
        async with site.peer() as peer:
            assert (await peer.ask("/checkpoint/7/0")).status == 200
        assert site.server.statistics().gone == 1


@proves("threat D23")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
async def test_slow_readers_make_way_for_one_that_waits(host):
    """They do so behind one proxy, too. Manifests and small answers need no place."""
    memory = Memory(LARGE)
    async with serving(memory, readers=2) as site, AsyncExitStack() as stack:
        slow = [
            await stack.enter_async_context(site.peer(receive_buffer=4096))
            for _ in range(2)
        ]
        for each in slow:
            await each.request("/checkpoint/7/full")
        await settle(lambda: site.server.statistics().readers == 2)
        peer = await stack.enter_async_context(site.peer(host=host))
        for path, fields in [("metadata", {}), ("full", {"Range": "bytes=0-999"})]:
            found = await peer.ask(f"/checkpoint/7/{path}", Prefer="wait=0", **fields)
            assert found.status in (200, 206)
        found = await peer.ask("/checkpoint/7/full", Prefer="wait=30")
        assert found.body == memory.file
        await settle(lambda: site.server.statistics().readers == 1)


@proves("cell HTTPTransport.disallow_checkpoint: success")
@proves("threat D9", "invariant 5")
async def test_retract_evicts_a_reader_that_hangs():
    """The grace is all that a hung reader gets; the memory is free after it."""
    memory = Memory(LARGE, fill=1, live=True)
    async with serving(memory) as site, site.peer(receive_buffer=4096) as peer:
        await peer.request("/checkpoint/7/full")
        await settle(lambda: site.server.statistics().readers == 1)
        async with asyncio.timeout(10):
            await site.store.retract(grace=0.05)
        assert memory.references == 0
        memory.overwrite(2)
        rest = await peer.read_all()
        statistics = site.server.statistics()
    assert 2 not in rest.partition(b"\r\n\r\n")[2][memory.manifest.header_bytes :]
    assert (statistics.evicted, statistics.readers) == (1, 0)


@proves("threat D9")
async def test_many_stalled_peers_do_not_slow_a_good_one():
    """200 peers that read nothing, and 50 that say nothing, cost the others nothing."""
    memory = Memory(8 << 20)
    async with serving(memory, readers=1000) as site:
        peers = [site.peer(receive_buffer=4096) for _ in range(250)]
        try:
            for peer in peers:
                await peer.__aenter__()
            for peer in peers[:200]:
                await peer.request("/checkpoint/7/full")
            await settle(lambda: site.server.statistics().readers == 200)
            async with site.peer() as good, asyncio.timeout(10):
                assert (await good.ask("/checkpoint/7/full")).body == memory.file
        finally:
            for peer in peers:
                peer.close()
        await settle(lambda: memory.references == 1)


async def test_stop_ends_waiting_sending_and_idle_connections():
    """Stopping is bounded whatever the clients do; what was stopped stays so."""
    memory = Memory(LARGE)
    async with (
        serving(memory) as site,
        site.peer(receive_buffer=4096) as slow,
        waiting(site, "9/full") as early,
        site.peer() as idle,
        site.peer() as mute,
    ):
        await slow.request("/checkpoint/7/full")
        await idle.ask("/checkpoint/7/metadata")
        await settle(lambda: site.server.statistics().readers == 1)
        async with asyncio.timeout(5):
            await site.server.stop()
        counts = site.server.statistics()
        assert (counts.waiting, counts.readers) == (0, 0)
        assert memory.references == 0
        for peer in (slow, early, idle, mute):
            await peer.read_all()
        await site.server.stop()
        with (
            socket.create_server(("127.0.0.1", 0)) as other,
            pytest.raises(ClosedError),
        ):
            await site.server.start([other])


@proves("threat T6")
async def test_a_lenient_parser_is_told_of(monkeypatch, caplog):
    """It is aiohttp's where its C extension is missing."""
    async with serving():
        assert "parser" not in caplog.text
    lenient = http_parser.HttpRequestParserPy
    monkeypatch.setattr(http_parser, "HttpRequestParser", lenient)
    async with serving():
        assert "no C parser" in caplog.text
