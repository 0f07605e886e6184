"""Publish state dicts: stage each one into a snapshot, then have it served."""

from __future__ import annotations

import time

import anyio

from aiockpt.errors import AiockptError, ClosedError, StepNotFoundError
from aiockpt.events import TransferEvent, emit
from aiockpt.http.options import require
from aiockpt.http.server_process import AnyEndpoint
from aiockpt.http.store import Failure
from aiockpt.runtime.lifetime import Deadline
from aiockpt.transfer.repeats import Repeats, content_of
from aiockpt.transfer.stager import Snapshot, Stager
from aiockpt.transport import exact_step

__all__ = ["Offering"]


class Offering:
    """Stages and publishes one checkpoint at a time; the last one wins.

    A withdrawal wins over every call that began before it. It does not wait for their
    staging, and they publish nothing. Each offer starts the endpoint itself, so that a
    withdrawal wins over the start too, and waiting receivers are told if it fails.

    Args:
        stager: Copies state dicts into snapshots.
        endpoint: Serves what its store publishes.
        grace: Seconds that readers get before they are evicted.
    """

    def __init__(
        self,
        stager: Stager,
        endpoint: AnyEndpoint,
        *,
        grace: float,
    ) -> None:
        require(grace=grace)
        self._stager = stager
        self._start = endpoint.start
        self._store = endpoint.store
        self._grace = grace
        self._turn = anyio.Lock()
        self._offered: Snapshot | None = None
        self._closed = False
        self._repeats = Repeats("publication")

    def __repr__(self) -> str:
        return f"<Offering {self._offered}>"

    async def offer(
        self, state_dict: object, step: int, deadline: Deadline, receivers: int
    ) -> None:
        """Stage ``state_dict`` and publish it, within ``deadline``.

        If this fails, the old checkpoint stays published, and the receivers that wait
        for ``step`` are told: as many as ``receivers``, or any number if that is 0.

        Raises:
            StepNotFoundError: :meth:`withdraw` was called meanwhile.
            TransferTimeoutError: the deadline passed.
            ClosedError: after, or because of, :meth:`close`.
        """
        started, step = time.monotonic(), exact_step(step)
        before = self._store.retractions
        self._store.fail(None)
        try:
            async with deadline:
                await self._start()
                async with self._turn:
                    self._check(step, before)
                    snapshot = await self._stager.stage(state_dict, step=step)
                    deadline.stop = "publish"
                    await self._publish(snapshot, before)
        except BaseException as error:
            if not self._closed and self._store.retractions == before:
                failure = Failure.of(error, step=step, receivers=receivers)
                self._store.fail(failure)
            raise
        nbytes, elapsed = snapshot.manifest.segment_bytes, time.monotonic() - started
        event = TransferEvent(stop="publish", step=step, nbytes=nbytes, seconds=elapsed)
        emit(self._repeats.told(event, content_of(snapshot.manifest)))

    async def rename(self, step: int) -> None:
        """Publish the last snapshot again as ``step``, without staging it.

        Raises:
            StepNotFoundError: nothing is published, or it was withdrawn meanwhile.
            ClosedError: after, or because of, :meth:`close`.
        """
        before, step = self._store.retractions, exact_step(step)
        async with self._turn:
            self._check(step, before)
            offered = self._offered
            if offered is None:
                raise StepNotFoundError(step)
            await self._start()
            if self._store.statistics().step is None:  # its server process has died
                raise StepNotFoundError(step)
            self._check(step, before)
            if offered.manifest.step == step:
                return
            offered.acquire()  # a withdrawal must not free it meanwhile
            try:
                renamed = await self._stager.relabel(offered, step=step)
            finally:
                offered.release()
            await self._publish(renamed, before)

    async def withdraw(self, *, grace: float | None = None) -> None:
        """Publish nothing; readers get the grace, then are evicted. Idempotent.

        This does not wait for a call that is staging; that call publishes nothing.
        """
        offered, self._offered = self._offered, None
        await self._store.retract(grace=self._grace if grace is None else grace)
        self._stager.trim()
        if offered is not None:
            emit(TransferEvent(stop="retract", step=offered.manifest.step))

    async def close(self, *, grace: float | None = None) -> None:
        """Publish nothing for good, and keep no memory. Idempotent."""
        self._closed = True
        self._stager.close()
        await self.withdraw(grace=grace)

    async def _publish(self, snapshot: Snapshot, before: int) -> None:
        # The store takes a reference of its own; ours ends here in every case.
        step = snapshot.manifest.step
        try:
            self._check(step, before)
            await self._store.publish(snapshot, grace=self._grace)
            self._offered = snapshot
        except StepNotFoundError:
            raise self._overtaken(step) from None
        finally:
            snapshot.release()

    def _check(self, step: int, before: int) -> None:
        if self._closed or self._store.retractions != before:
            raise self._overtaken(step)

    def _overtaken(self, step: int) -> AiockptError:
        if self._closed:
            return ClosedError("the transport")
        error = StepNotFoundError(step)
        error.add_note("the offer was withdrawn while this call was under way")
        return error
