"""What the machine does, measured for a few seconds in one process.

The figures are for advice, not for comparisons: `aiockpt bench` measures ratios.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from threading import Event
from typing import Final

from aiockpt.bench.memory import FRESH, HUGE, SMALL, fresh, touch, warm_host
from aiockpt.bench.raw import RawServer, fetch_raw, memcpy
from aiockpt.bench.statistics import percentile
from aiockpt.bench.ticker import Ticker
from aiockpt.format.chunks import digest
from aiockpt.runtime.bridge import Bridge

__all__ = ["Contention", "Measures", "measure"]

_SIZE: Final = 128 << 20
_REPEAT: Final = 3
_CLOSING: Final = 5.0
_MOMENT: Final = 0.4  # long enough for some dozens of ticks
_SMALL_COPY: Final = 1 << 20
_CALLS: Final = 40
_CONNECTIONS: Final = (1, 2)
_THREADS: Final = 5  # two connections, both ends, and one that is busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """What the loop and a C call suffer, in seconds.

    Attributes:
        lag: The 99th percentile of how late the loop is.
        call: The median of a short copy by a foreign function, with all around it.
    """

    lag: float
    call: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Speeds are in GB/s.

    Attributes:
        copy: From touched memory to touched memory, by one thread.
        faults: First touch of memory by ``memset``, by the kind of its pages.
        digest: Of xxh3-128, by one thread.
        loopback: Of raw sockets, by the number of connections: with the system's
            congestion control, and with what the library asks for.
        idle, busy: Without, and beside, a thread that runs Python only.
    """

    copy: float
    faults: dict[str, float]
    digest: float
    loopback: dict[int, tuple[float, float]]
    idle: Contention
    busy: Contention


def measure() -> Measures:
    """Measure everything; blocks for some seconds."""
    memory, other = (touch(fresh(FRESH, _SIZE)) for _ in range(2))
    loopback, idle, busy = asyncio.run(_measure_on_loop(memory, other))
    return Measures(
        copy=_speed(partial(memcpy, other, memory)),
        faults={kind: _speed(partial(_fault, kind)) for kind in (SMALL, HUGE)},
        digest=_speed(partial(_timed, partial(digest, [memory]))),
        loopback=loopback,
        idle=idle,
        busy=busy,
    )


def _speed(act: Callable[[], float]) -> float:
    return _SIZE / median(act() for _ in range(_REPEAT)) / 1e9


def _timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _fault(kind: str) -> float:
    warm_host(_SIZE)
    memory = fresh(kind, _SIZE)
    return _timed(partial(touch, memory))


async def _measure_on_loop(
    memory: memoryview, other: memoryview
) -> tuple[dict[int, tuple[float, float]], Contention, Contention]:
    bridge = Bridge(threads=_THREADS, name="doctor")
    try:
        loopback = {
            count: (
                await _loopback(memory, other, bridge, count, ask=False),
                await _loopback(memory, other, bridge, count, ask=True),
            )
            for count in _CONNECTIONS
        }
        idle = await _contention(other)
        async with _busy_thread(bridge):
            return loopback, idle, await _contention(other)
    finally:
        await bridge.aclose(timeout=_CLOSING)


async def _loopback(
    memory: memoryview, other: memoryview, bridge: Bridge, count: int, *, ask: bool
) -> float:
    server = RawServer(memory, bridge, ask=ask)
    try:
        took = []
        for _ in range(_REPEAT):
            started = time.perf_counter()
            await fetch_raw(server.port, count, lambda: other, bridge)
            took.append(time.perf_counter() - started)
    finally:
        await server.aclose()
    return _SIZE / median(took) / 1e9


@asynccontextmanager
async def _busy_thread(bridge: Bridge) -> AsyncIterator[None]:
    stop = Event()
    spinning = asyncio.create_task(bridge.run(_spin, stop))
    try:
        yield
    finally:
        stop.set()
        await spinning


def _spin(stop: Event) -> None:
    while not stop.is_set():
        sum(range(100))


async def _contention(memory: memoryview) -> Contention:
    ticker = Ticker()
    ticker.start()
    await asyncio.sleep(_MOMENT)
    lags = await ticker.stop()
    source, target = memory[:_SMALL_COPY], memory[_SMALL_COPY : 2 * _SMALL_COPY]
    calls = [_timed(partial(memcpy, target, source)) for _ in range(_CALLS)]
    return Contention(lag=percentile(lags, 0.99), call=median(calls))
