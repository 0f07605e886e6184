"""A reader-writer lock for one event loop: fair, safe to cancel, and able to evict.

Four rules say who enters:

1. A newcomer enters at once if nobody waits and nobody holds what excludes it.
   Otherwise it queues. So a waiting writer holds back the readers behind it.
2. When the last reader leaves, the writer at the head of the queue enters.
3. When a writer leaves, every reader that has queued so far enters, even from behind
   another writer. If no reader is queued, the next writer enters.
4. When a waiter is cancelled, the waiters behind it go on as if it had never come.

So nobody starves. A reader waits for at most one writer. A writer waits for one phase
of readers before each writer ahead of it, and for one before itself.

No hold belongs to a task. Acquiring returns a `Hold`, and any task may release it.
The lock is not re-entrant: a task that has a hold and acquires again queues like
any other, behind a writer that may be waiting for that very hold.

Plain functions make the decisions, and the one who leaves hands the hold over. The only
suspension point is the one await in ``RWLock._wait``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

logger = logging.getLogger(__name__)


class RWLockStatistics(NamedTuple):
    """A lock at one moment; ``oldest_reader`` is its age in seconds, or 0.0."""

    readers: int
    writers: int
    waiting_readers: int
    waiting_writers: int
    oldest_reader: float


class Hold:
    """One hold on a lock; any task of the loop may release it.

    As a context manager it is released at the end of the block.
    """

    __slots__ = ("_end", "since")

    def __init__(self, end: Callable[[Hold], None]) -> None:
        self._end: Callable[[Hold], None] | None = end
        self.since = time.monotonic()

    @property
    def is_held(self) -> bool:
        """Whether it was not released."""
        return self._end is not None

    def release(self) -> None:
        """End the hold, and let others in. A second call does nothing."""
        end, self._end = self._end, None
        if end is not None:
            end(self)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class _Waiter:
    """A caller in the queue, and the hold that it gets."""

    writes: bool
    evict: Callable[[], object] | None = None
    grace: float | None = None
    clock: asyncio.TimerHandle | None = None
    future: asyncio.Future[Hold] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class RWLock:
    """Many readers or one writer, on one event loop, by the rules of the module.

    A deadline belongs to the caller: put ``asyncio.timeout`` around an acquire.
    """

    def __init__(self) -> None:
        # The value evicts the reader; None: it cannot be evicted, or was already.
        self._readers: dict[Hold, Callable[[], object] | None] = {}
        self._writer: Hold | None = None
        self._queue: OrderedDict[_Waiter, None] = OrderedDict()
        self._graceful: set[_Waiter] = set()  # the queued writers with a grace
        # The first loop on which a caller had to wait; another loop is refused.
        self._loop: asyncio.AbstractEventLoop | None = None

    async def acquire_read(self, *, evict: Callable[[], object] | None = None) -> Hold:
        """Hold the lock together with other readers.

        Returns without suspending if the lock is free for readers. If cancelled, the
        lock is as if the call had never been made.

        Args:
            evict: Called at most once, on the loop, if this reader still holds when a
                writer's grace has passed, even if this call has not returned by then.
                It should make the reader release soon.
        """
        if self._writer is None and not self._queue:
            return self._hold_read(evict)
        return await self._wait(_Waiter(writes=False, evict=evict))

    async def acquire_write(self, *, grace: float | None = None) -> Hold:
        """Hold the lock alone.

        Returns without suspending if nobody holds the lock. If cancelled, the lock is
        as if the call had never been made, but for readers that were evicted.

        Args:
            grace: After so many seconds, each reader that still holds is evicted; this
                call still waits until they have released. Readers that enter first,
                since a writer left, have their own grace. None: nobody is evicted.
        """
        if not (self._readers or self._writer or self._queue):
            return self._hold_write()
        return await self._wait(_Waiter(writes=True, grace=grace))

    def statistics(self) -> RWLockStatistics:
        """Count the holders and the waiters."""
        # A cancelled waiter stays queued until its task runs; it no longer waits.
        waiting = [w.writes for w in self._queue if not w.future.done()]
        oldest = next(iter(self._readers), None)
        return RWLockStatistics(
            readers=len(self._readers),
            writers=int(self._writer is not None),
            waiting_readers=waiting.count(False),
            waiting_writers=waiting.count(True),
            oldest_reader=0.0 if oldest is None else time.monotonic() - oldest.since,
        )

    async def _wait(self, waiter: _Waiter) -> Hold:
        self._enqueue(waiter)
        try:
            return await waiter.future
        except BaseException:
            self._withdraw(waiter)
            raise

    def _enqueue(self, waiter: _Waiter) -> None:
        loop = waiter.future.get_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("the lock belongs to another event loop")
        self._queue[waiter] = None
        if waiter.grace is not None:
            self._graceful.add(waiter)
        # All waiters ahead may be cancelled already, before their tasks have run.
        self._admit()

    def _withdraw(self, waiter: _Waiter) -> None:
        """Take out a waiter whose await was cut short, in whatever state it is."""
        future = waiter.future
        hold = future.result() if future.done() and not future.cancelled() else None
        if waiter in self._queue:
            self._forget(waiter)
        elif hold is not None and hold is self._writer:
            # This writer never entered, so it does not leave either: no rule 3.
            self._writer = None
        elif hold is not None:
            hold.release()
        self._admit()

    def _hold_read(self, evict: Callable[[], object] | None) -> Hold:
        hold = Hold(self._end_read)
        self._readers[hold] = evict
        return hold

    def _hold_write(self) -> Hold:
        self._writer = hold = Hold(self._end_write)
        return hold

    def _end_read(self, hold: Hold) -> None:
        del self._readers[hold]
        if self._queue and not self._readers:
            self._admit()

    def _end_write(self, hold: Hold) -> None:
        assert self._writer is hold
        self._writer = None
        for waiter in [w for w in self._queue if not w.writes]:
            self._enter(waiter)
        self._admit()

    def _admit(self) -> None:
        """Let in all waiters that may enter, in order, from the head of the queue."""
        while self._queue and self._writer is None:
            waiter = next(iter(self._queue))
            if waiter.writes and self._readers and not waiter.future.done():
                break
            self._enter(waiter)
        self._start_clocks()

    def _enter(self, waiter: _Waiter) -> None:
        self._forget(waiter)
        if waiter.future.done():
            return  # cancelled; its task has not run yet, and will find itself gone
        hold = self._hold_write() if waiter.writes else self._hold_read(waiter.evict)
        waiter.future.set_result(hold)

    def _forget(self, waiter: _Waiter) -> None:
        del self._queue[waiter]
        self._graceful.discard(waiter)
        if waiter.clock is not None:
            waiter.clock.cancel()

    def _start_clocks(self) -> None:
        """Start the clock of every queued writer that waits for readers."""
        for waiter in self._graceful if self._readers else ():
            if waiter.clock is None and waiter.grace is not None:
                loop = waiter.future.get_loop()
                waiter.clock = loop.call_later(waiter.grace, self._evict, waiter)

    def _evict(self, waiter: _Waiter) -> None:
        waiter.clock = None
        if waiter.future.done():
            return  # cancelled; its task has not run yet
        for hold, evict in list(self._readers.items()):
            # An eviction before this one may have released this reader too.
            if evict is None or hold not in self._readers:
                continue
            self._readers[hold] = None
            try:
                evict()
            except Exception:
                logger.exception("evicting a reader failed; the writer waits on")
