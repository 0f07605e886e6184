"""An event loop that stands still now and then, and an interpreter that is busy."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiockpt.runtime.bridge import start_daemon

__all__ = ["LaggingLoop", "busy_interpreter"]


class LaggingLoop:
    """Blocks the running loop for ``seconds``, again and again; a context manager.

    It is what a training step does that somebody calls on the loop.

    Args:
        seconds: How long the loop stands still each time.
        pause: How long it runs in between.
    """

    def __init__(self, seconds: float, *, pause: float) -> None:
        self.seconds = seconds
        self.pause = pause
        self.count = 0
        self._next: asyncio.Handle | None = None

    def __enter__(self) -> LaggingLoop:
        self._next = asyncio.get_running_loop().call_soon(self._block)
        return self

    def __exit__(self, *_: object) -> None:
        if self._next is not None:
            self._next.cancel()

    def __repr__(self) -> str:
        return f"<LaggingLoop seconds={self.seconds} count={self.count}>"

    def _block(self) -> None:
        time.sleep(self.seconds)
        self.count += 1
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(self.pause, self._block)


@contextmanager
def busy_interpreter(threads: int = 1, *, hold: float | None = None) -> Iterator[None]:
    """Have threads compute in Python until the end of the block.

    Args:
        threads: How many.
        hold: Seconds for which one keeps the interpreter lock each time that it has
            it, as an extension does that does not let go of it; else Python's own.
    """
    interval, stop = sys.getswitchinterval(), threading.Event()
    if hold is not None:
        sys.setswitchinterval(hold)
    spinning = [start_daemon("busy", _spin, stop) for _ in range(threads)]
    try:
        yield
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in spinning:
            thread.join()


def _spin(stop: threading.Event) -> None:
    while not stop.is_set():
        for _ in range(1000):
            pass
