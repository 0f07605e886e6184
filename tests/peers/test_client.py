"""The client asks for what it needs, believes nothing, and says what went wrong."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable

import pytest
from aiohttp import ClientSession, web

from aiockpt import Limits, TransferEvent, add_hook
from aiockpt.errors import (
    AiockptError,
    AuthenticationError,
    CheckpointChangedError,
    ClosedError,
    IntegrityError,
    LimitExceededError,
    LocalProtocolError,
    RemoteProtocolError,
    StepNotFoundError,
)
from tests.support.proofs import proves
from tests.support.rangepeer import (
    STEP,
    TOKEN,
    Meddle,
    Memory,
    RangePeer,
    busy,
    describe,
    fetch,
    fetch_chunks,
    fetch_manifest,
    noise,
    receiver,
    refusing,
    serving,
    soon,
)

pytestmark = [
    pytest.mark.usefixtures("no_blocking"),
    pytest.mark.asyncio,
    pytest.mark.torch_free,
]

CHUNK = 1 << 16
SEGMENT = noise(5 * CHUNK + 100)
FOREIGN = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
FOREIGN = len(FOREIGN).to_bytes(8, "little") + FOREIGN


def editing(edit: Callable[[web.Response], object]) -> Meddle:
    """Change every answer of the peer."""

    async def meddle(peer: RangePeer, request: web.Request) -> web.StreamResponse:
        answer = peer.answer(request)
        edit(answer)
        return answer

    return meddle


def saying(**headers: str) -> Meddle:
    """Add headers to every answer of the peer, or replace them."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return editing(lambda answer: answer.headers.update(named))


def resizing(by: int) -> Meddle:
    """Send a body that is longer or shorter than was asked for."""

    def resize(answer: web.Response) -> None:
        assert isinstance(answer.body, bytes)
        answer.body = answer.body + b"x" * by if by > 0 else answer.body[:by]

    return editing(resize)


def bomb(answer: web.Response) -> None:
    """Announce what gzip makes of many zeros."""
    answer.body = gzip.compress(bytes(1 << 20))
    answer.headers["Content-Encoding"] = "gzip"


class TestFetchManifest:
    """A receiver requests the manifest first, within limits of time."""

    async def test_returns_what_the_peer_describes(self) -> None:
        """The manifest is the peer's."""
        async with serving(SEGMENT, chunk_bytes=CHUNK) as peer, receiver() as client:
            assert await fetch_manifest(client, peer.source()) == peer.manifest

    async def test_waits_until_the_step_is_published(self) -> None:
        """The client asks again, and says so, until the step is there."""
        errors = [StepNotFoundError(STEP), StepNotFoundError(STEP, serving=STEP - 1)]
        told: list[AiockptError] = []
        meddle = refusing(*errors)
        async with serving(SEGMENT, meddle=meddle) as peer, receiver() as client:
            manifest = await fetch_manifest(
                client, peer.source(), STEP, deadline=soon(), on_retry=told.append
            )
            assert manifest == peer.manifest
        served = [e.serving for e in told if isinstance(e, StepNotFoundError)]
        assert served == [None, STEP - 1]

    async def test_asks_the_peer_to_wait_no_longer_than_the_deadline(self) -> None:
        """``Prefer: wait`` is the rest of the time, in pieces of the stall timeout.

        The last half second is for the answer, which says what is served instead.
        """
        async with serving(SEGMENT) as peer, receiver() as client:
            for seconds in (2.5, -1, 3600):
                await fetch_manifest(
                    client, peer.source(), STEP, deadline=soon(seconds)
                )
        waits = [float(h["Prefer"].removeprefix("wait=")) for _, h in peer.requests]
        assert waits == [pytest.approx(2.0, abs=0.2), 0, 5]

    async def test_header_above_the_limit_is_refused_before_it_is_read(self) -> None:
        """A peer that announces too much is not even listened to."""
        silence = asyncio.Event()

        async def announce(_: RangePeer, request: web.Request) -> web.StreamResponse:
            answer = web.StreamResponse(
                headers={"Content-Length": str(2**62), "Aiockpt-Step": str(STEP)}
            )
            await answer.prepare(request)
            await answer.write(b"x")
            await silence.wait()
            return answer

        limits = Limits(max_header_bytes=10_000)
        async with (
            serving(SEGMENT, meddle=announce) as peer,
            receiver(limits=limits) as client,
        ):
            with pytest.raises(LimitExceededError) as caught:
                await fetch_manifest(client, peer.source())
            silence.set()
        assert caught.value.actual == 2**62

    async def test_damaged_header_is_fetched_again_then_reported(self) -> None:
        """Two damaged headers are forgiven, the third is an error with its peer."""
        damaged = bytearray(describe(SEGMENT).header)
        damaged[-100] ^= 1
        left = 2

        async def damage(peer: RangePeer, request: web.Request) -> web.Response | None:
            nonlocal left
            left -= 1
            answer = peer.answer(request)
            answer.body = damaged
            return answer if left >= 0 else None

        async with serving(SEGMENT, meddle=damage) as peer, receiver() as client:
            assert await fetch_manifest(client, peer.source()) == peer.manifest
            left = 3
            with pytest.raises(IntegrityError) as caught:
                await fetch_manifest(client, peer.source())
        assert caught.value.chunk is None
        assert caught.value.url.startswith(peer.base_url)

    @pytest.mark.parametrize(
        ("body", "headers", "message"),
        [
            (b"", {}, "is that an aiockpt server"),
            (b"<html> ", {}, "is that an aiockpt server"),
            (b"<html>" * 20, {}, "is that an aiockpt server"),
            (describe(SEGMENT, step=8).header, {}, "is that an aiockpt server"),
            (describe(SEGMENT, step=8).header, {"Aiockpt-Step": "8"}, "sends step 8"),
            (FOREIGN, {"Aiockpt-Step": str(STEP)}, "no manifest"),
        ],
        ids=["empty", "short", "page", "unnamed step", "other step", "safetensors"],
    )
    async def test_what_is_no_manifest_of_the_step_is_refused(
        self, body, headers, message
    ) -> None:
        """A web page, a server that mixes up its steps, a foreign header."""

        async def answer(_: RangePeer, request: web.Request) -> web.Response:
            return web.Response(body=bytes(body), headers=headers)

        async with serving(SEGMENT, meddle=answer) as peer, receiver() as client:
            with pytest.raises(RemoteProtocolError, match=message):
                await fetch_manifest(client, peer.source())


@pytest.mark.parametrize("fast_path", [True, False], ids=["direct", "portable"])
class TestFetchChunks:
    """The bytes, on both ways into memory."""

    @pytest.mark.parametrize("parallel", [1, 2, 4])
    async def test_opens_as_many_connections_as_requests_at_a_time(
        self, fast_path, parallel
    ) -> None:
        """Connections come back from each range in a state to be used again."""
        segment = noise(32 * CHUNK)
        async with (
            serving(segment, chunk_bytes=CHUNK) as peer,
            receiver(fast_path=fast_path, max_concurrency=parallel) as client,
        ):
            assert (await fetch(client, peer)).content == segment
        assert (len(peer.requests), len(peer.clients)) == (2 * parallel, parallel)

    async def test_asks_for_plain_bytes_of_one_snapshot(self, fast_path) -> None:
        """No encoding, no other snapshot, no credential that was not given."""
        async with serving(SEGMENT) as peer, receiver(fast_path=fast_path) as client:
            await fetch(client, peer)
        ((path, headers),) = peer.requests
        head = peer.manifest.header_bytes
        assert path == f"/checkpoint/{STEP}/full"
        assert headers["Range"] == f"bytes={head}-{head + len(SEGMENT) - 1}"
        assert headers["If-Match"] == f'"{peer.manifest.snapshot_id}"'
        assert headers["Accept-Encoding"] == "identity"
        assert "Authorization" not in headers

    @proves("threat D6")
    @pytest.mark.parametrize(
        ("meddle", "message"),
        [
            (editing(lambda a: a.set_status(200)), "answered HTTP 200"),
            (editing(lambda a: a.set_status(204)), "answered HTTP 204"),
            (editing(lambda a: a.set_status(302)), "redirects are not followed"),
            (editing(lambda a: a.headers.popall("Content-Range")), "Content-Range"),
            (saying(Content_Range="bytes 0-1/9"), "bytes 0 to 2 of 9"),
            (saying(Content_Encoding="br"), "'br'"),
            (editing(bomb), "'gzip'"),
            (editing(web.Response.enable_chunked_encoding), "how long"),
            (resizing(+1), "Content-Length 327781 for"),
            (resizing(-1), "Content-Length 327779 for"),
        ],
    )
    async def test_answer_that_is_not_exactly_the_range_is_refused(
        self, fast_path, meddle, message
    ) -> None:
        """Nothing of it is received, three times, then the error names the peer."""
        async with (
            serving(SEGMENT, meddle=meddle) as peer,
            receiver(fast_path=fast_path) as client,
        ):
            memory = Memory(len(SEGMENT))
            with pytest.raises(RemoteProtocolError, match=message) as caught:
                await fetch(client, peer, memory)
        assert peer.base_url in str(caught.value)
        assert len(peer.requests) == 3
        assert memory.content == bytes(len(SEGMENT))

    async def test_bad_chunk_is_fetched_again_and_no_other(self, fast_path) -> None:
        """One wrong byte costs one more request; progress is taken back."""
        async with (
            serving(SEGMENT, chunk_bytes=CHUNK) as peer,
            receiver(fast_path=fast_path) as client,
        ):
            peer.segment = peer.segment[:-1] + b"?"
            memory = Memory(len(SEGMENT))

            async def repair(_: RangePeer, request: web.Request) -> None:
                if memory.errors:
                    peer.segment = SEGMENT

            peer.meddle = repair
            await fetch(client, peer, memory)
        assert memory.content == SEGMENT
        assert (memory.bytes, memory.chunks) == (len(SEGMENT), 6)
        assert len(peer.requests) == 4
        head = peer.manifest.header_bytes
        last = f"bytes={head + 5 * CHUNK}-{head + len(SEGMENT) - 1}"
        assert peer.ranges()[-1] == last
        (error,) = memory.errors
        assert isinstance(error, IntegrityError)

    @proves("threat T2", "invariant 1")
    async def test_snapshot_that_changes_is_never_mixed_in(self, fast_path) -> None:
        """A 412 or another ``ETag`` ends the transfer and says what is there now."""
        other = describe(SEGMENT, step=STEP + 1).snapshot_id
        changed = CheckpointChangedError(expected="", actual=other)
        for meddle in (refusing(changed), saying(ETag=f'"{other}"')):
            async with (
                serving(SEGMENT, meddle=meddle) as peer,
                receiver(fast_path=fast_path) as client,
            ):
                with pytest.raises(CheckpointChangedError) as caught:
                    await fetch(client, peer)
            assert caught.value.expected == peer.manifest.snapshot_id
            assert caught.value.actual == other
            assert len(peer.requests) == 1

    async def test_first_failure_ends_the_others_and_comes_alone(
        self, fast_path
    ) -> None:
        """One typed error, no group, while another chunk would take for ever."""
        never = asyncio.Event()

        async def one_fails(_: RangePeer, request: web.Request) -> web.StreamResponse:
            if len(peer.requests) == 1:
                await never.wait()
            return web.Response(status=412)

        async with (
            serving(SEGMENT, chunk_bytes=CHUNK, meddle=one_fails) as peer,
            receiver(fast_path=fast_path) as client,
        ):
            with pytest.raises(CheckpointChangedError):
                await fetch(client, peer)
            never.set()


class TestErrors:
    """Each refusal of a peer becomes an error, and some are worth another attempt."""

    async def test_refused_credential_names_the_peer_and_not_the_token(self) -> None:
        """It is no use to try again."""
        no = refusing(AuthenticationError("here"))
        async with serving(SEGMENT, meddle=no) as peer, receiver() as client:
            with pytest.raises(AuthenticationError) as caught:
                await fetch(client, peer, token=TOKEN)
            assert len(peer.requests) == 1
        assert peer.base_url in str(caught.value)
        assert TOKEN not in f"{caught.value!r} {caught.value}"

    async def test_every_retry_is_an_event(self) -> None:
        """Hooks learn which peer made trouble and which."""
        events: list[TransferEvent] = []
        remove = add_hook(events.append)
        meddle = refusing(busy())
        async with serving(SEGMENT, meddle=meddle) as peer, receiver() as client:
            assert (await fetch(client, peer)).content == SEGMENT
        remove()
        assert [(e.stop, e.step, e.peer) for e in events] == [
            ("retry", STEP, peer.base_url)
        ]

    @pytest.mark.parametrize("chunk", [-1, 1])
    async def test_chunk_outside_the_grid_is_the_callers_mistake(self, chunk) -> None:
        """No request is made for it."""
        async with serving(SEGMENT) as peer, receiver() as client:
            with pytest.raises(LocalProtocolError, match=f"chunk {chunk}"):
                await fetch_chunks(
                    client,
                    peer.source(),
                    peer.manifest.outline,
                    Memory(len(SEGMENT)),
                    [chunk],
                    on_progress=lambda *_: None,
                )
            assert not peer.requests


class TestCredentials:
    """A token goes where it was meant to go, and is shown nowhere."""

    async def test_token_of_the_source_goes_before_the_configured_one(self) -> None:
        """The metadata knows best what its sender wants."""
        async with serving(SEGMENT) as peer, receiver(token="configured") as client:
            await fetch(client, peer, token=TOKEN)
            await fetch(client, peer)
        sent = [headers["Authorization"] for _, headers in peer.requests]
        assert sent == [f"Bearer {TOKEN}", "Bearer configured"]

    @proves("threat I4", "invariant 10")
    async def test_token_does_not_follow_a_redirect(self) -> None:
        """The other origin is never asked at all."""
        async with serving(SEGMENT) as thief:
            there = f"{thief.base_url}{STEP}/full"

            async def redirect(_: RangePeer, request: web.Request) -> web.Response:
                return web.Response(status=307, headers={"Location": there})

            async with serving(SEGMENT, meddle=redirect) as peer, receiver() as client:
                with pytest.raises(RemoteProtocolError, match="redirect"):
                    await fetch(client, peer, token=TOKEN)
            assert not thief.requests

    @pytest.mark.parametrize("token", ["", "two words", "line\r\nHost: evil", "\u20ac"])
    async def test_token_that_no_header_can_carry_is_refused_unseen(
        self, token
    ) -> None:
        """It is the caller's mistake, and the message does not repeat it."""
        async with serving(SEGMENT) as peer, receiver(token=token) as client:
            with pytest.raises(LocalProtocolError, match="token") as caught:
                await fetch(client, peer)
            assert not token or token not in str(caught.value)
            assert not peer.requests


class TestSession:
    """The owner of a session closes it."""

    async def test_closed_session_of_the_caller_is_named(self) -> None:
        """It is not the client that is closed."""
        async with ClientSession() as session:
            pass
        async with serving(SEGMENT) as peer, receiver(session) as client:
            with pytest.raises(ClosedError, match="ClientSession"):
                await fetch(client, peer)

    @proves("threat I4")
    async def test_environment_proxies_are_ignored(self, monkeypatch) -> None:
        """Checkpoints do not take the way of web pages."""
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1/")
        async with serving(SEGMENT) as peer, receiver() as client:
            assert (await fetch(client, peer)).content == SEGMENT

    async def test_credential_of_the_session_gives_way(self) -> None:
        """What the source demands replaces a default header of the same name."""
        async with ClientSession(headers={"Authorization": "Basic x"}) as session:
            async with serving(SEGMENT) as peer, receiver(session) as client:
                await fetch(client, peer, token=TOKEN)
            assert peer.requests[0][1]["Authorization"] == f"Bearer {TOKEN}"
