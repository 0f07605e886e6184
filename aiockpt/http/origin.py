"""Where a receive gets its bytes: from one peer, or from several that hold the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http.client import CheckpointClient, LatestInfo, Target
from aiockpt.http.fetching import OnProgress, OnVerified, Prepare
from aiockpt.http.manifests import NOTHING, Wishes
from aiockpt.http.member import Members
from aiockpt.http.protocol import Source, parse_metadata
from aiockpt.http.retrying import OnRetry
from aiockpt.http.several import SeveralSources
from aiockpt.runtime.secrets import discreet

__all__ = ["OneSource", "Origin", "distinct", "keeping", "origin_of", "sources_of"]

V = TypeVar("V")


class Origin(Protocol):
    """What a receive asks; its calls are those of a `CheckpointClient`."""

    @property
    def name(self) -> str:
        """Whom events and errors name, without the token."""

    def through(self, client: CheckpointClient) -> Origin:
        """Return the same, with what is known of it, asked by another client."""

    def given(self) -> dict[str, int]:
        """Return how many bytes came from whom, where there are several."""

    async def fetch_latest(
        self, *, wait: float = 0.0, on_retry: OnRetry | None = None
    ) -> LatestInfo:
        """Return what is served at this moment, or within ``wait`` seconds."""

    async def end_lease(self, step: int) -> None:
        """Say that the receive has ended, whose lease the requests have named."""

    async def keep_lease(self, step: int) -> None:
        """Say until cancelled that the receive goes on, although it asks nothing."""

    async def fetch_manifest(
        self,
        step: int,
        *,
        deadline: float,
        on_retry: OnRetry | None = None,
        wishes: Wishes = NOTHING,
    ) -> Manifest:
        """Return the manifest of ``step``, waiting until it is published.

        Of several sources none lends its memory.
        """

    async def fetch_chunks(
        self,
        outline: Outline,
        target: Target,
        chunks: Sequence[int],
        *,
        on_progress: OnProgress,
        on_retry: OnRetry | None = None,
        prepare: Prepare | None = None,
        on_verified: OnVerified | None = None,
    ) -> None:
        """Fetch chunks into ``target`` and verify each one."""


class OneSource:
    """A single peer: every call is the client's own."""

    def __init__(self, client: CheckpointClient, source: Source) -> None:
        self._client = client
        self._source = source
        self.name = source.base_url

    def __repr__(self) -> str:
        return f"<OneSource {self.name}>"

    def through(self, client: CheckpointClient) -> Origin:
        """See `Origin`."""
        return OneSource(client, self._source)

    def given(self) -> dict[str, int]:
        """See `Origin`."""
        return {}

    async def fetch_latest(
        self, *, wait: float = 0.0, on_retry: OnRetry | None = None
    ) -> LatestInfo:
        """See `Origin`."""
        source = self._source
        return await self._client.fetch_latest(source, wait=wait, on_retry=on_retry)

    async def end_lease(self, step: int) -> None:
        """See `Origin`."""
        if self._source.lease is not None:
            await self._client.end_lease(self._source, step)

    async def keep_lease(self, step: int) -> None:
        """See `Origin`."""
        if self._source.lease is not None:
            await self._client.keep_lease(self._source, step)

    async def fetch_manifest(
        self,
        step: int,
        *,
        deadline: float,
        on_retry: OnRetry | None = None,
        wishes: Wishes = NOTHING,
    ) -> Manifest:
        """See `Origin`."""
        return await self._client.fetch_manifest(
            self._source,
            step,
            deadline=deadline,
            on_retry=on_retry,
            wishes=wishes,
        )

    async def fetch_chunks(
        self,
        outline: Outline,
        target: Target,
        chunks: Sequence[int],
        *,
        on_progress: OnProgress,
        on_retry: OnRetry | None = None,
        prepare: Prepare | None = None,
        on_verified: OnVerified | None = None,
    ) -> None:
        """See `Origin`."""
        await self._client.fetch_chunks(
            self._source,
            outline,
            target,
            chunks,
            on_progress=on_progress,
            on_retry=on_retry,
            prepare=prepare,
            on_verified=on_verified,
        )


async def keeping(origin: Origin, step: int, work: Awaitable[V]) -> V:
    """Await what takes a while and asks nothing; the senders keep the snapshot.

    If cancelled, so is the work, and nothing is left behind.
    """
    speaking = asyncio.ensure_future(origin.keep_lease(step))
    try:
        return await work
    finally:
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)


def origin_of(client: CheckpointClient, sources: Sequence[Source]) -> Origin:
    """Return what asks one source, or several."""
    if len(sources) == 1:
        return OneSource(client, sources[0])
    return SeveralSources(client, Members(sources))


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
    """Return each address once, in order: nobody is to have two votes."""
    found: dict[str, Source] = {}
    for source in sources:
        found.setdefault(source.base_url, source)
    return [*found.values()]
