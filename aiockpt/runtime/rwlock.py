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

No hold belongs to a task. Acquiring returns a `Lease`, and any task may release it.
The lock is not re-entrant: a task that holds a lease and acquires again queues like
any other, behind a writer that may be waiting for that very lease.

Plain functions make the decisions, and the one who leaves hands the hold over. The only
suspension point is the one await in ``RWLock._wait``.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from aiockpt.errors import AiockptError, ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["Lease", "RWLock", "RWLockStatistics"]

logger = logging.getLogger(__name__)


class RWLockStatistics(NamedTuple):
    """A lock at one moment; ``oldest_reader`` is its age in seconds, or 0.0."""

    readers: int
    writers: int
    waiting_readers: int
    waiting_writers: int
    oldest_reader: float
    evicted: int


class Lease:
    """One hold on a lock; any task of the loop may release it."""

    __slots__ = ("_end", "since")

    def __init__(self, end: Callable[[Lease], None]) -> None:
        self._end: Callable[[Lease], None] | None = end
        self.since = time.monotonic()

    def release(self) -> None:
        """End the hold, and let others in. A second call does nothing."""
        end, self._end = self._end, None
        if end is not None:
            end(self)

    def __repr__(self) -> str:
        return f"<Lease {'held' if self._end else 'released'}>"


@dataclass(slots=True, eq=False)
class _Waiter:
    """A place in the queue. Its future gets a lease, or None if the lock closes."""

    writes: bool
    evict: Callable[[], object] | None = None
    grace: float | None = None
    clock: asyncio.TimerHandle | None = None
    future: asyncio.Future[Lease | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class _Holding:
    """Holds the lock for the length of an ``async with`` block."""

    def __init__(self, acquiring: Coroutine[None, None, Lease]) -> None:
        self._acquiring = acquiring
        self._lease: Lease

    async def __aenter__(self) -> Lease:
        self._lease = await self._acquiring
        return self._lease

    async def __aexit__(self, *exc_info: object) -> None:
        self._lease.release()


class RWLock:
    """Many readers or one writer, on one event loop, by the rules of the module.

    A deadline belongs to the caller: put ``asyncio.timeout`` around an acquire.
    """

    def __init__(self) -> None:
        # The value evicts the reader; None: it cannot be evicted, or was already.
        self._readers: dict[Lease, Callable[[], object] | None] = {}
        self._writer: Lease | None = None
        self._queue: OrderedDict[_Waiter, None] = OrderedDict()
        self._graceful: set[_Waiter] = set()  # the queued writers with a grace
        self._evicted = 0
        self._closed: AiockptError | None = None
        # The first loop on which a caller had to wait; another loop is refused.
        self._loop: asyncio.AbstractEventLoop | None = None

    async def acquire_read(self, *, evict: Callable[[], object] | None = None) -> Lease:
        """Hold the lock together with other readers.

        Returns without suspending if the lock is free for readers. If cancelled, the
        lock is as if the call had never been made.

        Args:
            evict: Called at most once, on the loop, if this reader still holds when a
                writer's grace has passed, even if this call has not returned by then.
                It should make the reader release soon.

        Raises:
            ClosedError: the lock is closed, or was closed meanwhile (see `close`).
        """
        if self._writer is None and not self._queue and self._closed is None:
            return self._hold_read(evict)
        return await self._wait(_Waiter(writes=False, evict=evict))

    async def acquire_write(self, *, grace: float | None = None) -> Lease:
        """Hold the lock alone.

        Returns without suspending if nobody holds the lock. If cancelled, the lock is
        as if the call had never been made, but for readers that were evicted.

        Args:
            grace: After so many seconds, each reader that still holds is evicted; this
                call still waits until they have released. Readers that enter first,
                since a writer left, have their own grace. None: nobody is evicted.

        Raises:
            ClosedError: see `acquire_read`.
        """
        if not (self._readers or self._writer or self._queue or self._closed):
            return self._hold_write()
        return await self._wait(_Waiter(writes=True, grace=grace))

    def read(self, *, evict: Callable[[], object] | None = None) -> _Holding:
        """`acquire_read` as an async context manager."""
        return _Holding(self.acquire_read(evict=evict))

    def write(self, *, grace: float | None = None) -> _Holding:
        """`acquire_write` as an async context manager."""
        return _Holding(self.acquire_write(grace=grace))

    def close(self, error: AiockptError | None = None) -> None:
        """Fail all waiters and newcomers; leases that are held stay valid.

        Each of them gets a copy of ``error`` (default: a `ClosedError`). Idempotent.
        """
        if self._closed is None:
            self._closed = error or ClosedError("the lock")
        for waiter in list(self._queue):
            self._forget(waiter)
            if not waiter.future.done():
                # Not set_exception: a waiter that is cancelled as well would never
                # retrieve it, and asyncio would log that as an error.
                waiter.future.set_result(None)

    def statistics(self) -> RWLockStatistics:
        """Count the holders, the waiters, and the readers that were ever evicted."""
        # A cancelled waiter stays queued until its task runs; it no longer waits.
        waiting = [w.writes for w in self._queue if not w.future.done()]
        oldest = next(iter(self._readers), None)
        return RWLockStatistics(
            readers=len(self._readers),
            writers=int(self._writer is not None),
            waiting_readers=waiting.count(False),
            waiting_writers=waiting.count(True),
            oldest_reader=0.0 if oldest is None else time.monotonic() - oldest.since,
            evicted=self._evicted,
        )

    def __repr__(self) -> str:
        now = self.statistics()
        holds = "writing" if now.writers else f"readers={now.readers}"
        closed = " closed" if self._closed else ""
        waiting = now.waiting_readers + now.waiting_writers
        return f"<RWLock {holds} waiting={waiting}{closed}>"

    async def _wait(self, waiter: _Waiter) -> Lease:
        self._enqueue(waiter)
        try:
            lease = await waiter.future
        except BaseException:
            self._withdraw(waiter)
            raise
        if lease is None:
            raise self._error()
        return lease

    def _enqueue(self, waiter: _Waiter) -> None:
        if self._closed is not None:
            raise self._error()
        loop = waiter.future.get_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(f"{self!r} belongs to another event loop")
        self._queue[waiter] = None
        if waiter.grace is not None:
            self._graceful.add(waiter)
        # All waiters ahead may be cancelled already, before their tasks have run.
        self._admit()

    def _withdraw(self, waiter: _Waiter) -> None:
        """Take out a waiter whose await was cut short, in whatever state it is."""
        future = waiter.future
        lease = future.result() if future.done() and not future.cancelled() else None
        if waiter in self._queue:
            self._forget(waiter)
        elif lease is not None and lease is self._writer:
            # This writer never entered, so it does not leave either: no rule 3.
            self._writer = None
        elif lease is not None:
            lease.release()
        self._admit()

    def _error(self) -> AiockptError:
        # One instance raised in many tasks would mix their tracebacks.
        return copy.copy(self._closed or ClosedError("the lock"))

    def _hold_read(self, evict: Callable[[], object] | None) -> Lease:
        lease = Lease(self._end_read)
        self._readers[lease] = evict
        return lease

    def _hold_write(self) -> Lease:
        self._writer = lease = Lease(self._end_write)
        return lease

    def _end_read(self, lease: Lease) -> None:
        del self._readers[lease]
        if self._queue and not self._readers:
            self._admit()

    def _end_write(self, lease: Lease) -> None:
        assert self._writer is lease
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
        lease = self._hold_write() if waiter.writes else self._hold_read(waiter.evict)
        waiter.future.set_result(lease)

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
        for lease, evict in list(self._readers.items()):
            # An eviction before this one may have released this reader too.
            if evict is None or lease not in self._readers:
                continue
            self._readers[lease] = None
            self._evicted += 1
            try:
                evict()
            except Exception:
                logger.exception("evicting a reader failed; the writer waits on")
