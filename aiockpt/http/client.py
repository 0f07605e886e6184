"""The client: sends one request to a peer and yields the answer.

This is the only module of the client that knows aiohttp's errors: two tables translate
them, one for before the answer and one for its body. Informational answers (HTTP 1xx)
are bounded at a gate before aiohttp's parser. A token goes to the origin that it was
given for and nowhere else: no redirect is followed, and the token is a header of single
requests only.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp
from aiohttp import ClientResponse, ClientSession, hdrs
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    IntegrityError,
    LocalProtocolError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransferInterruptedError,
    TransferStalledError,
    TransportError,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.http.body_reader import BodySink, read_body
from aiockpt.http.options import Auth, Receive
from aiockpt.http.problems import from_problem
from aiockpt.http.protocol import JOINS, LEASE_HEADER, SWARM_HEADER, Origin
from aiockpt.http.retry import HostLimitError, Liveness, OnRetry, Retries
from aiockpt.http.security import CheckedResolver, Reach, Scope, plain_address
from aiockpt.http.sockets import IO_THREADS, IdleClock
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.secrets import severed
from aiockpt.runtime.system import is_callers, is_hosts, refused_by_host
from aiockpt.transport import require

# aiohttp's parser must not hold a part of the body while the protocols change.
_READ_BUFFER_BYTES = 1 << 20
_MAX_PROBLEM_BYTES = 64 << 10
_MIN_STALL_TIMEOUT_S = 1e-3
_CONNECT_PART = 0.9  # of the stall timeout
_TOKEN = re.compile(r"[\x21-\x7e]+")
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")  # as OpenSSL puts it

_MAX_INFORMATIONAL_BYTES = 64 << 10  # of the answers to one request
_INFORMATIONAL = re.compile(rb"HTTP/\d\.\d 1(?!01)\d\d")
_INFORMATIONAL_START = b"HTTP/1.1 1"
_STATUS_BYTES = len(b"HTTP/1.1 100")
_HEADERS_END = re.compile(rb"\n\r?\n")
_BLANK_LINES = re.compile(rb"[\r\n]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request to a peer.

    Attributes:
        origin: The peer, its token and the lease of the receive.
        path: The path below the origin's URL.
        status: The status of a good answer. With ``may_be_empty``, 204 is good, too,
            and with ``may_be_delta``, 226.
        may_be_unknown: Whether older peers do not know the resource.
        step: The requested step, for errors.
        snapshot_id: The requested snapshot, for errors.
        chunk: The first requested chunk, for errors.
        wait: Seconds for which the peer was asked to wait before it answers.
        body: The body of the request.
    """

    origin: Origin
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = HTTPStatus.OK
    method: str = "GET"
    step: int | None = None
    snapshot_id: str | None = None
    chunk: int | None = None
    wait: float = 0.0
    may_be_empty: bool = False
    may_be_delta: bool = False
    may_be_unknown: bool = False
    body: bytes = b""

    @property
    def url(self) -> str:
        """The address, without any token."""
        return self.origin.base_url + self.path


class Line(NamedTuple):
    """The addresses of the two ends of a connection; empty if unknown."""

    local: str = ""
    remote: str = ""


class CheckedResponse:
    """An answer with the right status, whose body has not been read.

    Attributes:
        request: What was asked.
        status: The HTTP status.
        headers: The headers.
        line: The connection that brought it; None if it is not known any more.
    """

    def __init__(
        self,
        request: Request,
        response: ClientResponse,
        timer: _StallTimer,
        threads: Bridge,
    ) -> None:
        self.request = request
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.line = _line_of(response)
        self._response, self._timer, self._threads = response, timer, threads

    def length(self) -> int:
        """Return the length of the body.

        Raises:
            RemoteProtocolError: it is not given, or the body is encoded.
        """
        url = self.request.url
        encoding = self.headers.get(hdrs.CONTENT_ENCODING, "identity")
        if encoding.lower() != "identity":
            raise RemoteProtocolError(f"{url} sent Content-Encoding {encoding[:40]!r}")
        length = self.headers.get(hdrs.CONTENT_LENGTH, "")
        if re.fullmatch(r"[0-9]{1,19}", length) is None:
            raise RemoteProtocolError(f"{url} does not say how long its answer is")
        return int(length)

    async def read_into(self, sink: BodySink) -> None:
        """Read the rest of the body into memory.

        If cancelled, the connection is closed, and nothing writes to the memory.
        """
        self._timer.sink = sink
        await read_body(self._response, sink, self._threads)

    async def read(self, most: int, what: str) -> memoryview:
        """Return the body.

        Args:
            most: Bytes that it may have.
            what: The name of the body, for the error.

        Raises:
            RemoteProtocolError: it has more than ``most`` bytes.
        """
        if (length := self.length()) > most:
            raise RemoteProtocolError(
                f"{self.request.url} sent {what} of {length} bytes; at most {most} "
                "were expected"
            )
        body = memoryview(bytearray(length))
        await self.read_into(BodySink(lambda a, b: [body[a:b]], 0, length))
        return body

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, until it ends."""
        while piece := await self._response.content.readany():
            self._timer.extra += len(piece)
            yield piece

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Name the peer in what a parser says about the bytes of this answer."""
        url = self.request.url
        try:
            yield
        except IntegrityError as error:
            error.url = url
            raise
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{url}: {error}") from error


class _Response(ClientResponse):
    """A response whose repr shows no headers: a peer may mirror the request's.

    Attributes:
        line: The connection that brought it, which may be given back before the body
            is read.
    """

    line = Line()

    async def start(self, connection: Connection) -> ClientResponse:
        """Note the addresses, and read the headers; see aiohttp."""
        if (transport := connection.transport) is not None:
            names = map(transport.get_extra_info, ("sockname", "peername"))
            self.line = Line(*map(_address_in, names))
        return await super().start(connection)

    def __repr__(self) -> str:
        return f"<Response {self.status}>"


class _CheckedSession(NamedTuple):
    """A session, and the hosts that it connects to; the caller's has no resolver."""

    reach: Reach
    session: ClientSession
    resolver: CheckedResolver | None


class CheckpointClient:
    """Sends requests to peers, over sessions that are made when they are first needed.

    Errors are the package's own. Deadlines belong to the caller: cancel a call to end
    it, and neither a task, nor a descriptor, nor a half-read connection is left.

    Attributes:
        options: The options of a receive. A session of the caller is never closed, and
            looks names up itself: with ``Auth(peers=)``, only those on the list.
            Members of a swarm, which the caller did not name, are asked through
            sessions of the client's own.
        auth: Which hosts to connect to, and which manifests to accept. The token goes
            to an origin that brings none.
        stall_timeout: Seconds in which a connection must be established, and without a
            byte after which it is given up.
        bridge: The threads that decode manifests and prepare memory.
        name: The name of this client in the leases of its receives.
    """

    def __init__(
        self,
        options: Receive,
        auth: Auth,
        *,
        stall_timeout: float,
        bridge: Bridge,
    ) -> None:
        require(at_least=_MIN_STALL_TIMEOUT_S, stall_timeout=stall_timeout)
        self.options, self.auth = options, auth
        self.stall_timeout, self.bridge = stall_timeout, bridge
        self.name = secrets.token_hex(8)
        self._sessions: dict[Scope | None, _CheckedSession] = {}
        if (given := options.session) is not None:
            self._sessions[None] = _CheckedSession(Reach(auth.peers), given, None)
        self._threads = Bridge(threads=IO_THREADS, name="aiockpt-receive")
        self._closed = False
        self._end = asyncio.Event()

    async def aclose(self) -> None:
        """Close the client's own session. Calls still under way fail; idempotent."""
        self._closed = True
        self._end.set()
        self._threads.close(wait=False)
        sessions, self._sessions = self._sessions, {}
        for each in sessions.values():
            if each.resolver is not None:  # its connector does not close it
                await each.session.close()
                await each.resolver.close()

    async def pause(self, delay: float) -> None:
        """Sleep between two attempts.

        Raises:
            ClosedError: the client was closed meanwhile.
        """
        try:
            async with asyncio.timeout(delay):
                await self._end.wait()
        except TimeoutError:
            return
        raise ClosedError("the client")

    def liveness(self, reconnect_timeout: float | None = None) -> Liveness:
        """Return the liveness of a peer that is asked from now on."""
        if reconnect_timeout is None:
            reconnect_timeout = self.options.reconnect_timeout
        now = asyncio.get_running_loop().time()
        return Liveness(reconnect_timeout, self.stall_timeout, now)

    def retries(
        self,
        origin: Origin,
        step: int | None,
        on_retry: OnRetry | None = None,
        liveness: Liveness | None = None,
    ) -> Retries:
        """Return the attempts at a request; each retry is an event, too.

        Args:
            liveness: What other requests of this call know of the peer.
        """

        def tell(error: AiockptError) -> None:
            peer = origin.base_url
            emit(TransferEvent(stop="retry", step=step, peer=peer, detail=str(error)))
            if on_retry is not None:
                on_retry(error)

        return Retries(liveness or self.liveness(), tell, self.pause)

    @asynccontextmanager
    async def request(
        self, request: Request, on_bytes: Callable[[int], None] = lambda _: None
    ) -> AsyncIterator[CheckedResponse]:
        """Send a request; yield the answer, whose body the block reads.

        If cancelled, the connection is closed.

        Args:
            on_bytes: Gets the number of new bytes of the body, on the loop, a few
                times per second. What it raises ends the block.

        Raises:
            AiockptError: what a problem document, or another answer, says.
            TransferStalledError: no answer, or no body, for the stall timeout.
        """
        timer = _StallTimer(request, self.stall_timeout, on_bytes)
        async with timer, await self._send_headers(request) as response:
            answer = CheckedResponse(request, response, timer, self._threads)
            try:
                await self._check_status(request, response)
                yield answer
            except AiockptError:
                raise  # some of ours are an OSError or a ValueError too
            except Exception as error:
                failure = _in_answer(request, timer.sink, error)
                if failure is None or is_callers(error):
                    raise
                raise failure from error

    async def _send_headers(self, request: Request) -> ClientResponse:
        try:
            url = URL(request.url, encoded=True)
            context = self.auth.client_ssl_context
            checked = self._session_for(request.origin.within)
            ours = checked.resolver is not None
            checked.reach.check_host(url.host or "", looked_up_here=ours)
            return await checked.session.request(
                request.method,
                url,
                headers=self._headers(request),
                data=request.body or None,
                allow_redirects=False,
                auto_decompress=False,
                raise_for_status=False,
                read_bufsize=_READ_BUFFER_BYTES,
                ssl=True if context is None else context,
                timeout=aiohttp.ClientTimeout(
                    # The stall timer bounds both, but the connector's error says more.
                    # So the connector must be first; it would round to whole seconds.
                    total=None,
                    sock_connect=_CONNECT_PART * self.stall_timeout,
                    sock_read=None,
                    ceil_threshold=math.inf,
                ),
            )
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failure = _before_answer(request, error)
        try:
            # Not in the handler above: whatever aiohttp raised, a cancel too, has
            # passed frames with the request's headers, and may hold them itself.
            raise failure
        finally:
            del failure  # or it would keep itself alive through this frame

    async def _check_status(self, request: Request, response: ClientResponse) -> None:
        status = response.status
        if status == request.status:
            return
        if request.may_be_empty and status == HTTPStatus.NO_CONTENT:
            return
        if request.may_be_delta and status == HTTPStatus.IM_USED:
            return
        if 200 <= status < 300:
            raise RemoteProtocolError(
                f"{request.url} answered HTTP {status} and not {request.status}; "
                "is that an aiockpt server?"
            )
        body = await _read_problem(response)
        if token := self._token_for(request):  # error pages like to show the request
            body = body.replace(token.encode(), b"(the token)")
        raise from_problem(
            status,
            response.headers,
            body,
            url=request.url,
            step=request.step,
            snapshot_id=request.snapshot_id,
            may_be_unknown=request.may_be_unknown,
        )

    def _session_for(self, within: Scope | None) -> _CheckedSession:
        """Return the session for hosts that the caller named, or a peer of a scope."""
        if self._closed:
            raise ClosedError("the client")
        if within not in self._sessions:
            # No limit of connections: each transfer bounds its requests, and one that
            # waits in the pool would look like a peer that says nothing.
            reach = Reach(self.auth.peers, within=within)
            resolver = CheckedResolver(reach)
            session = ClientSession(
                connector=_Connector(limit=0, resolver=resolver),
                cookie_jar=aiohttp.DummyCookieJar(),
                response_class=_Response,
                trust_env=False,
            )
            self._sessions[within] = _CheckedSession(reach, session, resolver)
        checked = self._sessions[within]
        if checked.session.closed:
            raise ClosedError("the ClientSession that the caller gave")
        return checked

    def _headers(self, request: Request) -> dict[str, str]:
        headers = {hdrs.ACCEPT_ENCODING: "identity", **request.headers}
        if (lease := request.origin.lease) is not None:
            now = asyncio.get_running_loop().time()
            headers.setdefault(LEASE_HEADER, lease.header(now))
            if lease.joins:
                headers[SWARM_HEADER] = JOINS
        token = self._token_for(request)
        if token is not None:
            if _TOKEN.fullmatch(token) is None:
                raise LocalProtocolError("the token is empty or not printable ASCII")
            headers[hdrs.AUTHORIZATION] = f"Bearer {token}"
        return headers

    def _token_for(self, request: Request) -> str | None:
        return request.origin.token or self.auth.token


def _line_of(response: ClientResponse) -> Line | None:
    """Return the connection that brought a response.

    A session of the caller tells less: it gives the connection of a short answer back
    at once, and its other end may be a proxy.
    """
    if isinstance(response, _Response):
        return response.line
    connection = response.connection
    if connection is None or connection.transport is None:
        return None
    return Line(_address_in(connection.transport.get_extra_info("sockname")))


def _address_in(name: object) -> str:
    """Return the address in the name of a socket; empty if it has none."""
    return plain_address(str(name[0])) if isinstance(name, tuple) else ""


async def _read_problem(response: ClientResponse) -> bytes:
    """Read the beginning of an error's body; a broken one counts as empty."""
    body, content = b"", response.content
    try:
        while len(body) < _MAX_PROBLEM_BYTES and (data := await content.readany()):
            body += data
    except (aiohttp.ClientError, OSError):
        return b""
    return body


class _StallTimer:
    """Ends the block that it guards after the stall timeout without a byte.

    Args:
        request: What the error names; its ``wait`` is added for the first byte.
        on_bytes: See `CheckpointClient.request`.

    Attributes:
        sink: Counts the bytes, once there is a body to read.
        extra: Bytes that have come without a sink.
    """

    def __init__(
        self, request: Request, stall_timeout: float, on_bytes: Callable[[int], None]
    ) -> None:
        self.sink: BodySink | None = None
        self.extra = self._seen = 0
        self._url, self._chunk = request.url, request.chunk
        self._on_bytes = on_bytes
        self._scope = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._clock = IdleClock(stall_timeout, now, allowance=request.wait)
        self._timer: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._timer = self._loop.call_later(self._clock.period, self._tick)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._report()
        failure, self._failure = self._failure, None
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            if failure is not None:
                raise failure from None
            raise TransferStalledError(
                self._url, idle=self._clock.idle, chunk=self._chunk
            ) from None
        if failure is not None and not isinstance(error, asyncio.CancelledError):
            raise failure

    def _tick(self) -> None:
        now = self._loop.time()
        self._report()
        progress = self._seen + self.extra
        if self._clock.has_stalled(progress, now) or self._failure is not None:
            self._scope.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._clock.period, self._tick)

    def _report(self) -> None:
        """Report the bytes that came since the last call."""
        if self.sink is None or self.sink.filled == self._seen:
            return
        new, self._seen = self.sink.filled - self._seen, self.sink.filled
        try:
            self._on_bytes(new)
        except Exception as error:  # noqa: BLE001 - raised at the end of the block
            self._failure = error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return str(error.strerror)
    return str(error) or type(error).__name__


def _before_answer(request: Request, error: BaseException) -> BaseException:
    """Return what to raise for an error of aiohttp, or for a cancel, before the answer.

    It has no traceback, and no cause but the system's error: others refer to the
    headers of the request, and so to the token.
    """
    if isinstance(error, AiockptError) or not isinstance(error, Exception):
        return severed(error)
    cause = _system_error(error)
    if cause is not None and is_hosts(cause):
        failure: AiockptError | None = _host_limit(request, cause)
    else:
        failure = _translated(request, error)
    if failure is None:
        return severed(error)
    failure.__cause__ = cause and severed(cause)
    return failure


def _translated(request: Request, error: Exception) -> AiockptError | None:
    """Return the package's error for one before the answer; None if it is another's."""
    url, peer, why = request.url, request.origin.base_url, _reason(error)
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return RemoteProtocolError(
                f"{peer} shows a certificate that is not trusted here ({why}); trust "
                "it by Auth(client_ssl_context=...), or by --cafile"
            )
        case aiohttp.ClientConnectorError():
            if getattr(error.os_error, "reason", "") in _NO_TLS:
                why = (
                    "the port speaks no TLS there; if that is meant, the URL begins "
                    "with http://"
                )
        case aiohttp.ServerTimeoutError():
            why = (
                "no answer to the connection attempt; perhaps the address or the "
                "interface is wrong, or a firewall drops the packets"
            )
        case aiohttp.ClientConnectionError():
            why = "it closed the connection instead of answering"
            if peer.startswith("http:"):
                why += "; if it speaks TLS, the URL must begin with https://"
        case aiohttp.ClientResponseError() | HttpProcessingError():
            return _not_http(request)
        case aiohttp.InvalidURL():
            return LocalProtocolError(f"cannot ask {url}: {why}")
        case aiohttp.ClientError():
            return TransportError(f"{url}: {why}")
        case OSError():
            pass
        case ValueError():
            return LocalProtocolError(f"cannot ask {url}: {why}")
        case _:
            return None
    return PeerUnreachableError(peer, why)


def _not_http(request: Request) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"{request.url} does not answer in HTTP; is that an aiockpt server?"
    )


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the error of the system that an error of aiohttp was made of."""
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, aiohttp.ClientError):
            return error
        error = getattr(error, "os_error", None) or error.__cause__
    return None


def _host_limit(request: Request, error: BaseException) -> HostLimitError:
    return HostLimitError(str(refused_by_host(f"a request to {request.url}", error)))


def _in_answer(
    request: Request, sink: BodySink | None, error: Exception
) -> AiockptError | None:
    """Return the package's error for one in an answer; None if it is another's."""
    if is_hosts(error):
        return _host_limit(request, error)
    match error:
        case aiohttp.ClientPayloadError() | aiohttp.ClientConnectionError() | OSError():
            chunk, received, expected = request.chunk, 0, 0
            if sink is not None:
                chunk, received, expected = sink.arrived
            return TransferInterruptedError(
                request.url, received=received, expected=expected, chunk=chunk
            )
        case aiohttp.ClientError():
            return TransportError(f"{request.url}: {_reason(error)}")
        case HttpProcessingError():
            return _not_http(request)
    return None


# ----------------------------------------------------- informational answers (1xx)
#
# aiohttp reads as many of them as a peer sends, without bound. A flood of them keeps
# its parser, and so the loop, busy for as long as the peer likes.


class _Connector(aiohttp.TCPConnector):
    """Gives connections on which informational answers are bounded, and dropped."""

    async def connect(
        self, req: aiohttp.ClientRequest, *args: Any, **kwargs: Any
    ) -> Any:
        """Return a connection for one request; see `aiohttp.BaseConnector`.

        Raises:
            RemoteProtocolError: the peer has sent something without being asked.
        """
        connection = await super().connect(req, *args, **kwargs)
        transport, protocol = connection.transport, connection.protocol
        if transport is None or protocol is None or transport.is_closing():
            return connection  # aiohttp finds out why
        peer = str(req.url.origin())
        if protocol.should_close:
            connection.close()
            raise RemoteProtocolError(
                f"{peer} sent bytes before it was asked; is that an aiockpt server?"
            )
        transport.set_protocol(_Gate(peer, transport, protocol))
        return connection


class _Gate(asyncio.Protocol):
    """Takes the place of aiohttp's protocol until a final answer begins."""

    def __init__(
        self, peer: str, transport: asyncio.Transport, protocol: asyncio.Protocol
    ) -> None:
        self._peer, self._transport, self._protocol = peer, transport, protocol
        self._fault: RemoteProtocolError | None = None
        self._data = bytearray()
        self._dropped = self._looked = 0

    def data_received(self, data: bytes) -> None:
        """Drop the informational answers in front; let aiohttp have the final one."""
        self._data += data
        come = self._data
        while self._fault is None:
            if not self._looked:
                blank = _BLANK_LINES.match(come)
                self._drop(blank.end() if blank else 0)
                if _INFORMATIONAL.match(come) is None:
                    if len(come) >= _STATUS_BYTES or not _is_start(come):
                        self._transport.set_protocol(self._protocol)
                        self._protocol.data_received(bytes(come))
                    return
            found = _HEADERS_END.search(come, max(self._looked - 2, 0))
            if found is None:
                self._looked = len(come)
                if self._dropped + len(come) > _MAX_INFORMATIONAL_BYTES:
                    self._refuse()
                return
            self._looked = 0
            self._drop(found.end())

    def _drop(self, nbytes: int) -> None:
        """Drop so many bytes from the front; refuse the peer if these are too many."""
        self._dropped += nbytes
        if self._dropped > _MAX_INFORMATIONAL_BYTES:
            self._refuse()
        else:
            del self._data[:nbytes]

    def _refuse(self) -> None:
        self._fault = RemoteProtocolError(
            f"{self._peer} sent more than {_MAX_INFORMATIONAL_BYTES} bytes of "
            "informational answers (HTTP 1xx) or empty lines, and no other answer; is "
            "that an aiockpt server?"
        )
        self._data.clear()
        self._transport.abort()

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(self._fault or exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def _is_start(data: bytearray) -> bool:
    """Return whether an informational answer may begin with these bytes."""
    return all(
        byte == known or (known in b"0123456789" and byte in b"0123456789")
        for byte, known in zip(data, _INFORMATIONAL_START, strict=False)
    )
