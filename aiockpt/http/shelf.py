"""The checkpoint that a transport offers, and the superseded ones that are still read.

A shelf offers at most one published checkpoint. A receive takes a lease on the
snapshot that it begins with, and each request in flight reads one. A snapshot that is
superseded stays readable for those who read it, and goes with the last of them. At most
``keep_superseded`` such snapshots are kept. If there would be more, those that have
been read longest stay, and the readers of the others are evicted.

Each checkpoint has a reader-writer lock of its own. Memory that belongs to the trainer
(``live``) is never left with a reader: the shelf waits before it is replaced or
retracted, and evicts readers after the grace. What is retracted stays retracted: a
publication that began before does not undo it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from typing import NamedTuple

from aiockpt.errors import CheckpointChangedError, ClosedError, StepNotFoundError
from aiockpt.http.failing import Failure
from aiockpt.http.protocol import Lease
from aiockpt.http.published import Published, Servable

__all__ = ["Shelf", "ShelfStatistics"]


_MOST_LEASES = 4096
"""Of one checkpoint: a receive beyond them is served without one."""


class ShelfStatistics(NamedTuple):
    """What a shelf holds now; ``superseded`` counts the snapshots still being read."""

    step: int | None
    readers: int
    superseded: int
    oldest_reader: float
    evicted: int


class Shelf:
    """Holds the checkpoint that is being served. Bound to the loop that uses it.

    Attributes:
        keep_superseded: How many superseded snapshots stay while they are read.
    """

    def __init__(self, *, keep_superseded: int = 1) -> None:
        self.keep_superseded = keep_superseded
        self._current: Published | None = None
        self._superseded: set[Published] = set()
        self._expiry: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._closed = False
        self._evicted = 0
        self._retractions = 0
        self._failure: Failure | None = None
        self._withdrawals = 0

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<Shelf step={now.step} readers={now.readers}>"

    @property
    def latest(self) -> Published | None:
        """What is being served."""
        return self._current

    @property
    def retractions(self) -> int:
        """How often it was told to serve nothing."""
        return self._retractions

    @property
    def withdrawals(self) -> int:
        """How often a retraction took something away."""
        return self._withdrawals

    def statistics(self) -> ShelfStatistics:
        """Return what the shelf holds now, as one immutable record."""
        locks = [each.lock.statistics() for each in self._held()]
        return ShelfStatistics(
            step=self._current.step if self._current else None,
            readers=sum(lock.readers for lock in locks),
            superseded=len(self._superseded),
            oldest_reader=max((lock.oldest_reader for lock in locks), default=0.0),
            evicted=self._evicted,
        )

    async def publish(self, snapshot: Servable, *, grace: float) -> None:
        """Serve ``snapshot`` from now on, instead of what was served before.

        Returns at once if the old memory is a snapshot: its readers finish, as far as
        ``keep_superseded`` allows. Live memory is drained first: readers get ``grace``
        seconds, then are evicted, and those who come meanwhile wait. If cancelled, the
        old checkpoint is served.

        Raises:
            ClosedError: after :meth:`close`.
            StepNotFoundError: :meth:`retract` was called meanwhile, and holds.
        """
        if self._closed:
            raise ClosedError("the shelf")
        before = self._retractions
        await self._drain([each for each in self._held() if each.servable.live], grace)
        if self._retractions != before:
            raise StepNotFoundError(snapshot.manifest.step)
        self.replace(snapshot)  # nothing is awaited between the last drain and this

    def replace(self, snapshot: Servable) -> None:
        """Serve ``snapshot`` instead of what was served, which nobody must wait for.

        Live memory has no readers any more.
        """
        old, self._current = self._current, Published(snapshot)
        self._failure = None
        self._announce()
        if old is not None:
            self._superseded.add(old)
            self._tidy()

    def fail(self, failure: Failure | None) -> None:
        """Tell those who wait for the step of a failure that it does not come.

        None forgets it, as a publication does. What is served is not touched.
        """
        self._failure = failure
        self._announce()

    async def retract(self, *, grace: float) -> None:
        """Serve nothing; no byte of what was served is read once this returns.

        All leases end. Requests that are being answered get ``grace`` seconds, then are
        evicted. Idempotent, and cheap when nothing is served. If cancelled, nothing is
        served, and readers may go on until a later retract returns.
        """
        self._retractions += 1
        if self._failure is not None and self._failure.left is None:
            self._failure = None
        old, self._current = self._current, None
        if old is not None:
            self._withdrawals += 1
            self._announce()
            self._superseded.add(old)
        for each in self._superseded:
            if not each.servable.live:
                each.let_go()
        self._tidy()
        await self._drain(list(self._superseded), grace)

    async def close(self) -> None:
        """Serve nothing for good: evict readers at once, fail those who wait."""
        self._closed = True
        self._announce()
        await self.retract(grace=0.0)

    async def wait_for(
        self, step: int | None, *, wait: float, lease: Lease | None = None
    ) -> Published:
        """Return checkpoint ``step`` (None: any), waiting up to ``wait`` seconds.

        A step that is older than the one being served is refused at once. ``lease``
        says which receive waits, if that is known.

        Raises:
            StepNotFoundError: it did not come; ``serving`` says what is there.
            PeerFailedError: nor will it come.
            ClosedError: the shelf is closed.
        """
        await self._until(lambda: self._settled(step, lease), wait)
        return self._find(step, lease)

    async def wait_past(self, step: int, *, wait: float) -> Published:
        """Return what is served once it is newer than ``step``.

        A send that fails is no news: the next one may be.

        Raises:
            StepNotFoundError: nothing newer came, or what was served was retracted
                meanwhile; ``serving`` says what is there.
            ClosedError: the shelf is closed.
        """
        before = self._withdrawals
        await self._until(
            lambda: self._has_newer(step) or self._withdrawals != before, wait
        )
        now = self._find(None)
        if now.step <= step:
            raise StepNotFoundError(None, serving=now.step)
        return now

    def leased(self, lease: Lease, step: int) -> Published | None:
        """Return the superseded checkpoint ``step`` on which this lease still holds."""
        now = _now()
        for each in self._superseded:
            if each.step == step and each.holding(lease.id, now) is not None:
                return each
        return None

    def lease(self, published: Published, lease: Lease, *, patience: float) -> None:
        """Take or renew a receive's lease on a checkpoint; it has one at a time.

        The lease ends at ``lease.until``, or when nothing was asked for during
        ``patience`` seconds, or with :meth:`end_lease` or :meth:`retract`.
        """
        for each in self._held():
            if each is not published:
                each.end_lease(lease.id)
        if published.on_shelf:
            published.lease(lease, now=_now(), patience=patience, most=_MOST_LEASES)
        self._tidy()

    def end_lease(self, lease: Lease) -> None:
        """Release what is kept for a receive that has ended."""
        for each in self._held():
            each.end_lease(lease.id)
        self._tidy()

    @asynccontextmanager
    async def reading(
        self,
        published: Published,
        *,
        evict: Callable[[], None],
        lease: Lease | None = None,
    ) -> AsyncIterator[Published]:
        """Keep a checkpoint's memory as it is; ``evict`` must end the reading soon.

        ``lease`` is that of the receive which reads. It does not stall meanwhile.

        Raises:
            CheckpointChangedError: it left the shelf meanwhile.
        """
        evict = self._counting(evict)
        held = await published.lock.acquire_read(evict=evict)
        try:
            if not published.on_shelf:
                now = self._current.snapshot_id if self._current else None
                raise CheckpointChangedError(expected=published.snapshot_id, actual=now)
            with published.read(lease, evict):
                yield published
        finally:
            held.release()
            self._tidy()

    async def _until(self, holds: Callable[[], bool], wait: float) -> None:
        """Return when it holds, or after ``wait`` seconds."""
        if wait <= 0 or holds():
            return
        try:
            async with asyncio.timeout(wait):
                while not holds():
                    await self._news.wait()
        except TimeoutError:
            pass

    def _counting(self, evict: Callable[[], None]) -> Callable[[], None]:
        evicted = False

        def evict_and_count() -> None:
            nonlocal evicted
            self._evicted += not evicted
            evicted = True
            evict()

        return evict_and_count

    def _held(self) -> list[Published]:
        # The current one last: it is served until all others have been drained.
        now = [self._current] if self._current else []
        return [*self._superseded, *now]

    def _has_newer(self, step: int) -> bool:
        now = self._current
        return self._closed or (now is not None and now.step > step)

    def _settled(self, step: int | None, lease: Lease | None) -> bool:
        if self._closed:
            return True
        now = self._current
        if now is not None and (step is None or now.step >= step):
            return True
        return self._failure is not None and self._failure.concerns(step, lease)

    def _find(self, step: int | None, lease: Lease | None = None) -> Published:
        now = self._current
        if self._closed:
            raise ClosedError("the shelf")
        if now is None or (step is not None and now.step != step):
            if self._failure is not None and self._failure.concerns(step, lease):
                raise self._failure.tell(lease)
            raise StepNotFoundError(step, serving=now.step if now else None)
        return now

    def _announce(self) -> None:
        # Each waiter sleeps on the event of its time, so none misses a publication
        # that another one follows at once.
        self._news.set()
        self._news = asyncio.Event()

    def _tidy(self) -> None:
        """Let go of superseded snapshots that nobody reads, or that are too many."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        now, read = _now(), dict[Published, float]()
        for each in tuple(self._superseded):
            since = each.read_since(now)
            if since is None and (not each.on_shelf or not each.servable.live):
                each.let_go()
                self._superseded.discard(each)
            elif since is not None and each.on_shelf and not each.servable.live:
                read[each] = since
        for each in sorted(read, key=read.__getitem__)[self.keep_superseded :]:
            del read[each]
            each.let_go()
            for reading in tuple(each.readings):
                reading.evict()
            if not each.readings:
                self._superseded.discard(each)
        expiry = min((each.next_expiry() or inf for each in read), default=inf)
        if expiry < inf:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_at(expiry, self._tidy)

    async def _drain(self, published: list[Published], grace: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        for each in published:
            left = max(deadline - loop.time(), 0.0)
            lease = await each.lock.acquire_write(grace=left)
            # The lock is ours: nobody reads, and nobody who comes later will.
            each.let_go()
            lease.release()
            self._superseded.discard(each)


def _now() -> float:
    return asyncio.get_running_loop().time()
