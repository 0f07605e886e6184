"""What a user does around the commit of a checkpoint."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any

from aiockpt.runtime.blocking import run_blocking

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
    if inspect.isawaitable(outcome):
        run_blocking(_awaited(outcome))


async def _awaited(outcome: Awaitable[None]) -> None:
    await outcome
