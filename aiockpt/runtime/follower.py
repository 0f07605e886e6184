"""A thread for callers that have no event loop: what it does, is done behind them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVarTuple

__all__ = ["Follower"]

Args = TypeVarTuple("Args")


class Follower:
    """One thread that does things in their order, behind a caller that may block."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._calls: list[Future[object]] = []

    def __repr__(self) -> str:
        return f"<Follower {self._name} calls={len(self._calls)}>"

    def call(self, fn: Callable[[*Args], object], *args: *Args) -> None:
        """Have ``fn(*args)`` called after what was asked for before."""
        self._calls.append(self._pool.submit(fn, *args))

    def wait(self) -> None:
        """Return when everything is done; raise what the first that failed raised."""
        calls, self._calls = self._calls, []
        for each in calls:
            each.result()

    def close(self) -> None:
        """Forget what was not begun, and end the thread. Idempotent."""
        self._pool.shutdown(cancel_futures=True)
