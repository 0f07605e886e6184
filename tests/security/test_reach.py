"""A receiver connects to what the metadata names, and not to what that may hide."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.abc import AbstractResolver

from aiockpt import Auth
from aiockpt.errors import (
    AuthenticationError,
    LocalProtocolError,
    PeerUnreachableError,
    RemoteProtocolError,
)
from aiockpt.http import security
from aiockpt.http.protocol import parse_metadata
from aiockpt.http.security import CheckedResolver, Reach, Scope
from tests.support.proofs import proves
from tests.support.rangepeer import STEP, fetch, fetch_manifest, receiver, serving, soon
from tests.support.servers import TOKEN
from tests.support.servers import serving as checkpoint_serving

pytestmark = [pytest.mark.torch_free, pytest.mark.usefixtures("no_blocking")]

SERVICES = [
    "169.254.169.254", "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]",
    "[64:ff9b::a9fe:a9fe]", "[2002:a9fe:a9fe::]", "[fd00:ec2::254]", "100.100.100.200",
    "168.63.129.16", "169.254.170.2",
]  # fmt: skip


@proves("threat I6")
@pytest.mark.asyncio
@pytest.mark.parametrize("host", [*SERVICES, "224.0.0.1", "[ff02::1]"])
async def test_no_metadata_leads_to_a_metadata_service(host: str) -> None:
    """Nothing is sent there, for any spelling."""
    source = parse_metadata(f"http://{host}:80/checkpoint/#token")
    async with receiver(stall_timeout=0.5) as client:
        with pytest.raises(
            LocalProtocolError, match="does not connect there"
        ) as caught:
            await fetch_manifest(client, source, STEP, deadline=soon(1))
    assert "token" not in str(caught.value)


@pytest.mark.asyncio
@pytest.mark.parametrize("host", ["2852039166", "0xa9fea9fe", "169.254.43518"])
async def test_no_old_spelling_of_an_address_leads_there(host: str) -> None:
    """The system's resolver would read them as 169.254.169.254."""
    source = parse_metadata(f"http://{host}:80/checkpoint/#token")
    async with receiver(stall_timeout=0.5) as client:
        with pytest.raises((LocalProtocolError, PeerUnreachableError)):
            await fetch_manifest(client, source, STEP, deadline=soon(1))


class Book(AbstractResolver):
    """Says what it is told, and another thing the next time."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.closed = False

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> Any:
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                "proto": 0,
                "flags": 0,
            }
            for address in found
        ]

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Book:
    """Replace the system's resolver."""
    made = Book(["127.0.0.1"])
    monkeypatch.setattr(security, "DefaultResolver", lambda: made)
    return made


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "addresses",
    [["169.254.169.254"], ["169.254.7.7"], ["fe80::1%1"], ["::ffff:169.254.169.254"]],
)
async def test_a_name_does_not_lead_there_either(
    book: Book, addresses: list[str]
) -> None:
    """A name does not lead to link-local addresses, either."""
    book.answers = [addresses]
    source = parse_metadata("http://trainer.example:80/checkpoint/#token")
    async with receiver() as client:
        with pytest.raises(LocalProtocolError, match=r"trainer\.example"):
            await fetch_manifest(client, source, STEP, deadline=soon())


@proves("threat I6")
@pytest.mark.asyncio
async def test_a_name_that_changes_is_looked_up_once(book: Book) -> None:
    """The receiver connects to the address that it has checked."""
    book.answers = [["127.0.0.1", "169.254.169.254"], ["169.254.169.254"]]
    async with serving(b"x" * 1000) as peer, receiver() as client:
        url = peer.base_url.replace("127.0.0.1", "trainer.example")
        found = await fetch_manifest(client, parse_metadata(url), STEP, deadline=soon())
    assert found == peer.manifest
    assert book.closed


@pytest.mark.parametrize("host", ["169.254.7.7", "fe80::1%eth0", "127.0.0.1", "::1"])
def test_metadata_may_spell_out_what_is_near(host: str) -> None:
    """Hosts are joined by cables without a router, too."""
    Reach().check_host(host)


@proves("threat I6")
@pytest.mark.parametrize(
    ("peers", "host", "allowed"),
    [
        (["10.0.0.0/8"], "10.1.2.3", True), (["10.0.0.0/8"], "11.1.2.3", False),
        (["10.0.0.0/8"], "::ffff:10.1.2.3", True), (["fd00::/8"], "fd00::7", True),
        (["fd00::/8"], "10.1.2.3", False), (["10.1.2.3"], "10.1.2.3", True),
        (["10.1.2.3"], "10.1.2.4", False),
        (["169.254.169.254"], "169.254.169.254", True),
        (["0.0.0.0/0"], "169.254.169.254", True), (["trainer"], "10.1.2.3", False),
        ([], "127.0.0.1", False),
    ],
)  # fmt: skip
def test_peers_are_the_only_ones(peers: list[str], host: str, allowed: bool) -> None:
    """A list says all that is allowed, also what is not without one."""
    decide = Reach(peers).check_host
    if allowed:
        decide(host)
    else:
        with pytest.raises(LocalProtocolError):
            decide(host)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("peers", "name", "allowed"),
    [
        (["trainer-*.job.svc"], "trainer-0.job.svc", True),
        (["trainer-*.job.svc"], "TRAINER-0.job.svc.", True),
        (["trainer-*.job.svc"], "evil.example", False),
        (["127.0.0.0/8"], "evil.example", True),
        (["10.0.0.0/8"], "trainer-0.job.svc", False),
    ],
)
async def test_peers_may_be_names(
    book: Book, peers: list[str], name: str, allowed: bool
) -> None:
    """A name that is listed, or that leads to an address that is."""
    resolver = CheckedResolver(Reach(peers))
    if allowed:
        assert [each["host"] for each in await resolver.resolve(name)] == ["127.0.0.1"]
    else:
        with pytest.raises(LocalProtocolError, match="none of the peers"):
            await resolver.resolve(name)
    await resolver.close()


@proves("threat S8")
@pytest.mark.asyncio
@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "240.0.0.1", "fe80::1%1"])
async def test_a_member_has_an_address(book: Book, scope: Scope, address: str) -> None:
    """Wherever its source is: ``0.0.0.0`` leads to the receiver itself."""
    book.answers = [[address]]
    resolver = CheckedResolver(Reach(["*.example"], within=scope))
    with pytest.raises(PeerUnreachableError, match="no address of a host"):
        await resolver.resolve("member.example")
    await resolver.close()


@proves("threat I5")
@pytest.mark.asyncio
async def test_an_error_page_that_shows_the_request_shows_no_token() -> None:
    """Frameworks in debug mode answer with the request's headers."""

    async def debug(_: object, request: web.Request) -> web.Response:
        shown = {"detail": f"headers: {dict(request.headers)}", "title": "t0ken-7"}
        kind = "application/problem+json"
        return web.json_response(shown, status=status, content_type=kind)

    for status in (401, 403, 418, 500):
        async with serving(b"x", meddle=debug) as peer, receiver() as client:
            with pytest.raises(Exception) as caught:  # noqa: PT011 - of four kinds
                await fetch(client, peer, token="t0ken-7")
            assert "t0ken-7" not in f"{caught.value!r} {caught.value}"
            assert status != 401 or isinstance(caught.value, AuthenticationError)


@proves("threat I5")
@pytest.mark.asyncio
async def test_a_page_for_what_is_no_http_repeats_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither does the log: the next line may have the token."""
    field = f"Authorization: Bearer {TOKEN}"
    line = "GET /checkpoint/latest HTTP/1.1"
    requests = [
        f"{line}\nHost: x\n{field}\n\n",
        f"{line}\r\nHost: x\r\n{field}\rX: y\r\n\r\n",
        f"{line}\r\nHost: x\r\n{field}\r\nbad header\r\n\r\n",
        f"{line}\r\n{field}{'a' * 9000}\r\n\r\n",
        f"GET /{TOKEN} {TOKEN}\r\n\r\n",
    ]
    with caplog.at_level(logging.DEBUG):
        async with checkpoint_serving() as site:
            for request in requests:
                reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
                writer.write(request.encode())
                async with asyncio.timeout(20):
                    answer = await reader.read()
                writer.close()
                assert b" 400 " in answer.splitlines()[0]
                assert TOKEN.encode() not in answer
    assert TOKEN not in caplog.text


@proves("threat I10")
@pytest.mark.asyncio
async def test_peers_bound_who_gets_a_shared_token() -> None:
    """Metadata without a token sends it to the host that it names, of the peers."""
    heard: list[str] = []

    async def note(_: object, request: web.Request) -> web.Response:
        heard.append(request.headers["Authorization"])
        return web.Response(status=404)

    for peers in (["10.0.0.0/8"], ["127.0.0.0/8"]):
        shared: dict[str, Any] = {"token": "shared-by-the-job", "peers": peers}
        async with serving(b"x", meddle=note) as peer, receiver(**shared) as client:
            with pytest.raises((LocalProtocolError, RemoteProtocolError)):
                await fetch(client, peer)
        assert bool(heard) == (peers == ["127.0.0.0/8"])
    assert {*heard} == {"Bearer shared-by-the-job"}


@proves("threat I10")
@pytest.mark.asyncio
async def test_peers_bound_a_session_of_the_callers() -> None:
    """It looks names up unchecked, so it may ask only a listed name."""
    heard: list[str] = []

    async def note(_: object, request: web.Request) -> web.Response:
        heard.append(request.headers["Authorization"])
        return web.Response(status=404)

    async with serving(b"x", meddle=note) as peer, ClientSession() as session:
        source = parse_metadata(peer.base_url.replace("127.0.0.1", "localhost"))
        for name, error in [("trainer", LocalProtocolError), ("localhost", None)]:
            shared: dict[str, Any] = {"token": "t", "peers": ["127.0.0.0/8", name]}
            async with receiver(session, **shared) as client:
                with pytest.raises(error or RemoteProtocolError):
                    await fetch_manifest(client, source, STEP, deadline=soon())
            assert bool(heard) == (error is None)


@pytest.mark.parametrize(
    "options",
    [
        {"manifest_key": "short"},
        {"manifest_key": b""},
        {"peers": ["10.0.0.0/99"]},
        {"peers": ["a b"]},
        {"peers": [""]},
    ],
    ids=repr,
)
def test_options_that_cannot_be_are_refused(options: Any) -> None:
    """The call that gets them refuses them."""
    with pytest.raises(ValueError, match=r"manifest_key|peers"):
        Auth(**options)
    with pytest.raises(TypeError):
        Auth(peers="10.0.0.0/8")
    assert "topsecret-topsecret" not in repr(Auth(manifest_key="topsecret-topsecret"))
