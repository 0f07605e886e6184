"""What a user does around the commit of a checkpoint."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any

from aiockpt._bridge import Bridge

__all__ = ["WriterHook", "finish"]


class WriterHook(ABC):
    """Called by every rank's writer, around the commit of a checkpoint.

    Both methods may be coroutine functions; the writer waits for their end. They get
    the path that was saved to, and the keywords that were given to ``save``.
    """

    @abstractmethod
    def pre_commit(self, path: str, **kwargs: Any) -> Awaitable[None] | None:
        """Act when this rank's file is on the disk; if it raises, the save fails."""

    @abstractmethod
    def post_commit(self, path: str, **kwargs: Any) -> Awaitable[None] | None:
        """Act when the checkpoint is there for everybody."""


def finish(outcome: Awaitable[None] | None) -> None:
    """Run what a coroutine function returned to its end, on a loop of its own."""
    if not inspect.isawaitable(outcome):
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(_awaited(outcome))
    else:
        _finish_apart(outcome)


async def _awaited(outcome: Awaitable[None]) -> None:
    await outcome


def _finish_apart(outcome: Awaitable[None]) -> None:
    """Do so in another thread, since a loop already runs in this one."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(_awaited(outcome))
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failures.append(error)

    bridge = Bridge(threads=1, name="aiockpt-hook")
    bridge.post(run)
    bridge.close()
    for failure in failures:
        raise failure
