"""The swarm's part of a server, at the source of a snapshot and at its members.

At the source, the receivers of one snapshot are invited to serve each other, and the
tracker of the snapshot names them to each other. What members are sent waits for a
slot. A member serves a `Relay`, which has some of the chunks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web

from aiockpt.errors import (
    CheckpointChangedError,
    RemoteProtocolError,
    StepNotFoundError,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.format.manifest import Manifest
from aiockpt.http import protocol as http
from aiockpt.http.audit import VISIT
from aiockpt.http.body_writer import BodySender, Outcome
from aiockpt.http.extension import (
    UNLIMITED,
    Asked,
    BodyLimits,
    PlainResponse,
    PlainStream,
    ServiceExtension,
    transport_of,
)
from aiockpt.http.handlers import ServerConfig
from aiockpt.http.options import Swarm
from aiockpt.http.problems import PeerBusy, RefusedError
from aiockpt.http.responses import Reply, chunks_of, no_news_headers, plan_reply
from aiockpt.http.security import Reach, network_of, plain_address
from aiockpt.http.status import ShownSwarm
from aiockpt.http.store import Publication, Store
from aiockpt.http.tokens import swarm_token
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.secrets import Token
from aiockpt.swarm import messages
from aiockpt.swarm.relay import Relay, Slots
from aiockpt.swarm.tracker import Tracker

_MEMBERS: Final = http.ResourceKind.MEMBERS.value
_HAVE: Final = http.ResourceKind.HAVE.value

_RETRY_AFTER_S: Final = 1.0
_KEEP_ALIVE_S: Final = 2.0  # between two signs of life of a stream, unless asked for
_MIN_KEEP_ALIVE_S: Final = 0.1
_BATCH_CHUNKS: Final = 3  # that a stream announces together, on average
_MIN_BATCH_S: Final = 0.02  # for which a stream collects chunks
_MAX_BATCH_S: Final = 0.5
_INTERRUPT_S: Final = 1.0  # between two interruptions of the same receive
_MAX_WATCHERS: Final = 128  # members that are told of new chunks
_MAX_WATCHERS_OF_HOST: Final = 32  # at an IPv4 address; it may have IPv6, too
_MAX_SLOT_CHUNKS: Final = 2  # in a body that holds a slot
_UNSENT_PART: Final = 4  # the kernel may hold a fourth of such a body
_MIN_UNSENT_BYTES: Final = 32 << 10  # that the kernel may hold in any case
_MAX_MEMBERS_SHOWN: Final = 200  # on the status page
_MAX_ANNOUNCEMENT_BYTES: Final = 8 << 10


class SwarmEndpoint(ServiceExtension):
    """Serves the routes of a swarm, and limits what its members are sent.

    Args:
        config: How it is served. Without ``swarm`` in it, nobody is invited, and nobody
            can join.
        bridge: Runs what blocks.
        store: What is served.
    """

    methods: Mapping[str, Sequence[str]] = {
        _MEMBERS: ("POST", "DELETE"),
        _HAVE: ("GET", "HEAD"),
    }

    def __init__(self, config: ServerConfig, bridge: Bridge, store: Store) -> None:
        self._store, self._config, self._bridge = store, config, bridge
        self._trackers = WeakKeyDictionary[Publication, Tracker]()
        self._slots = Slots(2 * (config.swarm or Swarm()).slots)
        self._reach = None if config.peers is None else Reach(config.peers)
        # The bodies of receivers that can join, and the ids of their leases.
        self._joining: dict[BodySender, tuple[Publication, str]] = {}
        self._interrupted: dict[str, float] = {}  # ids of leases, and when
        self._watchers = Counter[str]()  # streams of what a relay has, by host
        self._has_told = False  # that others cannot reach a member

    def tracker(self, publication: Publication) -> Tracker:
        """Return the tracker of a publication; make it at the first call."""
        found = self._trackers.get(publication)
        if found is None:
            found = Tracker(len(publication.servable.manifest.grid))
            self._trackers[publication] = found
        return found

    async def answer(self, asked: Asked) -> web.StreamResponse:
        """Answer a request for the members of a swarm, or for what this server has."""
        if asked.resource.kind is http.ResourceKind.MEMBERS:
            return await self._members(asked)
        return await self._have(asked)

    def status(self, publication: Publication) -> ShownSwarm | None:
        """Return the members, and how many chunks the source has given."""
        if self._config.swarm is None:
            return None
        tracker = self.tracker(publication)
        members = tracker.statistics(_MAX_MEMBERS_SHOWN)
        return ShownSwarm(
            chunks=len(publication.servable.manifest.grid),
            given=tracker.promises.given,
            members=members,
            more=max(len(tracker) - len(members), 0),
        )

    # ---------------------------------------------------- what each answer says

    def headers(self, asked: Asked, reply: Reply) -> Mapping[str, str]:
        """Return the invitation to a swarm, or what goes with a relay's manifest.

        Raises:
            RefusedError: 416; a member does not send so much at a time.
        """
        relay = asked.publication.servable
        chunks = chunks_of(reply, relay.manifest)
        if not isinstance(relay, Relay):
            if asked.lease is None or asked.request.method != "GET":
                return {}
            return self._invitation(asked, asked.lease, chunks)
        is_sent = reply.status != HTTPStatus.NOT_MODIFIED
        if is_sent and len(chunks) > _MAX_SLOT_CHUNKS:
            raise RefusedError(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                f"a member sends at most {_MAX_SLOT_CHUNKS} chunks at a time",
            )
        is_manifest = asked.resource.kind is http.ResourceKind.METADATA
        return relay.headers if is_manifest else {}

    def _invitation(
        self, asked: Asked, lease: http.Lease, chunks: range
    ) -> Mapping[str, str]:
        """Return the headers for a receiver that can join a swarm, or that has joined.

        A receiver that is alone is told nothing, so that it asks for nothing more.
        """
        publication = asked.publication
        tracker = self.tracker(publication)
        has_others = self._has_others(publication, lease)
        if not (publication.has_lease(lease) or has_others):
            tracker.promises.reset()  # a receive begins, and is the only one
        if not lease.joins or self._config.swarm is None:
            return {}
        chunk = tracker.promise(lease.id, chunks)
        if tracker.has(lease.id):
            return {} if chunk is None else {http.NEXT_CHUNK_HEADER: str(chunk)}
        if not has_others:
            return {}
        return {
            http.SWARM_HEADER: self._tokens(asked)[0],
            "Cache-Control": "no-store",
        }

    def _has_others(self, publication: Publication, lease: http.Lease) -> bool:
        """Return whether another receive than this one is in the swarm, or can join."""
        tracker = self.tracker(publication)
        if len(tracker) > tracker.has(lease.id):
            return True
        return publication.has_joining(besides=lease)

    def _tokens(self, asked: Asked) -> tuple[Token, ...]:
        """Return the tokens of the swarm that count now, the one to send first."""
        publication, lapses = asked.publication, asked.request[VISIT].lapses
        return tuple(
            swarm_token(self._config.token, publication.snapshot_id, generation)
            for generation in self.tracker(publication).tokens(lapses, now=time.time())
        )

    # ------------------------------------------------------------ what is sent

    @asynccontextmanager
    async def sending(
        self, asked: Asked, reply: Reply, body: BodySender
    ) -> AsyncIterator[BodyLimits]:
        """Admit a body once a slot is free, if it is for a member or a future member.

        A body holds its slot until almost all of it has left.

        Raises:
            PeerBusy: no slot was free as long as the request waits.
            StepNotFoundError: the relay has ended meanwhile.
        """
        relay = asked.publication.servable
        chunks = chunks_of(reply, relay.manifest)
        nbytes, wait = reply.stop - reply.start, asked.wait(self._config.max_wait)
        unsent = max(nbytes // _UNSENT_PART, _MIN_UNSENT_BYTES)
        if isinstance(relay, Relay):
            async with relay.slots.take(nbytes, wait=wait) as sent:
                copy = None
                if chunks and relay.is_lent:
                    async with self._store.reading(asked.publication, evict=relay.end):
                        copy = await self._bridge.run(relay.copied, chunks)
                    if copy is None:  # the caller of the receive has changed a chunk
                        relay.end()
                if relay.ended:
                    raise StepNotFoundError(asked.publication.step)
                rate = relay.slots.body_rate
                yield BodyLimits(unsent, rate, is_quiet=True, copy=copy)
                if body.outcome is Outcome.SENT:
                    sent()
        elif self._needs_slot(asked, chunks):
            async with self._slots.take(nbytes, wait=wait) as sent:
                with self._giving(asked, reply, body):
                    yield BodyLimits(unsent)
                if body.outcome is Outcome.SENT:
                    sent()
        else:
            with self._giving(asked, reply, body):
                yield UNLIMITED

    def _needs_slot(self, asked: Asked, chunks: range) -> bool:
        """Return whether a body is for a member of a swarm, or for a future member.

        Long ranges are for receivers that do without others. They need no slot, since
        they would keep it for long.
        """
        publication, lease = asked.publication, asked.lease
        if lease is None or self._config.swarm is None:
            return False
        if not 0 < len(chunks) <= _MAX_SLOT_CHUNKS:
            return False
        is_next = lease.joins and self._has_others(publication, lease)
        return is_next or self.tracker(publication).has(lease.id)

    @contextmanager
    def _giving(self, asked: Asked, reply: Reply, body: BodySender) -> Iterator[None]:
        """Tell the tracker which chunks a receiver gets, if it can join the swarm."""
        publication, lease = asked.publication, asked.lease
        if lease is None or not lease.joins:
            yield
            return
        self._joining[body] = publication, lease.id
        try:
            yield
        finally:
            del self._joining[body]
            manifest = publication.servable.manifest
            given = _chunks_within(manifest, reply.start, body.arrived)
            self.tracker(publication).promises.give(given)

    # ------------------------------------------------------------- the members

    async def _members(self, asked: Asked) -> web.StreamResponse:
        """Add, renew or remove a member of the snapshot's swarm."""
        request, publication, lease = asked.request, asked.publication, asked.lease
        if self._config.swarm is None or publication.is_relay:
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is no swarm here")
        wanted, actual = request.headers.get("If-Match"), publication.snapshot_id
        if not http.if_match(wanted, actual):
            raise CheckpointChangedError(expected=(wanted or "")[:64], actual=actual)
        if lease is None:
            raise RemoteProtocolError(f"{http.LEASE_HEADER} must name the receive")
        tracker = self.tracker(publication)
        if request.method == "DELETE":
            tracker.leave(lease.id)
            return PlainStream(status=HTTPStatus.NO_CONTENT, headers=asked.identity)
        stall_timeout = self._config.stall_timeout
        said = await _read_announcement(request, timeout=stall_timeout)
        address = plain_address(request.remote or "")
        answer = tracker.announce(
            lease.id,
            said,
            address=address,
            trusts_url=self._trusts(said.url),
            link=_local_address(request),
            grant=request[VISIT].receiver,
        )
        answer.tokens = self._tokens(asked)
        if answer.seen is not None:
            self._tell_of_hidden(publication.step, address, said)
        if publication.has_lease(lease):
            # A member that gets everything from others sends heartbeats only.
            silent = max(stall_timeout, answer.lease)
            self._store.lease(publication, lease, silence_timeout=silent)
        if self._has_others(publication, lease):
            self._interrupt(publication)
        headers = {**no_news_headers(publication.step), **asked.identity}
        headers["Content-Type"] = "application/json"
        body = messages.format_announce_response(answer)
        return PlainResponse(body=body, headers=headers)

    def _trusts(self, url: str) -> bool:
        """Return whether others may connect to the host in a member's URL."""
        if self._reach is None or http.url_fault(url) is not None:
            return False
        return self._reach.allows(urlsplit(url).hostname or "")

    def _tell_of_hidden(
        self, step: int, address: str, said: messages.Announcement
    ) -> None:
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
                detail=f"hides a member: {messages.why_hidden(said, address)}",
                level=logging.WARNING,
            )
        )

    def _interrupt(self, publication: Publication) -> None:
        """Interrupt the bodies of long ranges, so that their receivers join the swarm.

        This happens to a receive at most once a second, whoever comes and goes.
        """
        now = asyncio.get_running_loop().time()
        for lease, since in [*self._interrupted.items()]:
            if now - since > _INTERRUPT_S:
                del self._interrupted[lease]
        short, again = publication.servable.manifest.chunk_bytes, {*self._interrupted}
        for body, (of, lease) in tuple(self._joining.items()):
            is_long = of is publication and body.sent and body.left > short
            if is_long and lease not in again:
                self._interrupted[lease] = now
                body.interrupt()

    # -------------------------------------------------------- what is here

    async def _have(self, asked: Asked) -> web.StreamResponse:
        """Send the bitmap of the chunks, and then each further chunk that arrives."""
        request, servable = asked.request, asked.publication.servable
        count = len(servable.manifest.grid)
        whole = http.Resource(http.ResourceKind.FULL, asked.resource.step)
        # A bitmap has no ranges.
        reply = plan_reply(whole, servable.manifest, request.headers, "HEAD")
        headers = {**reply.headers, **asked.identity, "Cache-Control": "no-store"}
        for name in ("Content-Length", "Accept-Ranges"):
            headers.pop(name, None)
        if request.method == "HEAD" or reply.status == HTTPStatus.NOT_MODIFIED:
            return PlainStream(status=reply.status, headers=headers)
        have = messages.format_have(servable.have, count)
        if not isinstance(servable, Relay):
            return PlainResponse(body=have, headers=headers)
        response = PlainStream(headers=headers)
        with self._watching(network_of(request.remote or "")):
            await self._stream(request, response, servable)
        return response

    @contextmanager
    def _watching(self, host: str) -> Iterator[None]:
        """Count a stream of a relay's chunks for as long as the block runs.

        Raises:
            PeerBusy: there are too many streams, to this host or at all.
        """
        watchers = self._watchers
        is_full = watchers[host] >= _MAX_WATCHERS_OF_HOST
        if is_full or watchers.total() >= _MAX_WATCHERS:
            raise PeerBusy(retry_after=_RETRY_AFTER_S)
        watchers[host] += 1
        try:
            yield
        finally:
            watchers[host] -= 1
            if not watchers[host]:
                del watchers[host]

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, relay: Relay
    ) -> None:
        asked = http.parse_prefer_wait(request.headers.get("Prefer"))
        every = max(asked or _KEEP_ALIVE_S, _MIN_KEEP_ALIVE_S)
        count = len(relay.manifest.grid)
        loop = asyncio.get_running_loop()
        try:
            await response.prepare(request)
            seen = len(relay.order)
            data = messages.format_have(relay.have, count)
            while True:
                async with asyncio.timeout(self._config.stall_timeout):
                    await response.write(data)
                if seen >= count or relay.ended:
                    break
                if seen == len(relay.order):
                    await relay.news.wait(every)
                # A chunk that is announced late is served late. But an announcement
                # costs as much as a few hundred kilobytes, and goes to many members.
                seconds = loop.time() - relay.began
                batch = _BATCH_CHUNKS * seconds / max(len(relay.order), 1)
                await asyncio.sleep(min(max(batch, _MIN_BATCH_S), _MAX_BATCH_S))
                transport_of(request)
                new = relay.order[seen:]
                seen += len(new)
                data = messages.format_chunks(new)
            await response.write_eof()
        except TimeoutError:
            transport_of(request).abort()


def _chunks_within(manifest: Manifest, start: int, nbytes: int) -> range:
    """Return the chunks whose end lies in a part of the file.

    A receiver that asks for the end of a chunk has its beginning.
    """
    size, head = manifest.chunk_bytes, manifest.header_bytes
    first, last = max(start - head, 0), max(start + nbytes - head, 0)
    stop = len(manifest.grid) if last == manifest.segment_bytes else last // size
    return range(min(first // size, stop), stop)


def _local_address(request: web.Request) -> str:
    """Return the address of this host at which a request came in."""
    name = transport_of(request).get_extra_info("sockname")
    return plain_address(str(name[0])) if isinstance(name, tuple) else ""


async def _read_announcement(
    request: web.Request, *, timeout: float
) -> messages.Announcement:
    """Return the announcement in a member's request.

    Raises:
        RemoteProtocolError: it is too long, or malformed, or does not come.
    """
    data = b""
    try:
        async with asyncio.timeout(timeout):
            while piece := await request.content.readany():
                data += piece
                if len(data) > _MAX_ANNOUNCEMENT_BYTES:
                    raise RemoteProtocolError("the announcement is too long")
        return messages.ANNOUNCEMENT.decode(data)
    except TimeoutError:
        raise RemoteProtocolError("the announcement did not come") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"the announcement is malformed: {error}") from None
