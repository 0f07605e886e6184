"""BackgroundCheckpointer: saves in the background, for programs without an event loop.

There is no second implementation: an `AsyncCheckpointer` does the work, on an event
loop in a thread of its own. A call blocks until its coroutine has ended there.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from aiockpt.checkpointers.async_checkpointer import AsyncCheckpointer, SaveHandle
from aiockpt.checkpointers.base import Checkpointer, CheckpointerStatistics
from aiockpt.events import Progress
from aiockpt.runtime.sync_facade import SyncFacade
from aiockpt.state.flatten import ready_for_threads
from aiockpt.transport import Timeout, seconds

__all__ = ["BackgroundCheckpointer"]

T = TypeVar("T")

_CLOSING: Final = 5.0


class BackgroundCheckpointer(
    Checkpointer, AbstractContextManager["BackgroundCheckpointer"]
):
    """Saves in the background without an event loop; any thread may use it.

    ``save`` blocks for the copy only. Writing, the commit with the other ranks,
    failures and policies are those of :class:`.AsyncCheckpointer`. A program that ends
    without :meth:`close` loses nothing: what was handed over is written.

    Args:
        checkpointer: What saves and loads. Nothing else may use it.
    """

    def __init__(self, checkpointer: AsyncCheckpointer) -> None:
        self._checkpointer = checkpointer
        # A background writer outlasts this thread by itself.
        self._facade = SyncFacade("the checkpointer", at_exit=_nothing)
        self._closed = False

    def __repr__(self) -> str:
        return f"<BackgroundCheckpointer over {self._checkpointer!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end(partial(self._checkpointer.__aexit__, kind, error, trace))

    def save(
        self,
        state_dict: Any,
        path: str | os.PathLike[str],
        *,
        timeout: Timeout | None = None,
        progress: Callable[[Progress], None] | None = None,
        **kwargs: Any,
    ) -> SaveHandle:
        """Stage ``state_dict``, hand it over, and return: it may be mutated then.

        The arguments are those of :meth:`.AsyncCheckpointer.save`. ``progress`` is
        called in the checkpointer's own thread. Call :meth:`.SaveHandle.result` to
        wait until the checkpoint is committed.

        Raises:
            SaveInProgressError: the policy is ``fail``, and two others are under way.
            TypeError, ValueError: ``path`` is not a path, or ``step`` not a step.
            ClosedError: after :meth:`close`.
            TransferTimeoutError: with ``raise_on_failure``. Without, this and all
                other failures fail the handle.

        If interrupted (Ctrl-C), nothing is saved; other ranks are told.
        """
        save = partial(
            self._checkpointer.save,
            ready_for_threads(state_dict),
            path,
            timeout=timeout,
            progress=progress,
            **kwargs,
        )
        limit = math.inf if timeout is None else seconds(timeout)
        return self._call(save, limit, "save")

    def load(
        self,
        path: str | os.PathLike[str],
        state_dict: Any = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the state dict at ``path``; see :meth:`.CheckpointReader.read`.

        If interrupted, ``state_dict`` may be filled in part.
        """
        load = partial(
            self._checkpointer.load,
            path,
            state_dict,
            default_map_location=default_map_location,
            strict=strict,
            **kwargs,
        )
        return self._call(load, math.inf, "load")

    def statistics(self) -> CheckpointerStatistics:
        """Return how many saves there were, and what they took."""
        return self._checkpointer.statistics()

    def close(self) -> tuple[BaseException, ...]:
        """Write what was handed over, and close everything. Idempotent.

        Returns the failures that nobody has seen. It takes
        ``subprocess_shutdown_timeout_secs`` at most; see
        :meth:`.AsyncCheckpointer.close`. If interrupted, the closing goes on, and a
        later call waits for it.
        """
        return self._end(self._checkpointer.close) or ()

    def _end(self, end: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Await ``end()`` and end the thread; do nothing the second time."""
        if self._closed:
            return None
        try:
            found = self._call(end, math.inf, "close")
        except Exception:  # a failed save, with `raise_on_failure`
            self._end_thread()
            raise
        self._end_thread()
        return found

    def _end_thread(self) -> None:
        self._closed = True
        self._facade.close(_nothing, wait=_CLOSING)

    def _call(
        self, fn: Callable[[], Coroutine[Any, Any, T]], timeout: float, stop: str
    ) -> T:
        begun, ended = threading.Lock(), threading.Event()

        async def run() -> T:
            if not begun.acquire(blocking=False):
                raise asyncio.CancelledError  # it was interrupted before it began
            try:
                return await fn()
            finally:
                ended.set()

        try:
            return self._facade.call(run, timeout=timeout, stop=stop)
        except Exception:
            raise
        except BaseException:
            # An interrupt has cancelled it: its threads let go of the caller's memory.
            if not begun.acquire(blocking=False):
                ended.wait(_CLOSING)
            raise


async def _nothing() -> None:
    return
