"""Coroutines for callers without an event loop.

`SyncFacade` keeps one loop in a daemon thread for as long as an object lives, so that
its methods can block. `run_blocking` runs one coroutine to its end.

anyio's blocking portal must be left where it was entered, and leaving it waits for its
thread. The owner of a `SyncFacade` may shut it down without waiting, may forget to, or
may fork. So the thread is a daemon that ends when it is told to, and a forked child
finds that it has none.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    LocalProtocolError,
    TransferTimeoutError,
    TransportError,
)
from aiockpt.runtime.bridge import CallResult, run_in_thread, start_daemon

T = TypeVar("T")

logger = logging.getLogger("aiockpt")

Last: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

_EXIT_WAIT_S = 0.5  # for which the exit of the interpreter waits
_ABANDON_AFTER_S = 5.0  # beyond the timeout of a call

_open: weakref.WeakSet[SyncFacade] = weakref.WeakSet()


class SyncFacade:
    """Runs coroutine functions on its own loop, for any other thread.

    Args:
        what: The object that the facade belongs to, for messages.
        at_exit: Awaited for up to half a second when the interpreter ends, if nobody
            has closed the facade.

    Attributes:
        is_closed: Whether the end has begun, by `close` or by the interpreter's exit.
    """

    def __init__(self, what: str, *, at_exit: Last) -> None:
        self._what = what
        self._at_exit = at_exit
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._last: asyncio.Future[Last] = self._loop.create_future()
        self._turn = threading.RLock()  # a signal's handler may close within a call
        self.is_closed = False
        self._thread = start_daemon(f"aiockpt-{what}", self._serve)
        _open.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process made it; a forked child has no such thread."""
        return self._pid == os.getpid()

    def call(
        self, fn: Callable[[], Coroutine[Any, Any, T]], *, timeout: float, phase: str
    ) -> T:
        """Return or raise what ``await fn()`` does; raise only an `Exception`.

        The coroutine keeps to ``timeout`` itself. Five seconds later this call gives up
        waiting. An interrupt of the calling thread, which may be any exception of a
        signal's handler, cancels the coroutine, and waits up to five seconds for its
        end: then no other thread uses the caller's memory.

        Raises:
            ClosedError: the facade is closed, or was closed meanwhile.
            LocalProtocolError: this is a forked child, or the loop's own thread.
            TransferTimeoutError: the coroutine did not end; ``phase`` names it.
        """
        self._check()
        waiting = _LoopCall[T]()
        with self._turn:
            self._check_open()
            coroutine = waiting.run(fn)
            try:
                work = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            except RuntimeError as error:  # something has ended the loop
                coroutine.close()
                raise ClosedError(self._what) from error
            self._check_open()  # or a signal's handler has closed it just now
        limit = min(timeout + _ABANDON_AFTER_S, threading.TIMEOUT_MAX)
        until = time.monotonic() + limit
        try:
            try:
                work.result(limit)
            except BaseException as error:
                if work.cancelled():
                    if self.is_closed:
                        raise ClosedError(self._what) from None
                    raise TransportError("the call was cancelled from within") from None
                if isinstance(error, TimeoutError) and time.monotonic() >= until:
                    raise TransferTimeoutError(phase, timeout) from error
                work.cancel()
                waiting.outlast(_ABANDON_AFTER_S)
                raise  # as a signal's handler has raised it
            return waiting.result()
        finally:
            work.cancel()
            waiting.clear()

    def ask(self, fn: Callable[[], T]) -> T:
        """Return ``fn()``, which the loop calls between two steps of its tasks.

        ``fn`` must not block. The loop's own thread, or the caller's once the facade is
        closed, calls it directly.

        Raises:
            LocalProtocolError: this is a forked child.
        """

        async def asked() -> T:
            return fn()

        if threading.current_thread() is not self._thread:
            try:
                return self.call(asked, timeout=math.inf, phase="ask")
            except ClosedError:
                if not self.is_closed:
                    raise
        return fn()

    def close(self, last: Last, *, wait: float) -> None:
        """Await ``last()`` on the loop, then cancel all other tasks and end the thread.

        Returns when the thread has ended, or after ``wait`` seconds; the thread then
        goes on by itself. Idempotent: only the first call's ``last`` is awaited. Does
        nothing in a forked child.
        """
        if not self.is_ours:
            return
        with self._turn:
            if not self.is_closed:
                self.is_closed = True
                with suppress(RuntimeError):  # something has ended the loop
                    self._loop.call_soon_threadsafe(self._last.set_result, last)
        if threading.current_thread() is not self._thread:
            self._thread.join(wait)

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError(self._what)

    def _check(self) -> None:
        if not self.is_ours:
            raise LocalProtocolError(
                f"{self._what} belongs to the process that made it, not to a forked one"
            )
        if threading.current_thread() is self._thread:
            raise LocalProtocolError(f"{self._what} cannot be called by its own thread")

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._until_closed())
            except BaseException as error:  # noqa: BLE001 - there is nobody above
                logger.error("%s: its loop was ended by %r", self._what, error)
            finally:
                with self._turn:
                    self.is_closed = True  # also if something else has ended the loop
                # Calls that were queued until now begin, so that they are cancelled.
                runner.run(asyncio.sleep(0))

    async def _until_closed(self) -> None:
        last = await self._last
        try:
            await last()
        except Exception:
            logger.exception("%s did not close as it should", self._what)


class _LoopCall(CallResult[T]):
    """A coroutine function on its way to the loop, and its outcome."""

    __slots__ = ("_begun", "_ended")

    def __init__(self) -> None:
        super().__init__()
        self._begun = threading.Lock()
        self._ended = threading.Event()

    async def run(self, fn: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Await ``fn()`` and keep its outcome; only a cancel is raised.

        A `BaseException` would end the loop, or the trainer, so it becomes the cause of
        an `AiockptError`.
        """
        if not self._begun.acquire(blocking=False):
            raise asyncio.CancelledError  # it was interrupted before it began
        try:
            self.set_result(await fn())
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - it travels to the caller
            self.error = error
        except BaseException as error:  # noqa: BLE001 - see above
            self.error = AiockptError(f"{type(error).__name__}: {error}")
            self.error.__cause__ = error
        finally:
            self._ended.set()

    def outlast(self, limit: float) -> None:
        """Wait until the cancelled coroutine has ended. If it has not begun, bar it."""
        if not self._begun.acquire(blocking=False):
            self._ended.wait(limit)


@atexit.register
def _close_all() -> None:
    for facade in tuple(_open):
        facade.close(facade._at_exit, wait=_EXIT_WAIT_S)  # noqa: SLF001 - its own module


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new loop; return or raise what it does.

    If the calling thread already runs a loop, that loop stands still meanwhile, and the
    coroutine runs in another thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return run_in_thread("aiockpt-blocking", asyncio.run, coroutine)
