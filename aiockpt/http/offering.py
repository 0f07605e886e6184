"""What a transport offers: state dicts staged into snapshots, and put on the store."""

from __future__ import annotations

import time
from typing import Protocol

import anyio

from aiockpt.errors import AiockptError, ClosedError, StepNotFoundError
from aiockpt.events import TransferEvent, emit
from aiockpt.http.options import require
from aiockpt.http.store import Failure, StoreStatistics
from aiockpt.runtime.lifetime import Deadline
from aiockpt.transfer.repeats import Repeats, content_of
from aiockpt.transfer.stager import Snapshot, Stager
from aiockpt.transport import exact_step

__all__ = ["Offering", "Offers"]


class Offers(Protocol):
    """A store, in this process or in another one, as its trainer sees it."""

    @property
    def retractions(self) -> int:
        """How often it was told to serve nothing."""

    def statistics(self) -> StoreStatistics:
        """Return what it holds now."""

    async def publish(self, snapshot: Snapshot, *, grace: float) -> None:
        """Serve ``snapshot`` from now on; see `Store.publish`."""

    async def retract(self, *, grace: float) -> None:
        """Serve nothing; see `Store.retract`."""

    def fail(self, failure: Failure | None) -> None:
        """Tell those who wait for a step that it does not come; None forgets it."""


class Serves(Protocol):
    """An endpoint, as far as an offer needs it."""

    @property
    def store(self) -> Offers:
        """Where it is published."""

    async def start(self) -> None:
        """Serve what is on the store."""


class Offering:
    """Stages and publishes one checkpoint at a time; the last one wins.

    A withdrawal wins over every call that began before it: it does not wait for their
    staging, and what they have staged by then is not published. Each offer starts the
    endpoint, so that it, too, is withdrawn meanwhile, or told of when that fails.
    """

    def __init__(
        self,
        stager: Stager,
        endpoint: Serves,
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

        If it fails, the old offer stays, and those who wait for ``step`` are told:
        as many as there are ``receivers``, or any number if that is 0.

        Raises:
            StepNotFoundError: it was withdrawn meanwhile; nothing is offered.
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
        """Publish what is offered as ``step``, without staging it again.

        Raises:
            StepNotFoundError: nothing is offered, or it was withdrawn meanwhile.
            ClosedError: after, or because of, :meth:`close`.
        """
        before, step = self._store.retractions, exact_step(step)
        async with self._turn:
            self._check(step, before)
            offered = self._offered
            if offered is None:
                raise StepNotFoundError(step)
            await self._start()
            if self._store.statistics().step is None:  # what served it has gone
                raise StepNotFoundError(step)
            self._check(step, before)
            if offered.manifest.step == step:
                return
            offered.acquire()  # a withdrawal must not free it under our hands
            try:
                renamed = await self._stager.relabel(offered, step=step)
            finally:
                offered.release()
            await self._publish(renamed, before)

    async def withdraw(self, *, grace: float | None = None) -> None:
        """Offer nothing; readers get the grace, then are evicted. Idempotent.

        Whatever is being staged meanwhile is not waited for, nor offered later.
        """
        offered, self._offered = self._offered, None
        await self._store.retract(grace=self._grace if grace is None else grace)
        self._stager.trim()
        if offered is not None:
            emit(TransferEvent(stop="retract", step=offered.manifest.step))

    async def close(self, *, grace: float | None = None) -> None:
        """Offer nothing for good, and keep no memory. Idempotent."""
        self._closed = True
        self._stager.close()
        await self.withdraw(grace=grace)

    async def _publish(self, snapshot: Snapshot, before: int) -> None:
        # The store takes a reference of its own; ours ends here, whatever happens.
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
