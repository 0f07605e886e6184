"""What was handed over to be written, and who writes it: a process or a thread."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from aiockpt.checkpointers.writer import Written
from aiockpt.events import call_guarded
from aiockpt.transfer.staging import Snapshot

__all__ = ["BackgroundWriter", "Submission"]


class Submission:
    """One write on its way. It belongs to one event loop.

    Attributes:
        number: Counts a writer's submissions, from 1.
        begun: Whether the writer has begun; then it cannot be dropped any more.
        seconds: How long the writer took.
        outcome: What is to be said of it when it is written.
        ended: Resolves when it is written (True) or was dropped (False), or fails.
    """

    def __init__(
        self,
        number: int,
        path: str,
        snapshot: Snapshot,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.number = number
        self.path = path
        self.step = snapshot.manifest.step
        self.nbytes = snapshot.manifest.segment_bytes
        self.begun = False
        self.seconds = 0.0
        self.outcome = Written()
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._settled = asyncio.Event()
        self._snapshot = snapshot
        self._progress = progress
        snapshot.acquire()

    def __repr__(self) -> str:
        state = "ended" if self.ended.done() else "begun" if self.begun else "waiting"
        return f"<Submission {self.number} {self.path} {state}>"

    @property
    def snapshot(self) -> Snapshot:
        """What is written; only until it has ended."""
        return self._snapshot

    def begin(self) -> None:
        """Note that the writer has begun."""
        self.begun = True
        self._settled.set()

    def advance(self, nbytes: int) -> None:
        """Tell how far the writer is."""
        if self._progress is not None:
            call_guarded(self._progress, nbytes)

    def finish(
        self, error: BaseException | None = None, *, written: bool = True
    ) -> None:
        """Note the end, and let go of the snapshot. Only the first end counts."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(written)
        else:
            self.ended.set_exception(error)
            # Whoever asks gets it. Nobody may: the checkpointer keeps account of it.
            self.ended.exception()
            written = False
        self._settled.set()
        self._snapshot.release()
        if written:
            self.advance(self.nbytes)

    async def written(self) -> bool:
        """Wait for the end: True if it is written, False if it was dropped.

        Raises:
            StorageError, WorkerError: it is not written.

        If cancelled, the write goes on.
        """
        await asyncio.wait({self.ended})
        return self.ended.result()

    async def settled(self) -> None:
        """Wait until it has begun, or ended without."""
        await self._settled.wait()


class BackgroundWriter(ABC):
    """Writes snapshots one after another, elsewhere than on the event loop."""

    @abstractmethod
    async def submit(
        self,
        staged: Any,
        path: str,
        keywords: Mapping[str, Any],
        progress: Callable[[int], None] | None = None,
    ) -> Submission:
        """Hand over a snapshot, or a state dict, which may be mutated afterwards.

        Raises:
            UnsupportedLeafError: a leaf, or a keyword, cannot travel.
            ClosedError: it is closed.

        If cancelled, either nothing was handed over, or everything was and is written.
        """

    @abstractmethod
    def drop(self, submission: Submission) -> None:
        """Call off a submission, unless it has begun; it ends either way."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what was handed over within a time of its own, then end."""

    @abstractmethod
    async def forsake(self, path: str, step: int, reason: str) -> None:
        """Tell the other ranks, if there are any, that this one saves nothing."""

    async def abandon(self) -> None:
        """End as if this process had died; where that is possible."""
        await self.close()
