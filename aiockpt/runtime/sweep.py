"""Much work in few threads: they go from item to item by themselves."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, TypeAlias, TypeVar

from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.inline import Inline
from aiockpt.runtime.tasks import together

__all__ = ["Over", "sweep"]

T = TypeVar("T")
R = TypeVar("R")
Over: TypeAlias = Callable[[], bool]
"""Whether nobody waits for a result any more; for work that takes long."""

_TURN: Final = 0.05  # s
_MOST: Final = 200  # results that the loop is told of at once


async def sweep(
    bridge: Bridge | Inline,
    threads: int,
    work: Callable[[T, Over], R],
    items: Iterable[T],
    report: Callable[[T, R], object],
) -> None:
    """Call ``work(item, over)`` in threads, so many at a time; ``report`` on the loop.

    Every return from a thread to the loop costs as much as copying a few megabytes. So
    results are reported together, when a thread has worked for a twentieth of a second,
    or for one item if somebody waits for the thread. All are before this returns.

    If cancelled, or if a call fails, nothing else begins. What is under way ends before
    that is raised, and finds ``over()`` true meanwhile; it may go unreported.
    """
    left, done, ended = deque(items), deque[tuple[T, R]](), asyncio.Event()
    going = min(threads, len(left))

    def take_turn() -> None:
        end = time.monotonic() + _TURN
        for item in islice(_taken(left), _MOST):
            done.append((item, work(item, ended.is_set)))
            if time.monotonic() >= end or _is_wanted(bridge):
                return

    async def worker() -> None:
        nonlocal going
        while left:
            await bridge.run(take_turn)
            _tell(report, done)
        going -= 1
        if not going:
            ended.set()

    async def watch() -> None:
        try:
            await ended.wait()
        finally:  # at once if cancelled, while the workers wait for their threads
            ended.set()
            left.clear()

    if going:
        await together([watch, *[worker] * going])


def _taken(items: deque[T]) -> Iterator[T]:
    with suppress(IndexError):  # another thread may have taken the last one
        while True:
            yield items.popleft()


def _tell(report: Callable[[T, R], object], done: deque[tuple[T, R]]) -> None:
    for item, result in _taken(done):
        report(item, result)


def _is_wanted(bridge: Bridge | Inline) -> bool:
    return isinstance(bridge, Bridge) and bridge.statistics().waiting > 0
