"""Times one act in a worker process, and what it costs its loop and its CPU."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import NotRequired, TypedDict, TypeVar

from aiockpt.bench.ticker import Ticker

__all__ = ["Cost", "Watch", "timed"]

T = TypeVar("T")


class Cost(TypedDict):
    """What an act took, as it travels between processes.

    ``began`` is on the system's monotonic clock, which all of them share.
    """

    seconds: float
    cpu: float
    lags: list[float]
    began: NotRequired[float]


class Watch:
    """Counts from `start` to `stop`."""

    def __init__(self) -> None:
        self._ticker = Ticker()
        self._cpu = 0.0
        self._started = 0.0
        self._began = 0.0

    def start(self) -> None:
        """Count from now on."""
        self._ticker.start()
        self._began = time.monotonic()
        self._cpu, self._started = time.process_time(), time.perf_counter()

    async def stop(self) -> Cost:
        """Return what was counted."""
        seconds = time.perf_counter() - self._started
        cpu = time.process_time() - self._cpu
        lags = await self._ticker.stop()
        return {"seconds": seconds, "cpu": cpu, "lags": lags, "began": self._began}


async def timed(act: Callable[[], Awaitable[T]]) -> tuple[T, Cost]:
    """Await ``act()``; return its result and its cost."""
    watch = Watch()
    watch.start()
    try:
        result = await act()
    finally:
        cost = await watch.stop()
    return result, cost
