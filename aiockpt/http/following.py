"""Follows a sender that is still staging: chunks first, what they must be afterwards.

Chunks are fetched in order, as soon as they are staged, and their digests noted. The
sealed manifest is waited for meanwhile: it must be the unsealed one with digests in it,
and what does not have them was not received. From then on there is nothing special
about this checkpoint, and the rest of it comes as any other does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Final

from aiockpt._tasks import together
from aiockpt.errors import AiockptError, CheckpointChangedError, IntegrityError
from aiockpt.http.exchange import ClientConfig
from aiockpt.http.fetching import ChunkFetch
from aiockpt.http.manifests import Memory, Run, authenticate, download_header
from aiockpt.http.retrying import Retrier, persist
from aiockpt.http.stretch import Part, UnsealedStretch
from aiockpt.http.translating import Exchange, naming
from aiockpt.wire.http import (
    Resource,
    ResourceKind,
    format_prefer_wait,
    format_resource,
)
from aiockpt.wire.manifest import Outline
from aiockpt.wire.unsealed import UNSEALED_HEADER, Promise

__all__ = ["AHEAD", "Following", "SealRequest"]

AHEAD: Final = 32 << 20
"""Bytes of a request: the last one is served when all of them are staged."""


@dataclass(frozen=True, slots=True)
class SealRequest:
    """Asks for the sealed header of what was promised.

    ``unsealed`` is its outline until then, ``run`` calls what takes a while.
    """

    fetch: ChunkFetch
    config: ClientConfig
    run: Run
    promise: Promise
    unsealed: Outline

    async def __call__(self) -> Outline:
        """Return the sealed outline, once there is one."""
        sealed = None
        while sealed is None:
            retrier = Retrier(self.fetch.patience)
            attempt = partial(self._send, retrier)
            fetch = self.fetch
            sealed = await persist(
                attempt, retrier, fetch.on_retry, pause=fetch.port.pause
            )
        return sealed

    async def _send(self, retrier: Retrier) -> Outline | None:
        fetch, tag, step = self.fetch, self.promise.tag, self.unsealed.step
        exchange = Exchange(
            source=fetch.source,
            path=format_resource(Resource(ResourceKind.METADATA, step)),
            # No condition: a cache that has the sealed header may give that.
            headers={
                UNSEALED_HEADER: tag,
                "Prefer": format_prefer_wait(fetch.held),
            },
            status=HTTPStatus.OK,
            step=step,
            snapshot_id=tag,
            allowance=fetch.held,
            may_be_empty=True,
        )
        header = await download_header(fetch.port, self.config, exchange, retrier)
        if header is None:
            await fetch.not_yet()
            return None
        with naming(exchange):
            return await self.run(partial(self._believe, header, exchange))

    def _believe(self, header: Memory, exchange: Exchange) -> Outline:
        authenticate(self.config, header, exchange)
        return self.promise.kept(header, self.unsealed)


@dataclass(slots=True)
class Following:
    """One fetch of chunks of an unsealed checkpoint.

    Attributes:
        sealed: The outline with digests, once it is there.
    """

    fetch: ChunkFetch
    request: SealRequest
    sealed: Outline | None = None
    _noted: dict[int, str] = field(default_factory=dict)

    async def run(
        self, runs: Sequence[Sequence[Part]], *, workers: int
    ) -> tuple[Outline, list[int]]:
        """Return the sealed outline, and the chunks that are still to be fetched.

        Raises:
            PeerFailedError: the peer could not stage it.
            StepNotFoundError: the peer has withdrawn it.
            AiockptError: as `CheckpointClient.fetch_chunks`.
        """
        queue = iter(runs)
        work = partial(self._work, queue)
        await together([self._wait, *[work] * min(workers, len(runs))])
        assert self.sealed is not None
        return self.sealed, self._judge(self.sealed, runs)

    async def _wait(self) -> None:
        self.sealed = await self.request()

    async def _work(self, queue: Iterator[Sequence[Part]]) -> None:
        """Fetch as long as there is no seal."""
        for parts in queue:
            if self.sealed is not None or not await self._fetch(parts):
                return

    async def _fetch(self, parts: Sequence[Part]) -> bool:
        """Fetch a run; say whether it makes sense to fetch another one."""
        fetch, stretch = self.fetch, UnsealedStretch(parts, self._noted)
        await fetch.have_ready(parts)
        try:
            await fetch.fetch(stretch, Retrier(fetch.patience))
        except CheckpointChangedError:
            # Not under this tag, or not through this cache: the seal tells.
            pass
        except AiockptError:
            if self.sealed is None:
                raise
        if stretch.chunk is None:
            return True
        _, come = stretch.leave()
        fetch.on_progress(-come, 0)
        return False

    def _judge(self, sealed: Outline, runs: Sequence[Sequence[Part]]) -> list[int]:
        """Return the chunks that are missing or wrong; count the others."""
        parts = [part for run in runs for part in run]
        left = [p for p in parts if self._noted.get(p.chunk) != sealed.digests[p.chunk]]
        wrong = [part for part in left if part.chunk in self._noted]
        lost = sum(part.stop - part.start for part in wrong)
        self.fetch.on_progress(-lost, len(parts) - len(left))
        if self.fetch.on_verified is not None:
            missing = {part.chunk for part in left}
            for part in parts:
                if part.chunk not in missing:
                    self.fetch.on_verified(part.chunk)
        for part in wrong[:1]:
            chunk, url = part.chunk, self.fetch.source.base_url
            expected, actual = sealed.digests[chunk], self._noted[chunk]
            error = IntegrityError(chunk=chunk, expected=expected, actual=actual)
            error.url = url
            self.fetch.on_retry(error)
        return [part.chunk for part in left]
