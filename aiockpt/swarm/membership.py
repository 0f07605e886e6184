"""A receive as a member of a swarm: it joins, announces itself, and serves what it has.

Nothing is sent before the source has said that others receive the same snapshot. From
then on, one task announces the receive and learns who else is there. `Neighbours` has
the download fetch chunks from these members, and marks each verified chunk in the
relay, which this process serves to the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
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
    RemoteProtocolError,
    StepNotFoundError,
    advice,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http import protocol as http
from aiockpt.http.client import CheckedResponse, CheckpointClient, Request
from aiockpt.http.host import Front
from aiockpt.http.listen import Endpoint
from aiockpt.http.options import Swarm
from aiockpt.http.peers import Peer
from aiockpt.http.security import Scope, endpoint, scope_of
from aiockpt.http.server import CheckpointServer
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.same_host import format_mark, identity
from aiockpt.runtime.secrets import Token
from aiockpt.swarm import messages
from aiockpt.swarm.policy import FIRST, LEASE
from aiockpt.swarm.relay import Relay
from aiockpt.transfer.source import ChunkDestination

_MOST: Final = 24  # members that are asked at a time; the tracker names no more
_LONGEST: Final = 64 << 10  # bytes of an answer to an announcement
_LONGEST_LIST: Final = 64  # ids in an announcement
_MOST_BAD: Final = 16  # ids of members that sent wrong bytes, in an announcement
_MOST_AVOIDED: Final = 6  # of those that failed: the source names the fewer others
_HOPE: Final = 1.0  # seconds for which a receive waits to hear of others
_AWAY: Final = 10.0  # seconds for which a member that failed once is not asked
_MOST_TIMES: Final = 6  # further failures, each of which doubles them
_AGAIN: Final = 10.0  # seconds until the next announcement, if none was answered yet
_SHORTEST_LEASE: Final = 3.0  # seconds
_LONGEST_LEASE: Final = 3600.0
_REPORT: Final = 1.0  # seconds between an announcement and one with a complaint
_MOST_NEW: Final = 24.0  # members that a receive may get to know at once, and
_NEW_PER_SECOND: Final = 2.0  # then on average
_FAREWELL: Final = 1.0  # seconds in which the source hears that a member leaves
_RECORD: Final = 4  # bytes of a chunk's number
_NOTHINGS: Final = 100  # records without a chunk that a member may send, and
_NOTHINGS_PER_SECOND: Final = 20.0


class _Joined(NamedTuple):
    """Where a receive joined a swarm, and what it serves there, since when."""

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
        """Return why a member that the source names is not asked; None if it may be."""
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


class _Known:
    """The other members that a receive knows.

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
        self._credit, self._since = _MOST_NEW, _now()  # for members that are new
        self._has_refused = False

    def learn(self, place: _Joined, named: tuple[messages.MemberInfo, ...]) -> None:
        """Take the members that are not known yet, as far as more are needed.

        A source that has started again has new ids for those that are known. However
        many a source names, a receive gets to know a bounded number of them per second.
        """
        known, now = {each.origin.base_url: each for each in self.members}, _now()
        self._credit += (now - self._since) * _NEW_PER_SECOND
        self._credit, self._since = min(self._credit, _MOST_NEW), now
        for info in named:
            url = info.url
            if url in known:
                known[url].member = info.id
                continue
            if len(self.members) >= _MOST or self._credit < 1:
                continue
            if fault := place.fault_of(url):
                if not self._has_refused:
                    place.tell(f"does not ask the member at {url!r}: {fault}")
                self._has_refused = True
                continue
            until, *_ = self._avoided.get(endpoint(url), (0.0, 0, ""))
            if until <= now:
                self._credit -= 1
                origin = http.Origin(url, place.relay.token, within=place.scope)
                known[url] = Peer(origin, have=0, member=info.id)
                self.members.append(known[url])

    def drop(self, member: Peer, error: AiockptError) -> None:
        """Ask a member no more, or not for a while; complain about wrong bytes."""
        with suppress(ValueError):
            self.members.remove(member)
        lied = Advice.WRONG in advice(error)
        at = endpoint(member.origin.base_url)
        until, times, _ = self._avoided.pop(at, (0.0, 0, ""))
        away = math.inf if lied else _AWAY * 2 ** min(times, _MOST_TIMES)
        self._avoided[at] = (max(until, _now() + away), times + 1, member.member)
        if lied:
            self.complaints.append(member.member)

    def ids(self) -> list[str]:
        """Return the ids of members that the source need not name."""
        now = _now()
        avoided = [name for until, _, name in self._avoided.values() if until > now]
        members = (each.member for each in self.members)
        return [*avoided[-_MOST_AVOIDED:], *members][-_LONGEST_LIST:]


class RelayHost(Front):
    """Serves what is received, too, always from its own loop.

    Args:
        endpoint: The address.
        server: Serves there once `start` was called, or an application does.
        bridge: Resolves a host that is a name.

    Attributes:
        members: The receives that are in a swarm, until their sources know that they
            left it. Some of them have returned.
        has_warned: Whether it is known that others cannot reach this address.
    """

    def __init__(
        self, endpoint: Endpoint, server: CheckpointServer, bridge: Bridge
    ) -> None:
        super().__init__(endpoint, server, bridge)
        self._store = server.store
        self.members: set[Membership] = set()
        self.has_warned = False

    async def enter(self, relay: Relay) -> str:
        """Serve a relay; return the URL under which members reach it.

        Of two relays of one snapshot, the second is read once the first has ended.

        Raises:
            AiockptError, OSError: the server cannot start.
        """
        await self.start()
        self._store.share(relay)
        return self.url()

    async def mark(self, snapshot_id: str) -> str:
        """Return this host's mark in the swarm of a snapshot; empty if unknown.

        Only processes of this host can make it.
        """
        known = await self._bridge.run(identity)
        return "" if known is None else format_mark(known, snapshot_id)

    async def lend(self, relay: Relay) -> None:
        """Serve copies only; once this returns, the memory may be changed."""
        async with self._store.unread(relay):
            relay.lend()

    async def leave(self, relay: Relay) -> None:
        """Serve a relay no more, also if `enter` failed or was cancelled."""
        await self._store.unshare(relay)

    async def end_lingering(self) -> None:
        """Serve no receive that has returned; nothing reads its memory any more."""
        for each in tuple(self.members):
            if each.is_lingering:
                await each.aclose()

    async def say_goodbye(self) -> None:
        """End what lingers; return when the sources of all that left know it."""
        await self.end_lingering()
        for each in tuple(self.members):
            await each.said_goodbye()

    async def aclose(self) -> None:
        """Serve nothing any more, and wait until the sources know it. Idempotent."""
        await self.say_goodbye()
        await self.stop()


class Membership:
    """The part of one receive in a swarm.

    Args:
        client: Announces the receive.
        options: How to serve.
        host: Serves what is received.
    """

    def __init__(
        self, client: CheckpointClient, options: Swarm, host: RelayHost
    ) -> None:
        self._client, self._options, self._host = client, options, host
        self._known = _Known()
        self._relay: Relay | None = None  # None before the manifest, and at the end
        self._place: _Joined | None = None  # None before the join
        self._task: asyncio.Task[None] | None = None  # from the join on
        self._mark = ""  # of this host, if the source is at a loopback address
        self._lingers = self._leaves = False
        self._until = math.inf  # when to leave
        self._gone = asyncio.Event()  # nothing is served, or will be

    @property
    def members(self) -> list[Peer]:
        """Those that may be asked for chunks."""
        return self._known.members

    # ------------------------------------------------------- what the receive says

    def begin(self, manifest: Manifest, headers: Mapping[str, str]) -> None:
        """Learn what is received; ``headers`` authenticate the manifest."""
        options = self._options
        self._relay = Relay(manifest, headers, slots=options.slots, rate=options.rate)

    def fill(self, destination: ChunkDestination) -> None:
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

    def add(self, chunk: int) -> None:
        """Serve a chunk that was verified."""
        if self._relay is not None:
            self._relay.add(chunk)

    def hear(self, source: Peer, answer: CheckedResponse) -> None:
        """Join the swarm if the source's answer has an invitation."""
        source.line, headers = answer.line or source.line, answer.headers
        named = http.parse_next_chunk(headers.get(http.NEXT_CHUNK_HEADER))
        source.next = source.next if named is None else named
        token = http.parse_invitation(headers.get(http.SWARM_HEADER))
        if token is not None:
            source.invitation = token
            self.join(source, token)

    def join(self, source: Peer, token: Token) -> None:
        """Begin to serve, and to announce that. Only the first call counts."""
        if self._place is not None or self._relay is None:
            return
        self._relay.token = token
        self._place = _Joined(source, self._relay, _now())
        self._task = asyncio.get_running_loop().create_task(self._run(self._place))
        self._task.add_done_callback(self._end)
        self._host.members.add(self)

    def drop(self, member: Peer, error: AiockptError) -> None:
        """Ask a member no more, or not for a while; complain about wrong bytes."""
        self._known.drop(member, error)
        if self._known.complaints and self._place is not None:
            self._place.relay.changes.notify()

    # ---------------------------------------------------------------- its end

    @property
    def hope_until(self) -> float:
        """Until when the receive may be about to hear of others, in loop time."""
        if self._place is None or self._gone.is_set():
            return -math.inf
        return self._place.since + _HOPE

    @property
    def has_joined(self) -> bool:
        """Whether the source has invited the receive to a swarm."""
        return self._place is not None

    @property
    def can_linger(self) -> bool:
        """Whether `linger` may be called: the caller gets the memory itself."""
        if self._place is None or self._gone.is_set() or self._relay is None:
            return False
        return self._options.linger > 0 and self._relay.kept is not None

    async def linger(self) -> None:
        """Serve for a while without the receive, whose caller gets the memory.

        If cancelled, it serves no more.
        """
        assert self._relay is not None, "it can linger"
        self._lingers, self._until = True, _now() + self._options.linger
        self.members.clear()
        try:
            await self._host.lend(self._relay)
        except BaseException:
            await self.aclose()
            raise

    @property
    def is_lingering(self) -> bool:
        """Whether it serves, or says goodbye, without the receive."""
        return self._lingers

    async def aclose(self) -> None:
        """Serve no more; once this returns, nothing reads the memory. Idempotent.

        The source hears of it within a second, in the background; see
        :meth:`said_goodbye`. Only a server process that does not answer for 5 s may
        read on. If cancelled, it serves no more either, but bodies may end a moment
        later.
        """
        self.members.clear()
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.let_go()  # so bodies end at their next slice
        if self._task is not None:
            if not self._leaves:
                self._leaves = True
                self._task.cancel()
            with anyio.CancelScope(shield=True):
                await self._gone.wait()

    async def said_goodbye(self) -> None:
        """Return at once if it serves, or else once the source knows that it left."""
        if self._task is not None and self._gone.is_set():
            await asyncio.wait({self._task})

    # ----------------------------------------------------------------- the task

    async def _run(self, place: _Joined) -> None:
        """Serve and announce the relay, until the time to linger has passed."""
        relay, url = place.relay, None
        try:
            url = await self._host.enter(relay)
            if place.scope is Scope.HOST:
                self._mark = await self._host.mark(relay.manifest.snapshot_id)
            if why := _why_not(place, url):
                place.tell(f"in no swarm: {why}", level=logging.WARNING)
            else:
                await self._announce_always(place, url)
        except (AiockptError, OSError) as error:
            place.tell(f"in no swarm: {error}", level=logging.WARNING)
        finally:
            self._leaves = True
            relay.let_go()
            await self._host.leave(relay)
            self._gone.set()
            if url is not None:
                await self._say_goodbye(place, url)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._gone.set()  # also if it was cancelled before it began
        self._host.members.discard(self)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._place is not None:
            self._place.tell(f"in no swarm: {error!r}", level=logging.ERROR)

    async def _announce_always(self, place: _Joined, url: str) -> None:
        part, lease, knows, relay = FIRST, _AGAIN, True, place.relay
        place.tell(f"serves the swarm at {url}")
        while self._until > _now() and not relay.ended:
            began = _now()
            if knows:
                try:
                    lease = await self._announce(place, url)
                except AiockptError as error:
                    # The members that are known are enough to go on.
                    knows = Advice.LATER in advice(error)
                    how = "cannot announce itself"
                    if not knows:
                        how = "announces itself no more"
                    place.tell(f"{how}: {error}")
            pause = part * lease / LEASE if knows else math.inf
            part = min(2 * part, 1.0)
            if _now() < self.hope_until and not self.members:
                pause = min(pause, _HOPE / 2)  # soon it would do without others
            while not relay.ended:
                if knows and self._known.complaints:
                    pause = min(pause, _REPORT)
                left = min(began + pause, self._until) - _now()
                if left <= 0:
                    break
                await relay.changes.wait(left if left < math.inf else None)

    async def _announce(self, place: _Joined, url: str) -> float:
        """Tell the source what is served; return the seconds of the lease."""
        known, relay, line = self._known, place.relay, place.source.line
        bad = tuple(known.complaints[:_MOST_BAD])
        said = messages.Announcement(
            url=url,
            zone=self._options.zone,
            have=len(relay.order),
            bad=bad,
            known=tuple(known.ids()),
            local=line.local,
            host=self._mark,
        )
        request = place.request(
            "POST", body=msgspec.json.encode(said), status=HTTPStatus.OK
        )
        async with self._client.request(request) as answer:
            place.source.line = answer.line or line
            body = await answer.read(_LONGEST, "an answer")
        del known.complaints[: len(bad)]
        try:
            found = messages.parse_announce_response(body)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{request.url} {error}") from None
        if found.tokens:
            relay.token, relay.other = (*found.tokens, Token(""))[:2]
            for member in known.members:
                member.origin = replace(member.origin, token=relay.token)
        # Another connection, as to another address of a name, has another end.
        is_new = line == place.source.line and not self._host.has_warned
        if found.seen is not None and is_new:
            self._host.has_warned = True
            why = messages.why_hidden(said, found.seen)
            place.tell(f"nobody is told of it: {why}", level=logging.WARNING)
        if not relay.is_lent:
            known.learn(place, found.members)
        source = place.source
        if source.next is None or relay.have >> source.next & 1:
            source.next = found.next
        return min(max(found.lease, _SHORTEST_LEASE), _LONGEST_LEASE)

    async def _say_goodbye(self, place: _Joined, url: str) -> None:
        """Tell the source what it does not know yet, and that the member leaves."""
        request = place.request("DELETE", status=HTTPStatus.NO_CONTENT)
        with suppress(AiockptError, TimeoutError):
            async with asyncio.timeout(_FAREWELL / 2):
                if self._known.complaints:
                    await self._announce(place, url)
        with suppress(AiockptError, TimeoutError):
            async with asyncio.timeout(_FAREWELL / 2), self._client.request(request):
                pass


def _why_not(place: _Joined, url: str) -> str | None:
    """Return why a receiver that serves at this URL joins no swarm."""
    if not place.is_private(url):
        return "the source speaks TLS, and this receiver does not"
    if urlsplit(url).path == http.MEMBER_PATH:
        return None
    return (
        f"it serves at {url}, and members serve at {http.MEMBER_PATH}; mount it there, "
        "and pass a host without a path as advertise="
    )


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
    have, data, most = None, bytearray(), first + _RECORD * (count + _NOTHINGS)
    async with client.request(request) as answer:
        async for piece in answer.pieces():
            data += piece
            most -= len(piece)
            if most + _RECORD * _NOTHINGS_PER_SECOND * (_now() - began) < 0:
                raise RemoteProtocolError(f"{request.url} sends without end")
            if have is None and len(data) < first:
                continue
            with answer.blamed():
                new = 0
                if have is None:
                    new = have = messages.parse_have(bytes(data[:first]), count)
                    del data[:first]
                # The first records may have come together with the bitmap.
                whole = len(data) - len(data) % _RECORD
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
