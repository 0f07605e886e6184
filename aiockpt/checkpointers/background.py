"""BackgroundCheckpointer: saves in the background, for programs without an event loop.

An `AsyncCheckpointer` does the work, on an event loop in a separate thread. Each call
blocks until its coroutine has ended there.
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
from typing import Any, Final, Never, Self, TypeVar

from aiockpt.checkpointers.async_checkpointer import AsyncCheckpointer, SaveHandle
from aiockpt.checkpointers.base import Checkpointer, CheckpointerStatistics
from aiockpt.events import Progress
from aiockpt.memory.device import settle
from aiockpt.runtime.sync_facade import SyncFacade
from aiockpt.state.flatten import ready_for_threads
from aiockpt.state.selection import Select
from aiockpt.storage.read import OnBytes, Verify
from aiockpt.transport import Timeout, seconds

__all__ = ["BackgroundCheckpointer"]

T = TypeVar("T")

_CLOSING: Final = 5.0


class BackgroundCheckpointer(
    Checkpointer, AbstractContextManager["BackgroundCheckpointer"]
):
    """Saves in the background without an event loop; any thread may use it.

    ``save`` blocks only while the state dict is copied. Writes, commits, errors and
    policies are those of :class:`.AsyncCheckpointer`. If a program ends without
    :meth:`close`, the staged saves are written nevertheless.

    Args:
        checkpointer: The checkpointer that does the work. Nothing else may use it.
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
        step: int | None = None,
        timeout: Timeout | None = None,
        progress: Callable[[Progress], None] | None = None,
        **own: Never,
    ) -> SaveHandle:
        """Stage ``state_dict``, pass the copy to the writer, and return a handle.

        You may change the state dict as soon as the call returns. Call
        :meth:`.SaveHandle.result` to wait until the checkpoint is committed. The
        arguments are those of :meth:`.AsyncCheckpointer.save`; ``progress`` is called
        in the checkpointer's thread. If interrupted (Ctrl-C), nothing is saved, and
        the other ranks are told.

        Raises:
            UnsupportedLeafError: leaves of types that cannot be saved; it names them.
            StateDictError, LimitExceededError: the state dict cannot be described, is
                nested too deeply or contains itself.
            SaveInProgressError: the policy is ``fail``, and two saves are not written.
            TypeError, ValueError: an unknown keyword; ``path`` is not a path, or
                ``step`` not a step.
            ValueError: several ranks have nowhere to meet, or a policy other than
                ``wait``.
            ClosedError: after :meth:`close`.
            TransferTimeoutError: the deadline passed, with ``raise_on_failure``.
                Without it, this and all other errors are raised by the handle only.
        """
        save = partial(
            self._checkpointer.save,
            ready_for_threads(state_dict, self._checkpointer.ports),
            path,
            step=step,
            timeout=timeout,
            progress=progress,
            **own,
        )
        limit = math.inf if timeout is None else seconds(timeout)
        return self._call(save, limit, "save")

    def load(
        self,
        path: str | os.PathLike[str],
        state_dict: Any = None,
        *,
        default_map_location: Any = None,
        strict: bool = True,
        into: Any = None,
        select: Select | None = None,
        verify: Verify = "full",
        mmap: bool = False,
        on_bytes: OnBytes | None = None,
        rank: int | None = None,
        **own: Never,
    ) -> Any:
        """Return the state dict at ``path``; see :meth:`.CheckpointReader.read`.

        ``strict`` is the default here, as in :func:`.load`. ``into`` is the template,
        and ``state_dict`` another name of it. ``own`` are
        keywords for a reader of your own that takes them. If interrupted, the template
        may be partly filled.
        """
        settle(self._checkpointer.ports)
        load = partial(
            self._checkpointer.load,
            path,
            state_dict,
            into=into,
            default_map_location=default_map_location,
            strict=strict,
            select=select,
            verify=verify,
            mmap=mmap,
            on_bytes=on_bytes,
            rank=rank,
            **own,
        )
        return self._call(load, math.inf, "load")

    def statistics(self) -> CheckpointerStatistics:
        """Return the numbers of saves, their bytes and their times."""
        return self._checkpointer.statistics()

    def close(self) -> tuple[BaseException, ...]:
        """Finish the staged saves, and close everything. Idempotent.

        This takes at most ``subprocess_shutdown_timeout_secs``; see
        :meth:`.AsyncCheckpointer.close`. If interrupted, the closing continues, and a
        later call waits for it.

        Returns:
            The errors of failed saves that no handle has raised.
        """
        return self._end(self._checkpointer.close) or ()

    def _end(self, end: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Await ``end()`` and end the thread. Idempotent."""
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
        except BaseException:
            # If a signal's handler has interrupted it, it was cancelled: once it has
            # ended, no thread uses the caller's memory.
            if not begun.acquire(blocking=False):
                ended.wait(_CLOSING)
            raise


async def _nothing() -> None:
    return
