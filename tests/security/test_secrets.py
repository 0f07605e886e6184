"""No secret is shown, and each opens only what it was given for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import ssl
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

import aiockpt
from aiockpt import AuthenticationError, add_hook, make_token
from aiockpt.errors import ForgedManifestError
from aiockpt.http.audit import Access
from aiockpt.testing import Answer, assert_same
from tests.support.proofs import proves
from tests.support.servers import Memory, Peer, settle
from tests.support.servers import serving as served
from tests.support.transports import (
    pair,
    port_of,
    proxied,
    receive,
    through,
    transport,
    weights,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("plain_environment")]

NONSENSE = b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n"
KEY = "a-manifest-key-of-the-job"


class Everything(logging.Handler):
    """All that is logged by anybody, as it could be written by any formatter."""

    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.getMessage()} {record.args!r} {vars(record)!r}")
        if record.exc_info:
            self.lines.append("".join(traceback.format_exception(*record.exc_info)))


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """Collect every log record and event, at every level."""
    handler, root = Everything(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    remove = add_hook(lambda event: handler.lines.append(f"{event} {event!r}"))
    yield handler.lines
    remove()
    root.setLevel(level)
    root.removeHandler(handler)


@pytest.fixture
def accesses() -> Iterator[list[Access]]:
    """Collect what the audit log tells."""
    found: list[Access] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert isinstance(record.args, tuple)
            found.append(record.args[0])  # type: ignore[arg-type]

    logger, keeper = logging.getLogger("aiockpt.audit"), Keep()
    logger.addHandler(keeper)
    logger.setLevel(logging.INFO)
    yield found
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(keeper)


def shown(error: BaseException) -> str:
    """Return everything that a program could print of an error."""
    return "".join(
        [repr(error), str(error), repr(vars(error)), *traceback.format_exception(error)]
    )


def insides() -> list[str]:
    """Return the text of every object of the package that lives now."""
    ours = [
        each
        for each in gc.get_objects()
        if str(type(each).__module__).startswith("aiockpt.")
    ]
    texts = []
    for each in ours:
        with contextlib.suppress(Exception):  # one that is half made
            text = "" if isinstance(each, str) else str(each)  # a token is one
            texts.append(f"{each!r} {text}")
    return texts


async def noting(errors: list[BaseException], call: Any) -> None:
    """Note the error of a call."""
    with pytest.raises((aiockpt.AiockptError, OSError)) as caught:
        await call
    errors.append(caught.value)


def check(secrets: list[str], *texts: str) -> None:
    """Fail if a secret stands anywhere."""
    everything = "\n".join(texts)
    for number, secret in enumerate(secrets):
        at = everything.find(secret)
        assert at < 0, f"secret {number}: {everything[max(at - 300, 0) : at + 20]}"


@proves("threat I1")
@pytest.mark.parametrize("token", [None, "open-sesame-open-sesame"])
async def test_no_record_repr_or_error_of_a_whole_life_shows_a_secret(
    token: str | None, seen: list[str]
) -> None:
    """Sends, receives, faults, refusals, grants: nothing that can be printed has it."""
    asyncio.get_running_loop().set_debug(True)
    options: dict[str, Any] = {"token": token, "manifest_key": KEY}
    errors: list[BaseException] = []
    failing = partial(noting, errors)

    async with pair(reconnect_timeout=0, **options) as (sender, receiver):
        secrets = [KEY, token or sender.metadata().partition("#")[2]]
        granted = sender.grant("rank-3", step=1)
        secrets.append(granted.partition("#")[2])
        await sender.send_checkpoint([], 1, weights(mib=0.5))
        await receive(sender, receiver)
        await receiver.recv_checkpoint(0, granted, 1)
        await failing(receiver.recv_checkpoint(0, granted, 2, timeout=5))
        await failing(receive(sender, receiver, step=0))
        await failing(receive(sender, receiver, step=5, timeout=0.1))
        async with transport(token=secrets[1] + "x", reconnect_timeout=0) as stranger:
            await failing(stranger.recv_checkpoint(0, sender.address(), 1))
        async with proxied(sender, otherwise=Answer(NONSENSE)) as proxy:
            await failing(
                receiver.recv_checkpoint(0, through(proxy, sender), 1, timeout=5)
            )
        async with Peer(port_of(sender), token=None) as raw:
            await raw.say(f"GET /?{secrets[1][:0]} HTTP/9\r\n\r\n".encode())
            await raw.read_all()
        metadata = sender.metadata()
        texts = [repr(vars(sender)), repr(vars(receiver)), *insides()]
        await sender.shutdown()
        await failing(receiver.recv_checkpoint(0, metadata, 1))
    asyncio.get_running_loop().set_debug(False)
    assert len(errors) == 6
    assert len(seen) > 20
    check(secrets, *seen, *texts, *map(shown, errors))


async def test_joined_metadata_shows_no_token_of_any_sender(seen: list[str]) -> None:
    """Receives, followers and failures: each token goes to its own sender only."""
    asyncio.get_running_loop().set_debug(True)
    errors: list[BaseException] = []
    failing = partial(noting, errors)

    async with (
        transport() as one,
        transport() as other,
        transport(reconnect_timeout=0) as receiver,
    ):
        plain = [sender.metadata() for sender in (one, other)]
        joined = aiockpt.join_metadata(plain)
        secrets = [text.partition("#")[2] for text in plain]
        assert all(secrets)
        for sender in (one, other):
            await sender.send_checkpoint([], 1, weights(mib=0.5))
        await receiver.recv_checkpoint(metadata=joined, step=1)
        await receiver.recv_checkpoint(metadata=[joined, joined])
        steps, follower = receiver.steps(joined), receiver.follow(joined)
        assert await anext(steps) == (await anext(follower))[0] == 1
        texts = [repr(steps), repr(vars(receiver)), *insides()]
        await follower.aclose()
        await failing(receiver.recv_checkpoint(metadata=joined, step=0))
        await failing(receiver.recv_checkpoint(metadata=joined, step=5, timeout=0.1))
        await failing(receiver.recv_checkpoint(metadata=[joined, plain[0]], step=1))
        swapped = [f"{one.address()}#{secrets[1]}", plain[1]]
        swapped_joined = aiockpt.join_metadata(swapped)
        await failing(receiver.recv_checkpoint(metadata=swapped_joined, step=1))
        await other.shutdown()
        await failing(receiver.recv_checkpoint(metadata=joined, step=1))
        await failing(anext(receiver.steps(joined, 1, reconnect_timeout=0)))
    asyncio.get_running_loop().set_debug(False)
    assert len(errors) == 6
    check(secrets, *seen, *texts, *map(shown, errors))


@proves("threat I3")
async def test_the_token_is_never_part_of_a_request_line() -> None:
    """It is a header, so that proxies and their logs do not get it as a URL."""
    heard: list[bytes] = []

    async def listen(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with transport(reconnect_timeout=0) as receiver:
        url = f"http://127.0.0.1:{port}/checkpoint/#t0ken-t0ken"
        with pytest.raises(aiockpt.TransportError):
            await receiver.recv_checkpoint(0, url, 1, timeout=5)
    server.close()
    await server.wait_closed()
    assert heard
    for request in heard:
        line, _, fields = request.partition(b"\r\n")
        assert line == b"GET /checkpoint/1/metadata HTTP/1.1"
        assert fields.count(b"t0ken-t0ken") == 1
        assert b"Authorization: Bearer t0ken-t0ken\r\n" in fields


@proves("threat I1")
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "token"),
        (b"\n", "token"),
        (b"\xff\xfes3cret-s3cret", "token"),
        (b"s3cret s3cret", "token"),
        (b"s3cret-s3cret" * 1000, "too long"),
    ],
)
async def test_a_bad_token_file_is_refused_and_not_shown(
    content: bytes, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error shows nothing of it, since it may be the wrong file."""
    (tmp_path / "token").write_bytes(content)
    monkeypatch.setenv("AIOCKPT_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(ValueError, match=fault) as caught:
        transport()
    assert "s3cret" not in shown(caught.value)


class TestGrants:
    """Tokens for single receivers."""

    @proves("threat S2")
    async def test_a_grant_opens_its_step_until_its_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The grant opens no other step of the transport."""
        async with pair(state=weights()) as (sender, receiver):
            granted = sender.grant("rank-3", step=1, lifetime=100)
            assert granted.startswith(sender.address())
            assert_same(await receiver.recv_checkpoint(0, granted, 1), weights())
            await sender.send_checkpoint([], 2, weights(2.0))
            with pytest.raises(AuthenticationError, match=r"HTTP 401.* step 1 only"):
                await receiver.recv_checkpoint(0, granted, 2)
            any_step = sender.grant("rank-3", lifetime=100)
            assert_same(await receiver.recv_checkpoint(0, any_step, 2), weights(2.0))
            later = time.time() + 131
            monkeypatch.setattr("aiockpt.http.handlers.time.time", lambda: later)
            with pytest.raises(AuthenticationError, match=r"HTTP 401.* expired"):
                await receiver.recv_checkpoint(0, any_step, 2)
            assert_same(await receive(sender, receiver, 2), weights(2.0))

    async def test_an_orchestrator_can_make_them(self) -> None:
        """It knows the senders' secret, and hands on tokens instead of it."""
        token = make_token("open-sesame", "node-7", step=1, expires=time.time() + 60)
        forged = make_token("close-sesame", "node-7", expires=time.time() + 60)
        async with transport(token="open-sesame") as sender:
            await sender.send_checkpoint([], 1, weights())
            for given, allowed in ((token, True), (forged, False)):
                async with transport(token=given) as receiver:
                    if allowed:
                        assert_same(await receive(sender, receiver), weights())
                        continue
                    with pytest.raises(AuthenticationError):
                        await receive(sender, receiver)

    async def test_an_insecure_transport_grants_nothing(self) -> None:
        """There is nothing that it could keep from anybody."""
        async with transport(insecure=True) as sender:
            with pytest.raises(aiockpt.errors.LocalProtocolError, match="insecure"):
                sender.grant("rank-3")


class TestManifestKey:
    """A key that authenticates manifests."""

    async def test_ends_that_share_it_understand_each_other(self) -> None:
        """A receiver that does not ask is served, too, and a long manifest arrives."""
        state = weights() | {f"scalar {n}": n for n in range(30_000)}
        async with (
            transport(manifest_key=KEY) as sender,
            transport(manifest_key=KEY.encode()) as receiver,
            transport() as careless,
        ):
            await sender.send_checkpoint([], 1, state)
            for each in (receiver, receiver, careless):
                assert_same(await receive(sender, each), state)

    @proves("threat S3")
    @pytest.mark.parametrize("other", [None, "another-key-of-another-job"])
    async def test_anybody_else_is_refused_before_the_data(
        self, other: str | None
    ) -> None:
        """Such as another job on a port that was ours: no chunk is asked for."""
        async with (
            transport(manifest_key=other) as sender,
            transport(manifest_key=KEY) as receiver,
        ):
            await sender.send_checkpoint([], 1, weights(mib=4))
            into = weights(7.0, mib=4)
            with pytest.raises(ForgedManifestError) as caught:
                await receive(sender, receiver, into=into)
            assert caught.value.missing == (other is None)
            assert sender.statistics().requests == 1
            assert_same(into, weights(7.0, mib=4))


@asynccontextmanager
async def mutual(client_authority: trustme.CA) -> AsyncIterator[tuple[Any, Any, Any]]:
    """Give a sender that asks for certificates, its authority, a client's context."""
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    server.verify_mode = ssl.CERT_REQUIRED
    client_authority.configure_trust(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    async with transport(ssl_context=server) as sender:
        await sender.send_checkpoint([], 1, weights())
        yield sender, authority, client


@proves("threat S4")
@pytest.mark.parametrize("whose", ["the right", "the wrong", "none"])
async def test_mutual_tls_takes_certificates_of_its_authority_only(whose: str) -> None:
    """The token comes on top; plain HTTP gets no answer at all."""
    ours = trustme.CA()
    async with mutual(ours) as (sender, _, client):
        if whose != "none":
            issuer = ours if whose == "the right" else trustme.CA()
            issuer.issue_cert("receiver@example.org").configure_cert(client)
        async with transport(client_ssl_context=client, reconnect_timeout=0) as peer:
            if whose == "the right":
                assert_same(await receive(sender, peer), weights())
                with pytest.raises(AuthenticationError):
                    await peer.recv_checkpoint(0, sender.address(), 1)
            else:
                with pytest.raises(aiockpt.AiockptError):
                    await receive(sender, peer)
            plain = sender.metadata().replace("https", "http")
            with pytest.raises(aiockpt.AiockptError):
                await peer.recv_checkpoint(0, plain, 1)


class TestAudit:
    """The audit says which receiver fetched which step."""

    @proves("threat R1")
    async def test_every_answer_with_bytes_is_told(
        self, accesses: list[Access]
    ) -> None:
        """The peer, the receiver of a grant, the step, the bytes, the status."""
        async with pair(state=weights(mib=4)) as (sender, receiver):
            granted = sender.grant("rank-3")
            await receiver.recv_checkpoint(0, granted, 1)
            await receive(sender, receiver)
            secrets = [granted.partition("#")[2], sender.metadata().partition("#")[2]]
            sent = sender.statistics().bytes_sent
        for receiver_id in ("rank-3", ""):
            mine = [each for each in accesses if each.receiver == receiver_id]
            # 204 answers who ends the lease of a snapshot.
            assert {each.status for each in mine} == {200, 204, 206}
            assert {each.step for each in mine} == {1}
            assert {each.peer for each in mine} == {"127.0.0.1"}
            assert {each.outcome for each in mine} == {"sent"}
            assert sum(each.nbytes for each in mine) > 4 << 20
        assert sum(each.nbytes for each in accesses) == sent
        lines = "\n".join(map(str, accesses))
        assert "receiver=rank-3 GET '/checkpoint/1/metadata' step=1 status=200" in lines
        assert not any(secret in lines for secret in secrets)

    @proves("threat R1")
    async def test_refusals_and_broken_bodies_are_told(
        self, accesses: list[Access]
    ) -> None:
        """The audit has the bytes that were sent."""
        memory = Memory(64 << 20)
        async with served(memory) as site:
            async with site.peer(token="wrong") as peer:
                assert (await peer.ask("/checkpoint/7/full")).status == 401
            async with site.peer(receive_buffer=4096) as peer:
                await peer.request("/checkpoint/7/full")
                await peer.head()
                assert await peer.read_some(1)
            await settle(lambda: len(accesses) == 2)
        refused, broken = accesses
        assert (refused.status, refused.nbytes, refused.outcome) == (401, 0, "refused")
        assert broken.outcome == "gone"
        assert 0 < broken.nbytes < memory.manifest.total_bytes

    @proves("threat R2")
    async def test_a_flood_of_refusals_is_few_lines(
        self, accesses: list[Access]
    ) -> None:
        """A path or a method cannot add lines to the log."""
        async with served(Memory(1000)) as site, site.peer(token="wrong") as peer:
            for _ in range(300):
                answer = await peer.ask("/checkpoint/7/%0a%1b[31m" + "x" * 1000)
                assert answer.status == 401
        assert len(accesses) == 20
        assert all(str(each).isprintable() for each in accesses)
        assert max(len(str(each)) for each in accesses) < 400
