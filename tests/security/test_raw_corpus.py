"""Whatever comes in over a socket costs little, ends soon, and harms nobody else."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tests.support.proofs import proves
from tests.support.servers import TOKEN, Memory, Peer, Site, serving, settle

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

PATIENCE = 20.0  # seconds; a shared machine is slow now and then
HEAD = b"Host: 127.0.0.1\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"
GET = b"GET /checkpoint/7/full HTTP/1.1\r\n" + HEAD
SMUGGLED = b"GET /checkpoint/7/metadata HTTP/1.1\r\n" + HEAD + b"\r\n"

HIDDEN = b"0\r\n\r\n" + SMUGGLED  # behind the last chunk of a body


def get(*fields: bytes, body: bytes = b"") -> bytes:
    """Return an authorized request with more fields, and what comes after it."""
    return GET + b"".join(field + b"\r\n" for field in fields) + b"\r\n" + body


def chunked(body: bytes) -> bytes:
    """Return such a request whose body comes in chunks."""
    return get(b"Transfer-Encoding: chunked", body=body)


def line(text: bytes) -> bytes:
    """Return an authorized request with another first line."""
    return text + b"\r\n" + HEAD + b"\r\n"


SMUGGLING = {
    "length and chunked": get(
        b"Content-Length: 6",
        b"Transfer-Encoding: chunked",
        body=HIDDEN,
    ),
    "chunked and length": get(
        b"Transfer-Encoding: chunked",
        b"Content-Length: 4",
        body=HIDDEN,
    ),
    "two lengths": get(
        b"Content-Length: 0",
        b"Content-Length: %d" % len(SMUGGLED),
        body=SMUGGLED,
    ),
    "two equal lengths": get(
        b"Content-Length: 5", b"Content-Length: 5", body=b"abcde" + SMUGGLED
    ),
    "a list of lengths": get(b"Content-Length: 5, 5", body=b"abcde" + SMUGGLED),
    "a signed length": get(b"Content-Length: +0", body=SMUGGLED),
    "a negative length": get(b"Content-Length: -1", body=SMUGGLED),
    "a hexadecimal length": get(b"Content-Length: 0x0", body=SMUGGLED),
    "a length with an underscore": get(b"Content-Length: 1_0", body=SMUGGLED),
    "no length": get(b"Content-Length: ", body=SMUGGLED),
    "an endless length": get(b"Content-Length: " + b"9" * 40, body=SMUGGLED),
    "a length in Arabic digits": get("Content-Length: ٣".encode(), body=SMUGGLED),
    "a body that is a request": get(
        b"Content-Length: %d" % len(SMUGGLED), body=SMUGGLED
    ),
    "two codings": get(
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: identity",
        body=HIDDEN,
    ),
    "an unknown coding": get(b"Transfer-Encoding: xchunked", body=HIDDEN),
    "a coding after a tab": get(b"Transfer-Encoding:\x0bchunked", body=HIDDEN),
    "a space before the colon": get(b"Transfer-Encoding : chunked", body=HIDDEN),
    "a folded coding": get(b"Transfer-Encoding:\r\n chunked", body=HIDDEN),
    "a chunk of a negative size": chunked(b"-1\r\n\r\n" + SMUGGLED),
    "a chunk of 2^64": get(
        b"Transfer-Encoding: chunked", body=b"1" + b"0" * 16 + b"\r\n" + SMUGGLED
    ),
    "a chunk with a bare line feed": chunked(b"0\n\n" + SMUGGLED),
    "a chunk with a long extension": get(
        b"Transfer-Encoding: chunked", body=b"5;" + b"x" * 100_000 + b"\r\n"
    ),
    "a bare carriage return": GET + b"X: a\rContent-Length: 5\r\n\r\n" + SMUGGLED,
    "bare line feeds": get().replace(b"\r\n", b"\n") + SMUGGLED,
}
"""A second request hides behind the first one."""

NONSENSE = {
    "nothing": b"\r\n\r\n",
    "a greeting of TLS": bytes.fromhex("160301020001fc0303") + bytes(500),
    "a preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /checkpoint/7/full\r\n\r\n",
    "HTTP/9": line(b"GET /checkpoint/7/full HTTP/9.9"),
    "no version": line(b"GET /checkpoint/7/full"),
    "a method in small letters": line(b"get /checkpoint/7/full HTTP/1.1"),
    "a long method": line(b"G" * 100_000 + b" / HTTP/1.1"),
    "a long path": line(b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1"),
    "a path with a zero": line(b"GET /checkpoint/\x00/full HTTP/1.1"),
    "a path upwards": line(b"GET /checkpoint/../../etc/passwd HTTP/1.1"),
    "an escaped path upwards": line(b"GET /checkpoint/%2e%2e%2fetc/passwd HTTP/1.1"),
    "another server": line(b"GET http://169.254.169.254/latest HTTP/1.1"),
    "a tunnel": line(b"CONNECT 169.254.169.254:80 HTTP/1.1"),
    "a star": line(b"OPTIONS * HTTP/1.1"),
    "a trace": line(b"TRACE /checkpoint/7/full HTTP/1.1"),
    "an upload": line(b"PUT /checkpoint/7/full HTTP/1.1"),
    "a step of many digits": line(
        b"GET /checkpoint/" + b"9" * 5000 + b"/full HTTP/1.1"
    ),
    "no colon": get(b"X"),
    "a name with a space": get(b"X Y: z"),
    "an empty name": get(b": z"),
    "a zero in a value": get(b"X: a\x00b"),
    "a megabyte in a value": get(b"X: " + b"y" * (1 << 20)),
    "ten thousand fields": get(*(b"X-%d: y" % n for n in range(10_000))),
    "a megabyte of one name": get(b"y" * (1 << 20) + b": z"),
    "two hosts": get(b"Host: example.org"),
    "two tokens": get(b"Authorization: Bearer other"),
    "an upgrade": get(b"Connection: Upgrade", b"Upgrade: h2c", b"HTTP2-Settings: AAMA"),
    "a web socket": get(
        b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x"
    ),
    "an expectation": get(b"Expect: 100-continue", b"Content-Length: 5"),
    "an odd expectation": get(b"Expect: everything"),
    "bytes": bytes(range(256)) * 100,
}

RANGES = {
    "ten thousand ranges": get(b"Range: bytes=" + b",".join([b"0-0"] * 1900)),
    "overlapping ranges": get(b"Range: bytes=" + b",".join([b"0-"] * 2000)),
    "a megabyte of ranges": get(b"Range: bytes=" + b"0-0," * (1 << 18)),
    "two fields": get(b"Range: bytes=0-0", b"Range: bytes=1-1"),
    "endless numbers": get(b"Range: bytes=" + b"9" * 4000 + b"-"),
    "a tag without an end": get(b'If-Match: "' + b"x" * 7000),
    "seven thousand tags": get(b"If-None-Match: " + b'"a",' * 1700),
    "a wait without an end": b"GET /checkpoint/8/full HTTP/1.1\r\n"
    + HEAD
    + b"Prefer: wait=1e999\r\n\r\n",
}


def peak() -> int:
    """Return the most memory that this process had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@asynccontextmanager
async def honest(site: Site, memory: Memory) -> AsyncIterator[None]:
    """Check that a good client gets every byte meanwhile, and nothing stays."""
    done = 0

    async def fetch() -> None:
        nonlocal done
        async with site.peer() as peer:
            while True:
                answer = await peer.ask("/checkpoint/7/full")
                assert answer.body == memory.file
                done += 1

    task = asyncio.create_task(fetch())
    try:
        yield
        before = done
        async with asyncio.timeout(PATIENCE):
            while done < before + 2 and not task.done():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await settle(lambda: site.server.statistics().readers == 0)
    await settle(lambda: memory.references == 1)


async def attack(port: int, raw: bytes) -> bytes:
    """Say something, and nothing more; return all that comes until the end."""
    async with asyncio.timeout(PATIENCE), Peer(port) as peer:
        # A server that has read enough may close while there is more to say.
        saying = asyncio.create_task(_say(peer, raw))
        came = await peer.read_all()
        saying.cancel()
        with suppress(asyncio.CancelledError):
            await saying
        return came


async def _say(peer: Peer, raw: bytes) -> None:
    with suppress(ConnectionError):
        await peer.say(raw)


async def attack_with(
    corpus: Mapping[str, bytes], memory: Memory, **options: Any
) -> dict[str, bytes]:
    """Try all of a corpus at once; return what came of each."""
    async with serving(memory, max_wait=0.2, **options) as site:
        tries = (attack(site.port, raw) for raw in corpus.values())
        return dict(zip(corpus, await asyncio.gather(*tries), strict=True))


def statuses(raw: bytes, memory: Memory) -> list[int]:
    """Return the statuses of the responses in what came."""
    rest = raw.replace(memory.file, b"")
    return [int(found) for found in re.findall(rb"HTTP/1\.[01] ([0-9]{3}) [A-Z]", rest)]


def unhidden(raw: bytes, memory: Memory) -> bool:
    """Whether the second request was answered with what it asks for."""
    return bytes(memory.manifest.header) in raw.replace(memory.file, b"")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server close what says nothing after half a second, not 75."""
    monkeypatch.setattr("aiockpt.http.server._KEEPALIVE_S", 0.5)


@proves("threat T6")
async def test_no_second_request_hides_behind_one() -> None:
    """It is the body of the first, or the connection ends; one in the open is seen."""
    memory = Memory(1000)
    came = await attack_with({"none": get() + SMUGGLED} | SMUGGLING, memory)
    assert [name for name, raw in came.items() if unhidden(raw, memory)] == ["none"]
    for name, raw in came.items():
        found = statuses(raw, memory)
        # The second may only be the refusal of what followed.
        assert name == "none" or all(status >= 400 for status in found[1:]), name


@proves("threat D7")
async def test_nonsense_ends_soon() -> None:
    """An answer or none, then the end; nothing is logged as an error of ours."""
    memory = Memory(1000)
    came = await attack_with(NONSENSE | RANGES, memory)
    for name, raw in came.items():
        assert all(100 <= status < 500 for status in statuses(raw, memory)), name
        # aiohttp shows a line that it could not read, escaped; nothing else is long.
        assert len(raw) < 20_000 + 4 * len((NONSENSE | RANGES)[name]), name
    told = {name: statuses(raw, memory) for name, raw in came.items()}
    assert told["an upload"] == [405]
    assert told["endless numbers"] == told["an expectation"] == [200]
    assert told["a megabyte in a value"] == told["a megabyte of ranges"] == [400]
    assert told["ten thousand ranges"] == [200]
    assert told["a wait without an end"] == [404]


@proves("threat D7")
@pytest.mark.timeout(240)
async def test_the_whole_corpus_at_once_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All of it, beside a client that gets every byte; memory stays."""
    caplog.set_level(logging.INFO)
    memory = Memory(300_000)
    corpus = [*SMUGGLING.values(), *NONSENSE.values(), *RANGES.values()]
    async with serving(memory, max_wait=0.2) as site, honest(site, memory):
        before = peak()
        await asyncio.gather(*(attack(site.port, each) for each in corpus))
        assert peak() - before < 64 << 20
    about_us = [each for each in caplog.records if each.name.startswith("aiockpt.h")]
    assert len(about_us) < 100


@proves("threat D7")
async def test_slow_headers_end_soon() -> None:
    """Nothing, half a header, or a byte now and then: the connection is closed."""
    memory = Memory(300_000)

    async def drip(peer: Peer) -> None:
        with suppress(ConnectionError):
            for byte in GET * 1000:
                await peer.say(bytes([byte]))
                await asyncio.sleep(0.02)

    async def be_slow(raw: bytes, *, dripping: bool) -> None:
        async with site.peer() as peer:
            await peer.say(raw)
            task = asyncio.create_task(drip(peer)) if dripping else None
            came = await peer.read_all()
            assert dripping or not came
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async with serving(memory) as site, honest(site, memory):
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(
                *(be_slow(GET[: n % 40], dripping=False) for n in range(100)),
                *(be_slow(GET[:20], dripping=True) for _ in range(50)),
            )
        # Only the honest one is left.
        await settle(lambda: len(site.connections) <= 2)


@proves("threat D11")
async def test_a_flood_of_small_ranges_is_bounded() -> None:
    """Ten thousand in one go, and nobody reads the answers."""
    memory = Memory(300_000)
    async with serving(memory) as site, honest(site, memory):
        before = peak()
        async with site.peer(receive_buffer=4096) as peer:
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(3):
                    for _ in range(100):
                        await peer.say(get(b"Range: bytes=5-5") * 100)
                        await asyncio.sleep(0)
            await settle(lambda: site.server.statistics().requests > 100)
            assert peak() - before < 64 << 20
        # Whoever leaves, leaves no work behind: only the honest one is there.
        await settle(lambda: len(site.connections) <= 1)


@proves("threat D11")
async def test_refusals_are_cheap() -> None:
    """Wrong tokens move no memory of the checkpoint, and take no time."""
    memory = Memory(64 << 20)
    async with serving(memory) as site:
        started = time.process_time()
        async with site.peer(token="wrong") as peer:
            for _ in range(200):
                assert (await peer.ask("/checkpoint/7/full")).status == 401
        assert time.process_time() - started < 2
        assert memory.references == 1
        assert site.server.statistics().bytes_sent == 0
