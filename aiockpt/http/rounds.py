"""Spreads requests over the rounds of the event loop.

Thousands of requests can arrive in one round. Each costs a fraction of a millisecond,
and everything else on the loop would wait for the sum.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

__all__ = ["Rounds"]

_PER_ROUND: Final = 16


class Rounds:
    """Lets so many requests begin in each round of the loop, in order of arrival."""

    def __init__(self) -> None:
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"<Rounds waiting={len(self._waiting)}>"

    async def begin(self) -> None:
        """Return in this round if it has room, or else in a later one."""
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._next, loop)
        if self._begun < _PER_ROUND:
            self._begun += 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = 0
        while self._waiting and self._begun < _PER_ROUND:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its client may have left
                waiter.set_result(None)
                self._begun += 1
        if self._begun:
            loop.call_soon(self._next, loop)
