"""A receive as a member of a swarm: it joins, announces itself, and serves what it has.

Nothing is sent before the source has said that others receive the same snapshot. From
then on, one task announces the receive and learns who else is there. `Download` fetches
chunks from these members, and marks each verified chunk in the relay, which this
process serves to the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Final, TypeAlias

import anyio
import msgspec
from aiohttp import hdrs

from aiockpt.errors import (
    AiockptError,
    IntegrityError,
    RemoteProtocolError,
    StagingError,
    StepNotFoundError,
    TransportError,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http import protocol as http
from aiockpt.http.client import CheckpointClient, Request
from aiockpt.http.options import Swarm
from aiockpt.http.peers import Peer
from aiockpt.http.relay import Relay
from aiockpt.http.security import endpoint
from aiockpt.http.swarm import FIRST, LEASE
from aiockpt.runtime.secrets import Token
from aiockpt.runtime.tasks import Notifier
from aiockpt.transfer.source import Target

__all__ = ["Door", "Membership"]

Door: TypeAlias = Callable[[Relay], Awaitable[str]]
"""Serves a relay, and returns the URL under which members reach it."""

_MOST: Final = 24  # members that are asked at a time; the tracker names no more
_LONGEST: Final = 64 << 10  # bytes of an answer to an announcement
_LONGEST_LIST: Final = 64  # ids in an announcement
_MOST_BAD: Final = 16  # ids of members that sent wrong bytes, in an announcement
_MOST_AVOIDED: Final = 6  # of those that failed: the source names the fewer others
_HOPE: Final = 1.0  # seconds for which a receive waits to hear of others
_AWAY: Final = 10.0  # seconds for which a member that failed once is not asked
_MOST_TIMES: Final = 6  # further failures, each of which doubles them
_SHORTEST_LEASE: Final = 1.0  # seconds
_LONGEST_LEASE: Final = 3600.0
_FAREWELL: Final = 1.0  # seconds in which the source hears that a member leaves
_RECORD: Final = 4  # bytes of a chunk's number
_NOTHINGS: Final = 100  # records without a chunk that a member may send, and
_NOTHINGS_PER_SECOND: Final = 20.0


class Membership:
    """The part of one receive in a swarm.

    Args:
        client: Announces the receive.
        options: How to serve.
        enter: Serves the relay.
        leave: Ends that, also if ``enter`` failed or was cancelled.

    Attributes:
        members: Those that may be asked for chunks.
    """

    def __init__(
        self,
        client: CheckpointClient,
        options: Swarm,
        enter: Door,
        leave: Callable[[Relay], Awaitable[None]],
    ) -> None:
        self.members: list[Peer] = []
        self._client, self._options = client, options
        self._enter, self._leave = enter, leave
        self._relay: Relay | None = None
        self._kept: object = None
        self._source: Peer | None = None
        self._task: asyncio.Task[None] | None = None
        # Members that failed: their endpoints, until when, how often, and their ids.
        self._avoided: dict[tuple[str, int], tuple[float, int, str]] = {}
        self._joined = 0.0
        self._complaints: list[str] = []
        self._until = math.inf
        self._is_closed = False
        self._wake = Notifier()

    def __repr__(self) -> str:
        return f"<Membership {self._relay} members={len(self.members)}>"

    # ------------------------------------------------------- what the receive says

    def begin(self, manifest: Manifest, headers: Mapping[str, str]) -> None:
        """Learn what is received; ``headers`` authenticate the manifest."""
        options = self._options
        self._relay = Relay(manifest, headers, slots=options.slots, rate=options.rate)

    def fill(self, target: Target) -> None:
        """Learn where the chunks go that are verified from now on.

        Chunks that went elsewhere before cannot be served together with these.
        """
        relay = self._relay
        if relay is None:
            return
        if relay.memory not in (None, target.memory):
            relay.end()
            self._relay = relay.memory = self._kept = None
            self._wake.notify()
            return
        relay.memory, self._kept = target.memory, target.kept

    def add(self, chunk: int) -> None:
        """Serve a chunk that was verified."""
        if self._relay is not None:
            self._relay.add(chunk)

    def hear(self, source: Peer, headers: Mapping[str, str]) -> None:
        """Join the swarm if the source's answer has an invitation."""
        named = http.parse_next_chunk(headers.get(http.NEXT_CHUNK_HEADER))
        source.next = source.next if named is None else named
        token = http.parse_invitation(headers.get(http.SWARM_HEADER))
        if token is not None:
            source.invitation = token
            self.join(source, token)

    def join(self, source: Peer, token: Token) -> None:
        """Begin to serve, and to announce that. Only the first call counts."""
        if self._task is not None or self._relay is None:
            return
        self._joined = _now()
        self._source, self._relay.token = source, token
        self._task = asyncio.get_running_loop().create_task(self._run(self._relay))

    def drop(self, member: Peer, error: AiockptError) -> None:
        """Ask a member no more, or not for a while; complain about wrong bytes."""
        with suppress(ValueError):
            self.members.remove(member)
        lied = isinstance(error, IntegrityError | RemoteProtocolError)
        at = endpoint(member.origin.base_url)
        until, times, _ = self._avoided.get(at, (0.0, 0, ""))
        away = math.inf if lied else _AWAY * 2 ** min(times, _MOST_TIMES)
        self._avoided[at] = (max(until, _now() + away), times + 1, member.member)
        if lied:
            self._complaints.append(member.member)
            self._wake.notify()

    async def watch(self, member: Peer, outline: Outline) -> AsyncGenerator[int]:
        """Yield bitmaps of the chunks that a member has got, as it gets them.

        Raises:
            StepNotFoundError: the member has left.
            PeerBusy: the member is watched by many already.
            RemoteProtocolError: the member announces what cannot be.
            TransportError: the connection broke.
        """
        count, began = len(outline.grid), _now()
        client, first = self._client, -(-count // 8)
        request = Request(
            origin=member.origin,
            path=http.format_resource(
                http.Resource(http.ResourceKind.HAVE, outline.step)
            ),
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
                        new = have = http.parse_have(bytes(data[:first]), count)
                        del data[:first]
                    # The first records may have come together with the bitmap.
                    whole = len(data) - len(data) % _RECORD
                    more = http.parse_chunks(bytes(data[:whole]), count)
                    del data[:whole]
                    if more & have:
                        raise RemoteProtocolError("a chunk is announced twice")
                have, new = have | more, new | more
                if new:
                    yield new
        if have is None or have.bit_count() < count:
            raise StepNotFoundError(outline.step, url=request.url)

    # ---------------------------------------------------------------- its end

    @property
    def is_active(self) -> bool:
        """Whether the receive knows others, or may be about to hear of some."""
        if self._task is None or self._task.done():
            return False
        return bool(self.members) or _now() < self._joined + _HOPE

    @property
    def has_joined(self) -> bool:
        """Whether the source has invited the receive to a swarm."""
        return self._task is not None

    @property
    def can_linger(self) -> bool:
        """Whether `linger` may be called: the caller gets the memory itself."""
        joined = self._task is not None and not self._task.done()
        return joined and self._options.linger > 0 and self._kept is not None

    def linger(self) -> None:
        """Serve for a while without the receive."""
        assert self._relay is not None, "it has joined"
        self._relay.lend()
        self.members.clear()
        self._until = _now() + self._options.linger
        self._wake.notify()

    @property
    def is_lingering(self) -> bool:
        """Whether it serves without the receive."""
        return self._until < math.inf and not self.is_over

    @property
    def is_over(self) -> bool:
        """Whether it neither serves any more, nor will."""
        return self._is_closed or (self._task is not None and self._task.done())

    async def aclose(self) -> None:
        """Serve no more; once this returns, nothing reads the memory. Idempotent.

        Only a server process that does not answer for 5 s may read on. If cancelled, it
        serves no more either, but bodies may end a moment later.
        """
        self._kept = None
        if self._relay is not None:
            self._relay.memory = None  # so bodies end at their next slice
        self.members.clear()
        task = self._task
        if task is not None:
            if not self._is_closed:
                self._is_closed = True
                task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({task})
        self._is_closed, self._relay = True, None

    # ----------------------------------------------------------------- the task

    async def _run(self, relay: Relay) -> None:
        """Serve and announce the relay, until the time to linger has passed."""
        assert self._source is not None
        url = None
        try:
            url = await self._enter(relay)
            if self._is_safe(url):
                await self._announce_always(relay, url)
            else:
                why = "the source speaks TLS, and this receiver does not"
                self._tell(relay, f"in no swarm: {why}", level=logging.WARNING)
        except (AiockptError, OSError) as error:
            self._tell(relay, f"in no swarm: {error}", level=logging.WARNING)
        finally:
            self._kept = relay.memory = None
            with anyio.CancelScope(shield=True):
                await self._leave(relay)
                if url is not None:
                    await self._say_goodbye(relay, url)

    async def _announce_always(self, relay: Relay, url: str) -> None:
        part, lease, knows = FIRST, _AWAY, True
        self._tell(relay, f"serves the swarm at {url}")
        while self._until > _now() and not relay.ended:
            if knows:
                try:
                    lease = await self._announce(relay, url)
                    if self._complaints:
                        continue  # they came meanwhile, or were too many
                except (TransportError, StagingError) as error:
                    # The members that are known are enough to go on.
                    self._tell(relay, f"cannot announce itself: {error}")
                except AiockptError as error:
                    self._tell(relay, f"announces itself no more: {error}")
                    knows = False
            pause = part * lease / LEASE if knows else _AWAY
            part = min(2 * part, 1.0)
            if self.is_active and not self.members:
                pause = min(pause, _HOPE / 2)  # soon it would do without others
            await self._wake.wait(max(min(pause, self._until - _now()), 0.0))

    def _is_safe(self, url: str) -> bool:
        """Return whether a member's URL is as private as the source's."""
        assert self._source is not None
        secret = self._source.origin.base_url.startswith("https:")
        return url.startswith("https:") or not secret

    async def _announce(self, relay: Relay, url: str) -> float:
        """Tell the source what is served; return the seconds of the lease."""
        bad = tuple(self._complaints[:_MOST_BAD])
        said = http.Announcement(
            url=url,
            zone=self._options.zone,
            have=len(relay.order),
            bad=bad,
            known=tuple(self._known()),
        )
        request = self._request(
            relay, "POST", body=msgspec.json.encode(said), status=HTTPStatus.OK
        )
        async with self._client.request(request) as answer:
            body = await answer.read(_LONGEST, "an answer")
        del self._complaints[: len(bad)]
        try:
            found = msgspec.json.decode(body, type=http.AnnounceResponse)
        except (msgspec.MsgspecError, ValueError) as error:
            raise RemoteProtocolError(
                f"{request.url} sent a malformed answer: {error}"
            ) from None
        self._learn(relay, found)
        return min(max(found.lease, _SHORTEST_LEASE), _LONGEST_LEASE)

    def _learn(self, relay: Relay, found: http.AnnounceResponse) -> None:
        """Take the members that are not known yet, as far as more are needed."""
        known, now = {each.origin.base_url for each in self.members}, _now()
        for info in found.members:
            url = f"{info.url.rstrip('/')}/"
            if len(self.members) >= _MOST or url in known or http.url_fault(url):
                continue
            until, *_ = self._avoided.get(endpoint(url), (0.0, 0, ""))
            if until <= now and self._is_safe(url) and not relay.is_lent:
                origin = http.Origin(url, relay.token)
                self.members.append(Peer(origin, have=0, member=info.id))
        source = self._source
        assert source is not None
        if source.next is None or relay.have >> source.next & 1:
            source.next = found.next

    def _known(self) -> list[str]:
        """Return the ids of members that the source need not name."""
        now = _now()
        avoided = [name for until, _, name in self._avoided.values() if until > now]
        members = (each.member for each in self.members)
        return [*avoided[-_MOST_AVOIDED:], *members][-_LONGEST_LIST:]

    async def _say_goodbye(self, relay: Relay, url: str) -> None:
        """Tell the source what it does not know yet, and that the member leaves."""
        request = self._request(relay, "DELETE", status=HTTPStatus.NO_CONTENT)
        with suppress(AiockptError, TimeoutError):
            async with asyncio.timeout(_FAREWELL / 2):
                if self._complaints:
                    await self._announce(relay, url)
        with suppress(AiockptError, TimeoutError):
            async with asyncio.timeout(_FAREWELL / 2), self._client.request(request):
                pass

    def _request(
        self, relay: Relay, method: str, *, status: int, body: bytes = b""
    ) -> Request:
        assert self._source is not None
        manifest = relay.manifest
        headers: dict[str, str] = {
            hdrs.IF_MATCH: http.format_etag(manifest.snapshot_id)
        }
        if body:
            headers[hdrs.CONTENT_TYPE] = "application/json"
        return Request(
            origin=self._source.origin,
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

    def _tell(self, relay: Relay, detail: str, level: int = logging.INFO) -> None:
        assert self._source is not None
        emit(
            TransferEvent(
                stop="swarm",
                step=relay.manifest.step,
                peer=self._source.origin.base_url,
                detail=detail,
                level=level,
            )
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
