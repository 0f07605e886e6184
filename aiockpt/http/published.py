"""A checkpoint that is offered, and who reads it: requests, and leases of receives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from aiockpt.format.manifest import Manifest
from aiockpt.http.protocol import Lease
from aiockpt.memory.arena import Lendable
from aiockpt.runtime.rwlock import RWLock

__all__ = ["Published", "Reading", "Servable"]


class Servable(Protocol):
    """A checkpoint in memory, as the server sees it."""

    @property
    def manifest(self) -> Manifest:
        """What describes it; sealed."""

    @property
    def live(self) -> bool:
        """Whether the memory belongs to the trainer, who will change it."""

    @property
    def arena(self) -> Lendable | None:
        """The memory that holds the data segment from its first byte on, if any."""

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment, in order."""

    def acquire(self) -> None:
        """Keep the memory as it is until :meth:`release`; counted."""

    def release(self) -> None:
        """Undo one :meth:`acquire`."""


@dataclass(slots=True, eq=False)
class Reading:
    """One request whose answer is read from a checkpoint's memory.

    Attributes:
        since: When it began, in loop time.
        evict: Ends it soon.
    """

    since: float
    evict: Callable[[], None]


@dataclass(slots=True, eq=False)
class Holding:
    """A lease, as its server sees it; times are loop times.

    Attributes:
        since: When the receive took it.
        until: When the receive ends at the latest.
        patience: Seconds without a request after which the receive has stalled.
        seen: When its last request began or ended.
        requests: How many of its requests are being answered.
    """

    since: float
    until: float
    patience: float
    seen: float
    requests: int = 0

    @property
    def expires(self) -> float:
        """When it ends if nothing else is heard of the receive."""
        if self.requests:
            return self.until
        return min(self.until, self.seen + self.patience)


class Published:
    """One checkpoint from its publication until its last reader is gone.

    Attributes:
        lock: Held for reading by every request, and for writing by whoever drains it.
        readings: The requests that are being answered from it.
    """

    __slots__ = ("_held", "_holdings", "lock", "readings", "servable")

    def __init__(self, servable: Servable) -> None:
        servable.acquire()
        self._held = True
        self._holdings: dict[str, Holding] = {}
        self.servable = servable
        self.lock = RWLock()
        self.readings: set[Reading] = set()

    def __repr__(self) -> str:
        return f"<Published step={self.step} readers={self.lock.statistics().readers}>"

    @property
    def step(self) -> int:
        """The step that names it."""
        return self.servable.manifest.step

    @property
    def snapshot_id(self) -> str:
        """The identity of its content."""
        return self.servable.manifest.snapshot_id

    @property
    def on_shelf(self) -> bool:
        """Whether the shelf still holds a reference, so that readers may come."""
        return self._held

    def let_go(self) -> None:
        """Give up the shelf's reference, and all leases; requests keep theirs.

        Idempotent.
        """
        self._holdings.clear()
        if self._held:
            self._held = False
            self.servable.release()

    def lease(self, lease: Lease, *, now: float, patience: float, most: int) -> None:
        """Take or renew a lease, unless there are ``most`` already."""
        holding = self._holdings.get(lease.id)
        if holding is not None:
            holding.until, holding.seen = lease.until, now
            return
        if len(self._holdings) >= most:
            self._forget_expired(now)
        if len(self._holdings) < most:
            self._holdings[lease.id] = Holding(now, lease.until, patience, now)

    def end_lease(self, lease_id: str) -> None:
        """End a lease; requests that are being answered go on."""
        self._holdings.pop(lease_id, None)

    def holding(self, lease_id: str, now: float) -> Holding | None:
        """Return the lease of this id, if it has not ended."""
        holding = self._holdings.get(lease_id)
        return None if holding is None or holding.expires <= now else holding

    @contextmanager
    def read(self, lease: Lease | None, evict: Callable[[], None]) -> Iterator[None]:
        """Keep the memory as it is during the block; the lease does not expire in it.

        ``evict`` must end the block soon.
        """
        now = asyncio.get_running_loop().time
        holding = None if lease is None else self._holdings.get(lease.id)
        reading = Reading(now(), evict)
        self.readings.add(reading)
        if holding is not None:
            holding.requests += 1
        self.servable.acquire()
        try:
            yield
        finally:
            self.servable.release()
            self.readings.discard(reading)
            if holding is not None:
                holding.requests -= 1
                holding.seen = now()

    def read_since(self, now: float) -> float | None:
        """Return since when it has been read; None if nobody reads it any more."""
        self._forget_expired(now)
        since = [holding.since for holding in self._holdings.values()]
        since += [reading.since for reading in self.readings]
        return min(since, default=None)

    def next_expiry(self) -> float | None:
        """Return when the next lease ends by itself; None without a lease."""
        expiries = (holding.expires for holding in self._holdings.values())
        return min(expiries, default=None)

    def _forget_expired(self, now: float) -> None:
        expired = [k for k, each in self._holdings.items() if each.expires <= now]
        for lease_id in expired:
            del self._holdings[lease_id]
