"""The client: a peer's manifest, and the chunks that it describes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus

from aiohttp import ClientSession, hdrs

from aiockpt.errors import AiockptError, StepNotFoundError
from aiockpt.events import TransferEvent, emit
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http.download import Download, Peer
from aiockpt.http.exchange import ClientConfig, Port
from aiockpt.http.fetching import ChunkFetch, OnProgress, OnVerified, Prepare, Target
from aiockpt.http.latest import LatestInfo, ask_incarnation, ask_latest
from aiockpt.http.manifests import NOTHING, ManifestRequest, Run, Wishes
from aiockpt.http.protocol import (
    LEASE_HEADER,
    Resource,
    ResourceKind,
    Source,
    format_prefer_wait,
    format_resource,
)
from aiockpt.http.retrying import OnRetry, Patience, Retrier, backoff, persist
from aiockpt.http.translating import Exchange
from aiockpt.runtime.host_limits import of_caller

__all__ = ["CheckpointClient", "ClientConfig", "LatestInfo", "Run", "Target"]

# An answer that took this long has waited: asking again at once is no busy loop.
_WAITED = 0.5
_FAREWELL = 1.0  # seconds in which a peer takes note that a receive has ended
_POLL = 30.0  # seconds for which a peer is asked to wait for news


class CheckpointClient:
    """Fetches manifests and chunks from peers.

    Errors are the package's own. Deadlines belong to the caller: cancel a call to end
    it, and neither a task, nor a descriptor, nor a half-read connection is left.

    Args:
        session: Used and never closed; None makes one, on first use, in that loop.
        run: Where a manifest is decoded.

    Attributes:
        name: What it is called in the leases of its receives.
    """

    def __init__(
        self, config: ClientConfig, session: ClientSession | None, *, run: Run
    ) -> None:
        self._config = config
        self._port = Port(config, session)
        self._run = run
        self.name = secrets.token_hex(8)

    async def fetch_manifest(
        self,
        source: Source,
        step: int,
        *,
        deadline: float,
        on_retry: OnRetry | None = None,
        wishes: Wishes = NOTHING,
    ) -> Manifest:
        """Return the manifest of ``step``, waiting until the peer publishes it.

        It waits for ``source.patience``, or until it is cancelled; ``deadline`` (loop
        time) only tells the peer how long that may be. If cancelled, nothing is left
        behind.

        Raises:
            StepNotFoundError: a newer step has taken its place, or it did not come.
            PeerUnreachableError, TransferStalledError, TransferInterruptedError: the
                peer was silent for the reconnect timeout.
            AuthenticationError, RemoteProtocolError, LimitExceededError,
                IntegrityError, ForgedManifestError: what the peer answered.
        """
        tell = self._teller(source, step, on_retry)
        until = _now() + source.patience
        request = ManifestRequest(self._port, self._config, self._run, wishes)
        polls = 0
        while True:
            asked, retrier = _now(), self._retrier()
            last = min(deadline, until)
            attempt = partial(request.send, source, step, last, retrier)
            try:
                return await persist(attempt, retrier, tell, pause=self._port.pause)
            except StepNotFoundError as error:
                past = error.serving is not None and error.serving > step
                if past or _now() >= until:
                    raise
                tell(error)
            polls += 1
            waited = _now() - asked > _WAITED
            await self._port.pause(0 if waited else backoff(polls))

    async def fetch_latest(
        self, source: Source, *, wait: float = 0.0, on_retry: OnRetry | None = None
    ) -> LatestInfo:
        """Return what the peer serves at this moment, or within ``wait`` seconds.

        Raises:
            StepNotFoundError: nothing is published.
        """
        retrier = self._retrier()
        tell = self._teller(source, None, on_retry)
        attempt = partial(ask_latest, self._port, source, wait=wait)
        found = await persist(attempt, retrier, tell, pause=self._port.pause)
        assert found is not None, "only a request for a newer step may come back empty"
        return found

    async def fetch_incarnation(
        self, source: Source, *, reconnect_timeout: float
    ) -> str | None:
        """Return the id of the peer's current start; None from a peer that has none.

        Raises:
            TransportError: the peer was silent for ``reconnect_timeout``, which may be
                infinite.
            AuthenticationError, RemoteProtocolError: what the peer answered.
        """
        retrier = self._retrier(reconnect_timeout)
        attempt = partial(ask_incarnation, self._port, source)
        tell = self._teller(source, None, None)
        try:
            return await persist(attempt, retrier, tell, pause=self._port.pause)
        except StepNotFoundError:  # the answer of an older peer that serves nothing
            return None

    async def wait_newer(
        self,
        source: Source,
        after: int | None,
        *,
        known: str | None = None,
        reconnect_timeout: float | None = None,
    ) -> LatestInfo:
        """Return what the peer serves once that is newer than step ``after``.

        Whatever is served by a sender whose incarnation is not ``known`` is newer: it
        has started again. This waits until it is cancelled, which leaves nothing
        behind. A peer that is silent, or busy, is asked again, ever more slowly.

        Raises:
            PeerUnreachableError, TransferStalledError, TransferInterruptedError: the
                peer was silent for ``reconnect_timeout``, which may be infinite.
            AuthenticationError, RemoteProtocolError: what the peer answered.
        """
        tell = self._teller(source, None, None)
        polls = 0
        while True:
            asked, retrier = _now(), self._retrier(reconnect_timeout)
            ask = partial(ask_latest, self._port, source, after, known=known)
            attempt = partial(ask, wait=_POLL)
            try:
                found = await persist(attempt, retrier, tell, pause=self._port.pause)
            except StepNotFoundError:
                found = None
            if found is not None:
                return found
            polls = 0 if _now() - asked > _WAITED else polls + 1
            await self._port.pause(backoff(polls) if polls else 0)

    async def fetch_chunks(
        self,
        source: Source,
        outline: Outline,
        target: Target,
        chunks: Sequence[int],
        *,
        on_progress: OnProgress,
        on_retry: OnRetry | None = None,
        prepare: Prepare | None = None,
        on_verified: OnVerified | None = None,
    ) -> None:
        """Fetch chunks into ``target`` and verify each one.

        Chunks are verified as their bytes arrive. ``on_progress`` gets newly arrived
        bytes (negative when a bad chunk is thrown away) and newly verified chunks; it
        must be quick and not raise. ``on_verified`` gets the number of each verified
        chunk, whose bytes are in ``target`` when the loop goes on, and stay as they
        are; it only takes note. ``prepare(start, stop)`` gets that memory of the data
        segment ready, a little ahead of its bytes. If cancelled, nothing is written to
        ``target`` any more, and any part of it may have been.

        Raises:
            IntegrityError: a chunk came three times with a wrong digest.
            CheckpointChangedError: the peer replaced the snapshot.
            StepNotFoundError: the peer retracted it.
            PeerUnreachableError, TransferStalledError, TransferInterruptedError: the
                peer was silent for the reconnect timeout.
            AuthenticationError, RemoteProtocolError: what the peer answered.
        """
        fetch = self.fetching(
            source,
            outline,
            target,
            on_progress=on_progress,
            on_retry=on_retry,
            prepare=prepare,
            on_verified=on_verified,
        )
        most = self._config.max_concurrency
        with closing(fetch):
            await Download([(Peer(source), fetch)], chunks, each=most, most=most).run()

    @property
    def max_concurrency(self) -> int:
        """How many requests of a transfer are made to one peer at a time."""
        return self._config.max_concurrency

    def fetching(
        self,
        source: Source,
        outline: Outline,
        target: Target,
        *,
        on_progress: OnProgress,
        on_retry: OnRetry | None,
        prepare: Prepare | None,
        on_verified: OnVerified | None,
    ) -> ChunkFetch:
        """Return what the requests to one peer have in common; see `fetch_chunks`."""
        return ChunkFetch(
            port=self._port,
            source=source,
            outline=outline,
            target=target,
            prepare=prepare,
            on_verified=on_verified,
            on_progress=of_caller(on_progress),
            on_retry=self._teller(source, outline.step, on_retry),
            patience=replace(self._retrier().patience, connected=True),
            lanes=self._config.max_concurrency,
        )

    async def end_lease(self, source: Source, step: int) -> None:
        """Tell the peer that the receive of ``source.lease`` has ended.

        A peer that does not hear it finds out by itself: the lease ends when nothing is
        asked for during the peer's stall timeout.
        """
        assert source.lease is not None
        left = source.lease.until - _now()  # all bytes are here: that it must not cost
        patience = min(_FAREWELL, max(left, 0.0) / 4)
        exchange = Exchange(
            source=source,
            method="HEAD",
            path=format_resource(Resource(ResourceKind.METADATA, step)),
            headers={LEASE_HEADER: source.lease.end},
            status=HTTPStatus.NO_CONTENT,
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._say(exchange)

    async def keep_lease(self, source: Source, step: int) -> None:
        """Renew ``source.lease`` until cancelled, while nothing else is asked for."""
        exchange = Exchange(
            source=source,
            path=format_resource(Resource(ResourceKind.METADATA, step)),
            headers={hdrs.IF_NONE_MATCH: "*", "Prefer": format_prefer_wait(0)},
            status=HTTPStatus.NOT_MODIFIED,
        )
        while True:
            await self._port.pause(self._config.stall_timeout / 4)
            await self._say(exchange)

    async def _say(self, exchange: Exchange) -> None:
        with suppress(AiockptError):
            async with self._port.open(exchange, _ignore):
                pass

    async def pause(self, delay: float) -> None:
        """Sleep; see `Port.pause`."""
        await self._port.pause(delay)

    async def aclose(self) -> None:
        """Close the client's own session. Calls still under way fail; idempotent."""
        await self._port.aclose()

    def __repr__(self) -> str:
        return f"<CheckpointClient {self._port.state}>"

    def _retrier(self, reconnect_timeout: float | None = None) -> Retrier:
        config = self._config
        if reconnect_timeout is None:
            reconnect_timeout = config.reconnect_timeout
        return Retrier(Patience(reconnect_timeout, config.stall_timeout, _now()))

    def _teller(
        self, source: Source, step: int | None, on_retry: OnRetry | None
    ) -> OnRetry:
        def tell(error: AiockptError) -> None:
            peer = source.base_url
            emit(TransferEvent(stop="retry", step=step, peer=peer, detail=str(error)))
            if on_retry is not None:
                on_retry(error)

        return tell


def _ignore(_: int) -> None:
    pass


def _now() -> float:
    return asyncio.get_running_loop().time()
