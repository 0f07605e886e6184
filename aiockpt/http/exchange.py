"""One request and its answer: the session, the headers, the errors of aiohttp.

This is the client's port to aiohttp: what aiohttp raises goes no further. A token
goes to the origin that it was given for and nowhere else: no redirect is followed, and
it is a header of single requests only.
"""

from __future__ import annotations

import asyncio
import mmap
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
from aiohttp import ClientResponse, ClientSession, hdrs
from yarl import URL

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    LocalProtocolError,
    RemoteProtocolError,
)
from aiockpt.format.limits import Limits
from aiockpt.http.connecting import Connector
from aiockpt.http.filler import Filler
from aiockpt.http.options import require, require_type
from aiockpt.http.protocol import LEASE_HEADER, from_problem
from aiockpt.http.pumps import Pumps
from aiockpt.http.reach import CheckedResolver, Reach
from aiockpt.http.receiving import receive
from aiockpt.http.security import Security
from aiockpt.http.translating import Exchange, before_answer, in_body
from aiockpt.http.watching import Watch

__all__ = ["ClientConfig", "Port", "length_of", "room_for"]

# The parser must not pause with a part of the body inside it while the movers change.
_READ_BUFFER = 1 << 20
_MAX_PROBLEM = 64 << 10
_SHORTEST = 1e-3  # seconds
_SMALL = 1 << 20
_OPEN = Security()
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """How a client behaves, in every transfer.

    Attributes:
        max_concurrency: Requests, and so connections, of one transfer at a time.
        stall_timeout: Seconds without a byte after which a connection is given up.
        connect_timeout: Seconds that a connection may take to come about.
        reconnect_timeout: Seconds for which a silent peer is tried again; 0: not at
            all, but for connections that broke while bytes were coming.
        token: What is sent where a source brings no token.
        limits: What is accepted.
        ssl_context: For ``https``; None takes the system's authorities.
        fast_path: Receive straight into the destination where that is possible.
        security: Whom to connect to, and whose manifests to take. A session of the
            caller's own looks names up itself, unchecked.
    """

    max_concurrency: int
    stall_timeout: float
    connect_timeout: float
    reconnect_timeout: float
    token: str | None = field(repr=False)
    limits: Limits
    ssl_context: ssl.SSLContext | None
    fast_path: bool = True
    security: Security = _OPEN

    def __post_init__(self) -> None:
        require_type(Limits, limits=self.limits)
        require(at_least=1, max_concurrency=self.max_concurrency)
        require(at_least=_SHORTEST, stall_timeout=self.stall_timeout)
        require(at_least=_SHORTEST, connect_timeout=self.connect_timeout)
        require(reconnect_timeout=self.reconnect_timeout)


class _Answer(ClientResponse):
    """An answer whose repr does not show its headers: a peer may mirror the request."""

    def __repr__(self) -> str:
        return f"<Answer {self.status}>"


class Port:
    """Lends a session to exchanges; a session of its own is made when first needed."""

    def __init__(self, config: ClientConfig, session: ClientSession | None) -> None:
        self._config = config
        self._session = session
        self._owned = session is None
        self._reach = Reach(config.security)
        self._resolver: CheckedResolver | None = None
        self._pumps = Pumps("aiockpt-receive")
        self._closed = False
        self._end = asyncio.Event()

    @property
    def state(self) -> str:
        """``open`` or ``closed``."""
        return "closed" if self._closed else "open"

    async def aclose(self) -> None:
        """Close the session, unless it is the caller's; calls after this fail."""
        self._closed = True
        self._end.set()
        self._pumps.close()
        session, self._session = self._session, None
        if self._owned and session is not None:
            await session.close()
        if self._resolver is not None:  # a connector does not close what it was given
            await self._resolver.close()

    @asynccontextmanager
    async def open(
        self, exchange: Exchange, on_bytes: Callable[[int], None]
    ) -> AsyncIterator[tuple[ClientResponse, Watch]]:
        """Send the request; give an answer of the right status, and its watch.

        The block receives the body. If cancelled, the connection is closed.

        Raises:
            AiockptError: what a problem document, or another answer, says.
            TransferStalledError: no answer, or no body, for the stall timeout.
        """
        watch = Watch(
            stall_timeout=self._config.stall_timeout,
            allowance=exchange.allowance,
            on_bytes=on_bytes,
            url=exchange.url,
            chunk=exchange.chunk,
        )
        async with watch:
            answer = await self._send(exchange)
            async with answer:
                with in_body(exchange):
                    await self._check_status(answer, exchange)
                    yield answer, watch

    async def pause(self, delay: float) -> None:
        """Sleep between two attempts.

        Raises:
            ClosedError: the port was closed meanwhile.
        """
        try:
            async with asyncio.timeout(delay):
                await self._end.wait()
        except TimeoutError:
            return
        raise ClosedError("the client")

    async def receive(
        self,
        exchange: Exchange,
        answer: ClientResponse,
        watch: Watch,
        filler: Filler,
    ) -> None:
        """Receive all that is left of the answer into ``filler``; count what came."""
        watch.filler = filler
        try:
            direct = self._config.fast_path
            await receive(answer, filler, self._pumps if direct else None)
        finally:
            exchange.received += filler.filled

    async def _send(self, exchange: Exchange) -> ClientResponse:
        try:
            return await self._get(exchange)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failure = before_answer(exchange, error)
        try:
            # Not in the handler above: whatever aiohttp raised, a cancel too, has
            # passed frames with the request's headers, and may hold them itself.
            raise failure
        finally:
            del failure  # or it would keep itself alive through this frame

    async def _get(self, exchange: Exchange) -> ClientResponse:
        config, url = self._config, URL(exchange.url, encoded=True)
        self._reach.check_host(url.host or "")
        return await self._get_session().request(
            exchange.method,
            url,
            headers=self._headers(exchange),
            allow_redirects=False,
            auto_decompress=False,
            raise_for_status=False,
            read_bufsize=_READ_BUFFER,
            ssl=True if config.ssl_context is None else config.ssl_context,
            timeout=aiohttp.ClientTimeout(
                # The watch sees both; the connector's own error says more.
                total=None,
                sock_connect=min(config.connect_timeout, config.stall_timeout),
                sock_read=None,
            ),
        )

    async def _check_status(self, answer: ClientResponse, exchange: Exchange) -> None:
        if answer.status == exchange.status or (
            exchange.may_be_empty and answer.status == HTTPStatus.NO_CONTENT
        ):
            return
        if 200 <= answer.status < 300:
            raise RemoteProtocolError(
                f"{exchange.url} answered HTTP {answer.status} and not "
                f"{exchange.status}; is that an aiockpt server?"
            )
        raise await self._problem_of(answer, exchange)

    async def _problem_of(
        self, answer: ClientResponse, exchange: Exchange
    ) -> AiockptError:
        body = await _read_problem(answer)
        if token := self._token_for(exchange):  # error pages like to show the request
            body = body.replace(token.encode(), b"(the token)")
        return from_problem(
            answer.status,
            answer.headers,
            body,
            url=exchange.url,
            step=exchange.step,
            snapshot_id=exchange.snapshot_id,
        )

    def _get_session(self) -> ClientSession:
        if self._closed:
            raise ClosedError("the client")
        if self._session is None:
            # No limit of connections: each transfer bounds its requests, and one that
            # waits in the pool would look like a peer that says nothing.
            self._resolver = CheckedResolver(self._reach)
            self._session = ClientSession(
                connector=Connector(limit=0, resolver=self._resolver),
                cookie_jar=aiohttp.DummyCookieJar(),
                response_class=_Answer,
                trust_env=False,
            )
        if self._session.closed:
            raise ClosedError("the ClientSession that the caller gave")
        return self._session

    def _headers(self, exchange: Exchange) -> dict[str, str]:
        headers = {hdrs.ACCEPT_ENCODING: "identity", **exchange.headers}
        if (lease := exchange.source.lease) is not None:
            now = asyncio.get_running_loop().time()
            headers.setdefault(LEASE_HEADER, lease.header(now))
        token = self._token_for(exchange)
        if token is not None:
            if _TOKEN.fullmatch(token) is None:
                raise LocalProtocolError("the token is empty or not printable ASCII")
            headers[hdrs.AUTHORIZATION] = f"Bearer {token}"
        return headers

    def _token_for(self, exchange: Exchange) -> str | None:
        return exchange.source.token or self._config.token


def length_of(answer: ClientResponse, url: str) -> int:
    """Return the body's length, which must be given and be that of plain bytes."""
    encoding = answer.headers.get(hdrs.CONTENT_ENCODING, "identity")
    if encoding.lower() != "identity":
        raise RemoteProtocolError(f"{url} sent Content-Encoding {encoding[:40]!r}")
    length = answer.headers.get(hdrs.CONTENT_LENGTH, "")
    if re.fullmatch(r"[0-9]{1,19}", length) is None:
        raise RemoteProtocolError(f"{url} does not say how long its answer is")
    return int(length)


def room_for(size: int) -> bytearray | mmap.mmap:
    """Return memory that costs nothing before it is filled: a peer only says a size."""
    return bytearray(size) if size <= _SMALL else mmap.mmap(-1, size)


async def _read_problem(answer: ClientResponse) -> bytes:
    """Read an error's body as far as it is of interest; a broken one is none."""
    body = b""
    try:
        while len(body) < _MAX_PROBLEM and (data := await answer.content.readany()):
            body += data
    except (aiohttp.ClientError, OSError):
        return b""
    return body
