"""A coroutine run to its end by somebody who has no event loop, or must not use his."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiockpt.runtime.bridge import Bridge

__all__ = ["run_blocking"]

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of its own; return or raise what it does.

    Where a loop runs in the calling thread already, it stands still meanwhile, and the
    coroutine runs in another thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return _run_apart(coroutine)


def _run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failures.append(error)

    bridge = Bridge(threads=1, name="aiockpt-blocking")
    bridge.post(run)
    bridge.close()
    for failure in failures:
        raise failure
    return results[0]
