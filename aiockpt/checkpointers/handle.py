"""One asynchronous save, as its caller sees it; and the account of all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from aiockpt.checkpointers.submission import Submission
from aiockpt.events import Progress, TransferEvent, call_guarded, emit
from aiockpt.transfer.repeats import Repeats

__all__ = ["Account", "CheckpointerStatistics", "SaveHandle", "meter", "with_warning"]


class CheckpointerStatistics(NamedTuple):
    """A moment of a checkpointer; a synchronous one skips and replaces nothing.

    Attributes:
        saves: Calls of ``save`` that were not cancelled.
        written: Saves that are durable and committed.
        failed: Saves that are not, and will not be.
        skipped: Saves that the policy did not begin.
        replaced: Saves that were staged, and gave way to a newer one.
        under_way: Saves that are being written, or wait for it.
        bytes_written: Bytes of all that are written.
        stall_seconds: How long the last save kept its caller from mutating the state.
        write_seconds: How long the last write took, from the end of its staging on.
        restarts: How often the checkpoint process was replaced.
    """

    saves: int
    written: int
    failed: int
    skipped: int
    replaced: int
    under_way: int
    bytes_written: int
    stall_seconds: float
    write_seconds: float
    restarts: int


class SaveHandle:
    """A save: staged when you get it, written later.

    Attributes:
        path: Where it is saved to.
        step: The checkpoint's step.
        staged: Whether the state dict was copied; False if it was skipped, or failed.
        skipped: Whether the policy did not begin it, since others are under way.
        replaced: Whether a newer save took its place before it was written.
        unchanged: Whether, when it is written, all tensors hold the same bytes as in
            the save that this checkpointer wrote before it.
    """

    def __init__(self, path: str, step: int) -> None:
        self.path = path
        self.step = step
        self.staged = False
        self.skipped = False
        self.replaced = False
        self.unchanged = False
        self.observed = False
        self.handed_over = False
        self._ended = asyncio.Event()
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<SaveHandle {self.path} step={self.step} {self._state}>"

    @property
    def _state(self) -> str:
        if self._error is not None:
            return "failed"
        for word in ("skipped", "replaced"):
            if getattr(self, word):
                return word
        return "written" if self.done() else "staged" if self.staged else "new"

    def done(self) -> bool:
        """Tell whether it has ended: written, failed, skipped or replaced."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it has not."""
        self.observed = self.observed or self._error is not None
        return self._error

    async def written(self) -> bool:
        """Wait until the checkpoint is durable, and committed by all ranks.

        Returns False for a save that was skipped or replaced, as the policy says.

        Raises:
            StorageError: it could not be written or committed.
            WorkerError: the checkpoint process died of it, or hung.
            StagingError, StateDictError: it could not be staged.

        If cancelled, the write goes on.
        """
        await self._ended.wait()
        if (error := self.error) is not None:
            raise error
        return not (self.skipped or self.replaced)

    def end(self, error: BaseException | None = None) -> None:
        """Note the end."""
        self._error = error
        self._ended.set()


class Account:
    """Counts saves, tells the world of them, and remembers what nobody has seen."""

    def __init__(self) -> None:
        self.failures: list[SaveHandle] = []
        self._counts = dict.fromkeys(
            ("saves", "written", "failed", "skipped", "replaced"), 0
        )
        self._bytes = 0
        self._stall = self._write = 0.0
        self._repeats = Repeats("save")

    def __repr__(self) -> str:
        return f"<Account {self._counts}>"

    def statistics(self, *, under_way: int, restarts: int) -> CheckpointerStatistics:
        """Return the numbers as they are now."""
        return CheckpointerStatistics(
            **self._counts,
            under_way=under_way,
            bytes_written=self._bytes,
            stall_seconds=self._stall,
            write_seconds=self._write,
            restarts=restarts,
        )

    def staged(self, handle: SaveHandle, nbytes: int, began: float) -> None:
        """Note that a state dict may be mutated again."""
        handle.staged = True
        self._stall = time.monotonic() - began
        self._counts["saves"] += 1
        emit(
            TransferEvent(
                stop="stage", step=handle.step, nbytes=nbytes, seconds=self._stall
            )
        )

    def skipped(self, handle: SaveHandle) -> None:
        """Note that a save was not begun."""
        handle.skipped = True
        self._counts["saves"] += 1
        self._counts["skipped"] += 1
        self._tell(handle, "skip", "two saves are under way", logging.WARNING)
        handle.end()

    def replaced(self, handle: SaveHandle) -> None:
        """Note that a newer save takes its place."""
        handle.replaced = True
        self._counts["replaced"] += 1
        self._tell(handle, "skip", "a newer save takes its place", logging.WARNING)
        handle.end()

    def written(self, handle: SaveHandle, submission: Submission, since: float) -> None:
        """Note that a save is durable."""
        self._counts["written"] += 1
        self._bytes += submission.nbytes
        self._write = time.monotonic() - since
        event = TransferEvent(
            stop="write",
            step=handle.step,
            nbytes=submission.nbytes,
            seconds=self._write,
            level=logging.INFO,
        )
        outcome = submission.outcome
        event = with_warning(event, outcome.warning)
        event = self._repeats.told(event, outcome.content, handle.path)
        handle.unchanged = event.unchanged
        emit(event)
        handle.end()

    def failed(self, handle: SaveHandle, error: BaseException) -> None:
        """Note that a save will not be there; it is in the log, whoever asks."""
        if not handle.staged:
            self._counts["saves"] += 1
        self._counts["failed"] += 1
        self.failures = [one for one in self.failures if not one.observed]
        self.failures.append(handle)
        what = f"{handle.path} is not saved: {type(error).__name__}: {error}"
        self._tell(handle, "write" if handle.staged else "stage", what, logging.ERROR)
        handle.end(error)

    def unobserved(self) -> list[BaseException]:
        """Return the failures that nobody has asked for; they count as seen now."""
        unseen = [handle for handle in self.failures if not handle.observed]
        self.failures.clear()
        return [error for handle in unseen if (error := handle.error) is not None]

    def _tell(self, handle: SaveHandle, stop: str, detail: str, level: int) -> None:
        emit(TransferEvent(stop=stop, step=handle.step, detail=detail, level=level))


def with_warning(event: TransferEvent, warning: str) -> TransferEvent:
    """Return an event that says what is wrong with a save that was committed."""
    if not warning:
        return event
    detail = "; ".join(filter(None, (event.detail, warning)))
    return replace(event, detail=detail, level=logging.WARNING)


def meter(
    report: Callable[[Progress], None] | None, nbytes: int
) -> Callable[[int], None] | None:
    """Return what tells a caller's ``progress`` how far a write is."""
    if report is None:
        return None
    began = time.monotonic()

    def tell(done: int) -> None:
        rate = done / max(time.monotonic() - began, 1e-6)
        state = Progress(stop="write", bytes_done=done, bytes_total=nbytes, rate=rate)
        call_guarded(report, state)

    return tell
