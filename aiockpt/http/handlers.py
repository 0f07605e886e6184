"""Answer requests from a store, inside any aiohttp application.

A request takes these steps: admit it, find the publication, plan the reply, send it.
Nothing here relies on the application around it, neither on its middlewares nor on
the options of its runner. So a handler finds out by itself that its client has left,
has limits of its own, and never lets a lost connection become a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
)
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, cast
from urllib.parse import urlsplit
from weakref import WeakSet

import anyio
import msgspec
from aiohttp import web

from aiockpt.errors import (
    AiockptError,
    CheckpointChangedError,
    ClosedError,
    LocalProtocolError,
    PeerFailedError,
    RemoteProtocolError,
    StepNotFoundError,
)
from aiockpt.events import LogLimit, TransferEvent, emit
from aiockpt.http import protocol as http
from aiockpt.http import sockets
from aiockpt.http.acceptor import Caller
from aiockpt.http.admission import Admission
from aiockpt.http.audit import STATUS, VISIT, Auditor
from aiockpt.http.auth import admit, bearer
from aiockpt.http.body_writer import BodySender, Outcome
from aiockpt.http.deltas import DeltaBody, Deltas
from aiockpt.http.options import Server, Swarm
from aiockpt.http.problems import PeerBusy, RefusedError, to_problem
from aiockpt.http.relay import Copy, Relay, Slots
from aiockpt.http.responses import (
    COMMON_HEADERS,
    Reply,
    landing_reply,
    latest_reply,
    no_news_headers,
    page_reply,
    plan_reply,
)
from aiockpt.http.security import Reach, network_of, plain_address
from aiockpt.http.status import wants_page
from aiockpt.http.store import Publication, Statistics, Store
from aiockpt.http.tokens import ManifestMacs, swarm_token
from aiockpt.local.attach import OFFER_HEADER, PROBE_HEADER
from aiockpt.local.lender import Lender
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.secrets import Token
from aiockpt.runtime.system import crowding

logger = logging.getLogger("aiockpt")

SMALL_BYTES: Final = 64 << 10
"""A body up to this size is copied and handed to aiohttp whole."""

_RETRY_AFTER: Final = 1.0  # seconds
_DELTAS: Final = 64 << 20  # bytes of the longest range that is answered with deltas
_PER_ROUND: Final = 16  # requests that begin in one round of the loop

_LEVELS: Final = {
    Outcome.SENT: logging.DEBUG,
    Outcome.GONE: logging.INFO,
    Outcome.STALLED: logging.WARNING,
    Outcome.EVICTED: logging.WARNING,
    Outcome.INTERRUPTED: logging.INFO,
}

RELAYED: Final = web.RequestKey("aiockpt.relayed", Publication)
"""The key of the relay that a member's request reads."""

LAPSES: Final = web.RequestKey("aiockpt.lapses", float)
"""The key of the time at which a request's own token ends."""

_OF_OTHERS: Final = ("GET", "HEAD")
_OF_MEMBERS: Final = ("POST", "DELETE")
_KEEP_ALIVE: Final = 2.0  # seconds
_SHORTEST: Final = 0.1  # seconds between two signs of life
_INTERRUPTS: Final = 1.0  # seconds between two of the same receive
_MOST_WATCHERS: Final = 128  # members that are told of new chunks
_MOST_WATCHERS_OF_HOST: Final = 32  # at an IPv4 address; it may have IPv6, too
_MOST_OF_SLOT: Final = 2  # chunks in a body that holds a slot
_UNSENT: Final = 4  # the kernel may hold a fourth of such a body,
_LEAST_UNSENT: Final = 32 << 10  # and at least so many bytes
_MOST_SHOWN: Final = 200  # members on the status page
_FACTS: Final = ("readers", "waiting", "bytes_sent", "requests", "refused")
_MAX_ANNOUNCEMENT: Final = 8 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What a server needs to know of its transport; a server process gets it, too.

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


class _Stream(web.StreamResponse):
    """A response that no application compresses: its length and digest are given."""

    def enable_compression(self, *_: object, **__: object) -> None:
        """Ignore it: receivers accept no coding, and a range of one makes no sense."""


class _Answer(_Stream, web.Response):
    """Such a response with its whole body."""


class CheckpointService:
    """The handlers over one store; any number of applications may route to them.

    Args:
        store: What is served.
        config: How.
        lender: Lends the memory to processes of this host.
    """

    def __init__(
        self,
        store: Store,
        config: ServerConfig,
        lender: Lender | None = None,
    ) -> None:
        self.store = store
        self.config = config
        self._lender = lender
        self._tuned = WeakSet[asyncio.BaseTransport]()
        self._threads = Bridge(threads=sockets.IO_THREADS, name="aiockpt-serve")
        self._deltas = Deltas(self._threads)
        self._rounds = _Rounds()
        self._bodies: dict[BodySender, Publication] = {}
        self._watchers = Counter[str]()  # streams of what a relay has, by host
        self._interrupted: dict[str, float] = {}  # ids of leases, and when
        self._has_told = False  # of members that others cannot reach
        self._slots = Slots(2 * (config.swarm or Swarm()).slots)
        self._reach = None if config.peers is None else Reach(config.peers)
        self._places = Admission(config.options.readers)
        self._manifests = Admission(config.options.readers)
        self._waiting = 0
        self._counts: Counter[str] = Counter()
        self._macs = ManifestMacs(config.manifest_key)
        self._auditor = Auditor()
        self._log_limit = LogLimit()
        self._closed = False

    def statistics(self) -> Statistics:
        """Return what the handlers have counted; the store counts the readers."""
        counts = self._counts
        return Statistics(
            waiting=self._waiting + self._places.waiting + self._manifests.waiting,
            requests=counts["requests"],
            refused=counts["refused"],
            bytes_sent=counts["bytes_sent"] + sum(body.sent for body in self._bodies),
            gone=counts["gone"],
            stalled=counts["stalled"],
        )

    def close(self) -> None:
        """Abort the bodies that are being sent, refuse every request. Idempotent."""
        self._closed = True
        for body in tuple(self._bodies):
            body.evict()
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
        if wants_page(request.headers.get("Accept", "")):
            return await self._answer(request, self._page, public=True)
        return await self._answer(request, self._landing)

    async def _answer(
        self,
        request: web.Request,
        handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
        *,
        public: bool = False,
    ) -> web.StreamResponse:
        """Admit a request and handle it; turn errors into responses; audit it."""
        self._counts["requests"] += 1
        with _being_handled(request) as caller, self._auditor.visit(request) as visit:
            try:
                await self._rounds.begin()
                is_public = self._admit(request, public=public)
                if caller is not None and not is_public:
                    caller.know()
                response = await handle(request)
            except ConnectionError:
                # Nobody reads this, but aiohttp wants a response.
                self._counts["gone"] += 1
                response = _Answer(status=HTTPStatus.SERVICE_UNAVAILABLE)
            except AiockptError as error:
                self._counts["refused"] += 1
                response = self._response_to(error)
                response.headers.update(self._identity)
            visit.status = response.status
        return response

    # -------------------------------------------------------------- admitting

    def _admit(self, request: web.Request, *, public: bool) -> bool:
        """Check a request; return whether it is answered without any token."""
        if self._closed:
            raise ClosedError("the server")
        config, token = self.config, self.config.token
        what = request.match_info.get("what")
        if what is not None:
            relayed = self.store.relayed(bearer(request.headers))
            if relayed is not None:
                request[RELAYED] = relayed
                token = bearer(request.headers)  # one of the relay's
        grant = admit(request.headers, token=token, hosts=config.hosts, public=public)
        if grant is not None:
            request[VISIT].receiver = grant.receiver
            grant.check(request.match_info.get("step"), now=time.time())
            request[LAPSES] = grant.lapses
        is_members = what == http.ResourceKind.MEMBERS.value
        allowed = _OF_MEMBERS if is_members else _OF_OTHERS
        if request.method not in allowed:
            raise RefusedError(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{request.method} is not answered here",
                {"Allow": ", ".join(allowed)},
            )
        transport = _transport_of(request)
        if transport not in self._tuned:
            with suppress(TypeError):  # uvloop's TLS: tuned again by each request
                self._tuned.add(transport)
            sockets.tune(
                transport,
                dead_after=2 * config.stall_timeout,
                began_classic=isinstance(request.protocol, Caller),
            )
        return public and "Authorization" not in request.headers

    # --------------------------------------------------------------- handling

    @property
    def _incarnation(self) -> str:
        """The id of this start of the sender; another one after each return."""
        returns = self.store.returns
        return (
            f"{self.config.incarnation}{returns:x}"
            if returns
            else self.config.incarnation
        )

    @property
    def _identity(self) -> dict[str, str]:
        return {http.INCARNATION_HEADER: self._incarnation}

    async def _latest(self, request: web.Request) -> web.StreamResponse:
        after = http.parse_after(request.query.getall(http.AFTER, []))
        known = request.headers.get(http.INCARNATION_HEADER)
        # After a restart of the sender, or a return, whatever it serves is news.
        restarted = known is not None and known != self._incarnation
        try:
            publication = await self._find(request, after=None if restarted else after)
        except StepNotFoundError as nothing:
            if after is None:
                raise
            headers = {**no_news_headers(nothing.serving), **self._identity}
            return _Answer(status=HTTPStatus.NO_CONTENT, headers=headers)
        headers, body = latest_reply(publication.servable.manifest)
        return _Answer(body=body, headers={**headers, **self._identity})

    async def _page(self, request: web.Request) -> web.StreamResponse:
        request[VISIT].outcome = STATUS
        headers, body = page_reply()
        return _moved(request) or _Answer(body=body, headers=headers)

    async def _landing(self, request: web.Request) -> web.StreamResponse:
        request[VISIT].outcome = STATUS
        now = self.store.latest
        manifest = now.servable.manifest if now is not None else None
        headers, body = landing_reply(manifest, self._status(now))
        headers.update(self._identity)
        return _moved(request) or _Answer(body=body, headers=headers)

    def _status(self, now: Publication | None) -> dict[str, object]:
        """Return what the status page shows; no token, and no lease."""
        statistics, swarm = self.store.statistics() + self.statistics(), None
        if now is not None and self.config.swarm is not None:
            members = now.tracker.statistics(_MOST_SHOWN)
            swarm = {
                "chunks": len(now.servable.manifest.grid),
                "given": now.tracker.given,
                "members": [each._asdict() for each in members],
            }
            if (more := len(now.tracker) - len(members)) > 0:
                swarm["more"] = more
        facts = {name: getattr(statistics, name) for name in _FACTS}
        return {**facts, "swarm": swarm}

    async def _resource(self, request: web.Request) -> web.StreamResponse:
        lease, ends = _lease_of(request)
        if lease is not None and ends:
            self.store.end_lease(lease)
            return _Stream(status=HTTPStatus.NO_CONTENT, headers=self._identity)
        resource, publication = await self._locate(request, lease)
        if resource.kind is http.ResourceKind.MEMBERS:
            return await self._members(request, publication, lease)
        manifest, is_have = (
            publication.servable.manifest,
            resource.kind is http.ResourceKind.HAVE,
        )
        method = "HEAD" if is_have else request.method  # a bitmap has no ranges
        reply = plan_reply(resource, manifest, request.headers, method)
        reply.headers.update(self._identity)
        if is_have:
            return await self._have(request, publication, reply)
        if RELAYED in request:
            return await self._relay(request, publication, resource, reply)
        if lease is not None and request.method == "GET":
            patience = self.config.stall_timeout
            if not (publication.has_lease(lease) or publication.has_others(lease)):
                publication.tracker.renew()  # a receive begins, and is the only one
            self.store.lease(publication, lease, patience=patience)
            reply.headers.update(self._invitation(request, publication, lease, reply))
        if resource.kind is http.ResourceKind.METADATA:
            reply.headers.update(await self._macs.headers_of(manifest))
            reply.headers.update(await self._offer(request, publication, lease))
            if (crowded := crowding()) is not None:
                reply.headers[http.BUSY_HEADER] = http.format_busy(*crowded)
            if lease is not None:
                silence = http.format_silence(self.config.stall_timeout)
                reply.headers[http.LEASE_HEADER] = silence
            if (base := self.store.base_of(publication)) is not None:
                tag = http.format_etag(base.snapshot_id)
                reply.headers[http.DELTA_BASE_HEADER] = tag
        if request.method == "HEAD" or reply.status == HTTPStatus.NOT_MODIFIED:
            return _Stream(status=reply.status, headers=reply.headers)
        return await self._send(request, publication, reply, lease)

    async def _locate(
        self, request: web.Request, lease: http.Lease | None
    ) -> tuple[http.Resource, Publication]:
        """Return what a request names, and the publication that has it."""
        step, relayed = request.match_info["step"], request.get(RELAYED)
        if step == http.LATEST and relayed is None:
            publication = await self._find(request)
            return _resource_of(request, str(publication.step)), publication
        resource = _resource_of(request, step)
        if relayed is None:
            found = await self._find(request, step=resource.step, lease=lease)
            return resource, found
        if relayed.step != resource.step:
            raise StepNotFoundError(resource.step, serving=relayed.step)
        return resource, relayed

    async def _send(
        self,
        request: web.Request,
        publication: Publication,
        reply: Reply,
        lease: http.Lease | None,
    ) -> web.StreamResponse:
        """Send a range or its delta, perhaps as soon as a slot is free."""
        if (base := self._delta_base(request, publication, reply)) is not None:
            delta = await self._delta(publication, base, reply, lease)
            if delta is not None:
                reply.status = HTTPStatus.IM_USED
                reply.headers["IM"] = http.DELTA
                tag = http.format_etag(base.snapshot_id)
                reply.headers[http.DELTA_BASE_HEADER] = tag
                reply.headers["Content-Length"] = str(delta.nbytes)
                return await self._send_body(request, publication, reply, lease, delta)
        if not self._needs_slot(publication, reply, lease):
            return await self._send_body(request, publication, reply, lease)
        nbytes, wait = reply.stop - reply.start, self._wait_of(request)
        async with self._slots.take(nbytes, wait=wait) as sent:
            return await self._send_body(request, publication, reply, lease, sent=sent)

    def _needs_slot(
        self, publication: Publication, reply: Reply, lease: http.Lease | None
    ) -> bool:
        """Return whether a body is for a member of a swarm, or for one to be.

        Long ranges are for receivers that do without others. They need no slot, since
        they would keep it for long.
        """
        chunks = len(_chunks_over(publication, reply))
        if lease is None or self.config.swarm is None:
            return False
        if not 0 < chunks <= _MOST_OF_SLOT:
            return False
        is_next = lease.joins and publication.has_others(lease)
        return is_next or publication.tracker.has(lease.id)

    # ------------------------------------------------------------------ swarm

    def _invitation(
        self,
        request: web.Request,
        publication: Publication,
        lease: http.Lease,
        reply: Reply,
    ) -> Mapping[str, str]:
        """Return the headers for a receiver that can join a swarm, or that has joined.

        A receiver that is alone is told nothing, so that it asks for nothing more.
        """
        if not lease.joins or self.config.swarm is None:
            return {}
        tracker = publication.tracker
        chunk = tracker.promise(lease.id, _chunks_over(publication, reply))
        if tracker.has(lease.id):
            return {} if chunk is None else {http.NEXT_CHUNK_HEADER: str(chunk)}
        if not publication.has_others(lease):
            return {}
        return {
            http.SWARM_HEADER: self._swarm_tokens(request, publication)[0],
            "Cache-Control": "no-store",
        }

    def _swarm_tokens(
        self, request: web.Request, publication: Publication
    ) -> tuple[Token, ...]:
        """Return the tokens of the swarm that count now, the one to send first."""
        lapses = request.get(LAPSES, math.inf)
        return tuple(
            swarm_token(self.config.token, publication.snapshot_id, generation)
            for generation in publication.tracker.tokens(lapses, now=time.time())
        )

    async def _members(
        self,
        request: web.Request,
        publication: Publication,
        lease: http.Lease | None,
    ) -> web.StreamResponse:
        """Add, renew or remove a member of the snapshot's swarm."""
        if self.config.swarm is None or RELAYED in request:
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is no swarm here")
        wanted, actual = request.headers.get("If-Match"), publication.snapshot_id
        if not http.if_match(wanted, actual):
            raise CheckpointChangedError(expected=(wanted or "")[:64], actual=actual)
        if lease is None:
            raise RemoteProtocolError(f"{http.LEASE_HEADER} must name the receive")
        tracker = publication.tracker
        if request.method == "DELETE":
            tracker.leave(lease.id)
            return _Stream(status=HTTPStatus.NO_CONTENT, headers=self._identity)
        said = await _read_announcement(request, timeout=self.config.stall_timeout)
        address = plain_address(request.remote or "")
        answer = tracker.announce(
            lease.id,
            said,
            address=address,
            trusts_url=self._trusts(said.url),
            link=_local_address(request),
            grant=request[VISIT].receiver,
        )
        answer.tokens = self._swarm_tokens(request, publication)
        if answer.seen is not None:
            self._tell_of_hidden(publication.step, address, said)
        if publication.has_lease(lease):
            # A member that gets everything from others sends heartbeats only.
            patience = max(self.config.stall_timeout, answer.lease)
            self.store.lease(publication, lease, patience=patience)
        if publication.has_others(lease):
            self._interrupt(publication)
        headers = {**no_news_headers(publication.step), **self._identity}
        headers["Content-Type"] = "application/json"
        return _Answer(body=http.format_announce_response(answer), headers=headers)

    def _trusts(self, url: str) -> bool:
        """Return whether others may connect to the host in a member's URL."""
        if self._reach is None or http.url_fault(url) is not None:
            return False
        return self._reach.allows(urlsplit(url).hostname or "")

    def _tell_of_hidden(self, step: int, address: str, said: http.Announcement) -> None:
        """Say once why receivers cannot serve each other, and what helps."""
        is_other_kind = said.local and (":" in said.local) != (":" in address)
        if self._has_told or is_other_kind:  # perhaps it knows another connection
            return
        self._has_told = True
        emit(
            TransferEvent(
                stop="swarm",
                step=step,
                peer=address,
                detail=f"hides a member: {http.why_hidden(said, address)}",
                level=logging.WARNING,
            )
        )

    def _interrupt(self, publication: Publication) -> None:
        """Have the receivers of long ranges ask again, so that they join the swarm.

        This happens to a receive at most once a second, whoever comes and goes.
        """
        now = asyncio.get_running_loop().time()
        for lease, since in [*self._interrupted.items()]:
            if now - since > _INTERRUPTS:
                del self._interrupted[lease]
        short, again = publication.servable.manifest.chunk_bytes, {*self._interrupted}
        for body, of in tuple(self._bodies.items()):
            long = of is publication and body.left > short
            if long and body.joins and body.joins not in again:
                self._interrupted[body.joins] = now
                body.interrupt()

    async def _have(
        self, request: web.Request, publication: Publication, reply: Reply
    ) -> web.StreamResponse:
        """Send the bitmap of the chunks, and then each further chunk that arrives."""
        relay, count = publication.servable, len(publication.servable.manifest.grid)
        reply.headers["Cache-Control"] = "no-store"
        for name in ("Content-Length", "Content-Range", "Accept-Ranges"):
            reply.headers.pop(name, None)
        if request.method == "HEAD" or reply.status == HTTPStatus.NOT_MODIFIED:
            return _Stream(status=reply.status, headers=reply.headers)
        if not isinstance(relay, Relay):
            body = http.format_have((1 << count) - 1, count)
            return _Answer(body=body, headers=reply.headers)
        host, watchers = network_of(request.remote or ""), self._watchers
        is_full = watchers[host] >= _MOST_WATCHERS_OF_HOST
        if is_full or watchers.total() >= _MOST_WATCHERS:
            raise PeerBusy(retry_after=_RETRY_AFTER)
        response = _Stream(headers=reply.headers)
        asked = http.parse_prefer_wait(request.headers.get("Prefer"))
        every = max(asked or _KEEP_ALIVE, _SHORTEST)
        watchers[host] += 1
        try:
            await response.prepare(request)
            seen = len(relay.order)
            data = http.format_have(relay.have, count)
            while True:
                async with asyncio.timeout(self.config.stall_timeout):
                    await response.write(data)
                if seen >= count or relay.ended or self._closed:
                    break
                if seen == len(relay.order):
                    await relay.news.wait(every)
                await asyncio.sleep(relay.batch())  # more may arrive
                _transport_of(request)
                new = relay.order[seen:]
                seen += len(new)
                data = http.format_chunks(new)
            await response.write_eof()
        except TimeoutError:
            _transport_of(request).abort()
        finally:
            watchers[host] -= 1
            if not watchers[host]:
                del watchers[host]
        return response

    async def _relay(
        self,
        request: web.Request,
        publication: Publication,
        resource: http.Resource,
        reply: Reply,
    ) -> web.StreamResponse:
        """Send what has been verified of a checkpoint that is being received."""
        relay = cast("Relay", publication.servable)
        if resource.kind is http.ResourceKind.METADATA:
            reply.headers.update(relay.headers)
        chunks = _chunks_over(publication, reply)
        if reply.status == HTTPStatus.NOT_MODIFIED:
            return _Stream(status=reply.status, headers=reply.headers)
        if len(chunks) > _MOST_OF_SLOT:
            raise RefusedError(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                f"a member sends at most {_MOST_OF_SLOT} chunks at a time",
            )
        if not relay.has(chunks):
            return _Stream(status=HTTPStatus.NO_CONTENT, headers=self._identity)
        if request.method == "HEAD":
            return _Stream(status=reply.status, headers=reply.headers)
        nbytes, wait = reply.stop - reply.start, self._wait_of(request)
        least = nbytes / relay.pace if relay.pace else 0.0
        async with relay.slots.take(nbytes, wait=wait, least=least) as sent:
            copy = None
            if chunks and relay.is_lent:
                copy = await self._copy(publication, chunks)
            if relay.ended:
                raise StepNotFoundError(resource.step)
            return await self._send_body(
                request, publication, reply, None, sent=sent, copy=copy
            )

    async def _copy(self, publication: Publication, chunks: range) -> Copy | None:
        """Return a copy of chunks of a relay, or end the relay if one has changed."""
        relay = cast("Relay", publication.servable)
        async with self.store.reading(publication, evict=relay.end):
            copy = await self._threads.run(relay.copied, chunks)
        if copy is None:
            relay.end()
        return copy

    def _wait_of(self, request: web.Request, *, unasked: float = 0.0) -> float:
        """Return the seconds for which a request waits for a slot or a place."""
        asked = http.parse_prefer_wait(request.headers.get("Prefer"))
        return min(unasked if asked is None else asked, self.config.max_wait)

    # ----------------------------------------------------------------- deltas

    def _delta_base(
        self, request: web.Request, publication: Publication, reply: Reply
    ) -> Publication | None:
        """Return the base of a delta if the request permits such an answer."""
        base = self.store.base_of(publication)
        if base is None or reply.status != HTTPStatus.PARTIAL_CONTENT:
            return None
        # A long range would keep both snapshots for as long as it is encoded.
        chunks = _chunks_of(publication, reply)
        if not chunks or (len(chunks) > 1 and reply.stop - reply.start > _DELTAS):
            return None
        asked = http.asks_for_delta(request.headers, base.snapshot_id)
        return base if asked else None

    async def _delta(
        self,
        publication: Publication,
        base: Publication,
        reply: Reply,
        lease: http.Lease | None,
    ) -> DeltaBody | None:
        """Return the deltas of a range, or None if the range itself is better.

        If the store needs the memory of a snapshot, this ends after the chunks that are
        being encoded, and returns None.
        """
        reading = self.store.reading
        with anyio.CancelScope() as scope:
            async with (
                reading(publication, evict=scope.cancel, lease=lease),
                reading(base, evict=scope.cancel),
            ):
                return await self._deltas.body(
                    publication, base, _chunks_of(publication, reply)
                )
        return None

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
            _transport_of(request)  # the application around us need not notice
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
        publication: Publication,
        lease: http.Lease | None,
    ) -> Mapping[str, str]:
        """Return the header that offers the memory to a receiver on this host."""
        if self._lender is None or request.method != "GET":
            return {}
        probe, receiver = request.headers.get(PROBE_HEADER), request[VISIT].receiver
        offer = await self._lender.offer(publication, probe, receiver, lease)
        # A ticket is good for a while only: no cache should keep it.
        return {OFFER_HEADER: offer, "Cache-Control": "no-store"} if offer else {}

    # ---------------------------------------------------------------- sending

    async def _send_body(
        self,
        request: web.Request,
        publication: Publication,
        reply: Reply,
        lease: http.Lease | None,
        delta: DeltaBody | None = None,
        *,
        sent: Callable[[], None] | None = None,
        copy: Copy | None = None,
    ) -> web.StreamResponse:
        """Send the reply's range of the publication's file, or the delta of it.

        A ``copy`` has the bytes of the data segment that are sent.

        If the body holds a slot, this returns only when almost all of it has left, and
        calls ``sent`` if that succeeds.
        """
        if publication.lost is not None:
            raise publication.lost
        servable, nbytes = publication.servable, reply.stop - reply.start

        def views(start: int, stop: int) -> list[memoryview]:
            first, last = reply.start + start, reply.start + stop
            return _file_views(publication, first, last, copy)

        if delta is not None:
            nbytes, views = delta.nbytes, delta.views
        transport, unsent, small = _transport_of(request), 0, SMALL_BYTES
        if sent is not None:
            unsent = small = max(nbytes // _UNSENT, _LEAST_UNSENT)
        if unsent or self.config.swarm is not None:  # or end earlier limits
            sockets.limit_unsent(transport, unsent)
            rate = servable.pace if isinstance(servable, Relay) else None
            sockets.pace(transport, rate)

        body = BodySender(
            transport,
            nbytes,
            views,
            stall_timeout=self.config.stall_timeout,
            threads=self._threads,
            joins=lease.id if lease and lease.joins and delta is None else "",
        )
        is_small = nbytes <= small
        place: AbstractAsyncContextManager[None] = nullcontext()
        if not is_small:
            is_manifest = reply.stop <= servable.manifest.header_bytes
            places = self._manifests if is_manifest else self._places
            wait = self._wait_of(request, unasked=self.config.stall_timeout / 2)
            place = places.take(network_of(request.remote or ""), body, wait=wait)
        try:
            async with (
                place,
                self._reading(request, publication, lease, body),
            ):
                is_lent = isinstance(servable, Relay) and servable.is_lent
                has_data = reply.stop > len(servable.manifest.header)
                if is_lent and has_data and copy is None:  # it was lent meanwhile
                    raise PeerBusy(retry_after=0.0)
                if is_small:
                    data = b"".join(views(0, nbytes))
                    self._counts["bytes_sent"] += nbytes
                    request[VISIT].nbytes = body.sent = body.arrived = nbytes
                    return _Answer(
                        status=reply.status, body=data, headers=reply.headers
                    )
                response = _Stream(status=reply.status, headers=reply.headers)
                with self._accounting(request, publication, body):
                    await body.run(request, response)
                if sent is not None and body.outcome is Outcome.SENT:
                    sent()
            return response
        finally:
            if body.joins:
                given = _chunks_within(publication, reply.start, body.arrived)
                publication.tracker.give(given)

    @asynccontextmanager
    async def _reading(
        self,
        request: web.Request,
        publication: Publication,
        lease: http.Lease | None,
        body: BodySender,
    ) -> AsyncIterator[None]:
        """Keep the memory during the block."""
        _transport_of(request)  # the client may have left while it waited
        is_relay = isinstance(publication.servable, Relay)
        evict = body.interrupt if is_relay else body.evict
        async with self.store.reading(publication, evict=evict, lease=lease):
            yield

    @contextmanager
    def _accounting(
        self, request: web.Request, publication: Publication, body: BodySender
    ) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._bodies[body] = publication
        try:
            yield
        finally:
            del self._bodies[body]
            self._counts["bytes_sent"] += body.sent
            outcome = body.outcome or Outcome.GONE
            if outcome is not Outcome.SENT:
                self._counts[outcome.value] += 1
            visit = request[VISIT]
            visit.nbytes, visit.outcome = body.sent, outcome.value
            level = _LEVELS[outcome]
            if isinstance(publication.servable, Relay):  # of another member
                level = min(level, logging.INFO)
            if level == logging.WARNING and not self._log_limit.passes(outcome):
                level = logging.INFO
            emit(
                TransferEvent(
                    stop="evict" if outcome is Outcome.EVICTED else "serve",
                    step=publication.step,
                    peer=request.remote or "",
                    nbytes=body.sent,
                    seconds=loop.time() - began,
                    detail="" if outcome is Outcome.SENT else outcome.value,
                    level=level,
                )
            )

    def _response_to(self, error: AiockptError) -> web.Response:
        problem = to_problem(error)
        if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            problem.headers["Retry-After"] = f"{_RETRY_AFTER:.0f}"
            if self._log_limit.passes(type(error)):
                logger.error("a request failed", exc_info=error)
        headers = {**COMMON_HEADERS, **problem.headers}
        return _Answer(status=problem.status, headers=headers, body=problem.body)


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


@contextmanager
def _being_handled(request: web.Request) -> Iterator[Caller | None]:
    """Keep a connection of our own open during the block, and return it."""
    caller = request.protocol
    if not isinstance(caller, Caller):
        yield None
        return
    caller.begin()
    try:
        yield caller
    finally:
        caller.end()


class _Rounds:
    """Spreads requests over the rounds of the event loop, in order of arrival.

    Thousands of requests can arrive in one round. Each costs a fraction of a
    millisecond, and everything else on the loop would wait for the sum.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def begin(self) -> None:
        """Return in this round if it has room, or else in a later one."""
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._next, loop)
        if self._begun < _PER_ROUND:
            self._begun += 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = 0
        while self._waiting and self._begun < _PER_ROUND:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its client may have left
                waiter.set_result(None)
                self._begun += 1
        if self._begun:
            loop.call_soon(self._next, loop)


def _file_views(
    publication: Publication, start: int, stop: int, copy: Copy | None
) -> list[memoryview]:
    """Return the bytes ``[start, stop)`` of a checkpoint's header and data segment.

    A ``copy`` takes the place of the segment.

    Raises:
        PeerFailedError: the bytes are a state dict's own, and its memory has changed.
    """
    servable = publication.servable
    header = servable.manifest.header
    split = len(header)
    views = [memoryview(header)[start:stop]] if start < split else []
    if stop > split:
        try:
            views += (copy or servable).views(max(start - split, 0), stop - split)
        except LocalProtocolError as error:
            detail = f"step {publication.step} cannot be served any more: {error}"
            if publication.lost is None:
                logger.warning("%s", detail)
            publication.lost = PeerFailedError(None, detail)
            raise publication.lost from error
    return views


def _chunks_over(publication: Publication, reply: Reply) -> range:
    """Return the chunks of which a reply has bytes."""
    manifest = publication.servable.manifest
    size, head = manifest.chunk_bytes, manifest.header_bytes
    first, last = max(reply.start - head, 0), max(reply.stop - head, 0)
    return range(first // size, -(-last // size))


def _chunks_within(publication: Publication, start: int, nbytes: int) -> range:
    """Return the chunks whose end lies in a part of the file.

    A receiver that asks for the end of a chunk has its beginning.
    """
    manifest = publication.servable.manifest
    size, head = manifest.chunk_bytes, manifest.header_bytes
    first, last = max(start - head, 0), max(start + nbytes - head, 0)
    stop = len(manifest.grid) if last == manifest.segment_bytes else last // size
    return range(min(first // size, stop), stop)


def _chunks_of(publication: Publication, reply: Reply) -> range:
    """Return the chunks of a range; none if the range is not made of whole chunks."""
    manifest = publication.servable.manifest
    start = reply.start - manifest.header_bytes
    stop = reply.stop - manifest.header_bytes
    size, whole = manifest.chunk_bytes, manifest.segment_bytes
    if start < 0 or start % size or (stop % size and stop != whole):
        return range(0)
    return range(start // size, -(-stop // size))


def _transport_of(request: web.Request) -> asyncio.Transport:
    """Return a request's connection.

    Raises:
        ConnectionResetError: its client has left.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client has left")
    return transport


def _local_address(request: web.Request) -> str:
    """Return the address of this host at which a request came in."""
    name = _transport_of(request).get_extra_info("sockname")
    return plain_address(str(name[0])) if isinstance(name, tuple) else ""


def _moved(request: web.Request) -> web.Response | None:
    """Return the way to the address with a slash at its end, unless it has one.

    What is there refers to paths below it.
    """
    path = request.rel_url.raw_path
    if path.endswith("/"):
        return None
    headers = {**COMMON_HEADERS, "Location": f"{path.rpartition('/')[2]}/"}
    return _Answer(status=HTTPStatus.PERMANENT_REDIRECT, headers=headers)


def _resource_of(request: web.Request, step: str) -> http.Resource:
    """Return the resource that a request names.

    Raises:
        RefusedError: there is no such resource.
    """
    try:
        return http.parse_resource(step, request.match_info["what"])
    except RemoteProtocolError as error:
        raise RefusedError(HTTPStatus.NOT_FOUND, str(error)) from None


def _lease_of(request: web.Request) -> tuple[http.Lease | None, bool]:
    """Return the lease that a request names, and whether the request ends it.

    Raises:
        RemoteProtocolError: the header is malformed.
    """
    now, headers = asyncio.get_running_loop().time(), request.headers
    lease = http.parse_lease(
        headers.get(http.LEASE_HEADER), now=now, swarm=headers.get(http.SWARM_HEADER)
    )
    return lease, lease is not None and lease.until <= now


async def _read_announcement(
    request: web.Request, *, timeout: float
) -> http.Announcement:
    """Return what a member says.

    Raises:
        RemoteProtocolError: it is too long, or malformed, or does not come.
    """
    data = b""
    try:
        async with asyncio.timeout(timeout):
            while piece := await request.content.readany():
                data += piece
                if len(data) > _MAX_ANNOUNCEMENT:
                    raise RemoteProtocolError("the announcement is too long")
        return msgspec.json.decode(data, type=http.Announcement)
    except TimeoutError:
        raise RemoteProtocolError("the announcement did not come") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"the announcement is malformed: {error}") from None
