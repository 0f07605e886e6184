"""Sender: computes the fingerprints of what is served, each once, one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

import anyio

from aiockpt.errors import (
    Advice,
    AiockptError,
    CheckpointChangedError,
    PeerFailedError,
    StepNotFoundError,
    advice,
    kept,
)
from aiockpt.http.problems import PeerBusy
from aiockpt.http.store import Publication, Store

logger = logging.getLogger("aiockpt")

ComputeFingerprint: TypeAlias = Callable[[Any], Awaitable[bytes]]
"""Returns the fingerprint of a checkpoint of the store as JSON; may be cancelled."""

_RETRY_AFTER_S: Final = 0.0  # a request waits for the computation


class PassingFailureError(PeerFailedError):
    """A fingerprint could not be computed, but the checkpoint is not the reason."""


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
        self._tasks: dict[Publication, asyncio.Task[bytes | PeerFailedError | None]]
        self._tasks = {}

    async def of(self, publication: Publication, *, wait: float) -> bytes:
        """Return the fingerprint of a publication as JSON.

        Raises:
            PeerBusy: it is not there within ``wait`` seconds.
            StepNotFoundError: the checkpoint was replaced or retracted first.
            PeerFailedError: it cannot be computed.
        """
        found = publication.fingerprint
        if found is None:
            task = self._tasks.get(publication)
            if task is None:
                task = asyncio.create_task(self._run(publication))
                self._tasks[publication] = task
                task.add_done_callback(lambda _: self._tasks.pop(publication))
            await asyncio.wait({task}, timeout=wait)
            if not task.done():
                raise PeerBusy(retry_after=_RETRY_AFTER_S)
            found = None if task.cancelled() else task.result()
        if found is None:
            raise StepNotFoundError(publication.step, serving=self._store.step)
        if isinstance(found, PeerFailedError):
            raise kept(found)  # a raise adds the frames of a request
        return found

    async def _run(self, publication: Publication) -> bytes | PeerFailedError | None:
        """Return the fingerprint of a publication, or why it has none.

        The publication keeps it, except for a failure that may pass. None: the memory
        was given up.
        """
        task = asyncio.current_task()

        def evict() -> None:
            assert task is not None
            task.cancel()

        with suppress(CheckpointChangedError):  # given up before its turn came
            async with self._turn, self._store.reading(publication, evict=evict):
                found: bytes | PeerFailedError
                try:
                    found = await self._compute(publication.servable)
                except Exception as error:  # noqa: BLE001 - each request raises it
                    found = failure_of(publication.step, error)
                if not isinstance(found, PassingFailureError):
                    publication.fingerprint = found
                return found
        return None


def failure_of(step: int, error: Exception) -> PeerFailedError:
    """Return what a client learns of a fingerprint that could not be computed."""
    if isinstance(error, PeerFailedError):
        return kept(error)
    said = f"{error}"
    passes = Advice.LATER in advice(error)
    if not isinstance(error, AiockptError):  # only the log has details
        logger.error("a fingerprint failed", exc_info=error)
        said = f"{type(error).__name__}; the sender's log has more"
        passes = True
    kind = PassingFailureError if passes else PeerFailedError
    return kind(None, f"step {step} has no fingerprint: {said}")
