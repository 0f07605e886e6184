"""How long an object of one event loop lives: its first use, its calls, its one end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

from aiockpt.errors import ClosedError, LocalProtocolError

__all__ = ["Lifetime"]

logger = logging.getLogger("aiockpt")


class Lifetime:
    """Says whether ``what`` may be used, and ends it exactly once."""

    def __init__(self, what: str) -> None:
        self.closed = False
        self._what = what
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._calls = 0
        self._idle = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        closed = " closed" if self.closed else ""
        return f"<Lifetime of {self._what} calls={self._calls}{closed}>"

    def check(self) -> None:
        """Raise ``ClosedError`` once the end has begun."""
        if self.closed:
            raise ClosedError(self._what)

    def bind(self) -> asyncio.AbstractEventLoop:
        """Return the running loop, which becomes the only one at the first use.

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
        """Count a call from its beginning to its end.

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
        """Take these steps in order, once; whoever calls this waits for their end.

        Each is taken, whatever the ones before it raise. If cancelled, they go on by
        themselves, and a later call waits for them.
        """
        loop = self.bind()
        if self._ending is None:
            self.closed = True
            self._ending = loop.create_task(_all(steps))
        await asyncio.wait({self._ending})
        self._ending.result()


async def _all(steps: Sequence[Callable[[], Awaitable[None]]]) -> None:
    async with AsyncExitStack() as stack:
        for step in reversed(steps):
            stack.push_async_callback(step)
