"""Answer requests from a store, inside any aiohttp application.

A request takes these steps: admit it, find the publication, plan the reply, look
whether its chunks are there, wait until the body is admitted, send it. A
`ServiceExtension` may answer further resources.

Nothing here relies on the application around it, neither on its middlewares nor on
the options of its runner. So a handler finds out by itself that its client has left,
has limits of its own, and never lets a lost connection become a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final
from weakref import WeakSet

from aiohttp import web

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    LocalProtocolError,
    RemoteProtocolError,
    StepNotFoundError,
)
from aiockpt.events import LogLimit, TransferEvent, emit
from aiockpt.http import protocol as http
from aiockpt.http import sockets
from aiockpt.http.acceptor import Caller
from aiockpt.http.admission import Admission, Rounds
from aiockpt.http.audit import STATUS, VISIT, Auditor
from aiockpt.http.auth import admit, bearer
from aiockpt.http.body_writer import BodySender, Outcome
from aiockpt.http.deltas import DeltaBody, Deltas
from aiockpt.http.extension import (
    UNLIMITED,
    Asked,
    BodyLimits,
    Lends,
    PlainResponse,
    PlainStream,
    ServiceExtension,
    transport_of,
)
from aiockpt.http.fingerprint_tasks import FingerprintTasks
from aiockpt.http.options import Server, Swarm
from aiockpt.http.problems import RefusedError, to_problem
from aiockpt.http.responses import (
    COMMON_HEADERS,
    Reply,
    chunks_of,
    fingerprint_reply,
    latest_reply,
    no_news_headers,
    plan_reply,
)
from aiockpt.http.security import network_of
from aiockpt.http.status import ShownCounters, page_reply, status_reply, wants_page
from aiockpt.http.store import Publication, Statistics, Store
from aiockpt.http.tokens import ManifestMacs
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.system import crowding

logger = logging.getLogger("aiockpt")

SMALL_BYTES: Final = 64 << 10
"""A body up to this size is copied and handed to aiohttp whole."""

RELAY: Final = web.RequestKey("aiockpt.relay", Publication)
"""The key of the relay that the token of a request opens."""

_RETRY_AFTER_S: Final = 1.0
_METHODS: Final = ("GET", "HEAD")
_LEVELS: Final = {
    Outcome.SENT: logging.DEBUG,
    Outcome.GONE: logging.INFO,
    Outcome.STALLED: logging.WARNING,
    Outcome.EVICTED: logging.WARNING,
    Outcome.INTERRUPTED: logging.INFO,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How to serve: what a server, or a server process, gets from its transport.

    Attributes:
        options: How to serve.
        token: The bearer token that every request must carry; None only together
            with ``insecure``. A certificate that TLS asks for comes on top.
        insecure: Serve everybody who can connect and names the server by an IP
            address, ``localhost`` or one of ``hosts``.
        stall_timeout: Seconds without progress after which a reader is aborted.
        default_wait: Seconds to wait for a step if the request does not say.
        max_wait: The most seconds that ``Prefer: wait=N`` may ask for.
        hosts: Host names that an insecure server answers to.
        manifest_key: The key that authenticates manifests, if any.
        lends: Whether other processes of this host may map what is served.
        incarnation: The id of this start of the sender.
        swarm: How to serve receivers that can join a swarm; None: offer no swarm.
        peers: The hosts that may stand in the URL of a member; see `Auth`. None: the
            host that the member has.
    """

    options: Server
    token: str | None = field(repr=False)
    insecure: bool
    stall_timeout: float
    default_wait: float
    max_wait: float
    hosts: frozenset[str]
    manifest_key: bytes | None = field(default=None, repr=False)
    lends: bool = False
    incarnation: str = "0"
    swarm: Swarm | None = None
    peers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if (self.token is None) != self.insecure:
            raise LocalProtocolError(
                "the server must know who may read: pass a token, or insecure=True"
            )


class Traffic:
    """Counts the requests of a service, and the bytes that it sends.

    Attributes:
        requests: Requests that have arrived.
        refused: Requests that were answered with an error.
        gone: Bodies and waits that ended because the client left.
        waiting: Requests that wait for a step.
        bytes_sent: Bytes of the bodies that have ended.
        limit: Says which log lines would only repeat others.
    """

    def __init__(self) -> None:
        self.requests = self.refused = self.gone = self.waiting = self.bytes_sent = 0
        self.limit = LogLimit()
        self._stalled = 0
        self._bodies: set[BodySender] = set()

    def statistics(self) -> Statistics:
        """Return the counters, with the bytes of the bodies that are being sent."""
        return Statistics(
            waiting=self.waiting,
            requests=self.requests,
            refused=self.refused,
            bytes_sent=self.bytes_sent + sum(body.sent for body in self._bodies),
            gone=self.gone,
            stalled=self._stalled,
        )

    def evict(self) -> None:
        """Abort all bodies that are being sent."""
        for body in tuple(self._bodies):
            body.evict()

    @contextmanager
    def sending(self, asked: Asked, body: BodySender, *, quiet: bool) -> Iterator[None]:
        """Account for a body that is sent during the block.

        If ``quiet``, no early end of it is a warning.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._bodies.add(body)
        try:
            yield
        finally:
            self._bodies.discard(body)
            self.bytes_sent += body.sent
            outcome = body.outcome or Outcome.GONE
            self.gone += outcome is Outcome.GONE
            self._stalled += outcome is Outcome.STALLED
            visit = asked.request[VISIT]
            visit.nbytes, visit.outcome = body.sent, outcome.value
            level = _LEVELS[outcome]
            if level == logging.WARNING and (quiet or not self.limit.passes(outcome)):
                level = logging.INFO
            emit(
                TransferEvent(
                    stop="evict" if outcome is Outcome.EVICTED else "serve",
                    step=asked.publication.step,
                    peer=asked.request.remote or "",
                    nbytes=body.sent,
                    seconds=loop.time() - began,
                    detail="" if outcome is Outcome.SENT else outcome.value,
                    level=level,
                )
            )


class CheckpointService:
    """Handles the requests for one store, from any number of applications.

    Args:
        store: Holds what is served.
        config: How to serve.
        extension: Serves what belongs to no plain checkpoint.
        lender: Lends the memory to processes of this host.
        fingerprints: Computes fingerprints; None: this service has none.
    """

    def __init__(
        self,
        store: Store,
        config: ServerConfig,
        extension: ServiceExtension,
        lender: Lends | None = None,
        fingerprints: FingerprintTasks | None = None,
    ) -> None:
        self.store = store
        self.config = config
        self._extension = extension
        self._lender, self._fingerprints = lender, fingerprints
        self._tuned = WeakSet[asyncio.BaseTransport]()
        self._threads = Bridge(threads=sockets.IO_THREADS, name="aiockpt-serve")
        self._deltas = Deltas(store, self._threads)
        self._rounds = Rounds()
        self._bodies = Admission(config.options.readers)
        self._manifests = Admission(config.options.readers)
        self._macs = ManifestMacs(config.manifest_key)
        self._auditor = Auditor()
        self._traffic = Traffic()
        self._closed = False

    def statistics(self) -> Statistics:
        """Return what the handlers have counted; the store counts the readers."""
        waiting = self._bodies.waiting + self._manifests.waiting
        return self._traffic.statistics() + Statistics(waiting=waiting)

    def close(self) -> None:
        """Abort the bodies that are being sent, refuse every request. Idempotent."""
        self._closed = True
        self._traffic.evict()
        self._threads.close(wait=False)

    async def resource(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for ``{step}/{what}``, or ``latest/{what}``."""
        return await self._answer(request, self._resource)

    async def latest(self, request: web.Request) -> web.StreamResponse:
        """Answer which step is served, or wait for one after another."""
        return await self._answer(request, self._latest)

    async def landing(self, request: web.Request) -> web.StreamResponse:
        """Answer what is served, at the prefix itself; a browser gets an empty page.

        A browser sends no token when it opens an address, but the page's script does.
        """
        public = wants_page(request.headers.get("Accept", ""))
        return await self._answer(request, self._landing, public=public)

    async def _answer(
        self,
        request: web.Request,
        handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
        *,
        public: bool = False,
    ) -> web.StreamResponse:
        """Admit a request and handle it; turn errors into responses; audit it."""
        self._traffic.requests += 1
        caller = request.protocol if isinstance(request.protocol, Caller) else None
        handling = nullcontext() if caller is None else caller.handling()
        with handling, self._auditor.visit(request) as visit:
            try:
                await self._rounds.begin()
                self._admit(request, public=public)
                is_anonymous = public and "Authorization" not in request.headers
                if caller is not None and not is_anonymous:
                    caller.know()
                response = await handle(request)
            except ConnectionError:
                # Nobody reads this, but aiohttp wants a response.
                self._traffic.gone += 1
                response = PlainResponse(status=HTTPStatus.SERVICE_UNAVAILABLE)
            except AiockptError as error:
                self._traffic.refused += 1
                response = self._response_to(error)
                response.headers.update(self._identity)
            visit.status = response.status
        return response

    # -------------------------------------------------------------- admitting

    def _admit(self, request: web.Request, *, public: bool) -> None:
        """Raise unless a request may be answered, and tune its connection."""
        if self._closed:
            raise ClosedError("the server")
        config, token = self.config, self.config.token
        what, offered = request.match_info.get("what"), bearer(request.headers)
        if what is not None and (relay := self.store.relay_of(offered)) is not None:
            request[RELAY] = relay
            token = offered  # the relay's own
        grant = admit(request.headers, token=token, hosts=config.hosts, public=public)
        if grant is not None:
            visit = request[VISIT]
            visit.receiver, visit.lapses = grant.receiver, grant.lapses
            grant.check(request.match_info.get("step"), now=time.time())
        allowed = self._extension.methods.get(what or "", _METHODS)
        if request.method not in allowed:
            raise RefusedError(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{request.method} is not answered here",
                {"Allow": ", ".join(allowed)},
            )
        transport = transport_of(request)
        if transport not in self._tuned:
            with suppress(TypeError):  # uvloop's TLS: tuned again by each request
                self._tuned.add(transport)
            sockets.tune(
                transport,
                dead_after=2 * config.stall_timeout,
                began_classic=isinstance(request.protocol, Caller),
            )

    # --------------------------------------------------------------- handling

    @property
    def _identity(self) -> dict[str, str]:
        """The id of this start of the sender; another one after each return."""
        returns = f"{self.store.returns:x}" if self.store.returns else ""
        return {http.INCARNATION_HEADER: self.config.incarnation + returns}

    async def _latest(self, request: web.Request) -> web.StreamResponse:
        after = http.parse_after(request.query.getall(http.AFTER, []))
        known = request.headers.get(http.INCARNATION_HEADER)
        # After a restart of the sender, or a return, whatever it serves is news.
        restarted = known is not None and known not in self._identity.values()
        try:
            publication = await self._find(request, after=None if restarted else after)
        except StepNotFoundError as nothing:
            if after is None:
                raise
            headers = {**no_news_headers(nothing.serving), **self._identity}
            return PlainResponse(status=HTTPStatus.NO_CONTENT, headers=headers)
        headers, body = latest_reply(publication.servable.manifest)
        return PlainResponse(body=body, headers={**headers, **self._identity})

    async def _landing(self, request: web.Request) -> web.StreamResponse:
        request[VISIT].outcome = STATUS
        path = request.rel_url.raw_path
        if not path.endswith("/"):  # what is there refers to paths below it
            headers = {**COMMON_HEADERS, "Location": f"{path.rpartition('/')[2]}/"}
            status = HTTPStatus.PERMANENT_REDIRECT
            return PlainResponse(status=status, headers=headers)
        if wants_page(request.headers.get("Accept", "")):
            headers, body = page_reply()
            return PlainResponse(body=body, headers=headers)
        now = self.store.latest
        found = self.store.statistics() + self.statistics()
        counters = ShownCounters(
            readers=found.readers,
            waiting=found.waiting,
            bytes_sent=found.bytes_sent,
            requests=found.requests,
            refused=found.refused,
            swarm=None if now is None else self._extension.status(now),
        )
        manifest = None if now is None else now.servable.manifest
        headers, body = status_reply(manifest, counters)
        return PlainResponse(body=body, headers={**headers, **self._identity})

    async def _resource(self, request: web.Request) -> web.StreamResponse:
        now, headers = asyncio.get_running_loop().time(), request.headers
        named, swarm = headers.get(http.LEASE_HEADER), headers.get(http.SWARM_HEADER)
        lease = http.parse_lease(named, now=now, swarm=swarm)
        if lease is not None and lease.until <= now:
            self.store.end_lease(lease)
            return PlainStream(status=HTTPStatus.NO_CONTENT, headers=self._identity)
        asked = await self._locate(request, lease)
        if asked.resource.kind.value in self._extension.methods:
            return await self._extension.answer(asked)
        if asked.resource.kind is http.ResourceKind.FINGERPRINT:
            return await self._fingerprint(asked)
        manifest = asked.publication.servable.manifest
        reply = plan_reply(asked.resource, manifest, request.headers, request.method)
        reply.headers.update(self._identity)
        reply.headers.update(self._extension.headers(asked, reply))
        if request.method == "GET":
            self._renew(asked)
        is_own = not asked.publication.is_relay
        if is_own and asked.resource.kind is http.ResourceKind.METADATA:
            reply.headers.update(await self._about(asked))
        if reply.status == HTTPStatus.NOT_MODIFIED:
            return PlainStream(status=reply.status, headers=reply.headers)
        if not asked.publication.has(chunks_of(reply, manifest)):
            return PlainStream(status=HTTPStatus.NO_CONTENT, headers=self._identity)
        if request.method == "HEAD":
            return PlainStream(status=reply.status, headers=reply.headers)
        delta = await self._deltas.answer(asked, reply)
        return await self._send(asked, reply, delta)

    def _renew(self, asked: Asked) -> None:
        """Take or renew the lease that a request names, if it names one."""
        if asked.lease is not None:
            silent = self.config.stall_timeout
            self.store.lease(asked.publication, asked.lease, silence_timeout=silent)

    async def _fingerprint(self, asked: Asked) -> web.StreamResponse:
        """Answer with the fingerprint, which is computed when somebody asks first."""
        request, publication = asked.request, asked.publication
        if self._fingerprints is None or publication.is_relay:
            detail = "fingerprints are not computed here"
            raise RefusedError(HTTPStatus.NOT_FOUND, detail)
        manifest = publication.servable.manifest
        reply = fingerprint_reply(asked.resource, manifest, request.headers)
        reply.headers.update(self._identity)
        if request.method == "HEAD" or reply.status == HTTPStatus.NOT_MODIFIED:
            return PlainStream(status=reply.status, headers=reply.headers)
        self._renew(asked)
        most = self.config.max_wait
        wait = asked.wait(most, unasked=most)
        try:
            body = await self._fingerprints.of(publication, wait=wait)
        finally:
            self._renew(asked)  # the wait may have been as long as a silence
        return PlainResponse(status=reply.status, body=body, headers=reply.headers)

    async def _locate(self, request: web.Request, lease: http.Lease | None) -> Asked:
        """Return what a request names, and the publication that has it."""
        step, relay = request.match_info["step"], request.get(RELAY)
        publication = relay
        if relay is None and step == http.LATEST:
            publication = await self._find(request)
            step = str(publication.step)
        try:
            resource = http.parse_resource(step, request.match_info["what"])
        except RemoteProtocolError as error:
            raise RefusedError(HTTPStatus.NOT_FOUND, str(error)) from None
        if publication is None:
            publication = await self._find(request, step=resource.step, lease=lease)
        elif publication.step != resource.step:
            raise StepNotFoundError(resource.step, serving=publication.step)
        kept_by = lease if relay is None else None
        return Asked(request, resource, publication, kept_by, self._identity)

    async def _about(self, asked: Asked) -> Mapping[str, str]:
        """Return the headers that go only with the manifest of a checkpoint."""
        request, publication, lease = asked.request, asked.publication, asked.lease
        headers = {**await self._macs.headers_of(publication.servable.manifest)}
        if self._lender is not None and request.method == "GET":
            probe = request.headers.get(http.PROBE_HEADER)
            receiver = request[VISIT].receiver
            offer = await self._lender.offer(publication, probe, receiver, lease)
            if offer:  # its ticket is good for a while only: no cache should keep it
                headers |= {http.OFFER_HEADER: offer, "Cache-Control": "no-store"}
        if (crowded := crowding()) is not None:
            headers[http.BUSY_HEADER] = http.format_busy(*crowded)
        if lease is not None:
            silence = http.format_silence(self.config.stall_timeout)
            headers[http.LEASE_HEADER] = silence
        if (base := self.store.base_of(publication)) is not None:
            headers[http.DELTA_BASE_HEADER] = http.format_etag(base.snapshot_id)
        return headers

    async def _find(
        self,
        request: web.Request,
        *,
        step: int | None = None,
        after: int | None = None,
        lease: http.Lease | None = None,
    ) -> Publication:
        """Return the publication that a request names, waiting as long as it may.

        That is the snapshot of ``step`` on which its receive holds a lease, or the
        published ``step``, or the first one after the step ``after``, or, if nothing
        is named, whatever is served.
        """
        if lease is not None and step is not None:
            leased = self.store.leased(lease, step)
            if leased is not None:
                return leased
        is_named = step is not None or after is not None
        default = self.config.default_wait if is_named else 0.0
        asked = http.parse_prefer_wait(request.headers.get("Prefer"))
        wait = min(default if asked is None else asked, self.config.max_wait)

        def check() -> None:
            transport_of(request)  # the application around us need not notice
            if self._closed:
                raise ClosedError("the server")

        self._traffic.waiting += 1
        try:
            if after is not None:
                return await self.store.wait_past(after, wait=wait, check=check)
            return await self.store.wait_for(step, wait=wait, lease=lease, check=check)
        finally:
            self._traffic.waiting -= 1

    # ---------------------------------------------------------------- sending

    async def _send(
        self, asked: Asked, reply: Reply, delta: DeltaBody | None
    ) -> web.StreamResponse:
        """Send the reply's range of the publication's file, or the delta of it."""
        request, publication = asked.request, asked.publication
        if publication.lost is not None:
            raise publication.lost
        transport, nbytes = transport_of(request), reply.stop - reply.start

        def views(start: int, stop: int) -> list[memoryview]:
            first, last = reply.start + start, reply.start + stop
            return publication.views(first, last, limits.copy)

        if delta is not None:
            nbytes, views = delta.nbytes, delta.views
            delta.describe(reply)
        body = BodySender(
            transport,
            nbytes,
            views,
            stall_timeout=self.config.stall_timeout,
            threads=self._threads,
        )
        sending: AbstractAsyncContextManager[BodyLimits] = nullcontext(UNLIMITED)
        if delta is None:
            sending = self._extension.sending(asked, reply, body)
        async with sending as limits:
            is_small = nbytes <= (limits.unsent or SMALL_BYTES)
            admitted: AbstractAsyncContextManager[None] = nullcontext()
            if not is_small:
                admitted = self._admitted(asked, reply, body)
            evict = body.interrupt if limits.is_quiet else body.evict
            reading = self.store.reading(publication, evict=evict, lease=asked.lease)
            async with admitted, reading:
                transport_of(request)  # the client may have left while it waited
                sockets.limit_unsent(transport, limits.unsent)  # or lift earlier limits
                sockets.limit_rate(transport, limits.rate)
                if is_small:
                    data = b"".join(views(0, nbytes))
                    self._traffic.bytes_sent += nbytes
                    request[VISIT].nbytes = body.sent = body.arrived = nbytes
                    return PlainResponse(
                        status=reply.status, body=data, headers=reply.headers
                    )
                views(nbytes - 1, nbytes)  # what cannot be read is an error's answer
                response = PlainStream(status=reply.status, headers=reply.headers)
                with self._traffic.sending(asked, body, quiet=limits.is_quiet):
                    await body.run(request, response)
                return response

    def _admitted(
        self, asked: Asked, reply: Reply, body: BodySender
    ) -> AbstractAsyncContextManager[None]:
        """Return a context manager that waits for a slot, and holds it."""
        is_manifest = reply.stop <= asked.publication.servable.manifest.header_bytes
        admission = self._manifests if is_manifest else self._bodies
        wait = asked.wait(self.config.max_wait, unasked=self.config.stall_timeout / 2)
        return admission.take(network_of(asked.request.remote or ""), body, wait=wait)

    def _response_to(self, error: AiockptError) -> web.Response:
        problem = to_problem(error)
        if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            problem.headers["Retry-After"] = f"{_RETRY_AFTER_S:.0f}"
            if self._traffic.limit.passes(type(error)):
                logger.error("a request failed", exc_info=error)
        headers = {**COMMON_HEADERS, **problem.headers}
        return PlainResponse(status=problem.status, headers=headers, body=problem.body)


def routes(service: CheckpointService, prefix: str) -> list[web.RouteDef]:
    """Return the routes below ``prefix`` ("" for a sub-application's root).

    They take every method: a method but ``GET`` and ``HEAD`` gets our own 405.
    """
    base = prefix.rstrip("/")
    landings = [f"{base}/", base] if base else ["/"]
    latest, resource = f"{base}/{http.LATEST}", f"{base}/{{step}}/{{what}}"
    return [
        *(web.get(path, service.landing) for path in landings),
        web.route("*", latest, service.latest, expect_handler=_ignore_expect),
        web.route("*", resource, service.resource, expect_handler=_ignore_expect),
    ]


async def _ignore_expect(_: web.Request) -> None:
    """Answer ``Expect: 100-continue`` by the response alone (RFC 9110, 10.1.1).

    aiohttp writes its ``100 Continue`` before any handler, to clients that may have
    left, and logs that as an error.
    """
