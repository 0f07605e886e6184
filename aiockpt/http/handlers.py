"""Answers requests from a store, inside any aiohttp application.

Nothing here relies on the application around it: not on its middlewares, nor on the
options of its runner. So a handler finds out by itself that its client has left, has
its own limits, and never lets a lost connection become a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import NamedTuple

from aiohttp import web

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    RemoteProtocolError,
    StepNotFoundError,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.http import protocol as http
from aiockpt.http import sockets
from aiockpt.http.audit import VISIT, Auditor, Visit
from aiockpt.http.bodies import FileBody
from aiockpt.http.guard import RefusedError, ServerConfig, admit
from aiockpt.http.landing import landing_reply
from aiockpt.http.lending import Lender
from aiockpt.http.memory_protocol import OFFER_HEADER, PROBE_HEADER
from aiockpt.http.problems import PeerBusy, to_problem
from aiockpt.http.pumps import Pumps
from aiockpt.http.replies import (
    COMMON_HEADERS,
    Reply,
    latest_reply,
    no_news_headers,
    plan_reply,
)
from aiockpt.http.rounds import Rounds
from aiockpt.http.sending import Outcome, Sending
from aiockpt.http.store import Publication, Store
from aiockpt.http.tokens import ManifestMacs

__all__ = ["CheckpointService", "ServerStatistics"]

SMALL_BYTES = 64 << 10
"""A body up to this size is copied and handed to aiohttp whole."""

_RETRY_AFTER = 1.0

logger = logging.getLogger("aiockpt")


class _Stream(web.StreamResponse):
    """A response that no application compresses: its length and digest are given."""

    def enable_compression(self, *_: object, **__: object) -> None:
        """Ignore it: receivers accept no coding, and a range of one makes no sense."""


class _Answer(_Stream, web.Response):
    """Such a response with its whole body."""


class ServerStatistics(NamedTuple):
    """What a service does now (the first two), and did since it was made."""

    readers: int
    waiting: int
    requests: int
    refused: int
    bytes_sent: int
    gone: int
    stalled: int
    evicted: int


class CheckpointService:
    """The handlers over one store; any number of applications may route to them."""

    def __init__(
        self, store: Store, config: ServerConfig, lender: Lender | None = None
    ) -> None:
        self.store = store
        self.config = config
        self._lender = lender
        self._pumps = Pumps("aiockpt-serve")
        self._rounds = Rounds()
        self._sendings: set[Sending] = set()
        self._readers = 0
        self._waiting = 0
        self._identity = {http.INCARNATION_HEADER: config.incarnation}
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._macs = ManifestMacs(config.manifest_key)
        self._auditor = Auditor()

    def __repr__(self) -> str:
        step = self.store.statistics().step
        return f"<CheckpointService step={step} readers={self._readers}>"

    def statistics(self) -> ServerStatistics:
        """Return the counters as one immutable record."""
        counts = {name: self._counts[name] for name in ServerStatistics._fields[2:]}
        return ServerStatistics(self._readers, self._waiting, **counts)

    def close(self) -> None:
        """Abort the bodies that are being sent, refuse every request. Idempotent."""
        self._closed = True
        for sending in tuple(self._sendings):
            sending.evict()
        self._pumps.close()

    async def resource(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for ``{step}/{what}``, or ``latest/{what}``."""
        return await self._guarded(request, self._resource)

    async def latest(self, request: web.Request) -> web.StreamResponse:
        """Answer which step is being served, or wait for one after another."""
        return await self._guarded(request, self._latest)

    async def landing(self, request: web.Request) -> web.StreamResponse:
        """Answer what is being served, at the address that people know."""
        return await self._guarded(request, self._landing)

    async def _guarded(
        self,
        request: web.Request,
        answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        visit = request[VISIT] = Visit()
        try:
            response = await self._answered(request, answer)
            visit.status = response.status
            return response
        finally:
            self._auditor.note(visit.access(request))

    async def _answered(
        self,
        request: web.Request,
        answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        self._counts["requests"] += 1
        await self._rounds.begin()
        try:
            self._admit(request)
            return await answer(request)
        except ConnectionError:
            # Nobody will read this: aiohttp wants a response, and finds out itself.
            self._counts["gone"] += 1
            return _Answer(status=HTTPStatus.SERVICE_UNAVAILABLE)
        except AiockptError as error:
            self._counts["refused"] += 1
            response = _response_to(error)
            response.headers.update(self._identity)
            return response

    def _admit(self, request: web.Request) -> None:
        if self._closed:
            raise ClosedError("the server")
        grant = admit(request.headers, self.config)
        if grant is not None:
            request[VISIT].receiver = grant.receiver
            grant.check(request.match_info.get("step"), now=time.time())
        if request.method not in ("GET", "HEAD"):
            raise RefusedError(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{request.method} is not answered here",
                {"Allow": "GET, HEAD"},
            )
        transport = _transport_of(request)
        patience, own = self.config.stall_timeout, self.config.own_sockets
        sockets.tune(transport, dead_after=2 * patience, began_classic=own)

    async def _latest(self, request: web.Request) -> web.StreamResponse:
        after = http.parse_after(request.query.getall(http.AFTER, []))
        known = request.headers.get(http.INCARNATION_HEADER)
        restarted = known is not None and known != self.config.incarnation
        try:
            if after is None or restarted:  # whatever is served is news
                published = await self._resolve(request)
            else:
                published = await self._resolve(request, after=after)
        except StepNotFoundError as nothing:
            if after is None:
                raise
            headers = {**no_news_headers(nothing.serving), **self._identity}
            return _Answer(status=HTTPStatus.NO_CONTENT, headers=headers)
        headers, body = latest_reply(published.servable.manifest)
        return _Answer(body=body, headers={**headers, **self._identity})

    async def _landing(self, request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path
        if not path.endswith("/"):  # the page has relative links
            location = {**COMMON_HEADERS, "Location": f"{path.rpartition('/')[2]}/"}
            return _Answer(status=HTTPStatus.PERMANENT_REDIRECT, headers=location)
        now = self.store.latest
        manifest = now.servable.manifest if now is not None else None
        headers, body = landing_reply(manifest, request.headers.get("Accept", ""))
        return _Answer(body=body, headers={**headers, **self._identity})

    async def _resource(self, request: web.Request) -> web.StreamResponse:
        lease, ends = _lease_of(request)
        if lease is not None and ends:
            self.store.end_lease(lease)
            return _Stream(status=HTTPStatus.NO_CONTENT, headers=self._identity)
        if request.match_info["step"] == http.LATEST:
            published = await self._resolve(request)
            resource = _resource_of(request, str(published.step))
        else:
            resource = _resource_of(request, request.match_info["step"])
            published = await self._find(request, resource.step, lease)
        manifest = published.servable.manifest
        reply = plan_reply(resource, manifest, request.headers, request.method)
        if lease is not None and request.method == "GET":
            self.store.lease(published, lease, patience=self.config.stall_timeout)
        reply.headers.update(self._identity)
        if resource.kind is http.ResourceKind.METADATA:
            reply.headers.update(await self._macs.headers_of(manifest))
            reply.headers.update(await self._offer(request, published, lease))
        if request.method == "HEAD" or reply.status == HTTPStatus.NOT_MODIFIED:
            return _Stream(status=reply.status, headers=reply.headers)
        with self._admission():
            return await self._send(request, published, reply, lease)

    async def _find(
        self, request: web.Request, step: int, lease: http.Lease | None
    ) -> Publication:
        """Return the snapshot that a receive has leased, or the one that is served."""
        found = None if lease is None else self.store.leased(lease, step)
        return found or await self._resolve(request, step=step, lease=lease)

    async def _resolve(
        self,
        request: web.Request,
        *,
        step: int | None = None,
        after: int | None = None,
        lease: http.Lease | None = None,
    ) -> Publication:
        """Return the publication that a request names, waiting as long as it may.

        That is the one of ``step``, or the first one after the step ``after``, or,
        without either, whatever is served.
        """
        is_named = step is not None or after is not None
        default = self.config.default_wait if is_named else 0.0
        asked = http.parse_prefer_wait(request.headers.get("Prefer"))
        wait = min(default if asked is None else asked, self.config.max_wait)

        def check() -> None:
            _transport_of(request)  # an application around us need not notice
            if self._closed:
                raise ClosedError("the server")

        self._waiting += 1
        try:
            if after is not None:
                return await self.store.wait_past(after, wait=wait, check=check)
            return await self.store.wait_for(step, wait=wait, lease=lease, check=check)
        finally:
            self._waiting -= 1

    async def _offer(
        self,
        request: web.Request,
        published: Publication,
        lease: http.Lease | None,
    ) -> Mapping[str, str]:
        """Offer the memory itself to who asks from this host."""
        if self._lender is None or request.method != "GET":
            return {}
        probe, receiver = request.headers.get(PROBE_HEADER), request[VISIT].receiver
        offer = await self._lender.offer(published, probe, receiver, lease)
        # A ticket is good once: no cache should keep it.
        return {OFFER_HEADER: offer, "Cache-Control": "no-store"} if offer else {}

    @contextmanager
    def _admission(self) -> Iterator[None]:
        if self._readers >= self.config.max_readers:
            raise PeerBusy(retry_after=_RETRY_AFTER)
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    async def _send(
        self,
        request: web.Request,
        published: Publication,
        reply: Reply,
        lease: http.Lease | None,
    ) -> web.StreamResponse:
        body = FileBody(published.servable, reply.start, reply.stop)
        sending = Sending(
            _transport_of(request),
            stall_timeout=self.config.stall_timeout,
            pumps=self._pumps,
        )
        async with self.store.reading(published, evict=sending.evict, lease=lease):
            if body.nbytes <= SMALL_BYTES:
                data = b"".join(body.views(0, body.nbytes))
                self._counts["bytes_sent"] += len(data)
                request[VISIT].nbytes = len(data)
                return _Answer(status=reply.status, body=data, headers=reply.headers)
            response = _Stream(status=reply.status, headers=reply.headers)
            with self._accounting(request, published.step, sending):
                await sending.run(request, response, body)
        return response

    @contextmanager
    def _accounting(
        self, request: web.Request, step: int, sending: Sending
    ) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._sendings.add(sending)
        try:
            yield
        finally:
            self._sendings.discard(sending)
            self._counts["bytes_sent"] += sending.sent
            outcome = sending.outcome or Outcome.GONE
            if outcome is not Outcome.SENT:
                self._counts[outcome.value] += 1
            visit = request[VISIT]
            visit.nbytes, visit.outcome = sending.sent, outcome.value
            emit(_event_of(outcome, step, request, sending, loop.time() - began))


_LEVELS = {
    Outcome.SENT: logging.DEBUG,
    Outcome.GONE: logging.INFO,
    Outcome.STALLED: logging.WARNING,
    Outcome.EVICTED: logging.WARNING,
}


def _event_of(
    outcome: Outcome,
    step: int,
    request: web.Request,
    sending: Sending,
    elapsed: float,
) -> TransferEvent:
    return TransferEvent(
        stop="evict" if outcome is Outcome.EVICTED else "serve",
        step=step,
        peer=request.remote or "",
        nbytes=sending.sent,
        seconds=elapsed,
        detail="" if outcome is Outcome.SENT else outcome.value,
        level=_LEVELS[outcome],
    )


def _resource_of(request: web.Request, step: str) -> http.Resource:
    """Return what is asked for.

    Raises:
        RefusedError: there is no such thing.
    """
    try:
        return http.parse_resource(step, request.match_info["what"])
    except RemoteProtocolError as error:
        raise RefusedError(HTTPStatus.NOT_FOUND, str(error)) from None


def _response_to(error: AiockptError) -> web.Response:
    problem = error.problem if isinstance(error, RefusedError) else to_problem(error)
    if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        problem.headers["Retry-After"] = f"{_RETRY_AFTER:.0f}"
        logger.error("a request failed", exc_info=error)
    headers = {**COMMON_HEADERS, **problem.headers}
    return _Answer(status=problem.status, headers=headers, body=problem.body)


def _lease_of(request: web.Request) -> tuple[http.Lease | None, bool]:
    """Return the lease that a request names, and whether the request ends it.

    Raises:
        RefusedError: the header is malformed.
    """
    now = asyncio.get_running_loop().time()
    try:
        lease = http.parse_lease(request.headers.get(http.LEASE_HEADER), now=now)
    except RemoteProtocolError as error:
        raise RefusedError(HTTPStatus.BAD_REQUEST, str(error)) from None
    return lease, lease is not None and lease.until <= now


def _transport_of(request: web.Request) -> asyncio.Transport:
    """Return a request's connection.

    Raises:
        ConnectionResetError: its client has left.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client has left")
    return transport
