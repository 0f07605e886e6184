"""What a transport offers: state dicts staged into snapshots, and put on the shelf."""

from __future__ import annotations

import time

import anyio

from aiockpt._deadline import Deadline
from aiockpt.errors import StepNotFoundError
from aiockpt.http.options import require
from aiockpt.http.shelf import Shelf
from aiockpt.observe import TransferEvent, emit
from aiockpt.staging import Snapshot, Stager

__all__ = ["Offering"]


class Offering:
    """Stages and publishes one checkpoint at a time; the last one wins."""

    def __init__(self, stager: Stager, shelf: Shelf, *, grace: float) -> None:
        require(grace=grace)
        self._stager = stager
        self._shelf = shelf
        self._grace = grace
        self._turn = anyio.Lock()
        self._offered: Snapshot | None = None

    def __repr__(self) -> str:
        return f"<Offering {self._offered}>"

    async def offer(self, state_dict: object, step: int, deadline: Deadline) -> None:
        """Stage ``state_dict`` and publish it. If it fails, the old offer stays."""
        started = time.monotonic()
        async with self._turn:
            snapshot = await self._stager.stage(state_dict, step=step)
            deadline.stop = "publish"
            await self._publish(snapshot)
        nbytes, elapsed = snapshot.manifest.segment_bytes, time.monotonic() - started
        emit(TransferEvent(stop="publish", step=step, nbytes=nbytes, seconds=elapsed))

    async def rename(self, step: int) -> None:
        """Publish what is offered as ``step``, without staging it again.

        Raises:
            StepNotFoundError: nothing is offered.
        """
        async with self._turn:
            if self._shelf.latest is None or self._offered is None:
                raise StepNotFoundError(step)
            if self._shelf.latest.step != step:
                renamed = await self._stager.relabel(self._offered, step=step)
                await self._publish(renamed)

    async def withdraw(self, *, grace: float | None = None) -> None:
        """Offer nothing; readers get the grace, then are evicted. Idempotent."""
        offered, self._offered = self._offered, None
        await self._shelf.retract(grace=self._grace if grace is None else grace)
        self._stager.trim()
        if offered is not None:
            emit(TransferEvent(stop="retract", step=offered.manifest.step))

    async def _publish(self, snapshot: Snapshot) -> None:
        # The shelf takes a reference of its own; ours ends here, whatever happens.
        self._offered = snapshot
        try:
            await self._shelf.publish(snapshot, grace=self._grace)
        finally:
            snapshot.release()
