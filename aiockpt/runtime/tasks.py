"""Concurrency inside one call: tasks that end before it returns, and many small jobs.

`task_group` runs coroutines until its block ends, `run_all` returns their results, and
`beside` runs one beside a block. `map_in_threads` runs a function over many items in a
few threads. `Notifier` wakes the tasks that wait for a change.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
)
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

import anyio
from anyio.abc import TaskGroup

from aiockpt.runtime.bridge import Bridge

# anyio would load its parts on their first use, which is on an event loop.
import_module("anyio._backends._asyncio")

T = TypeVar("T")
R = TypeVar("R")

Over: TypeAlias = Callable[[], bool]
"""Returns whether the result is no longer needed; long work should ask it."""

TURN_S: Final = 0.05
"""How long a thread works before it reports to the loop."""

_MAX_RESULTS: Final = 200  # in one report to the loop


class Notifier:
    """Wakes the tasks that wait for something to change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake every task that waits now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout: float | None) -> None:
        """Wait for the next `notify`, at most ``timeout`` seconds."""
        event = self._event
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            return


async def run_all(
    jobs: Iterable[Callable[[], Coroutine[Any, Any, object]]],
) -> list[Any]:
    """Run coroutine functions concurrently; return their results in the given order.

    The first failure cancels the other jobs and is raised alone, with the further
    failures as its notes: no ``ExceptionGroup`` comes out. Every job has ended when
    this returns or raises. If cancelled, every job is cancelled and has ended.
    """
    results: dict[int, Any] = {}

    async def run(at: int, job: Callable[[], Coroutine[Any, Any, object]]) -> None:
        results[at] = await job()

    async with task_group() as group:
        for at, job in enumerate(jobs):
            group.start_soon(run, at, job)
    return [results[at] for at in range(len(results))]


@asynccontextmanager
async def beside(job: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run a coroutine function beside a block, which ends when both have ended.

    The first failure cancels the other, and is raised alone. If cancelled, both are.
    """
    async with task_group() as group:
        group.start_soon(job)
        yield


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Open a task group whose first failure is raised alone, with its own cause."""
    failed: BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as failures:
        failed, *others = _leaves(failures)
        for other in others:
            failed.add_note(f"also failed: {other}")
    try:
        if failed is not None:
            raise failed  # not from the group, which would replace its own cause
    finally:
        del failed  # its traceback has this frame


def _leaves(failures: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found = []
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            found += _leaves(failure)
        else:
            found.append(failure)
    return found


async def map_in_threads(
    bridge: Bridge,
    threads: int,
    work: Callable[[T, Over], R],
    items: Iterable[T],
    report: Callable[[T, R], object],
) -> None:
    """Call ``work(item, over)`` for each item in threads; ``report`` on the loop.

    Each return from a thread to the loop costs as much as copying a few megabytes. So a
    thread goes from item to item for 50 ms and then reports its results together. It
    reports after one item if another call waits for the thread. All results are
    reported before this returns.

    If cancelled, or if a call fails, no further item begins. The calls that run end
    before the error is raised; ``over()`` is true meanwhile. Their results may stay
    unreported.

    Args:
        bridge: Where the threads come from.
        threads: How many of them to use at most.
        work: Called in a thread with an item and `Over`.
        items: What to work on.
        report: Called on the loop with an item and its result.
    """
    left, done, ended = deque(items), deque[tuple[T, R]](), asyncio.Event()
    going = min(threads, len(left))

    def take_turn() -> None:
        end = time.monotonic() + TURN_S
        for item in islice(_taken(left), _MAX_RESULTS):
            done.append((item, work(item, ended.is_set)))
            if time.monotonic() >= end or bridge.statistics().waiting:
                return

    async def worker() -> None:
        nonlocal going
        while left:
            await bridge.run(take_turn)
            for item, result in _taken(done):
                report(item, result)
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
        await run_all([watch, *[worker] * going])


def _taken(items: deque[T]) -> Iterator[T]:
    with suppress(IndexError):  # another thread may have taken the last one
        while True:
            yield items.popleft()
