"""Times at which many things end, of which the earliest is wanted."""

from __future__ import annotations

import heapq
from math import inf
from typing import Final, Generic, TypeVar

K = TypeVar("K", int, str)

_SPARE_ENTRIES: Final = 64  # outdated entries that a small heap may have


class Deadlines(Generic[K]):
    """The deadlines of keys. Each call takes logarithmic time, also if keys renew.

    A deadline that changes leaves an outdated entry in the heap. The heap is made anew
    when more than half of its entries are outdated.
    """

    __slots__ = ("_heap", "_times")

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def set(self, key: K, time: float) -> None:
        """Set the deadline of a key, or change it."""
        if self._times.get(key) == time:
            return
        self._times[key] = time
        if len(self._heap) > 2 * len(self._times) + _SPARE_ENTRIES:
            self._heap = [(time, key) for key, time in self._times.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (time, key))

    def forget(self, key: K) -> None:
        """Forget a key, if it is known."""
        self._times.pop(key, None)

    def first(self) -> float:
        """Return the earliest deadline; infinity without any."""
        heap, times = self._heap, self._times
        while heap and times.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else inf

    def expired(self, now: float) -> list[K]:
        """Return the keys whose time has come, the earliest first, and forget them."""
        found = []
        while self.first() <= now:
            key = self._heap[0][1]
            del self._times[key]
            found.append(key)
        return found
