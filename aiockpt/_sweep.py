"""Much work in few threads: they go from item to item by themselves."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, TypeVar

from aiockpt._bridge import Bridge
from aiockpt._inline import Inline
from aiockpt._tasks import together

__all__ = ["sweep"]

T = TypeVar("T")
R = TypeVar("R")

_TURN: Final = 0.05  # s: after that a thread is somebody else's, if he waits


async def sweep(
    bridge: Bridge | Inline,
    threads: int,
    work: Callable[[T], R],
    items: Iterable[T],
    report: Callable[[T, R], object],
    *,
    at_once: bool = False,
) -> None:
    """Call ``work(item)`` in so many threads at a time, and ``report`` on the loop.

    Every return from a thread to the loop costs as much as copying a few megabytes. So
    results are reported together, when a thread has worked for a twentieth of a second
    or for one item; or, ``at_once``, each when it is there, by a ``report`` that must
    not fail then. All are reported before this returns.

    If cancelled, or if a call fails, the threads end what they are in before that is
    raised, and begin nothing else. Results that are left are not reported.
    """
    loop = asyncio.get_running_loop()
    left, done = deque(items), deque[tuple[T, R]]()

    def tell() -> None:
        for item, result in _taken(done):
            report(item, result)

    def take_turn() -> None:
        end = time.monotonic() + _TURN
        for item in _taken(left):
            done.append((item, work(item)))
            if at_once:
                loop.call_soon_threadsafe(tell)
            if time.monotonic() >= end:
                return

    async def worker() -> None:
        while left:
            await bridge.run(take_turn)
            tell()

    await together([worker] * min(threads, len(left)))


def _taken(items: deque[T]) -> Iterator[T]:
    with suppress(IndexError):  # another thread may have taken the last one
        while True:
            yield items.popleft()
