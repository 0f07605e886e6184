"""A client follows a peer that is staging, and believes nothing before the seal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from aiockpt.errors import (
    CheckpointChangedError,
    IntegrityError,
    PeerFailedError,
    RemoteProtocolError,
    StepNotFoundError,
)
from aiockpt.http.client import CheckpointClient
from aiockpt.http.manifests import Advance, Wishes
from aiockpt.wire.manifest import Manifest, Outline
from aiockpt.wire.problems import to_problem
from aiockpt.wire.relabel import UNSEALED, with_digests
from aiockpt.wire.unsealed import UNSEALED_HEADER, make_tag
from rangepeer import (
    STEP,
    Memory,
    RangePeer,
    describe,
    noise,
    receiver,
    serving,
    soon,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

CHUNK = 64 << 10
SEGMENT = noise(10 * CHUNK + 100)
CHUNKS = range(11)
TAG = make_tag(bytes(16))
Answer = Callable[[RangePeer, web.Request], web.Response]


def unsealed(manifest: Manifest) -> Manifest:
    """Return a manifest as it was before its digests were known."""
    return with_digests(manifest, [UNSEALED] * len(manifest.digests))


def problem(error: Exception) -> web.Response:
    """Return how a server tells of an error."""
    told = to_problem(error)
    return web.Response(status=told.status, body=told.body, headers=told.headers)


def early(peer: RangePeer, _: web.Request) -> web.Response:
    """Give the unsealed manifest."""
    headers = {"Aiockpt-Step": str(STEP), UNSEALED_HEADER: TAG}
    return web.Response(body=unsealed(peer.manifest).header, headers=headers)


def sealed(peer: RangePeer, request: web.Request) -> web.Response:
    """Give the sealed manifest."""
    return peer.answer(request)


def staged(peer: RangePeer, request: web.Request) -> web.Response:
    """Give a range under the tag."""
    header = bytes(peer.manifest.header)
    first, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
    total = len(header) + len(peer.segment)
    return web.Response(
        status=206,
        body=(header + peer.segment)[first : last + 1],
        headers={
            "Content-Range": f"bytes {first}-{last}/{total}",
            "ETag": f'"{TAG}"',
        },
    )


@dataclass
class Staging:
    """A ``meddle`` that answers as if the peer were staging; a turn for each answer."""

    manifest: Answer = early
    ranges: list[Answer] = field(default_factory=list)
    seals: list[Answer] = field(default_factory=list)
    asked: int = 0

    async def __call__(
        self, peer: RangePeer, request: web.Request
    ) -> web.StreamResponse | None:
        said = request.headers.get(UNSEALED_HEADER)
        if said is None:
            return None
        if said == "accept":
            return self.manifest(peer, request)
        assert said == TAG
        whole = request.path.endswith("/metadata")
        assert request.headers.get("If-Match") == (None if whole else f'"{TAG}"')
        self.asked += 1
        turns, rest = (self.seals, sealed) if whole else (self.ranges, staged)
        return (turns.pop(0) if turns else rest)(peer, request)


async def follow(
    client: CheckpointClient, peer: RangePeer, memory: Memory
) -> tuple[Outline, list[int]]:
    """Follow a peer that stages."""
    advance = Advance()
    manifest = await client.fetch_manifest(
        peer.source(), STEP, deadline=soon(), wishes=Wishes(advance=advance)
    )
    assert advance.promise is not None
    return await client.follow(
        peer.source(),
        advance.promise,
        manifest.outline,
        memory,
        CHUNKS,
        on_progress=memory.count,
        on_retry=memory.errors.append,
    )


async def followed(staging: Staging, **options: Any) -> tuple[Memory, list[int]]:
    """Follow a peer; return what came, and which chunks are still to be fetched."""
    memory = Memory(len(SEGMENT))
    async with (
        serving(SEGMENT, chunk_bytes=CHUNK, meddle=staging) as peer,
        receiver(**options) as client,
    ):
        outline, left = await follow(client, peer, memory)
        assert outline == peer.manifest.outline
    return memory, left


def later(_: RangePeer, __: web.Request) -> web.Response:
    """Say that it is not there yet."""
    return web.Response(status=204)


def failing(error: Exception) -> Answer:
    """Answer with an error."""
    return lambda *_: problem(error)


async def test_what_was_sealed_as_it_came_is_received() -> None:
    """Whenever the seal comes, the rest is left to an ordinary fetch."""
    memory, left = await followed(Staging(seals=[later] * 3))
    there = {*CHUNKS} - {*left}
    assert there
    for chunk in there:
        cut = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        assert memory.content[cut] == SEGMENT[cut]
    assert memory.chunks == len(there)
    assert memory.bytes == sum(len(SEGMENT[c * CHUNK : (c + 1) * CHUNK]) for c in there)
    assert memory.errors == []


async def test_what_is_not_there_yet_is_asked_for_again() -> None:
    """After a pause, also if the peer does not make it wait."""
    staging = Staging(ranges=[later] * 4, seals=[later] * 8)
    _, left = await followed(staging)
    assert left == []
    assert staging.asked > 12


async def test_a_chunk_that_is_not_the_sealed_one_was_not_received() -> None:
    """It is counted out again, and told as damage."""

    def damaged(peer: RangePeer, request: web.Request) -> web.Response:
        answer = staged(peer, request)
        assert isinstance(answer.body, bytes)
        answer.body = bytes([answer.body[0] ^ 1]) + answer.body[1:]
        return answer

    staging = Staging(ranges=[damaged], seals=[later] * 8)
    memory, left = await followed(staging, max_concurrency=1)
    assert left == [0]
    assert memory.bytes == len(SEGMENT) - CHUNK
    assert memory.chunks == len(CHUNKS) - 1
    (error,) = memory.errors
    assert isinstance(error, IntegrityError)
    assert error.chunk == 0


async def test_what_cannot_be_had_early_is_had_later() -> None:
    """A cache in between may answer with something else."""
    changed = failing(CheckpointChangedError(expected=TAG, actual=None))
    staging = Staging(ranges=[changed] * 99, seals=[later] * 2)
    memory, left = await followed(staging)
    assert left == [*CHUNKS]
    assert memory.bytes == 0


@pytest.mark.parametrize(
    "error",
    [PeerFailedError(None, "no memory"), StepNotFoundError(STEP)],
    ids=["failed", "withdrawn"],
)
async def test_an_end_without_a_seal_is_an_error(error: Exception) -> None:
    """Whichever request learns of it."""
    for staging in (
        Staging(ranges=[failing(error)] * 99, seals=[later] * 99),
        Staging(ranges=[later] * 99, seals=[failing(error)]),
    ):
        with pytest.raises(type(error)):
            await followed(staging)


def seal_of(segment: bytes, step: int) -> Answer:
    """Give the sealed manifest of something else."""

    def other(_: RangePeer, __: web.Request) -> web.Response:
        manifest = describe(segment, step=step, chunk_bytes=CHUNK)
        headers = {"Aiockpt-Step": str(STEP)}
        return web.Response(body=manifest.header, headers=headers)

    return other


async def test_the_seal_of_another_checkpoint_is_refused() -> None:
    """Three times, as any answer that contradicts the format."""
    for other in (seal_of(SEGMENT, STEP + 1), seal_of(SEGMENT[:-1], STEP)):
        with pytest.raises(RemoteProtocolError, match="another checkpoint"):
            await followed(Staging(ranges=[later] * 999, seals=[other] * 3))


async def test_a_seal_that_is_unsealed_is_good_for_no_chunk() -> None:
    """Zeros are nobody's digest."""
    _, left = await followed_loosely(Staging(seals=[early]))
    assert left == [*CHUNKS]


async def followed_loosely(staging: Staging) -> tuple[Outline, list[int]]:
    """Follow a peer, whatever it seals."""
    async with (
        serving(SEGMENT, chunk_bytes=CHUNK, meddle=staging) as peer,
        receiver() as client,
    ):
        return await follow(client, peer, Memory(len(SEGMENT)))


@pytest.mark.parametrize("tag", ["", "accept", "unsealed-0", 32 * "0"])
async def test_a_bad_tag_is_refused(tag: str) -> None:
    """It is none of ours."""

    def tagged(peer: RangePeer, request: web.Request) -> web.Response:
        answer = early(peer, request)
        answer.headers[UNSEALED_HEADER] = tag
        return answer

    with pytest.raises(RemoteProtocolError, match="bad Aiockpt-Unsealed"):
        await followed(Staging(manifest=tagged))


async def test_what_has_digests_cannot_be_called_unsealed() -> None:
    """The two contradict each other."""

    def both(peer: RangePeer, request: web.Request) -> web.Response:
        answer = sealed(peer, request)
        answer.headers[UNSEALED_HEADER] = TAG
        return answer

    with pytest.raises(RemoteProtocolError, match="has digests"):
        await followed(Staging(manifest=both))
