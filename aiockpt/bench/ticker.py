"""An unrelated task that wants the loop every 5 ms, and notes how late it gets it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

__all__ = ["Ticker"]

PERIOD = 0.005


class Ticker:
    """Ticks between `start` and `stop`."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Tick from now on."""
        self._lags = []
        self._task = asyncio.create_task(self._tick())

    async def stop(self) -> list[float]:
        """Stop; return how late each tick was, in seconds.

        The tick that was due when it stopped counts, so that a loop which was blocked
        all the time has at least one.
        """
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        return self._lags

    async def _tick(self) -> None:
        due = time.monotonic() + PERIOD
        try:
            while True:
                await asyncio.sleep(PERIOD)
                now = time.monotonic()
                self._lags.append(now - due)
                due = now + PERIOD
        finally:
            if (late := time.monotonic() - due) > 0:
                self._lags.append(late)
