"""Cancels a call at one of its awaits, whichever of its tasks that one is in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import ContextVar, copy_context
from types import coroutine
from typing import Any

__all__ = ["Cut", "cut_at"]


class Cut:
    """A call that is cancelled when it, or a task it made, waits for the n-th time."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.awaits = 0
        self.task: asyncio.Task[Any] | None = None

    @property
    def reached(self) -> bool:
        """Whether the call waited that often."""
        return self.awaits > self.at

    def waits(self) -> None:
        """Count an await, and cancel the call if it is the one."""
        self.awaits += 1
        if self.awaits == self.at + 1:
            assert self.task is not None
            self.task.cancel()


_cut: ContextVar[Cut | None] = ContextVar("_cut", default=None)


async def cut_at(at: int, call: Coroutine[Any, Any, Any]) -> Cut:
    """Run ``call``, cancel it at its await number ``at``, and wait for its end."""
    loop = asyncio.get_running_loop()
    factory = loop.get_task_factory()
    loop.set_task_factory(_make_task)
    cut, context = Cut(at), copy_context()
    context.run(_cut.set, cut)
    try:
        cut.task = loop.create_task(_counted(call, cut), context=context)
        await asyncio.wait({cut.task})
    finally:
        loop.set_task_factory(factory)
    return cut


def _make_task(
    loop: asyncio.AbstractEventLoop, call: Any, **options: Any
) -> asyncio.Task[Any]:
    cut = _cut.get()
    counted = call if cut is None else _counted(call, cut)
    return asyncio.Task(counted, loop=loop, **options)


async def _counted(call: Coroutine[Any, Any, Any], cut: Cut) -> Any:
    return await _steps(call, cut)


@coroutine
def _steps(call: Coroutine[Any, Any, Any], cut: Cut) -> Generator[Any, Any, Any]:
    error: BaseException | None = None
    while True:
        try:
            awaited = call.send(None) if error is None else call.throw(error)
        except StopIteration as end:
            return end.value
        cut.waits()
        try:
            yield awaited
            error = None
        except BaseException as thrown:  # noqa: BLE001 - it is the call's
            error = thrown
