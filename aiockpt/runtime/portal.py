"""An event loop for callers who have none: theirs blocks, ours goes on in its thread.

anyio's blocking portal must be left where it was entered, and leaving it waits for its
thread. Here somebody may shut down without waiting, forget to, or fork: the thread is
a daemon, ends when it is told to, and a forked child finds that it has none.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    LocalProtocolError,
    TransferTimeoutError,
    TransportError,
)
from aiockpt.runtime.bridge import start_daemon

__all__ = ["Portal"]

T = TypeVar("T")

logger = logging.getLogger("aiockpt")

Last: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

_LEAVING = 0.5
_MARGIN = 5.0  # a call that has not ended by itself this long after its time is left


_open: weakref.WeakSet[Portal] = weakref.WeakSet()


class _Outcome(Generic[T]):
    """What comes of a coroutine, on its way to the thread that waits for it.

    In a future, an error and its traceback would refer to each other: what could not
    be sent would stay in memory until the garbage collector comes.
    """

    __slots__ = ("_result", "error")

    def __init__(self) -> None:
        self._result: list[T] = []
        self.error: Exception | None = None

    async def take(self, fn: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Await ``fn()``; let nothing out but a cancel.

        What is no ``Exception`` is made one: it would end the loop, or a trainer.
        """
        try:
            self._result.append(await fn())
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - it travels to the caller
            self.error = error
        except BaseException as error:  # noqa: BLE001 - see above
            self.error = AiockptError(f"{type(error).__name__}: {error}")
            self.error.__cause__ = error

    def get(self) -> T:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self._result[0]

    def clear(self) -> None:
        """Forget it, whoever still refers to this."""
        self.error = None
        self._result.clear()


class Portal:
    """Runs coroutine functions on a loop of its own, for any other thread.

    Who does not close it is left with ``at_exit`` being awaited, for a moment, when the
    interpreter ends.
    """

    def __init__(self, what: str, *, at_exit: Last) -> None:
        self._what = what
        self._at_exit = at_exit
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._last: asyncio.Future[Last] = self._loop.create_future()
        self._turn = threading.RLock()  # a signal's handler may close within a call
        self._closed = False
        self._thread = start_daemon(f"aiockpt-{what}", self._serve)
        _open.add(self)

    def __repr__(self) -> str:
        return f"<Portal of {self._what}{' closed' if self._closed else ''}>"

    @property
    def is_ours(self) -> bool:
        """Whether this process has made it: a forked child has no such thread."""
        return self._pid == os.getpid()

    def call(
        self, fn: Callable[[], Coroutine[Any, Any, T]], *, timeout: float, stop: str
    ) -> T:
        """Return or raise what ``await fn()`` does; only an ``Exception`` is raised.

        The coroutine keeps to ``timeout`` itself; somewhat later nobody waits for it
        any more. An interrupt of the calling thread cancels it.

        Raises:
            ClosedError: the portal is closed, or was closed meanwhile.
            LocalProtocolError: this is a forked child, or the loop's own thread.
            TransferTimeoutError: it did not end; ``stop`` says what it was.
        """
        self._check()
        outcome = _Outcome[T]()
        with self._turn:
            self._check_open()
            coroutine = outcome.take(fn)
            try:
                work = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            except RuntimeError as error:  # something has ended the loop
                coroutine.close()
                raise ClosedError(self._what) from error
            self._check_open()  # or a signal's handler has closed it just now
        try:
            work.result(min(timeout + _MARGIN, threading.TIMEOUT_MAX))
            return outcome.get()
        except Exception as error:
            if error is outcome.error:
                raise
            if work.cancelled():
                raise self._cancelled() from None
            raise TransferTimeoutError(stop, timeout) from error
        finally:
            work.cancel()
            outcome.clear()

    def close(self, last: Last, *, wait: float) -> None:
        """Await ``last()`` on the loop, then cancel what is left and end the thread.

        Returns when it has ended, or after ``wait`` seconds; it then goes on by itself.
        Idempotent; the first one's ``last`` counts. Does nothing in a forked child.
        """
        if not self.is_ours:
            return
        with self._turn:
            if not self._closed:
                self._closed = True
                with suppress(RuntimeError):  # something has ended the loop
                    self._loop.call_soon_threadsafe(self._last.set_result, last)
        if threading.current_thread() is not self._thread:
            self._thread.join(wait)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(self._what)

    def _cancelled(self) -> AiockptError:
        if self._closed:
            return ClosedError(self._what)
        return TransportError("the call was cancelled from within")

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
                    self._closed = True  # also where something else has ended the loop
                # What it was given until now begins, so that it is cancelled.
                runner.run(asyncio.sleep(0))

    async def _until_closed(self) -> None:
        last = await self._last
        try:
            await last()
        except Exception:
            logger.exception("%s did not close as it should", self._what)


@atexit.register
def _close_all() -> None:
    for portal in tuple(_open):
        portal.close(portal._at_exit, wait=_LEAVING)  # noqa: SLF001 - its own module
