"""Loading from a peer: the chunks that are wanted, fetched by the client."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Final

from aiockpt.checkpointers.sources import Reading
from aiockpt.errors import AiockptError
from aiockpt.format.chunks import chunks_over
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.http.auth import find_credentials
from aiockpt.http.client import CheckpointClient
from aiockpt.http.download import Download
from aiockpt.http.manifests import PATIENCE, chase
from aiockpt.http.options import Auth, Receive
from aiockpt.http.peers import Peer, Peers
from aiockpt.http.protocol import Lease, Origin, parse_address
from aiockpt.memory.arena import Memory
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.sync_facade import run_blocking
from aiockpt.state.segment import Segment
from aiockpt.transfer.placement import Placement
from aiockpt.transfer.source import OnBytes, PlainTarget, Verify

__all__ = ["PeerSource", "open_peer"]

_THREADS: Final = 2
_CONNECTIONS: Final = 4
_STALL_TIMEOUT: Final = 10.0
_BEAT: Final = 0.1

_PATIENCE: Final = 60.0
"""Seconds in which the manifest must come, and then each next byte of the chunks."""


@contextmanager
def open_peer(text: str, reading: Reading) -> Iterator[PeerSource]:
    """Give what a peer serves: the step of the URL, or else what it serves now.

    Raises:
        StepNotFoundError: it does not serve that step.
        TransferTimeoutError: nothing new came for 60 seconds, whatever it answered.
        TransportError, AuthenticationError: it could not be asked.
        LocalProtocolError: this is no such URL.
    """
    address = parse_address(text)
    patience = PATIENCE if address.step is None else math.inf
    lease = Lease.begin(math.inf)
    origin = replace(address.origin, lease=lease, patience=patience)
    peer = _Peer(origin, address.step, reading.limits)
    manifest = run_blocking(peer.find(reading.on_bytes))
    yield PeerSource(peer, manifest, reading)
    run_blocking(peer.end(manifest.step))


class PeerSource:
    """What a peer serves, as a `SegmentSource`; the client verifies every chunk."""

    def __init__(self, peer: _Peer, manifest: Manifest, reading: Reading) -> None:
        self._peer = peer
        self._manifest = manifest
        self.segment = Segment(
            manifest, limits=reading.limits, allow_pickle=reading.allow_pickle
        )

    def __repr__(self) -> str:
        return f"<PeerSource {self._manifest}>"

    def read(
        self, placement: Placement, *, verify: Verify, on_bytes: OnBytes | None
    ) -> None:
        """Fetch the chunks that ``placement`` wants bytes of."""
        del verify
        chunks = chunks_over(self._manifest.grid, placement.ranges)
        fetch = self._peer.fetch(self._manifest, placement.memory, chunks, on_bytes)
        run_blocking(fetch)
        placement.load(placement.ranges, host=False)


@dataclass(frozen=True, slots=True)
class _Peer:
    """Where to ask, and how; every call is on a loop of its own."""

    origin: Origin
    step: int | None
    limits: Limits

    async def find(self, on_bytes: OnBytes | None) -> Manifest:
        """Return the manifest."""
        asked = "a checkpoint" if self.step is None else f"step {self.step}"
        deadline = self._deadline("fetch_manifest", asked)
        with closing(Bridge(threads=1, name="aiockpt-peer")) as bridge:
            async with (
                aclosing(self._client(bridge)) as client,
                deadline,
                _Meter(on_bytes, deadline).raising(),
            ):
                origin = replace(self.origin, patience=0.0)  # waits for no step
                peers = Peers.at(client, [origin], deadline.note, deadline=0.0)

                async def ask(step: int) -> Manifest:
                    try:
                        return (await peers.manifest(step)).manifest
                    except AiockptError as error:
                        deadline.note(error)
                        raise

                async def newest() -> int:
                    return (await peers.latest()).step

                if self.step is not None:
                    return await ask(self.step)
                return (await chase(newest, ask, pause=client.pause))[1]

    async def end(self, step: int) -> None:
        """Tell the peer that all has come."""
        with closing(Bridge(threads=1, name="aiockpt-peer")) as bridge:
            async with aclosing(self._client(bridge)) as client:
                await Peers.at(client, [self.origin]).end_lease(step)

    async def fetch(
        self,
        manifest: Manifest,
        target: Memory,
        chunks: Sequence[int],
        on_bytes: OnBytes | None,
    ) -> None:
        """Fetch chunks into ``target``."""
        deadline = self._deadline("fetch_chunk", f"step {manifest.step}")
        with closing(Bridge(threads=_THREADS, name="aiockpt-peer")) as bridge:
            async with aclosing(self._client(bridge)) as client, deadline:
                meter = _Meter(on_bytes, deadline)
                async with meter.raising():
                    peer = Peer(self.origin, joined=True)
                    peers = Peers(client, [peer], deadline.note)
                    outline, memory = manifest.outline, PlainTarget(target)
                    await Download(peers, outline, memory, chunks, meter.add).run()

    def _deadline(self, stop: str, asked: str) -> Deadline:
        what = f"{asked} from {self.origin.base_url}"
        return Deadline(_PATIENCE, stop=stop, what=what)

    def _client(self, bridge: Bridge) -> CheckpointClient:
        known = find_credentials(None, insecure=False, env=os.environ)
        return CheckpointClient(
            Receive(
                limits=self.limits,
                connections=_CONNECTIONS,
                reconnect_timeout=_STALL_TIMEOUT,
            ),
            Auth(token=known.to_send),
            stall_timeout=_STALL_TIMEOUT,
            bridge=bridge,
        )


class _Meter:
    """Hands on how many bytes came; what the listener raises ends the fetch.

    A listener hears of nothing while a peer is silent: it is told of no bytes, then,
    so that it can end that, too. Bytes beyond all that came before renew the deadline.
    Those that come once more, because they were wrong, do not.
    """

    def __init__(self, on_bytes: OnBytes | None, deadline: Deadline) -> None:
        self._on_bytes = on_bytes
        self._deadline = deadline
        self._come = self._most = 0
        self._task = asyncio.current_task()
        self._failure: BaseException | None = None

    def add(self, nbytes: int, chunks: int) -> None:
        del chunks
        self._come += nbytes
        if self._come > self._most:
            self._most = self._come
            self._deadline.renew()
        if self._on_bytes is None or self._failure is not None:
            return
        try:
            self._on_bytes(nbytes)
        except BaseException as error:  # noqa: BLE001 - `raising` raises it
            self._failure = error
            assert self._task is not None
            self._task.cancel()

    @asynccontextmanager
    async def raising(self) -> AsyncIterator[None]:
        """Raise what the listener does, in the block."""
        beat = asyncio.create_task(self._beat()) if self._on_bytes else None
        try:
            yield
        except asyncio.CancelledError:
            # Its traceback has this: a cycle would keep what was fetched into.
            failure, self._failure = self._failure, None
            if failure is None:
                raise
            try:
                raise failure from None
            finally:
                del failure
        finally:
            if beat is not None:
                beat.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT)
            self.add(0, 0)
