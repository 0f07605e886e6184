"""Deadlines of calls, and the end of objects that end exactly once."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    contextmanager,
)
from types import TracebackType

from aiockpt.errors import ClosedError, LocalProtocolError, TransferTimeoutError, kept

logger = logging.getLogger("aiockpt")


class Deadline(AbstractAsyncContextManager["Deadline"]):
    """Ends its block after ``timeout`` seconds with `TransferTimeoutError`.

    A timeout of 0 fails on entry, before any I/O. The call keeps two attributes up to
    date for the error's message: ``phase`` names what it does now, and ``last_error``
    is the last failure. ``what`` names the step and the peer. The error keeps the notes
    of the exception that left the block.
    """

    def __init__(self, timeout: float, *, phase: str, what: str = "") -> None:
        self.timeout = timeout
        self.phase = phase
        self.what = what
        self.last_error = ""
        self.when = 0.0
        self._scope: asyncio.Timeout | None = None
        self._passed = False

    @property
    def expired(self) -> bool:
        """Whether the deadline passed within the block."""
        return self._passed or (self._scope is not None and self._scope.expired())

    async def __aenter__(self) -> Deadline:
        if not self.timeout:
            raise self._expired()
        self.when = asyncio.get_running_loop().time() + self.timeout
        self._scope = asyncio.timeout_at(self.when)
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._scope is not None
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:
            if self._scope.expired():
                raise self._expired(*getattr(error, "__notes__", ())) from late
            raise
        finally:
            # The timeout refers to the task, and through it to the error's frames.
            self._passed, self._scope = self._scope.expired(), None

    def note(self, error: Exception) -> None:
        """Remember the last failure, which is being retried."""
        self.last_error = str(error)

    def renew(self) -> None:
        """Restart the timeout because the call has made progress."""
        if self._scope is not None and not self._scope.expired():
            self.when = asyncio.get_running_loop().time() + self.timeout
            self._scope.reschedule(self.when)

    def _expired(self, *notes: str) -> TransferTimeoutError:
        error = TransferTimeoutError(
            self.phase, self.timeout, what=self.what, last_error=self.last_error
        )
        for note in notes:
            error.add_note(note)
        return error


class Lifetime:
    """Guards the object named ``what``: it has one event loop and ends exactly once."""

    def __init__(self, what: str) -> None:
        self.closed = False
        self._what = what
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._calls = 0
        self._idle = asyncio.Event()
        self._ending: asyncio.Task[Exception | None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether this process has used the object, and its end has not begun."""
        return self._loop is not None and not self.closed and self._pid == os.getpid()

    def check(self) -> None:
        """Raise ``ClosedError`` once the end has begun."""
        if self.closed:
            raise ClosedError(self._what)

    def bind(self) -> asyncio.AbstractEventLoop:
        """Return the running loop; the first use decides which loop that must be.

        Raises:
            LocalProtocolError: the first use was on another loop, or in the process
                that this one was forked from.
        """
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, self._pid = running, os.getpid()
        if self._pid != os.getpid():  # its threads and its peers are the parent's
            raise LocalProtocolError(
                f"{self._what} belongs to the process that first used it, and this is "
                "a forked one: make one after the fork"
            )
        if self._loop is not running:
            raise LocalProtocolError(
                f"{self._what} belongs to the event loop that first used it, and this "
                "is another one: make one for each loop"
            )
        return running

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call for as long as the block runs.

        Raises:
            ClosedError: the end has begun.
            LocalProtocolError: see :meth:`bind`.
        """
        self.check()
        self.bind()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def calls_ended(self, *, timeout: float) -> None:
        """Wait until no call is under way, for at most ``timeout`` seconds."""
        if not self._calls:
            return
        self._idle.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%s: %d calls outlive it", self._what, self._calls)

    async def end(self, *steps: Callable[[], Awaitable[None]]) -> None:
        """Await these steps in order, once; every caller waits until they have ended.

        Each step is awaited, whatever the earlier ones raise. If cancelled, the steps
        go on by themselves, and a later call waits for them.
        """
        loop = self.bind()
        if self._ending is None:
            self.closed = True
            self._ending = loop.create_task(_all(steps))
        await asyncio.wait({self._ending})
        if (error := self._ending.result()) is not None:
            raise kept(error)  # a raise adds the caller's frames


async def _all(steps: Sequence[Callable[[], Awaitable[None]]]) -> Exception | None:
    """Await the steps; return an error that they raise, without its frames."""
    try:
        async with AsyncExitStack() as stack:
            for step in reversed(steps):
                stack.push_async_callback(step)
    except Exception as error:  # noqa: BLE001 - each caller raises it
        return kept(error)
    return None
