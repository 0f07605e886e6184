"""A receive in a swarm: who the other members are, and which chunks they have.

`Neighbours` adds the members that the source names to the download, and watches what
each of them has. It passes on what the download learns: answers of sources, verified
chunks, and members that were dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Final

import anyio

from aiockpt.errors import AiockptError, ClosedError
from aiockpt.format.manifest import Manifest
from aiockpt.http.client import CheckedResponse
from aiockpt.http.download import Download, ReceiveExtension
from aiockpt.http.peers import Peer
from aiockpt.runtime.tasks import task_group
from aiockpt.swarm.membership import Membership, watch
from aiockpt.transfer.source import ChunkDestination

_LOOK: Final = 0.1  # seconds between two looks at which members are known


class Neighbours(ReceiveExtension):
    """The other members of a swarm, for one receive.

    Args:
        membership: The part of the receive in the swarm.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._download: Download | None = None
        self._has_explained = False

    # ------------------------------------------------------------------- the receive

    @property
    def can_linger(self) -> bool:
        """Whether `linger` may be called: the caller of the receive gets the memory."""
        return self._membership.can_linger

    def receives(self, manifest: Manifest, headers: Mapping[str, str]) -> None:
        """Learn what is received; ``headers`` authenticate the manifest."""
        self._membership.begin(manifest, headers)

    def fill(self, destination: ChunkDestination) -> None:
        """Learn where the chunks go that are verified from now on."""
        self._membership.fill(destination)

    async def linger(self) -> None:
        """Serve for a while without the receive, whose caller gets the memory."""
        await self._membership.linger()

    async def leave(self, goodbye_s: float = 0.0) -> None:
        """Serve no more; once this returns, nothing reads the memory."""
        await self._membership.aclose()
        if goodbye_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(goodbye_s):
                    await self._membership.said_goodbye()

    # ------------------------------------------------------------------ each download

    def begin(self, download: Download) -> None:
        """Take part in a download, which begins now."""
        self._download, self._has_explained = download, False
        download.planner.may_share = True
        for peer in download.sources:
            if peer.invitation is not None:
                self._membership.join(peer, peer.invitation)
        self._hope(download)

    def _hope(self, download: Download) -> None:
        download.planner.members.hope_until = self._membership.hope_until

    async def gather(self) -> None:
        """Add the members that the source names, and watch what they have."""
        assert self._download is not None, "it has begun"
        download, known = self._download, set[Peer]()
        async with task_group() as tasks:
            while True:
                self._hope(download)
                # Deltas of the sources are shorter than the chunks of members.
                deltas = download.planner.gets_deltas
                for peer in () if deltas else tuple(self._membership.members):
                    if peer not in known:
                        known.add(peer)
                        peer.joined = False
                        download.add(peer, reconnect_timeout=0.0)
                        tasks.start_soon(self._watch, download, peer)
                await anyio.sleep(_LOOK)

    async def _watch(self, download: Download, peer: Peer) -> None:
        """Learn which chunks a member has."""
        news = watch(download.client, peer, download.outline)
        try:
            async with aclosing(news):
                async for new in news:
                    peer.have |= new
                    if not peer.joined or new & download.planner.fresh:
                        peer.joined = True
                        download.news.notify()
        except ClosedError:
            raise  # not the member's fault
        except AiockptError as error:
            download.drop(peer, error)

    def hear(self, peer: Peer, answer: CheckedResponse) -> None:
        """Join the swarm if a source's answer has an invitation."""
        if not peer.member and self._download is not None:
            self._membership.hear(peer, answer)
            self._hope(self._download)

    def verified(self, chunk: int) -> None:
        """Serve a chunk to the others."""
        self._membership.add(chunk)

    def drop(self, peer: Peer, error: AiockptError) -> None:
        """Have the source name a member no more, or not for a while."""
        if peer.member:
            self._membership.drop(peer, error)

    def explain(self, error: AiockptError) -> None:
        """Add how many chunks no member of the swarm has."""
        if self._membership.has_joined and not self._has_explained:
            assert self._download is not None, "it has begun"
            self._has_explained = True
            count = self._download.planner.unknown.bit_count()
            error.add_note(f"no member of the swarm has {count} of the chunks")
