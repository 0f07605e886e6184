"""A receive as a member of a swarm: it joins, announces itself, and serves what it has.

Nothing is sent before the source has said that others receive the same snapshot. From
then on, one task announces the receive and learns which other members there are.
`Membership` adds these members to the download, and watches which chunks they have. It
marks each verified chunk in the relay, which this process serves to the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import anyio
import msgspec
from aiohttp import hdrs

from aiockpt.errors import (
    Advice,
    AiockptError,
    ClosedError,
    RemoteProtocolError,
    StepNotFoundError,
    advice,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http import protocol as http
from aiockpt.http.client import CheckedResponse, CheckpointClient, Request
from aiockpt.http.download import Download, ReceiveExtension
from aiockpt.http.host import Front
from aiockpt.http.listen import Endpoint
from aiockpt.http.options import Swarm
from aiockpt.http.peers import Peer
from aiockpt.http.security import Scope, endpoint, scope_of
from aiockpt.http.server import CheckpointServer
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.same_host import format_mark, identity
from aiockpt.runtime.secrets import Token
from aiockpt.runtime.tasks import task_group
from aiockpt.swarm import messages
from aiockpt.swarm.policy import FIRST, HEARTBEATS_PER_LEASE
from aiockpt.swarm.relay import Relay, Slots
from aiockpt.transfer.source import ChunkDestination

_MAX_MEMBERS: Final = 24  # that are asked for chunks; the tracker names no more
_MAX_ANSWER_BYTES: Final = 64 << 10  # of an answer to an announcement
_MAX_KNOWN_IDS: Final = 64  # of members, in an announcement
_MAX_BAD_IDS: Final = 16  # of members that sent wrong bytes, in an announcement
_MAX_AVOIDED_IDS: Final = 6  # of members that failed; each hides one from the source
_HOPE_S: Final = 1.0  # for which a receive waits to hear of others
_AWAY_S: Final = 10.0  # for which a member that failed once is not asked
_MAX_AWAY_DOUBLINGS: Final = 6  # of that time, one for each further failure
_FIRST_LEASE_S: Final = 10.0  # until an announcement was answered
_MIN_LEASE_S: Final = 3.0
_MAX_LEASE_S: Final = 3600.0
_REPORT_S: Final = 1.0  # from an announcement to one with a complaint
_NEW_AT_ONCE: Final = 24.0  # members that a receive may get to know at once
_NEW_PER_S: Final = 2.0  # members that it may get to know on average
_FAREWELL_S: Final = 1.0  # in which the source hears that a member leaves
_LOOK_S: Final = 0.1  # between two looks at which members are known
_RECORD_BYTES: Final = 4  # of a chunk's number
_EMPTY_RECORDS: Final = 100  # records without a chunk that a member may send at once
_EMPTY_RECORDS_PER_S: Final = 20.0  # that it may send on average


class _Joined(NamedTuple):
    """The source whose swarm a receive has joined, its relay, and the loop time."""

    source: Peer
    relay: Relay
    since: float

    def request(self, method: str, *, status: int, body: bytes = b"") -> Request:
        """Return a request to the tracker."""
        manifest = self.relay.manifest
        headers: dict[str, str] = {
            hdrs.IF_MATCH: http.format_etag(manifest.snapshot_id)
        }
        if body:
            headers[hdrs.CONTENT_TYPE] = "application/json"
        return Request(
            origin=self.source.origin,
            method=method,
            path=http.format_resource(
                http.Resource(http.ResourceKind.MEMBERS, manifest.step)
            ),
            headers=headers,
            body=body,
            status=status,
            step=manifest.step,
            snapshot_id=manifest.snapshot_id,
        )

    @property
    def scope(self) -> Scope:
        """The scope in which the source is, for this receiver."""
        host = self.source.line.remote
        return scope_of(host or urlsplit(self.source.origin.base_url).hostname or "")

    def is_private(self, url: str) -> bool:
        """Return whether a member's URL is as private as the source's."""
        return url.startswith("https:") or not self.source.origin.base_url.startswith(
            "https:"
        )

    def fault_of(self, url: str) -> str | None:
        """Return why a member that the source names is not asked, or None."""
        if fault := http.member_fault(url):
            return fault
        scope = scope_of(urlsplit(url).hostname or "")
        if not self.scope.may_name(scope):
            return f"its host is {scope.value}, and the source has none of that kind"
        return None if self.is_private(url) else "it speaks no TLS, and the source does"

    def tell(self, detail: str, level: int = logging.INFO) -> None:
        """Emit an event."""
        emit(
            TransferEvent(
                stop="swarm",
                step=self.relay.manifest.step,
                peer=self.source.origin.base_url,
                detail=detail,
                level=level,
            )
        )


class KnownMembers:
    """The other members of the swarm that a receive knows.

    Attributes:
        members: Those that may be asked for chunks.
        complaints: The ids of those that sent wrong bytes, until the source knows.
    """

    def __init__(self) -> None:
        self.members: list[Peer] = []
        self.complaints: list[str] = []
        # Those that failed: their endpoints, until when, how often, and their ids. The
        # one that failed last is the last.
        self._avoided: dict[tuple[str, int], tuple[float, int, str]] = {}
        self._credit, self._since = _NEW_AT_ONCE, _now()  # for members that are new
        self._has_refused = False

    def learn(self, joined: _Joined, named: tuple[messages.MemberInfo, ...]) -> None:
        """Add members that are not known yet, until there are enough of them.

        A source that has started again has new ids for those that are known. However
        many a source names, a receive gets to know a bounded number of them per second.
        """
        known, now = {each.origin.base_url: each for each in self.members}, _now()
        self._credit += (now - self._since) * _NEW_PER_S
        self._credit, self._since = min(self._credit, _NEW_AT_ONCE), now
        for info in named:
            url = info.url
            if url in known:
                known[url].member = info.id
                continue
            if len(self.members) >= _MAX_MEMBERS or self._credit < 1:
                continue
            if fault := joined.fault_of(url):
                if not self._has_refused:
                    joined.tell(f"does not ask the member at {url!r}: {fault}")
                self._has_refused = True
                continue
            until, *_ = self._avoided.get(endpoint(url), (0.0, 0, ""))
            if until <= now:
                self._credit -= 1
                origin = http.Origin(url, joined.relay.tokens[0], within=joined.scope)
                known[url] = Peer(origin, have=0, member=info.id)
                self.members.append(known[url])

    def drop(self, member: Peer, error: AiockptError) -> None:
        """Ask a member no more, or not for a while; complain about wrong bytes."""
        with suppress(ValueError):
            self.members.remove(member)
        lied = Advice.WRONG in advice(error)
        at = endpoint(member.origin.base_url)
        until, times, _ = self._avoided.pop(at, (0.0, 0, ""))
        away = math.inf if lied else _AWAY_S * 2 ** min(times, _MAX_AWAY_DOUBLINGS)
        self._avoided[at] = (max(until, _now() + away), times + 1, member.member)
        if lied:
            self.complaints.append(member.member)

    def ids(self) -> list[str]:
        """Return the ids of members that the source need not name."""
        now = _now()
        avoided = [name for until, _, name in self._avoided.values() if until > now]
        members = (each.member for each in self.members)
        return [*avoided[-_MAX_AVOIDED_IDS:], *members][-_MAX_KNOWN_IDS:]


class RelayHost(Front):
    """An address at which this process also serves what it receives.

    Args:
        endpoint: The address.
        server: Serves there once `start` was called, or an application does.
        bridge: Resolves a host that is a name.
        options: How to serve what is received; None: receives join no swarm.

    Attributes:
        store: What the server serves.
        members: The receives that are in a swarm, until their sources know that they
            left it. Some of them have returned.
        has_warned: Whether it is known that others cannot reach this address.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        server: CheckpointServer,
        bridge: Bridge,
        options: Swarm | None,
    ) -> None:
        super().__init__(endpoint, server, bridge)
        self.store, self.options = server.store, options
        self.members: set[Membership] = set()
        self.has_warned = False

    async def enter(self, relay: Relay) -> str:
        """Serve a relay; return the URL under which members reach it.

        Of two relays of one snapshot, the second is read once the first has ended.

        Raises:
            AiockptError, OSError: the server cannot start.
        """
        await self.start()
        self.store.serve_relay(relay)
        return self.url()

    async def end_lingering(self) -> None:
        """End the relays of receives that have returned; nothing reads their memory."""
        for each in tuple(self.members):
            if each.is_lingering:
                await each.leave()

    async def say_goodbye(self) -> None:
        """End the lingering relays; wait until all sources know which members left."""
        await self.end_lingering()
        for each in tuple(self.members):
            await each.said_goodbye()

    async def aclose(self) -> None:
        """Stop serving, and wait until the sources know it. Idempotent."""
        await self.say_goodbye()
        await self.stop()


class Membership(ReceiveExtension):
    """The part of one receive in a swarm.

    Args:
        client: Announces the receive.
        host: Serves what is received.
    """

    def __init__(self, client: CheckpointClient, host: RelayHost) -> None:
        assert host.options is not None, "receives may join a swarm"
        self._client, self._options, self._host = client, host.options, host
        self.known = KnownMembers()
        self._relay: Relay | None = None  # None before the manifest, and at the end
        self._joined: _Joined | None = None  # None before the join
        self._download: Download | None = None  # the last one that has begun
        self._task: asyncio.Task[None] | None = None  # from the join on
        self._mark = ""  # of this host, if the source is at a loopback address
        self._lingers = self._leaves = self._has_explained = False
        self._until = math.inf  # when to leave
        self._gone = asyncio.Event()  # nothing is served, or will be

    # ------------------------------------------------------------------- the receive

    def receives(self, manifest: Manifest, headers: Mapping[str, str]) -> None:
        """Learn what is received; ``headers`` authenticate the manifest."""
        slots = Slots(self._options.slots, self._options.rate)
        self._relay = Relay(manifest, headers, slots)

    def reads_into(self, destination: ChunkDestination) -> None:
        """Learn where the chunks go that are verified from now on.

        Chunks that went elsewhere before cannot be served together with these.
        """
        relay = self._relay
        if relay is None:
            return
        if relay.memory in (None, destination.memory):
            relay.memory, relay.kept = destination.memory, destination.kept
        else:
            relay.let_go()
            relay.end()
            self._relay = None

    def join(self, source: Peer, token: Token) -> None:
        """Begin to serve, and to announce that. Only the first call counts."""
        if self._joined is not None or self._relay is None:
            return
        self._relay.tokens = (token,)
        self._joined = _Joined(source, self._relay, _now())
        self._task = asyncio.get_running_loop().create_task(self._run(self._joined))
        self._task.add_done_callback(self._end)
        self._host.members.add(self)

    # ------------------------------------------------------------------ each download

    def begin(self, download: Download) -> None:
        """Take part in a download, which begins now."""
        self._download, self._has_explained = download, False
        download.planner.may_share = True
        for peer in download.sources:
            if peer.invitation is not None:
                self.join(peer, peer.invitation)
        download.planner.members.hope_until = self._hope_until

    async def gather(self) -> None:
        """Add the members that the source names, and watch what they have."""
        assert self._download is not None, "it has begun"
        download, added = self._download, set[Peer]()
        async with task_group() as tasks:
            while True:
                download.planner.members.hope_until = self._hope_until
                # Deltas of the sources are shorter than the chunks of members.
                deltas = download.planner.gets_deltas
                for peer in () if deltas else tuple(self.known.members):
                    if peer not in added:
                        added.add(peer)
                        peer.has_checkpoint = False
                        download.add(peer, reconnect_timeout=0.0)
                        tasks.start_soon(_learn_chunks, download, peer)
                await anyio.sleep(_LOOK_S)

    def hear(self, peer: Peer, answer: CheckedResponse) -> None:
        """Join the swarm if a source's answer has an invitation."""
        if peer.member or self._download is None:
            return
        peer.line, headers = answer.line or peer.line, answer.headers
        named = http.parse_next_chunk(headers.get(http.NEXT_CHUNK_HEADER))
        peer.next = peer.next if named is None else named
        token = http.parse_invitation(headers.get(http.SWARM_HEADER))
        if token is not None:
            peer.invitation = token
            self.join(peer, token)
        self._download.planner.members.hope_until = self._hope_until

    def verified(self, chunk: int) -> None:
        """Serve a chunk to the others."""
        if self._relay is not None:
            self._relay.add(chunk)

    def drop(self, peer: Peer, error: AiockptError) -> None:
        """Ask a member no more, or not for a while; complain about wrong bytes."""
        if not peer.member:
            return
        self.known.drop(peer, error)
        if self.known.complaints and self._joined is not None:
            self._joined.relay.changes.notify()

    def explain(self, error: AiockptError) -> None:
        """Add how many chunks no member of the swarm has."""
        if self._joined is not None and not self._has_explained:
            assert self._download is not None, "it has begun"
            self._has_explained = True
            count = self._download.planner.unknown.bit_count()
            error.add_note(f"no member of the swarm has {count} of the chunks")

    @property
    def _hope_until(self) -> float:
        """The loop time until which the receive waits to hear of other members."""
        if self._joined is None or self._gone.is_set():
            return -math.inf
        return self._joined.since + _HOPE_S

    # ---------------------------------------------------------------- its end

    @property
    def can_linger(self) -> bool:
        """Whether `linger` may be called: the caller gets the memory itself."""
        if self._joined is None or self._gone.is_set() or self._relay is None:
            return False
        return self._options.linger > 0 and self._relay.kept is not None

    async def linger(self) -> None:
        """Serve copies for a while without the receive, whose caller gets the memory.

        If cancelled, it serves no more.
        """
        relay = self._relay
        assert relay is not None, "it can linger"
        self._lingers, self._until = True, _now() + self._options.linger
        self._download = None  # it has the caller's progress callback
        self.known.members.clear()
        try:
            async with self._host.store.unread(relay):
                relay.lend()  # the caller may change the memory from now on
        except BaseException:
            await self.leave()
            raise

    @property
    def is_lingering(self) -> bool:
        """Whether the receive has returned, and its relay is served or says goodbye."""
        return self._lingers

    async def leave(self, goodbye_s: float = 0.0) -> None:
        """Stop serving; once this returns, nothing reads the memory. Idempotent.

        Wait for at most ``goodbye_s`` seconds until the source knows it. It normally
        hears of it within a second. Only a server process that does not answer for 5 s
        may read on. If cancelled, it stops serving all the same, but bodies may end a
        moment later.
        """
        self._download = None
        self.known.members.clear()
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.let_go()  # so bodies end at their next slice
        if self._task is not None:
            if not self._leaves:
                self._leaves = True
                self._task.cancel()
            with anyio.CancelScope(shield=True):
                await self._gone.wait()
        if goodbye_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(goodbye_s):
                    await self.said_goodbye()

    async def said_goodbye(self) -> None:
        """Wait until the source knows that the member left, if it has left."""
        if self._task is not None and self._gone.is_set():
            await asyncio.wait({self._task})

    # ----------------------------------------------------------------- the task

    async def _run(self, joined: _Joined) -> None:
        """Serve and announce the relay, until the time to linger has passed."""
        relay, url = joined.relay, None
        try:
            url = await self._host.enter(relay)
            if joined.scope is Scope.HOST:
                known = await self._client.bridge.run(identity)
                if known is not None:  # only processes of this host can make the mark
                    self._mark = format_mark(known, relay.manifest.snapshot_id)
            if why := _why_not(joined, url):
                joined.tell(f"in no swarm: {why}", level=logging.WARNING)
            else:
                await self._announce_always(joined, url)
        except (AiockptError, OSError) as error:
            joined.tell(f"in no swarm: {error}", level=logging.WARNING)
        finally:
            self._leaves = True
            relay.let_go()
            await self._host.store.end_relay(relay)
            self._gone.set()
            if url is not None:
                await self._say_goodbye(joined, url)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._gone.set()  # also if it was cancelled before it began
        self._host.members.discard(self)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._joined is not None:
            self._joined.tell(f"in no swarm: {error!r}", level=logging.ERROR)

    async def _announce_always(self, joined: _Joined, url: str) -> None:
        part, lease, knows, relay = FIRST, _FIRST_LEASE_S, True, joined.relay
        joined.tell(f"serves the swarm at {url}")
        while self._until > _now() and not relay.ended:
            began = _now()
            if knows:
                try:
                    lease = await self._announce(joined, url)
                except AiockptError as error:
                    # The members that are known are enough to go on.
                    knows = Advice.LATER in advice(error)
                    how = "cannot announce itself"
                    if not knows:
                        how = "announces itself no more"
                    joined.tell(f"{how}: {error}")
            # The tracker decides the interval: `heartbeat` in swarm/policy.py.
            pause = part * lease / HEARTBEATS_PER_LEASE if knows else math.inf
            part = min(2 * part, 1.0)
            if _now() < self._hope_until and not self.known.members:
                pause = min(pause, _HOPE_S / 2)  # soon it would do without others
            while not relay.ended:
                if knows and self.known.complaints:
                    pause = min(pause, _REPORT_S)
                left = min(began + pause, self._until) - _now()
                if left <= 0:
                    break
                await relay.changes.wait(left if left < math.inf else None)

    async def _announce(self, joined: _Joined, url: str) -> float:
        """Tell the source what is served; return the seconds of the lease."""
        known, relay, line = self.known, joined.relay, joined.source.line
        bad = tuple(known.complaints[:_MAX_BAD_IDS])
        said = messages.Announcement(
            url=url,
            zone=self._options.zone,
            have=len(relay.order),
            bad=bad,
            known=tuple(known.ids()),
            local=line.local,
            host=self._mark,
        )
        request = joined.request(
            "POST", body=msgspec.json.encode(said), status=HTTPStatus.OK
        )
        async with self._client.request(request) as answer:
            joined.source.line = answer.line or line
            body = await answer.read(_MAX_ANSWER_BYTES, "an answer")
        del known.complaints[: len(bad)]
        try:
            found = messages.parse_announce_response(body)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{request.url} {error}") from None
        if found.tokens:
            relay.tokens = found.tokens
            for member in known.members:
                member.origin = replace(member.origin, token=found.tokens[0])
        # Another connection, as to another address of a name, has another end.
        is_new = line == joined.source.line and not self._host.has_warned
        if found.seen is not None and is_new:
            self._host.has_warned = True
            why = messages.why_hidden(said, found.seen)
            joined.tell(f"nobody is told of it: {why}", level=logging.WARNING)
        if not relay.is_lent:
            known.learn(joined, found.members)
        source = joined.source
        if source.next is None or relay.have >> source.next & 1:
            source.next = found.next
        return min(max(found.lease, _MIN_LEASE_S), _MAX_LEASE_S)

    async def _say_goodbye(self, joined: _Joined, url: str) -> None:
        """Send the source the last complaints, and tell it that the member leaves."""
        request = joined.request("DELETE", status=HTTPStatus.NO_CONTENT)
        with suppress(AiockptError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S / 2):
                if self.known.complaints:
                    await self._announce(joined, url)
        with suppress(AiockptError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S / 2), self._client.request(request):
                pass


def _why_not(joined: _Joined, url: str) -> str | None:
    """Return why a receiver that serves at this URL joins no swarm."""
    if not joined.is_private(url):
        return "the source speaks TLS, and this receiver does not"
    if urlsplit(url).path == http.MEMBER_PATH:
        return None
    return (
        f"it serves at {url}, and members serve at {http.MEMBER_PATH}: mount it there, "
        "or pass advertise= without another path"
    )


async def _learn_chunks(download: Download, peer: Peer) -> None:
    """Learn which chunks a member has; drop it from the download if that fails."""
    try:
        async with aclosing(watch(download.client, peer, download.outline)) as news:
            async for new in news:
                peer.have |= new
                if not peer.has_checkpoint or new & download.planner.fresh:
                    peer.has_checkpoint = True
                    download.news.notify()
    except ClosedError:
        raise  # not the member's fault
    except AiockptError as error:
        download.drop(peer, error)


async def watch(
    client: CheckpointClient, member: Peer, outline: Outline
) -> AsyncGenerator[int]:
    """Yield bitmaps of the chunks that a member has got, as it gets them.

    Raises:
        StepNotFoundError: the member has left.
        PeerBusy: the member is watched by many already.
        RemoteProtocolError: the member announces what cannot be.
        TransportError: the connection broke.
    """
    count, began = len(outline.grid), _now()
    first = -(-count // 8)
    request = Request(
        origin=member.origin,
        path=http.format_resource(http.Resource(http.ResourceKind.HAVE, outline.step)),
        headers={
            hdrs.IF_MATCH: http.format_etag(outline.snapshot_id),
            "Prefer": http.format_prefer_wait(client.stall_timeout / 4),
        },
        step=outline.step,
        snapshot_id=outline.snapshot_id,
    )
    have, data, most = (
        None,
        bytearray(),
        first + _RECORD_BYTES * (count + _EMPTY_RECORDS),
    )
    async with client.request(request) as answer:
        async for piece in answer.pieces():
            data += piece
            most -= len(piece)
            if most + _RECORD_BYTES * _EMPTY_RECORDS_PER_S * (_now() - began) < 0:
                raise RemoteProtocolError(f"{request.url} sends without end")
            if have is None and len(data) < first:
                continue
            with answer.blamed():
                new = 0
                if have is None:
                    new = have = messages.parse_have(bytes(data[:first]), count)
                    del data[:first]
                # The first records may have come together with the bitmap.
                whole = len(data) - len(data) % _RECORD_BYTES
                more = messages.parse_chunks(bytes(data[:whole]), count)
                del data[:whole]
                if more & have:
                    raise RemoteProtocolError("a chunk is announced twice")
            have, new = have | more, new | more
            if new:
                yield new
    if have is None or have.bit_count() < count:
        raise StepNotFoundError(outline.step, url=request.url)


def _now() -> float:
    return asyncio.get_running_loop().time()
