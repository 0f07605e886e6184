"""Whatever a network does: the right bytes arrive, or one typed error does."""

from __future__ import annotations

import asyncio
import ssl
import time

import pytest
import trustme
from aiohttp import web

from aiockpt.errors import (
    AiockptError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransferInterruptedError,
    TransferStalledError,
)
from aiockpt.testing import (
    Answer,
    CutAfter,
    Drip,
    FaultProxy,
    Refuse,
    StallAfter,
)
from tests.support.proofs import proves
from tests.support.rangepeer import (
    Client,
    Memory,
    RangePeer,
    fetch,
    fetch_latest,
    fetch_manifest,
    noise,
    receiver,
    serving,
)
from tests.support.servers import settle

pytestmark = [
    pytest.mark.usefixtures("no_blocking"),
    pytest.mark.asyncio,
    pytest.mark.torch_free,
    pytest.mark.parametrize("fast_path", [True, False], ids=["direct", "portable"]),
]

CHUNK = 1 << 16
SMALL = noise(200)
LARGE = noise(16 * CHUNK)
HEAD, LENGTH = b"HTTP/1.1 206 OK\r\n", b"Content-Length: %d\r\n"


async def length_of_answer(client: Client, peer: RangePeer) -> int:
    """Return the bytes of one whole answer, its head included."""
    async with FaultProxy("127.0.0.1", peer.port) as proxy:
        await fetch(client, peer, port=proxy.port)
        return proxy.statistics().bytes_down


@proves("threat T1")
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
async def test_every_truncation_point_is_survived(fast_path, reset, stride) -> None:
    """A connection may end after any byte: the transfer goes on from there."""
    async with (
        serving(SMALL) as peer,
        receiver(fast_path=fast_path, reconnect_timeout=20) as client,
        FaultProxy("127.0.0.1", peer.port) as proxy,
    ):
        points = range(0, await length_of_answer(client, peer) + 1, stride)
        proxy.faults = [CutAfter(count, reset=reset) for count in points]

        async def work() -> None:
            while proxy.statistics().connections < len(proxy.faults):
                memory = Memory(len(peer.segment), pieces=range(0, 200, 7))
                await fetch(client, peer, memory, port=proxy.port)
                assert memory.content == peer.segment
                assert memory.bytes == len(peer.segment)

        async with asyncio.TaskGroup() as group:
            for _ in range(32):
                group.create_task(work())


async def test_broken_connection_resumes_after_what_had_arrived(fast_path) -> None:
    """No byte of a chunk is asked for twice."""
    # With FIN: a reset may throw away what has arrived and nobody has read.
    cuts = [CutAfter(10_000), CutAfter(20_000)]
    async with (
        serving(LARGE) as peer,
        FaultProxy("127.0.0.1", peer.port, faults=cuts) as proxy,
        receiver(fast_path=fast_path, max_concurrency=1) as client,
    ):
        memory = await fetch(client, peer, port=proxy.port)
        assert memory.content == LARGE
        assert memory.bytes == len(LARGE)
    starts = [int(r.removeprefix("bytes=").split("-")[0]) for r in peer.ranges()]
    head = peer.manifest.header_bytes
    assert starts[0] == head
    assert head < starts[1] < starts[2]
    errors = [e for e in memory.errors if isinstance(e, TransferInterruptedError)]
    assert [error.received for error in errors] == [
        start - head for start in starts[1:]
    ]


@proves("threat D12", "fault 3")
@pytest.mark.parametrize("count", [0, 50, 5000])
async def test_silent_peer_is_given_up_after_the_stall_timeout(
    fast_path, count
) -> None:
    """The silence begins before or within its answer, and the error has its length."""
    async with (
        serving(LARGE) as peer,
        FaultProxy("127.0.0.1", peer.port, otherwise=StallAfter(count)) as proxy,
        receiver(fast_path=fast_path, stall_timeout=0.2) as client,
    ):
        with pytest.raises(TransferStalledError) as caught:
            await fetch(client, peer, port=proxy.port)
    assert caught.value.idle >= 0.2
    assert caught.value.chunk == 0


async def test_slow_peer_is_no_silent_peer(fast_path) -> None:
    """A drip is waited for; time in which nobody could read a byte does not count."""
    async with (
        serving(noise(2000)) as peer,
        FaultProxy("127.0.0.1", peer.port, otherwise=Drip(1500, burst=10)) as proxy,
        receiver(fast_path=fast_path, stall_timeout=1.0) as client,
    ):
        start = time.monotonic()
        task = asyncio.create_task(fetch(client, peer, port=proxy.port))
        await settle(lambda: proxy.statistics().bytes_down)
        time.sleep(1.5)  # noqa: ASYNC251 - the loop is busy elsewhere
        assert (await task).content == peer.segment
        assert time.monotonic() - start > 1.0


@pytest.mark.parametrize("seconds", [0, 0.3])
async def test_peer_that_is_not_there_is_tried_until_the_reconnect_timeout(
    fast_path, seconds
) -> None:
    """Without a timeout it fails at once, and the error asks the right question."""
    async with (
        serving(SMALL) as peer,
        receiver(fast_path=fast_path, reconnect_timeout=seconds) as client,
    ):
        start = time.monotonic()
        memory = Memory(len(SMALL))
        with pytest.raises(PeerUnreachableError, match="is the sender running") as e:
            await fetch(client, peer, memory, port=1)
        assert time.monotonic() - start >= seconds
        assert len(memory.errors) > 1 or not seconds
        assert e.value.__cause__ is not None


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Answer(b"SSH-2.0-OpenSSH_9.9\r\n"), RemoteProtocolError),
        (Answer(HEAD + LENGTH % 5 + LENGTH % 6 + b"\r\n"), RemoteProtocolError),
        (Answer(HEAD + b"X: y\r\n" * 10_000), RemoteProtocolError),
        (Answer(b"\0" * 1000), RemoteProtocolError),
        (Answer(HEAD.replace(b"1.1", b"1.0") + b"\r\nend?"), RemoteProtocolError),
        (Answer(b""), PeerUnreachableError),
        (Refuse(), PeerUnreachableError),
    ],
    ids=["ssh", "smuggler", "flood", "zeros", "unframed", "hangup", "reset"],
)
async def test_impostor_is_told_from_a_sender(fast_path, fault, error) -> None:
    """Any other server on the port leads to an error of ours that names it."""
    async with (
        serving(SMALL) as peer,
        FaultProxy("127.0.0.1", peer.port, otherwise=fault) as proxy,
        receiver(fast_path=fast_path, stall_timeout=0.5) as client,
    ):
        with pytest.raises(error) as caught:
            await fetch(client, peer, port=proxy.port)
        with pytest.raises(error):
            await fetch_manifest(client, peer.source(port=proxy.port))
        with pytest.raises(error):
            await fetch_latest(client, peer, port=proxy.port)
    assert str(proxy.port) in str(caught.value)


async def test_cancelled_receive_writes_nothing_more(fast_path) -> None:
    """The memory is the caller's again when the call has ended."""
    async with (
        serving(LARGE) as peer,
        FaultProxy("127.0.0.1", peer.port, otherwise=Drip(2e6, burst=20_000)) as proxy,
        receiver(fast_path=fast_path) as client,
    ):
        memory = Memory(len(LARGE), pieces=range(0, len(LARGE) // 2, 4096))
        task = asyncio.create_task(fetch(client, peer, memory, port=proxy.port))
        await settle(lambda: proxy.statistics().bytes_down >= len(LARGE) // 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left = bytes(memory.content)
        await asyncio.sleep(0.02)
        assert memory.content == left
        assert 0 < len(left.rstrip(b"\0")) < len(LARGE)


async def test_tls_is_received_the_portable_way(fast_path) -> None:
    """Encrypted bytes are no destination's; the answer is the same."""
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with serving(LARGE, chunk_bytes=CHUNK, ssl_context=server) as peer:
        async with receiver(fast_path=fast_path, ssl_context=trusting) as client:
            assert (await fetch(client, peer)).content == LARGE
        async with receiver(fast_path=fast_path) as client:
            with pytest.raises(RemoteProtocolError, match="ssl_context"):
                await fetch(client, peer)


async def test_large_problem_document_is_read_no_further_than_of_interest(
    fast_path,
) -> None:
    """A refusal that never ends is cut short."""
    sent = 0

    async def ramble(_: RangePeer, request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse(status=401)
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"no" * 10_000)
                sent += 20_000
        except ConnectionError:
            return answer

    async with (
        serving(SMALL, meddle=ramble) as peer,
        receiver(fast_path=fast_path) as client,
    ):
        with pytest.raises(AiockptError, match="refused the request: HTTP 401"):
            await fetch(client, peer)
    assert sent < 50_000_000
