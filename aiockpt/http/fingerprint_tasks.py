"""Sender: computes the fingerprints of what is served, each once, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import anyio

from aiockpt.errors import (
    CheckpointChangedError,
    LocalProtocolError,
    PeerFailedError,
    RemoteProtocolError,
    StateDictError,
    kept,
)
from aiockpt.http.problems import PeerBusy
from aiockpt.http.store import Publication, Store

ComputeFingerprint: TypeAlias = Callable[[Any], Awaitable[bytes]]
"""Returns the fingerprint of a checkpoint of the store as JSON; may be cancelled."""

_RETRY_AFTER_S: Final = 0.0  # a request waits for the computation


class FingerprintTasks:
    """The fingerprints that are being computed.

    A task belongs to a publication, not to a request. So a client that leaves cancels
    nothing for others. The task reads the memory as a request does: the store keeps it,
    and ends the task if it must not be read any more.

    Args:
        store: Holds the publications.
        compute: Computes a fingerprint.
    """

    def __init__(self, store: Store, compute: ComputeFingerprint) -> None:
        self._store, self._compute = store, compute
        self._turn = anyio.Lock()
        self._tasks: dict[Publication, asyncio.Task[bytes]] = {}

    async def of(self, publication: Publication, *, wait: float) -> bytes:
        """Return the fingerprint of a publication as JSON.

        Raises:
            PeerBusy: it is not there within ``wait`` seconds.
            CheckpointChangedError: the memory must not be read any more.
            PeerFailedError: it cannot be computed.
        """
        if publication.fingerprint is not None:
            return publication.fingerprint
        task = self._tasks.get(publication)
        if task is None:
            task = asyncio.create_task(self._run(publication))
            self._tasks[publication] = task
            task.add_done_callback(lambda task: self._ended(publication, task))
        await asyncio.wait({task}, timeout=wait)
        if not task.done():
            raise PeerBusy(retry_after=_RETRY_AFTER_S)
        if task.cancelled():
            raise CheckpointChangedError(expected=publication.snapshot_id)
        if (error := task.exception()) is not None:
            raise kept(error)  # a raise adds the frames of a request
        return task.result()

    async def _run(self, publication: Publication) -> bytes:
        task = asyncio.current_task()

        def evict() -> None:
            assert task is not None
            task.cancel()

        async with (
            self._turn,
            self._store.reading(publication, evict=evict),
        ):
            try:
                found = await self._compute(publication.servable)
            except (StateDictError, LocalProtocolError, RemoteProtocolError) as error:
                why = f"step {publication.step} has no fingerprint: {error}"
                raise PeerFailedError(None, why) from error
        publication.fingerprint = found
        return found

    def _ended(self, publication: Publication, task: asyncio.Task[bytes]) -> None:
        del self._tasks[publication]
        if not task.cancelled():
            task.exception()  # it counts as seen, although every client may have left
