"""Tasks inside one call: all of them end before it returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import anyio

__all__ = ["News", "together"]


class News:
    """Wakes those who wait for something to change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Wake everybody who waits now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout: float | None) -> None:
        """Wait for the next `tell`, or for so many seconds if that is less."""
        event = self._event
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            return


async def together(jobs: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Run coroutine functions at once; the first failure cancels the others.

    It is raised alone, the others as its notes: no ``ExceptionGroup`` comes out. If
    cancelled, every job is cancelled and has ended.
    """
    try:
        async with anyio.create_task_group() as group:
            for job in jobs:
                group.start_soon(job)
    except BaseExceptionGroup as failures:
        first, *others = _leaves(failures)
        for other in others:
            first.add_note(f"also failed: {other}")
        raise first from failures


def _leaves(failures: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found = []
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            found += _leaves(failure)
        else:
            found.append(failure)
    return found
