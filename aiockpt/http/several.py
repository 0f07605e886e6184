"""Several peers that hold the same checkpoint, asked as one.

Which checkpoint that is, is settled by their manifests before a byte of it is asked
for: the snapshot id is the digest of a manifest, with the digests of all chunks in it,
so peers that agree hold the same bytes. Whoever differs is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import anyio

from aiockpt.errors import (
    AiockptError,
    CheckpointChangedError,
    ClosedError,
    StagingError,
)
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http.client import CheckpointClient, LatestInfo, Target
from aiockpt.http.fetching import OnProgress, OnVerified, Prepare
from aiockpt.http.manifests import NOTHING, Wishes
from aiockpt.http.member import Members, summed_up
from aiockpt.http.poll import Poll
from aiockpt.http.protocol import Source
from aiockpt.http.retrying import OnRetry
from aiockpt.http.stretch import parts_of
from aiockpt.http.striping import Striping
from aiockpt.runtime.tasks import News, together

__all__ = ["SeveralSources"]

V = TypeVar("V")
Ask = Callable[[Source, OnRetry], Awaitable[V]]

_LANES = 4  # times the client's concurrency, of all sources together


class SeveralSources:
    """An `Origin` of several sources, from the manifest to the last chunk.

    From each manifest on, it knows which of them are well and hold that checkpoint.
    """

    def __init__(self, client: CheckpointClient, members: Members) -> None:
        self._client = client
        self._members = members
        self._sources = members.sources

    def __repr__(self) -> str:
        return f"<SeveralSources {self._members!r}>"

    @property
    def name(self) -> str:
        """All addresses, without tokens."""
        return self._members.name

    def through(self, client: CheckpointClient) -> SeveralSources:
        """Return the same, with what is known of it, asked by another client."""
        return SeveralSources(client, self._members)

    def given(self) -> dict[str, int]:
        """Return how many bytes came from whom, the last time that chunks were."""
        urls = [source.base_url for source in self._sources]
        return dict(zip(urls, self._members.given, strict=True))

    async def fetch_latest(
        self, *, wait: float = 0.0, on_retry: OnRetry | None = None
    ) -> LatestInfo:
        """Return what most of them serve; where equal, the newest.

        Those that serve nothing are waited for as long as ``wait`` says.

        Raises:
            AiockptError: none of them serves anything.
        """
        poll = Poll[LatestInfo](len(self._sources), key=_same, rank=_step)
        await self._hold(poll, partial(self._ask_latest, wait), on_retry)
        if not poll.parties():
            raise summed_up(self._sources, poll.failures)
        return poll.parties()[0].value

    async def fetch_manifest(
        self,
        step: int,
        *,
        deadline: float,
        on_retry: OnRetry | None = None,
        wishes: Wishes = NOTHING,
    ) -> Manifest:
        """Return the manifest of ``step`` that most have; else the first one's.

        It waits until one has it, and then for the others as far as they matter, and
        not for long. Those who are silent may join in later.

        Raises:
            AiockptError: nobody is left; see `Members.verdict`.
        """
        self._members.begin(deadline)
        poll = Poll[Manifest](len(self._sources), key=_outline)
        del wishes  # what is lent, one peer lends alone
        ask = partial(self._ask_manifest, step, NOTHING)
        await self._hold(poll, ask, on_retry)
        for number, error in poll.failures.items():
            self._members.drop(number, error, step=step)
        if not poll.parties():
            raise self._members.verdict()
        chosen, *others = poll.parties()
        self._members.agreed.update(chosen.voters)
        for party in others:
            for number in party.voters:
                error = self._differing(number, chosen.value, party.value)
                self._members.drop(number, error, step=step)
        return chosen.value

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
        """Fetch chunks into ``target``, from whoever is fast; verify each one.

        As :meth:`.CheckpointClient.fetch_chunks`, until nobody is left.
        """
        parts = parts_of(outline, chunks)
        if not parts:
            return
        members, began = self._members, _now()
        members.given = [0] * len(members)
        fetches = [
            self._client.fetching(
                source,
                outline,
                target,
                on_progress=on_progress,
                on_retry=on_retry,
                prepare=prepare,
                on_verified=on_verified,
            )
            for source in self._sources
        ]
        striping = Striping(
            members,
            fetches,
            parts,
            lanes=self._lanes(),
            most=self._client.max_concurrency,
            join=partial(self._join, outline, on_retry),
        )
        with ExitStack() as stack:
            for fetch in fetches:
                stack.callback(fetch.close)
            await striping.run()
        members.report(outline.step, _now() - began)

    def _lanes(self) -> int:
        most = self._client.max_concurrency
        return max(1, min(most, _LANES * most // len(self._sources)))

    async def end_lease(self, step: int) -> None:
        """Say to all that have the checkpoint that the receive has ended."""
        await self._say(self._client.end_lease, step)

    async def keep_lease(self, step: int) -> None:
        """Say to all that have the checkpoint that the receive goes on."""
        await self._say(self._client.keep_lease, step)

    async def _say(
        self, say: Callable[[Source, int], Coroutine[Any, Any, None]], step: int
    ) -> None:
        sources = [self._sources[number] for number in self._members.agreed]
        leased = [source for source in sources if source.lease is not None]
        await together([partial(say, source, step) for source in leased])

    async def _ask_latest(
        self, wait: float, source: Source, on_retry: OnRetry
    ) -> LatestInfo:
        return await self._client.fetch_latest(source, wait=wait, on_retry=on_retry)

    async def _ask_manifest(
        self,
        step: int,
        wishes: Wishes,
        source: Source,
        on_retry: OnRetry | None,
    ) -> Manifest:
        return await self._client.fetch_manifest(
            source,
            step,
            deadline=self._members.deadline,
            on_retry=on_retry,
            wishes=wishes,
        )

    async def _join(
        self, outline: Outline, on_retry: OnRetry | None, number: int
    ) -> None:
        """Return when a member is known to hold the checkpoint; else raise."""
        if number not in self._members.agreed:
            source = self._sources[number]
            found = await self._ask_manifest(outline.step, NOTHING, source, on_retry)
            if found.outline != outline:
                raise self._differing(number, outline, found)
            self._members.agreed.add(number)

    def _differing(
        self, number: int, expected: Outline | Manifest, actual: Manifest
    ) -> AiockptError:
        return _OtherCheckpointError(
            expected=expected.snapshot_id,
            actual=actual.snapshot_id,
            url=self._sources[number].base_url,
        )

    async def _hold(self, poll: Poll[V], ask: Ask[V], on_retry: OnRetry | None) -> None:
        """Ask all at once, until the poll is settled or everybody failed."""
        news = News()

        async def vote(number: int) -> None:
            def doubt(error: AiockptError) -> None:
                poll.doubt(number)
                news.tell()
                if on_retry is not None:
                    on_retry(error)

            try:
                answer = await ask(self._sources[number], doubt)
                poll.vote(number, answer, _now())
            except (ClosedError, StagingError):
                raise  # not the peer's fault
            except AiockptError as error:
                poll.fail(number, error)
            news.tell()

        async def count() -> None:
            while not poll.is_settled(_now()):
                await news.wait(poll.left(_now()))
            scope.cancel()

        with anyio.CancelScope() as scope:
            votes = [partial(vote, number) for number in range(len(self._sources))]
            await together([count, *votes])


class _OtherCheckpointError(CheckpointChangedError):
    """A peer serves the step, and not what the others do under this name."""

    def __str__(self) -> str:
        return (
            f"{self.url} serves another snapshot of this step, {self.actual}; the "
            f"others serve {self.expected}"
        )


def _same(info: LatestInfo) -> LatestInfo:
    return info


def _step(info: LatestInfo) -> int:
    return info.step


def _outline(manifest: Manifest) -> Outline:
    return manifest.outline


def _now() -> float:
    return asyncio.get_running_loop().time()
