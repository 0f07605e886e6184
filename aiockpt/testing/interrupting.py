"""Interrupts a coroutine at each of its suspension points, one after another.

A suspension point is a place where the call, or a task that it made, waits. A cancel,
or a failure of something that the call waits for, can arrive only there::

    async for struck in interruptions(lambda: transport.recv_checkpoint(0, url, 7)):
        assert struck.cancelled or struck.error is None, struck
        ...  # nothing has leaked, and the transport still works

With threads and sockets, no run repeats an earlier one exactly. So a point is a number,
not a place in the code. ``where`` gives the place that the run had reached.

With ``error``, the awaited operation first runs to its end, and then raises instead of
returning, like a thread that has failed. A bare turn of the loop
(``asyncio.sleep(0)``), a lock and a task group cannot fail, so they do not count as
points then.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_KINDS = (
    ("cr_frame", "cr_await"),
    ("ag_frame", "ag_await"),
    ("gi_frame", "gi_yieldfrom"),
)
_INFALLIBLE = ("asyncio/locks.py", "asyncio/tasks.py", "_backends/_asyncio.py")
"""Locks and task groups, for which a wait cannot fail."""


@dataclass(frozen=True, slots=True)
class Interruption(Generic[T]):
    """A call that was interrupted at one of its suspension points, and has ended.

    Attributes:
        at: The number of the point, from 0.
        reached: Whether the call got that far. If not, it ran undisturbed.
        where: The innermost line that waited there: ``file:line function``.
        task: The finished task of the call.
    """

    at: int
    reached: bool
    where: str
    task: asyncio.Task[T]

    @property
    def cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return self.task.cancelled()

    @property
    def error(self) -> BaseException | None:
        """The exception of the call, unless it was cancelled."""
        return None if self.cancelled else self.task.exception()

    @property
    def returned(self) -> bool:
        """Whether the call returned normally."""
        return not self.cancelled and self.error is None

    def __str__(self) -> str:
        where = f"point {self.at} ({self.where})" if self.reached else "no point"
        how = "cancelled" if self.cancelled else repr(self.error or "returned")
        return f"interrupted at {where}: {how}"


class _Aim:
    """The interruption to make: which task, at which point, and with what error."""

    def __init__(self, at: int, error: BaseException | None) -> None:
        self.left = at
        self.error = error
        self.where = ""
        self.reached = False
        self.task: asyncio.Task[Any] | None = None

    def strikes(self, waiting: Coroutine[Any, Any, Any], awaited: Any) -> bool:
        """Count a suspension; say whether to interrupt it."""
        assert self.task is not None
        if self.reached or self.task.done():  # a task may outlive its call
            return False
        location = _location(waiting) if self.error is not None or not self.left else ""
        if self.error is not None and (
            awaited is None or location.startswith(_INFALLIBLE)
        ):
            return False
        self.left -= 1
        self.reached, self.where = self.left < 0, location
        return self.reached


_aim: ContextVar[_Aim | None] = ContextVar("_aim", default=None)


async def interruptions(
    make: Callable[[], Coroutine[Any, Any, T]],
    *,
    error: Callable[[], BaseException] | None = None,
    start: int = 0,
    every: int = 1,
) -> AsyncIterator[Interruption[T]]:
    """Repeat a call, and interrupt each run at a later suspension point.

    The last interruption is of a run that ended before its point, undisturbed.

    Args:
        make: Returns a new coroutine for each run.
        error: The exception to raise at the point; None: the call is cancelled there.
        start: The first point.
        every: The distance between points; 1 takes all of them.
    """
    for at in count(start, every):
        struck = await interrupted(make(), at, error=error() if error else None)
        yield struck
        if not struck.reached:
            return


async def interrupted(
    call: Coroutine[Any, Any, T], at: int, *, error: BaseException | None = None
) -> Interruption[T]:
    """Make a call, interrupt it at its suspension point ``at``, and wait for its end.

    With ``error``, the awaited operation raises it in place of its result. Otherwise
    the call is cancelled, whichever of its tasks waits there.

    If this is cancelled, it cancels the call and waits for its end.
    """
    loop = asyncio.get_running_loop()
    factory = loop.get_task_factory()
    aim, context = _Aim(at, error), copy_context()
    context.run(_aim.set, aim)
    loop.set_task_factory(_make_task)
    try:
        task = loop.create_task(_Watched(call, aim), context=context)
        aim.task = task
        await _end_of(task)
    finally:
        loop.set_task_factory(factory)
    return Interruption(at, aim.reached, aim.where, task)


async def _end_of(task: asyncio.Task[Any]) -> None:
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise


def _make_task(
    loop: asyncio.AbstractEventLoop, call: Any, **options: Any
) -> asyncio.Task[Any]:
    aim = _aim.get()
    watched = call if aim is None else _Watched(call, aim)
    return asyncio.Task(watched, loop=loop, **options)


class _Watched(Coroutine[Any, Any, T]):
    """A coroutine whose suspensions are counted."""

    def __init__(self, call: Coroutine[Any, Any, T], aim: _Aim) -> None:
        self._call = call
        self._aim = aim
        self._error: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)  # its state and name, which others look at

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError("it is for a task")

    def send(self, value: Any) -> Any:
        """Resume, or raise the error if this wait is the one to fail."""
        error, self._error = self._error, None
        if error is not None:
            return self._suspended(self._call.throw(error))
        return self._suspended(self._call.send(value))

    def throw(self, *error: Any) -> Any:
        """Pass a genuine exception on."""
        self._error = None
        return self._suspended(self._call.throw(*error))

    def close(self) -> None:
        """Close the coroutine."""
        self._call.close()

    def _suspended(self, awaited: Any) -> Any:
        aim = self._aim
        if aim.strikes(self._call, awaited):
            self._error = aim.error
            if aim.error is None:
                assert aim.task is not None
                aim.task.cancel()
        return awaited


def _location(waiting: object) -> str:
    """Return where the innermost coroutine of a chain waits."""
    location = ""
    inner: object = waiting
    while inner is not None:
        kind = next((kind for kind in _KINDS if hasattr(inner, kind[0])), None)
        if kind is None:
            break
        if frame := getattr(inner, kind[0]):
            code, file = frame.f_code, Path(frame.f_code.co_filename)
            location = f"{file.parent.name}/{file.name}:{frame.f_lineno} {code.co_name}"
        inner = _unwrapped(getattr(inner, kind[1]))
    return location


def _unwrapped(awaited: object) -> object:
    """Return the coroutine that a coroutine's or a generator's iterator runs."""
    if type(awaited).__name__ not in ("coroutine_wrapper", "async_generator_asend"):
        return awaited
    return next(iter(gc.get_referents(awaited)), None)
