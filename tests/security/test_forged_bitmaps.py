"""What a member of a swarm announces may be forged: impossible, or without end."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from aiohttp import web

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.manifest import Outline
from aiockpt.http.peers import Peer
from aiockpt.http.protocol import Origin
from aiockpt.swarm.membership import watch
from tests.support.proofs import proves
from tests.support.servers import running
from tests.support.transports import CHUNK, transport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

CHUNKS = 10
NONE, SOME = b"\x00\x00", b"\x03\x00"  # bitmaps: of no chunk, and of the first two
NOTHING_NEW = b"\xff" * 4


def records(*chunks: int) -> bytes:
    """Return the records of chunks that a member has got."""
    return b"".join(each.to_bytes(4, "little") for each in chunks)


@proves("threat T11")
@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([b"\x00\x04"], "bits beyond those of 10 chunks"),
        ([b"\xff\xff"], "bits beyond those of 10 chunks"),
        ([NONE + records(10)], "chunk 10 of 10 does not exist"),
        ([NONE + records(2**32 - 2)], "chunk 4294967294 of 10 does not exist"),
        ([NONE + records(4, 4)], "chunk 4 of 10 is named twice"),
        ([SOME + records(1)], "a chunk is announced twice"),
        ([SOME, records(4), records(5, 4)], "twice"),
        ([NONE, *[NOTHING_NEW] * 1000], "sends without end"),
    ],
    ids=[
        "one bit too many",
        "many bits too many",
        "no such chunk",
        "a large number",
        "twice in a piece",
        "in the bitmap",
        "twice",
        "without end",
    ],
)
async def test_an_impossible_bitmap_is_refused(
    pieces: list[bytes], message: str
) -> None:
    """The error is one for which a receive drops the member and reports it."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            for piece in pieces:
                await response.write(piece)
                await asyncio.sleep(0)
        return response

    app = web.Application()
    app.router.add_get("/1/have", answer)
    grid = ChunkGrid(CHUNKS * CHUNK, CHUNK)
    outline = Outline(1, "id", grid, ("",) * CHUNKS, 0)
    async with running(app) as host, transport(swarm=True) as receiver:
        member = Peer(Origin(f"http://127.0.0.1:{host.port}/", "token"), have=0)
        with pytest.raises(RemoteProtocolError, match=message):
            async for _ in watch(receiver._client, member, outline):
                pass
