"""Up to where the data segment has arrived: told by a thread, awaited by the loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress

__all__ = ["Arrivals"]


class Arrivals:
    """Wakes whoever waits for the next bytes; made on the loop that waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()
        self._reached = 0

    def __repr__(self) -> str:
        return f"<Arrivals bytes={self._reached}>"

    def tell(self, stop: int) -> None:
        """Say, from any thread, that everything before ``stop`` is there."""
        with suppress(RuntimeError):  # a closed loop has nobody to wake
            self._loop.call_soon_threadsafe(self._advance, stop)

    async def reach(self, stop: int) -> None:
        """Wait until everything before ``stop`` is there."""
        while self._reached < stop:
            self._more.clear()
            await self._more.wait()

    def _advance(self, stop: int) -> None:
        self._reached = stop
        self._more.set()
