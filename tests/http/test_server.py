"""What the server answers: statuses, headers, ranges, conditions, guards."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import http_parser

from aiockpt.errors import ClosedError, LocalProtocolError
from aiockpt.http.handlers import ServerStatistics
from tests.support.proofs import proves
from tests.support.serving import CONFIG, TOKEN, Memory, serving, settle

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

BIG = 3_000_000  # takes several slices, and more than the small bodies' limit


async def test_metadata_full_and_chunks_are_the_file():
    """The three resources are cuts of one file, and describe themselves."""
    memory = Memory(BIG, chunk_bytes=1 << 20)
    header = memory.manifest.header
    async with serving(memory) as site, site.peer() as peer:
        metadata = await peer.ask("/checkpoint/7/metadata")
        full = await peer.ask("/checkpoint/7/full")
        last = await peer.ask("/checkpoint/7/2")
    assert metadata.body == header
    assert full.body == memory.file
    assert last.body == bytes(memory.data[2 << 20 :])
    assert last.headers["Aiockpt-Digest"] == f"xxh3-128={memory.manifest.digests[2]}"
    for answer in (metadata, full, last):
        assert answer.status == 200
        assert answer.headers["ETag"] == memory.etag
        assert answer.headers["Content-Length"] == str(len(answer.body))
        assert answer.headers["Accept-Ranges"] == "bytes"
        assert answer.headers["Aiockpt-Step"] == "7"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-cache, no-transform"
        assert answer.headers["Server"] == "aiockpt"
    assert memory.references == 0


RANGES = [
    ("bytes=0-9", 206, (0, 10)),
    ("bytes=10-10", 206, (10, 11)),
    ("bytes=100-", 206, (100, None)),
    ("bytes=-5", 206, (-5, None)),
    ("bytes=0-99999999999", 206, (0, None)),
    ("bytes=-99999999999", 206, (0, None)),
    ("BYTES=0-0", 206, (0, 1)),
    ("bytes=9-5", 200, (0, None)),
    ("bytes=0-4,6-9", 200, (0, None)),
    ("bytes=abc", 200, (0, None)),
    ("bytes=0-99999999999999999999999", 200, (0, None)),
    ("items=0-4", 200, (0, None)),
    ("bytes=-0", 416, None),
    ("bytes=99999999-", 416, None),
]


@pytest.mark.parametrize("path", ["metadata", "full", "1"])
async def test_ranges_follow_rfc_9110(path):
    """One satisfiable range is honoured, an empty one is 416, the rest is ignored."""
    memory = Memory(BIG, chunk_bytes=1 << 20)
    wholes = {
        "metadata": memory.manifest.header,
        "full": memory.file,
        "1": bytes(memory.data[1 << 20 : 2 << 20]),
    }
    whole = wholes[path]
    async with serving(memory) as site, site.peer() as peer:
        for value, status, cut in RANGES:
            answer = await peer.ask(f"/checkpoint/7/{path}", Range=value)
            assert answer.status == status, value
            if cut is None:
                assert answer.headers["Content-Range"] == f"bytes */{len(whole)}"
                continue
            start, stop, _ = slice(*cut).indices(len(whole))
            assert answer.body == whole[start:stop], value
            said = f"bytes {start}-{stop - 1}/{len(whole)}"
            assert answer.headers.get("Content-Range") == (
                said if status == 206 else None
            )


@pytest.mark.parametrize(
    ("conditions", "status"),
    [
        ({"If_Match": "{etag}"}, 206),
        ({"If_Match": '"other", {etag}'}, 206),
        ({"If_Match": "*"}, 206),
        ({"If_Match": '"other"'}, 412),
        ({"If_Match": "W/{etag}"}, 412),
        ({"If_None_Match": "{etag}"}, 304),
        ({"If_None_Match": "W/{etag}"}, 304),
        ({"If_None_Match": "*"}, 304),
        ({"If_None_Match": '"other"'}, 206),
        ({"If_Match": '"other"', "If_None_Match": "{etag}"}, 412),
        ({"If_Range": "{etag}"}, 206),
        ({"If_Range": '"other"'}, 200),
        ({"If_Range": "W/{etag}"}, 200),
        ({"If_Range": "Sat, 01 Jan 2000 00:00:00 GMT"}, 200),
    ],
)
async def test_conditions_follow_rfc_9110(conditions, status):
    """If-Match and If-Range compare strongly, If-None-Match weakly, in this order."""
    memory = Memory(1000)
    sent = {name: value.format(etag=memory.etag) for name, value in conditions.items()}
    async with serving(memory) as site, site.peer() as peer:
        answer = await peer.ask("/checkpoint/7/full", Range="bytes=0-9", **sent)
        again = await peer.ask("/checkpoint/7/full")
    assert answer.status == status
    assert again.body == memory.file  # the connection is in step
    if status == 304:
        assert answer.headers["ETag"] == memory.etag
        assert "Content-Length" not in answer.headers
    if status == 412:
        assert json.loads(answer.body)["actual"] == memory.manifest.snapshot_id


@pytest.mark.parametrize(
    ("path", "size"), [("metadata", None), ("full", None), ("0", 1 << 20)]
)
async def test_head_answers_like_get_without_body_and_range(path, size):
    """HEAD gives the headers of the whole; a Range does not apply to it."""
    memory = Memory(BIG, chunk_bytes=1 << 20)
    sizes = {"metadata": memory.manifest.header_bytes, "full": len(memory.file)}
    async with serving(memory) as site, site.peer() as peer:
        for ranged in ({}, {"Range": "bytes=0-9"}, {"Range": "bytes=-0"}):
            answer = await peer.ask(f"/checkpoint/7/{path}", method="HEAD", **ranged)
            assert answer.status == 200
            assert answer.headers["Content-Length"] == str(size or sizes[path])
            assert answer.headers["ETag"] == memory.etag
            assert "Content-Range" not in answer.headers
        missing = await peer.ask("/checkpoint/8/full", method="HEAD")
        assert missing.status == 404


@pytest.mark.parametrize(
    ("path", "status", "facts"),
    [
        ("/checkpoint/8/full", 404, {"step": 8, "serving": 7}),
        ("/checkpoint/6/full", 410, {"step": 6, "serving": 7}),
        ("/checkpoint/7/1", 404, {}),
        ("/checkpoint/7/99999999999999999999999", 404, {}),
        ("/checkpoint/7/-1", 404, {}),
        ("/checkpoint/07/full", 404, {}),
        ("/checkpoint/x/full", 404, {}),
        ("/checkpoint/7/..%2f..%2fetc%2fpasswd", 404, {}),
    ],
)
async def test_what_is_not_there_is_a_problem_document(path, status, facts):
    """A client learns what is being served instead."""
    async with serving(Memory(1000)) as site, site.peer() as peer:
        answer = await peer.ask(path)
    assert answer.status == status
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["Cache-Control"] == "no-store"
    document = json.loads(answer.body)
    assert document["status"] == status
    assert {fact: document[fact] for fact in facts} == facts


async def test_latest_names_the_checkpoint_being_served():
    """A client that knows no step can find one."""
    memory = Memory(1000, step=12)
    async with serving() as site, site.peer() as peer:
        nothing = await peer.ask("/checkpoint/latest")
        await site.store.publish(memory, grace=0)
        answer = await peer.ask("/checkpoint/latest")
    assert nothing.status == 404
    assert json.loads(nothing.body)["serving"] is None
    assert json.loads(answer.body) == {
        "step": 12,
        "snapshot_id": memory.manifest.snapshot_id,
        "total_bytes": len(memory.file),
    }
    assert answer.headers["Cache-Control"] == "no-store"


@proves("threat I8")
async def test_health_is_told_to_anybody_and_tells_nothing():
    """A probe has no token; it learns that the server runs, and not what it runs on."""
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


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_only_get_and_head_are_answered(method):
    """There is nothing to change here, and nothing for other sites' scripts."""
    async with serving(Memory(1000)) as site, site.peer() as peer:
        answer = await peer.ask("/checkpoint/7/full", method=method)
        assert answer.status == 405
        assert answer.headers["Allow"] == "GET, HEAD"
        assert not any(h.startswith("Access-Control") for h in answer.headers)
        latest = await peer.ask("/checkpoint/latest", method=method)
        assert latest.status == 405


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer a-toke", "Bearer a-tokenx", "Basic a-token",
     "a-token", "Bearer \N{LATIN SMALL LETTER E WITH ACUTE}"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/checkpoint/7/full", "/checkpoint/latest"])
async def test_the_wrong_token_is_refused(path, authorization):
    """Nobody reads without the token, nor learns whether there is anything."""
    fields = {} if authorization is None else {"Authorization": authorization}
    async with serving(Memory(1000)) as site, site.peer(token=None) as peer:
        answer = await peer.ask(path, **fields)
        missing = await peer.ask("/checkpoint/99/full", **fields)
        posted = await peer.ask(path, method="POST", **fields)
    assert answer.status == missing.status == posted.status == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert TOKEN not in repr(answer)


async def test_the_scheme_of_the_token_is_not_case_sensitive():
    """RFC 9110 section 11.1."""
    async with serving(Memory(1000)) as site, site.peer(token=None) as peer:
        answer = await peer.ask("/checkpoint/latest", Authorization=f"bEARER {TOKEN}")
    assert answer.status == 200


@proves("threat S6")
@pytest.mark.parametrize(
    "fields",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
async def test_pages_of_other_sites_are_refused(fields):
    """A browser that visits a bad page is no way in, token or not."""
    async with serving(Memory(1000)) as site, site.peer() as peer:
        answer = await peer.ask("/checkpoint/7/full", **fields)
        typed = await peer.ask("/checkpoint/7/full", Sec_Fetch_Site="none")
    assert answer.status == 403
    assert typed.status == 200


@proves("threat S6")
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:1234", 200),
        ("[::1]:80", 200),
        ("localhost:80", 200),
        ("LOCALHOST.", 200),
        ("node-17:4000", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
async def test_an_insecure_server_answers_only_to_its_names(host, status):
    """A page whose name was rebound to our address still sends its own name."""
    names = frozenset({"node-17"})
    async with (
        serving(Memory(1000), token=None, insecure=True, hosts=names) as site,
        site.peer(token=None) as peer,
    ):
        answer = await peer.ask("/checkpoint/7/full", Host=host)
    assert answer.status == status


async def test_without_any_way_to_tell_readers_apart_it_does_not_start():
    """Leaving out the token is not the same as asking for an open server."""
    with pytest.raises(LocalProtocolError, match="insecure=True"):
        replace(CONFIG, token=None)


async def test_an_early_request_waits_for_its_step():
    """A receiver may come before the sender has staged."""
    memory = Memory(BIG, step=9)
    async with serving() as site, site.peer() as peer:
        await peer.request("/checkpoint/9/full", Prefer="wait=30")
        await settle(lambda: site.server.counters().server.waiting == 1)
        await site.store.publish(memory, grace=0)
        answer = await peer.answer()
        assert answer.body == memory.file
        assert site.server.counters().server.waiting == 0


async def test_a_wait_is_bounded_by_request_and_server():
    """The shorter of the two; without a preference the server's default."""
    async with serving(max_wait=0.05, default_wait=0.01) as site, site.peer() as peer:
        for preference in ({"Prefer": "wait=3600"}, {}, {"Prefer": "wait=0"}):
            answer = await peer.ask("/checkpoint/9/full", **preference)
            assert answer.status == 404
        latest = await peer.ask("/checkpoint/latest", Prefer="wait=3600")
        assert latest.status == 404


@proves("cell HTTPTransport.start: the other one dies")
async def test_a_client_that_leaves_while_it_waits_is_forgotten():
    """Nothing is kept for a client that is gone."""
    async with serving() as site:
        async with site.peer() as peer:
            await peer.request("/checkpoint/9/full", Prefer="wait=30")
            await settle(lambda: site.server.counters().server.waiting == 1)
        await settle(lambda: site.server.counters().server.waiting == 0)


async def test_too_many_readers_are_asked_to_come_back():
    """Admission is bounded; HEAD and errors need none."""
    memory = Memory(64 << 20)
    async with serving(memory, readers=1) as site:
        async with site.peer(receive_buffer=4096) as slow, site.peer() as peer:
            await slow.request("/checkpoint/7/full")
            await settle(lambda: site.server.counters().server.readers == 1)
            refused = await peer.ask("/checkpoint/7/full")
            head = await peer.ask("/checkpoint/7/full", method="HEAD")
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert head.status == 200
        await settle(lambda: site.server.counters().server.readers == 0)
        async with site.peer() as peer:
            admitted = await peer.ask("/checkpoint/7/0")
        assert admitted.status == 200
        assert site.server.counters().server.gone == 1


async def test_one_connection_carries_many_ranges():
    """Bodies leave the connection in step: it is used again and again."""
    memory = Memory(BIG)
    size = len(memory.file)
    step = 200_000
    async with serving(memory) as site, site.peer() as peer:
        parts = []
        for start in range(0, size, step):
            last = min(start + step, size) - 1
            wanted = f"bytes={start}-{last}"
            answer = await peer.ask("/checkpoint/7/full", Range=wanted)
            assert answer.status == 206
            parts.append(answer.body)
    assert b"".join(parts) == memory.file


async def test_pipelined_requests_are_answered_in_order():
    """A client need not wait for one response before it asks for the next."""
    memory = Memory(BIG, chunk_bytes=1 << 20)
    async with serving(memory) as site, site.peer() as peer:
        for path in ("full", "1", "nonsense", "metadata", "0"):
            await peer.request(f"/checkpoint/7/{path}")
        answers = [await peer.answer() for _ in range(5)]
    assert [answer.status for answer in answers] == [200, 200, 404, 200, 200]
    assert answers[0].body == memory.file
    assert answers[1].body == bytes(memory.data[1 << 20 : 2 << 20])
    assert answers[3].body == memory.manifest.header
    assert answers[4].body == bytes(memory.data[: 1 << 20])


async def test_a_body_waits_for_the_responses_before_it():
    """What aiohttp still has in its buffers comes first."""
    memory = Memory(1 << 20)
    async with (
        serving(memory, send_buffer=4096) as site,
        site.peer(receive_buffer=4096) as peer,
    ):
        for chunk in range(4):
            await peer.request(f"/checkpoint/7/{chunk}")
        await peer.request("/checkpoint/7/full")
        for chunk in range(4):
            start = chunk << 16
            body = (await peer.answer()).body
            assert body == bytes(memory.data[start : start + (1 << 16)])
        assert (await peer.answer()).body == memory.file


async def test_nonsense_is_refused_without_a_fuss():
    """A port scanner gets its 400, and leaves no traceback in the log."""
    async with serving(Memory(1000)) as site:
        for nonsense in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/9.9\r\nx\r\n\r\n"):
            async with site.peer() as peer:
                await peer.say(nonsense)
                assert b" 400 " in await peer.read_all()


async def test_http_1_0_gets_the_body_and_the_end():
    """The oldest clients work, too."""
    memory = Memory(BIG)
    async with serving(memory) as site, site.peer() as peer:
        authorization = f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
        await peer.say(b"GET /checkpoint/7/full HTTP/1.0\r\n" + authorization)
        whole = await peer.read_all()
    assert whole.endswith(memory.file)
    assert len(whole) - len(memory.file) < 1000


async def test_curl_rebuilds_the_file_from_pieces(tmp_path):
    """A stock client gets the right bytes."""
    memory = Memory(BIG)
    half = len(memory.file) // 2
    async with serving(memory) as site:
        parts = []
        for piece in (f"0-{half - 1}", f"{half}-"):
            target = tmp_path / piece
            curl = await asyncio.create_subprocess_exec(
                *("curl", "-sSf", "-r", piece, "-o", target, f"{site.url}7/full"),
                *("-H", f"Authorization: Bearer {TOKEN}", "--noproxy", "*"),
                stdout=subprocess.DEVNULL,
            )
            assert await curl.wait() == 0
            parts.append(target.read_bytes())
    assert b"".join(parts) == memory.file


async def test_an_aiohttp_client_reuses_its_connection():
    """The client library that we use ourselves agrees about the framing."""
    memory = Memory(BIG, chunk_bytes=1 << 20)
    async with serving(memory) as site, aiohttp.ClientSession() as session:
        session.headers["Authorization"] = f"Bearer {TOKEN}"
        for _ in range(5):
            async with session.get(f"{site.url}7/full") as response:
                assert await response.read() == memory.file
        assert len(site.connections) == 1


async def test_republishing_changes_the_entity_tag():
    """A receiver in the middle of the old one learns it from its next request."""
    old, new = Memory(BIG, step=7, fill=1), Memory(BIG, step=7, fill=2)
    async with serving(old) as site, site.peer() as peer:
        first = await peer.ask("/checkpoint/7/0", If_Match=old.etag)
        await site.store.publish(new, grace=0)
        second = await peer.ask("/checkpoint/7/1", If_Match=old.etag)
        third = await peer.ask("/checkpoint/7/1")
    assert set(first.body) == {1}
    assert second.status == 412
    assert json.loads(second.body)["actual"] == new.manifest.snapshot_id
    assert set(third.body) == {2}
    assert old.references == new.references == 0


async def test_a_slow_reader_of_a_superseded_snapshot_gets_the_old_bytes():
    """Replacing a snapshot neither cuts nor mixes what is on its way."""
    old = Memory(16 << 20, step=7, fill=1)
    async with serving(old) as site:
        async with site.peer(receive_buffer=4096) as peer:
            await peer.request("/checkpoint/7/full")
            head = await peer.head()
            async with asyncio.timeout(5):
                await site.store.publish(Memory(1000, step=8), grace=0)
            body = await peer.read_some(int(head.headers["Content-Length"]))
        assert body == old.file
        await settle(lambda: old.references == 0)


@proves("cell HTTPTransport.disallow_checkpoint: success")
@proves("threat D9", "invariant 5")
async def test_retract_evicts_a_reader_that_hangs():
    """The grace is all that a hung reader gets; the memory is free after it."""
    memory = Memory(64 << 20, fill=1, live=True)
    async with serving(memory) as site, site.peer(receive_buffer=4096) as peer:
        await peer.request("/checkpoint/7/full")
        await settle(lambda: site.server.counters().server.readers == 1)
        async with asyncio.timeout(10):
            await site.store.retract(grace=0.05)
        assert memory.references == 0
        memory.overwrite(2)
        rest = await peer.read_all()
        statistics = site.server.counters().server
    assert 2 not in rest.partition(b"\r\n\r\n")[2][memory.manifest.header_bytes :]
    assert (statistics.evicted, statistics.readers) == (1, 0)


async def test_a_stalled_reader_is_aborted():
    """Whoever reads nothing for the stall timeout is dropped."""
    memory = Memory(64 << 20)
    async with serving(memory, stall_timeout=0.4) as site:
        async with site.peer(receive_buffer=4096) as peer:
            await peer.request("/checkpoint/7/full")
            await settle(lambda: site.server.counters().server.stalled == 1)
            rest = await peer.read_all()
        assert len(rest) < len(memory.file)
        assert memory.references == 1  # the store's own


@proves("threat D9")
@pytest.mark.timeout(120)
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
            await settle(lambda: site.server.counters().server.readers == 200)
            async with site.peer() as good, asyncio.timeout(10):
                for _ in range(10):
                    assert (await good.ask("/checkpoint/7/full")).body == memory.file
        finally:
            for peer in peers:
                peer.close()
        await settle(lambda: memory.references == 1)


async def test_stop_ends_waiting_sending_and_idle_connections():
    """Stopping is bounded whatever the clients do."""
    memory = Memory(64 << 20)
    async with (
        serving(memory) as site,
        site.peer(receive_buffer=4096) as slow,
        site.peer() as waiting,
        site.peer() as idle,
        site.peer() as mute,
    ):
        await slow.request("/checkpoint/7/full")
        await waiting.request("/checkpoint/9/full", Prefer="wait=30")
        await idle.ask("/checkpoint/7/metadata")

        def counts() -> ServerStatistics:
            return site.server.counters().server

        await settle(lambda: counts().waiting == counts().readers == 1)
        async with asyncio.timeout(5):
            await site.server.stop()
        assert (counts().waiting, counts().readers) == (0, 0)
        assert memory.references == 0
        for peer in (slow, waiting, idle, mute):
            await peer.read_all()
        await site.server.stop()


@proves("threat T6")
async def test_a_lenient_parser_is_told_of(monkeypatch, caplog):
    """It is aiohttp's where its C extension is missing."""
    async with serving():
        assert "parser" not in caplog.text
    lenient = http_parser.HttpRequestParserPy
    monkeypatch.setattr(http_parser, "HttpRequestParser", lenient)
    async with serving():
        assert "no C parser" in caplog.text


async def test_a_server_starts_once():
    """What was stopped stays stopped."""
    async with serving() as site:
        with socket.create_server(("127.0.0.1", 0)) as other:
            await site.server.start([other])
            async with site.peer() as peer:
                assert (await peer.ask("/healthz")).status == 200
            await site.server.stop()
            with pytest.raises(ClosedError):
                await site.server.start([other])


async def test_statistics_and_repr_say_what_is_going_on():
    """A person sees it, and a test can read it."""
    async with serving(Memory(1000)) as site, site.peer() as peer:
        await peer.ask("/checkpoint/7/full")
        await peer.ask("/checkpoint/8/full")
        assert repr(site.server) == "<CheckpointServer step=7 readers=0>"
        statistics = site.server.counters().server
    assert (statistics.requests, statistics.refused) == (2, 1)
    assert statistics.bytes_sent > 1000
    assert TOKEN not in repr(CONFIG)
