"""A receiver made from the page of the wire format, curl, and senders that lie."""

from __future__ import annotations

import asyncio
import shutil
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zstandard
from aiohttp import ClientSession, web

from aiockpt.errors import RemoteProtocolError
from aiockpt.testing import assert_same
from tests.support.proofs import proves
from tests.support.transports import (
    MIB,
    Transport,
    port_of,
    transport,
    weights_of,
)

pytestmark = pytest.mark.asyncio

CHUNK = MIB
HEAD = struct.Struct("<BxxxI")


def patched(base: bytes, kind: int, body: bytes) -> bytes:
    """Apply a delta word by word, as the page of the wire format says."""
    if kind == 0:
        return base
    if kind == 2:
        return body
    (count,) = struct.unpack_from("<I", body)
    planes = zstandard.ZstdDecompressor().decompress(body[4:])
    assert len(planes) == 4 * count
    made = bytearray(base)
    word = -1
    for n in range(count):
        gap = planes[n] | planes[count + n] << 8
        folded = planes[2 * count + n] | planes[3 * count + n] << 8
        word += gap + 1
        difference = (folded >> 1) ^ -(folded & 1)
        (old,) = struct.unpack_from("<H", made, 2 * word)
        struct.pack_into("<H", made, 2 * word, (old + difference) & 0xFFFF)
    return bytes(made)


@asynccontextmanager
async def two_steps() -> AsyncIterator[tuple[Transport, Transport, bytes]]:
    """Give a sender of two steps that keeps the first, a receiver, and that step."""
    async with (
        transport(keep_base=True, chunk_bytes=CHUNK) as sender,
        transport(same_host=False, reconnect_timeout=0) as receiver,
    ):
        await sender.send_checkpoint(step=1, state_dict=weights_of(0))
        base = await segment(sender, 1)
        await sender.send_checkpoint(step=2, state_dict=weights_of(1))
        yield sender, receiver, base


async def segment(sender: Transport, step: int) -> bytes:
    """Return the data segment of a step, by a plain GET of the file."""
    address, _, token = sender.metadata().partition("#")
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        ClientSession() as session,
        session.get(f"{address}{step}/full", headers=headers) as answer,
    ):
        file = await answer.read()
    return file[8 + int.from_bytes(file[:8], "little") :]


async def test_the_page_suffices_to_write_a_receiver() -> None:
    """Every chunk of the new step is the old one and its delta."""
    async with two_steps() as (sender, _, old), ClientSession() as session:
        address, _, token = sender.metadata().partition("#")
        allowed = {"Authorization": f"Bearer {token}"}
        async with session.get(f"{address}2/metadata", headers=allowed) as answer:
            base, target = answer.headers["Delta-Base"], answer.headers["ETag"]
            head = len(await answer.read())
        new = await segment(sender, 2)
        assert len(old) == len(new)
        asked = {
            **allowed,
            "Range": f"bytes={head}-{head + len(new) - 1}",
            "If-Match": target,
            "A-IM": "other;q=0.5, Aiockpt-Delta",
            "If-None-Match": f'"someone-elses", {base}',
        }
        async with session.get(f"{address}2/full", headers=asked) as answer:
            deltas = await answer.read()
            assert answer.status == 226
            assert answer.headers["IM"] == "aiockpt-delta"
            assert answer.headers["Delta-Base"] == base
            assert answer.headers["ETag"] == target
            expected = f"bytes {head}-{head + len(new) - 1}/{head + len(new)}"
            assert answer.headers["Content-Range"] == expected
        made, at = b"", 0
        for start in range(0, len(old), CHUNK):
            kind, nbytes = HEAD.unpack_from(deltas, at)
            body = deltas[at + HEAD.size : at + HEAD.size + nbytes]
            made += patched(old[start : start + CHUNK], kind, body)
            at += HEAD.size + nbytes
        assert at == len(deltas)
        assert made == new


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"A-IM": "aiockpt-delta"},
        {"A-IM": "gzip", "If-None-Match": "BASE"},
        {"A-IM": "aiockpt-delta", "If-None-Match": '"another"'},
        {"A-IM": "aiockpt-delta", "If-None-Match": "BASE", "Range": "bytes=9-99"},
    ],
    ids=["none", "no base", "other name", "other base", "not whole chunks"],
)
async def test_other_requests_get_the_bytes(headers: dict[str, str]) -> None:
    """Curl sees nothing new unless it asks for all that the page says."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    async with two_steps() as (sender, _, _):
        address, _, token = sender.metadata().partition("#")
        command = ["curl", "-sS", "-D", "-", "-o", "/dev/null", f"{address}2/metadata"]
        command += ["-H", f"Authorization: Bearer {token}"]
        answer = await said(command)
        base = answer.partition("Delta-Base: ")[2].split("\r\n")[0]
        head = int(answer.partition("Content-Length: ")[2].split("\r\n")[0])
        named = {"Range": f"bytes={head}-{head + CHUNK - 1}", **headers}
        command[6] = f"{address}2/full"
        for name, value in named.items():
            command += ["-H", f"{name}: {value.replace('BASE', base)}"]
        answer = await said(command)
    assert answer.startswith("HTTP/1.1 206 ")
    assert "\r\nIM:" not in answer


async def said(command: list[str]) -> str:
    """Return what a program prints."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


# ------------------------------------------------------------------- senders that lie

Lie = Callable[[dict[str, str], bytes], bytes]


def header(name: str, value: str) -> Lie:
    """Replace a header of the answer."""

    def lie(headers: dict[str, str], body: bytes) -> bytes:
        headers[name] = value
        return body

    return lie


def body_of(make: Callable[[bytes], bytes]) -> Lie:
    """Replace the body of the answer."""
    return lambda headers, body: make(body)


def sparse(count: int, frame: bytes) -> Lie:
    """Replace each delta by this sparse one."""
    delta = struct.pack("<I", count) + frame
    record = HEAD.pack(1, len(delta)) + delta

    def forge(body: bytes) -> bytes:
        at = chunks = 0
        while at < len(body):
            at += HEAD.size + HEAD.unpack_from(body, at)[1]
            chunks += 1
        return record * chunks

    return body_of(forge)


BOMB = zstandard.ZstdCompressor().compress(bytes(256 << 20))
LIES: dict[str, tuple[Lie, str]] = {
    "another base": (header("Delta-Base", '"other"'), "not requested"),
    "no name": (header("IM", "gzip"), "not requested"),
    "another range": (header("Content-Range", "bytes 0-9/99"), "bytes 0 to 10"),
    "longer than the range": (
        body_of(lambda body: bytes(9 * MIB)),
        "deltas of 9437184",
    ),
    "nothing": (body_of(lambda body: b""), "0 deltas"),
    "cut short": (body_of(lambda body: body[:-1]), "ends too early"),
    "one too many": (body_of(lambda body: body + HEAD.pack(0, 0)), "after the last"),
    "a bomb": (sparse(1, BOMB), "without 1 changes"),
    "too many changes": (sparse(64 << 20, BOMB), "changes for"),
}


@asynccontextmanager
async def liar(sender: Transport, lie: Lie) -> AsyncIterator[str]:
    """Serve what a sender does, with other deltas; give the metadata."""
    told: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        headers = {k: v for k, v in request.headers.items() if k != "Host"}
        url = f"http://127.0.0.1:{port_of(sender)}{request.raw_path}"
        async with session.request(request.method, url, headers=headers) as answer:
            body = await answer.read()
            said = {k: v for k, v in answer.headers.items() if k in PASSED}
            if answer.status == 226:
                told.append(url)
                body = lie(said, body)
            return web.Response(status=answer.status, headers=said, body=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    address, _, token = sender.metadata().partition("#")
    path = address.partition("//")[2].partition("/")[2]
    try:
        async with ClientSession() as session:
            yield f"http://127.0.0.1:{port}/{path}#{token}"
    finally:
        await runner.cleanup()
    assert told, "the receiver has asked for no delta"


PASSED = (
    *("Aiockpt-Step", "Content-Range", "Content-Type", "Delta-Base", "ETag", "IM"),
    *("Aiockpt-Lease", "Aiockpt-Incarnation", "Repr-Digest"),
)


@proves("threat D13")
@pytest.mark.parametrize("name", LIES)
async def test_a_lie_is_the_senders_fault(name: str) -> None:
    """A typed error blames the sender, and the template is as it was."""
    lie, fault = LIES[name]
    async with two_steps() as (sender, receiver, _), liar(sender, lie) as metadata:
        template = weights_of(0)
        with pytest.raises(RemoteProtocolError, match=fault):
            await receiver.recv_checkpoint(
                metadata=metadata, step=2, into=template, have=True, timeout=30
            )
        assert_same(template, weights_of(0))


@proves("invariant 1")
async def test_a_wrong_delta_is_noticed_by_its_digest() -> None:
    """The receiver fetches the bytes of each chunk instead."""
    lie = sparse(1, zstandard.ZstdCompressor().compress(b"\0\0\2\0"))
    async with two_steps() as (sender, receiver, _), liar(sender, lie) as metadata:
        template: Any = weights_of(0)
        got = await receiver.recv_checkpoint(
            metadata=metadata, step=2, into=template, have=True
        )
        assert got is template
        assert_same(got, weights_of(1))
