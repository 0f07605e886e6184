"""The sources of a receive: one peer, or several that hold the same checkpoint.

Which checkpoint that is, the first manifest decides. A snapshot id is the digest of a
manifest with the digests of all chunks, so peers with the same id hold the same bytes.
A peer with another one is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    StagingError,
    StepNotFoundError,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.format.manifest import Outline
from aiockpt.http.client import CheckpointClient
from aiockpt.http.download import (
    Download,
    OtherSnapshotError,
    Peer,
    verdict,
)
from aiockpt.http.manifests import (
    LatestInfo,
    ManifestReply,
    end_lease,
    fetch_latest,
    fetch_manifest,
    keep_lease,
)
from aiockpt.http.protocol import Source, parse_metadata
from aiockpt.http.retry import OnRetry, poll
from aiockpt.runtime.secrets import discreet
from aiockpt.runtime.tasks import Notifier, run_all
from aiockpt.transfer.source import OnProgress, Target

__all__ = ["Sources", "distinct", "keeping", "sources_of"]

V = TypeVar("V")

_WAIT = 30.0  # seconds for which a sender is asked to wait for its first step
_OTHERS = 0.5  # seconds in which a source may name a newer step than the first one


@dataclass(eq=False)
class Sources:
    """What a receive asks, from the manifest to the last chunk.

    Errors are the only source's own. Of several sources, the one that tells most is
    raised once nobody is left, with the others as its notes.

    Attributes:
        client: What asks them.
        peers: In the caller's order.
    """

    client: CheckpointClient
    peers: list[Peer]
    _deadline: float = field(default=0.0, init=False)

    @classmethod
    def of(cls, client: CheckpointClient, sources: Iterable[Source]) -> Sources:
        """Return what asks these sources."""
        return cls(client, [Peer(source) for source in sources])

    def __repr__(self) -> str:
        return f"<Sources {len(self._left())} of {len(self.peers)}>"

    @property
    def name(self) -> str:
        """All addresses, without tokens."""
        return " ".join(peer.source.base_url for peer in self.peers)

    def through(self, client: CheckpointClient) -> Sources:
        """Return the same, with what is known of them, asked by another client."""
        other = Sources(client, self.peers)
        other._deadline = self._deadline
        return other

    def given(self) -> dict[str, int]:
        """Return how many verified bytes each of several gave in the last download."""
        if len(self.peers) == 1:
            return {}
        return {peer.source.base_url: peer.given for peer in self.peers}

    async def fetch_latest(
        self, *, wait: float = 0.0, on_retry: OnRetry | None = None
    ) -> LatestInfo:
        """Return the newest step that is served at this moment.

        Sources that serve nothing are waited for as long as ``wait`` says, until
        another one answers.

        Raises:
            StepNotFoundError: nothing is published.
        """

        async def ask(peer: Peer) -> LatestInfo:
            return await fetch_latest(
                self.client, peer.source, wait=wait, on_retry=on_retry
            )

        peers = [Peer(peer.source) for peer in self.peers]
        answers = await _answers(peers, ask, others=_OTHERS)
        return max(answers.values(), key=lambda info: info.step)

    async def newest(self) -> int:
        """Return the step that is served now; wait until there is one."""

        async def ask() -> LatestInfo | None:
            with suppress(StepNotFoundError):
                return await self.fetch_latest(wait=_WAIT)
            return None

        return (await poll(ask, pause=self.client.pause)).step

    async def fetch_manifest(
        self,
        step: int,
        *,
        deadline: float,
        on_retry: OnRetry | None = None,
        probe: str | None = None,
    ) -> ManifestReply:
        """Return the manifest of ``step`` that comes first, once a source has it.

        The other sources may join in later. Of several, none lends its memory.

        Raises:
            AiockptError: nobody is left.
        """
        self._deadline = deadline
        for peer in self.peers:
            peer.error, peer.joined, peer.given = None, False, 0
        if len(self.peers) > 1:
            probe = None

        async def ask(peer: Peer) -> ManifestReply:
            return await fetch_manifest(
                self.client,
                peer.source,
                step,
                deadline=deadline,
                on_retry=on_retry,
                probe=probe,
            )

        answers = await _answers(self.peers, ask, step=step)
        first = next(iter(answers.values()))
        for peer, other in answers.items():
            try:
                peer.require(first.manifest.outline, other.manifest.outline)
            except OtherSnapshotError as error:
                peer.drop(error, step)
        return first

    async def fetch_chunks(
        self,
        outline: Outline,
        target: Target,
        chunks: Sequence[int],
        *,
        on_progress: OnProgress,
        on_retry: OnRetry | None = None,
    ) -> None:
        """Fetch chunks from all sources that are left; see `Download`."""
        began, peers = _now(), self._left()
        for peer in peers:
            peer.given = 0
        download = Download(
            self.client,
            peers,
            outline,
            target,
            on_progress=on_progress,
            deadline=self._deadline,
            on_retry=on_retry,
        )
        await download.run(chunks)
        if len(self.peers) > 1:
            self._report(outline.step, _now() - began)

    async def end_lease(self, step: int) -> None:
        """Say to all that have the checkpoint that the receive has ended."""
        await self._say(end_lease, step)

    async def keep_lease(self, step: int) -> None:
        """Say until cancelled that the receive goes on, although it asks nothing."""
        await self._say(keep_lease, step)

    async def _say(
        self,
        say: Callable[[CheckpointClient, Source, int], Coroutine[Any, Any, None]],
        step: int,
    ) -> None:
        leased = [
            peer.source
            for peer in self.peers
            if peer.source.lease is not None and (peer.joined or len(self.peers) == 1)
        ]
        await run_all([partial(say, self.client, source, step) for source in leased])

    def _left(self) -> list[Peer]:
        if len(self.peers) == 1:  # nobody gives up the only one
            self.peers[0].error = None
        return [peer for peer in self.peers if peer.error is None]

    def _report(self, step: int, seconds: float) -> None:
        for peer in self.peers:
            emit(
                TransferEvent(
                    stop="fetch_chunk",
                    step=step,
                    peer=peer.source.base_url,
                    nbytes=peer.given,
                    seconds=seconds,
                    level=logging.INFO,
                )
            )


async def _answers(
    peers: Sequence[Peer],
    ask: Callable[[Peer], Awaitable[V]],
    *,
    step: int | None = None,
    others: float = 0.0,
) -> dict[Peer, V]:
    """Ask all peers at once; return the answers, the first one first.

    The first answer is waited for, and more for another ``others`` seconds. The peers
    that fail by then are dropped.

    Raises:
        AiockptError: all of them failed.
    """
    if len(peers) == 1:
        return {peers[0]: await ask(peers[0])}
    answers: dict[Peer, V] = {}
    news = Notifier()

    async def hear(peer: Peer) -> None:
        try:
            answers[peer] = await ask(peer)
        except (ClosedError, StagingError):
            raise  # not the peer's fault
        except AiockptError as error:
            if step is None:
                peer.error = error
            else:
                peer.drop(error, step)
        news.notify()

    async def count() -> None:
        while not answers and any(peer.error is None for peer in peers):
            await news.wait(None)
        until = _now() + others
        while any(peer.error is None and peer not in answers for peer in peers):
            if (seconds := until - _now()) <= 0:
                break
            await news.wait(seconds)
        scope.cancel()

    with anyio.CancelScope() as scope:
        await run_all([count, *(partial(hear, peer) for peer in peers)])
    if not answers:
        raise verdict(peers)
    return answers


async def keeping(sources: Sources, step: int, work: Awaitable[V]) -> V:
    """Await what takes a while and asks nothing; the senders keep the snapshot.

    If cancelled, so is the work, and nothing is left behind.
    """
    speaking = asyncio.ensure_future(sources.keep_lease(step))
    try:
        return await work
    finally:
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)


@discreet
def sources_of(metadata: str | Sequence[str]) -> list[Source]:
    """Return the sources that a caller names, each once.

    Raises:
        ValueError: there is none.
        TypeError: neither a string nor strings.
        LocalProtocolError: not what ``metadata()`` returns.
    """
    given: object = metadata  # callers without types pass anything
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    texts: list[Any] = [*metadata] if several else [metadata]
    if not texts:
        raise ValueError("metadata is an empty list: name a source at least")
    return distinct(map(parse_metadata, texts))


def distinct(sources: Iterable[Source]) -> list[Source]:
    """Return each address once, in order."""
    found: dict[str, Source] = {}
    for source in sources:
        found.setdefault(source.base_url, source)
    return [*found.values()]


def _now() -> float:
    return asyncio.get_running_loop().time()
