"""`SaveHandle`: one save, from the copy in memory until it is durable.

A checkpointer makes the handle, and a `BackgroundWriter` (a process or a thread) takes
it over with the copy. Both writers ask the disk with `find_out` if nobody can tell any
more what became of a write.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from aiockpt.checkpointers.base import Written, anything, report_written, step_for
from aiockpt.checkpointers.config import (
    CheckpointWriterConfig,
    RankInfo,
    SaveRanks,
)
from aiockpt.checkpointers.messages import (
    MAX_TEXT_CHARACTERS,
    Forsake,
    Kept,
    Progressed,
    plain,
)
from aiockpt.checkpointers.ranks import RankLookup
from aiockpt.checkpointers.writer import Writers, remove_old
from aiockpt.errors import (
    AiockptError,
    LocalProtocolError,
    StorageError,
    TransferTimeoutError,
    kept,
)
from aiockpt.events import Progress, guarded
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge
from aiockpt.storage.directory import StrPath, absolute, is_address
from aiockpt.storage.interface import Storage, storage_at
from aiockpt.transport import Timeout, seconds

_DISK_ANSWER_S: Final = 10.0
"""How long to ask a disk, which may hang, for the result of a write."""

_OTHERS_COMMIT_S: Final = 2.0
"""How long to wait for rank 0 to commit what this rank has written."""

_POLL_S: Final = 0.05
_MAX_PATH_CHARACTERS: Final = 16 << 10

_numbers: Final = itertools.count(1)

SaveEnd: TypeAlias = Written | BaseException | Literal["skipped", "replaced"]
"""How a save ends: the result of its commit, its error, or why it is not written."""


class SaveHandle:
    """One save. A checkpointer returns it before the checkpoint is written.

    It belongs to the event loop that made it. Make one yourself to hand something to a
    :class:`BackgroundWriter` without a checkpointer.

    Args:
        path: The checkpoint's directory.
        step: The checkpoint's step. None: the number at the end of ``path``.
        progress: Called with :class:`.Progress` during the write.
        on_end: Called with the handle and the outcome at its end, before anyone who
            waits for the end wakes.

    Attributes:
        path: The checkpoint's directory.
        step: The checkpoint's step.
        nbytes: The bytes of its tensors; 0 until a writer has it.
        begun: Whether the write has begun, so that it cannot be dropped any more.
        unchanged: Whether all tensors hold the same bytes as in the previous save of
            this checkpointer; known once the save is written.
    """

    def __init__(
        self,
        path: StrPath,
        step: int | None = None,
        *,
        progress: Callable[[Progress], None] | None = None,
        on_end: Callable[[SaveHandle, SaveEnd], None] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.step = step_for(path, {"step": step})
        self.nbytes = 0
        self.begun = self.unchanged = False
        # Of the writer: which of this process's saves this is, from 1; its copy, until
        # the end; and the `RankDraft.identity` of the complete file, once it is known.
        self.number = 0
        self.snapshot: Snapshot | None = None
        self.file: tuple[int, int] | None = None
        self.staged_at = 0.0
        self.observed = False  # whether somebody has seen the error
        self.ended: asyncio.Future[SaveEnd] = asyncio.get_running_loop().create_future()
        self._ended_for_threads = threading.Event()
        self._progress = None if progress is None else guarded(progress)
        self._on_end = on_end

    def __repr__(self) -> str:
        outcome = self._outcome
        state = "staged" if self.staged else "new"
        if isinstance(outcome, str):
            state = outcome
        elif outcome is not None:
            state = "written" if isinstance(outcome, Written) else "failed"
        return f"<SaveHandle {self.path} step={self.step} {state}>"

    @property
    def staged(self) -> bool:
        """Whether a writer has taken over the copy. A save may end before that."""
        return self.number > 0

    @property
    def skipped(self) -> bool:
        """Whether the busy policy skipped the save."""
        return self._outcome == "skipped"

    @property
    def replaced(self) -> bool:
        """Whether a newer save replaced this one before it was written."""
        return self._outcome == "replaced"

    def done(self) -> bool:
        """Return whether the save is written, failed, skipped or replaced."""
        return self._ended_for_threads.is_set()

    @property
    def error(self) -> BaseException | None:
        """Return why the save failed, or None; each time another copy of the error."""
        if not isinstance(outcome := self._outcome, BaseException):
            return None
        self.observed = True
        return kept(outcome)  # a raise adds the caller's frames

    @property
    def warning(self) -> str:
        """Return why some rank has not confirmed the commit, or an empty text."""
        return outcome.warning if isinstance(outcome := self._outcome, Written) else ""

    async def written(self) -> bool:
        """Wait until the checkpoint is durable, and committed by all ranks.

        If cancelled, the write continues.

        Returns:
            False if the busy policy skipped or replaced the save, else True.

        Raises:
            StorageError: the checkpoint could not be written or committed. If
                ``may_be_committed`` is true, it may be there nevertheless.
            WorkerError: the checkpoint process died or hung during this write.
            StagingError, StateDictError: the state dict could not be staged.
        """
        await asyncio.wait({self.ended})  # a cancel does not cancel the future
        return self._result()

    def result(self, timeout: Timeout | None = None) -> bool:
        """Block until the checkpoint is durable, and committed by all ranks.

        Use this in place of :meth:`written` in a thread without the checkpointer's
        event loop, for example with a :class:`.BackgroundCheckpointer`.

        Args:
            timeout: How long to wait, in seconds or as a ``timedelta``. None: no limit.

        Raises:
            TransferTimeoutError: ``timeout`` has passed; the write continues.
            LocalProtocolError: this thread runs the event loop that has to finish the
                save, so the call would wait for ever.
        """
        limit = threading.TIMEOUT_MAX if timeout is None else seconds(timeout)
        if not self.done() and asyncio._get_running_loop() is self.ended.get_loop():  # noqa: SLF001 - unlike get_running_loop, it raises nothing
            raise LocalProtocolError(
                "SaveHandle.result() would block the event loop that it waits for: "
                "await SaveHandle.written()"
            )
        if not self._ended_for_threads.wait(min(limit, threading.TIMEOUT_MAX)):
            raise TransferTimeoutError("write", limit, what=f"of {self.path}")
        return self._result()

    @property
    def _outcome(self) -> SaveEnd | None:
        return self.ended.result() if self.ended.done() else None

    def _result(self) -> bool:
        if (error := self.error) is not None:
            raise error
        return not (self.skipped or self.replaced)

    # -------------------------------------------- for the checkpointer and the writer

    def hand_over(self, snapshot: Snapshot) -> None:
        """Note that a writer has the save. The handle keeps the snapshot to its end."""
        snapshot.acquire()
        self.number, self.snapshot = next(_numbers), snapshot
        self.step = snapshot.manifest.step
        self.nbytes = snapshot.manifest.segment_bytes
        self.staged_at = time.monotonic()

    def hear(self, message: Progressed | Kept) -> None:
        """Note what the writer says before the end."""
        if isinstance(message, Kept):
            self.file = message.device, message.inode
        elif self.begun:
            report_written(self._progress, self.staged_at, message.nbytes, self.nbytes)
        else:
            self.begun = True

    def end(self, outcome: SaveEnd) -> None:
        """Record the end, and release the snapshot. Only the first end counts.

        Args:
            outcome: The result of the commit, or why the save is not written.
        """
        if self.ended.done():
            return
        if self.snapshot is not None:
            self.snapshot.release()
        if isinstance(outcome, Written):
            report_written(self._progress, self.staged_at, self.nbytes, self.nbytes)
        # They may refer to anything, and a handle may be kept for long.
        on_end, self._on_end = self._on_end, None
        self.snapshot = self._progress = None
        known = kept(outcome) if isinstance(outcome, BaseException) else outcome
        # Coroutines that wait for the future wake in a later turn of the loop.
        self.ended.set_result(known)
        try:
            if on_end is not None:
                on_end(self, outcome)
        finally:
            self._ended_for_threads.set()


class BackgroundWriter(ABC):
    """Writes snapshots one after another, off the event loop.

    Attributes:
        writers: What makes the writer that gets the keywords of a save; None if that
            is not known.
    """

    writers: Writers | None = None

    @abstractmethod
    async def submit(
        self, handle: SaveHandle, staged: Any, keywords: Mapping[str, Any]
    ) -> None:
        """Take over a save. ``staged`` may be mutated afterwards.

        The writer ends the handle. If this raises, the handle has not ended, and
        nothing is written. If cancelled, either nothing was handed over, or the
        checkpoint is written.

        Args:
            handle: The save.
            staged: What :meth:`.CheckpointStager.stage` has returned, or a state dict.
            keywords: The keyword arguments of ``save``.

        Raises:
            UnsupportedLeafError: a leaf, or a keyword, cannot be saved as data.
            ClosedError: it is closed.
        """

    def own_functions(self) -> Sequence[Callable[..., object]]:
        """Return the user's own functions that get the keywords of a save."""
        return [anything] if self.writers is None else self.writers.own_functions()

    @abstractmethod
    def drop(self, handle: SaveHandle) -> None:
        """Drop a save, unless its write has begun. The handle ends in either case."""

    @abstractmethod
    async def close(self) -> None:
        """Finish the submitted writes within the writer's time limit, then end."""

    @abstractmethod
    async def forsake(self, path: str, step: int, reason: str) -> None:
        """Tell the other ranks, if there are any, that this one saves nothing."""

    def ranks(self) -> SaveRanks | None:
        """Return the ranks of a save that begins now, or None if they do not matter.

        Raises:
            ValueError: there are several ranks, and nowhere to meet.
        """
        return None if self.writers is None else self.writers.lookup.of_save()

    async def abandon(self) -> None:
        """End as if this process had died, if the writer can outlive it."""
        await self.close()


async def find_out(
    bridge: Bridge,
    handle: SaveHandle,
    path: str,
    error: AiockptError,
    *,
    rank_info: RankInfo,
    config: CheckpointWriterConfig | None,
    at_work: bool,
) -> Written | AiockptError:
    """Ask the disk what became of a begun write that the writer does not report.

    If it was committed, old checkpoints are removed, as the writer would have done.

    Args:
        bridge: Runs the thread that asks.
        handle: The save.
        path: The absolute path of the checkpoint.
        error: Why the writer does not report it.
        rank_info: The writer's rank.
        config: Says which old checkpoints stay.
        at_work: Whether the writer may still commit it, or nobody knows what it does.

    Returns:
        The result of the write; or the error, which says if the result is not known.
    """
    rank, file = rank_info.global_rank, handle.file
    if file is None:
        return _unknown(error) if at_work else error

    def ask() -> Storage | None:
        until = time.monotonic() + (_OTHERS_COMMIT_S if rank else 0.0)
        destination = storage_at(path)
        while not destination.is_committed(rank, file):
            if time.monotonic() >= until:
                return None
            time.sleep(_POLL_S)
        return destination

    try:
        async with asyncio.timeout(_DISK_ANSWER_S):
            committed = await bridge.run_apart(ask)
    except (TimeoutError, OSError, AiockptError):
        return _unknown(error)
    if committed is not None:
        if not rank and config is not None:
            with suppress(TimeoutError, OSError, AiockptError):  # then it goes on alone
                async with asyncio.timeout(_DISK_ANSWER_S):
                    await bridge.run_apart(remove_old, committed, config)
        return Written(f"{Path(path).name} is committed, but {error}")
    # Another rank may commit it later.
    return _unknown(error) if at_work or rank else error


def _unknown(error: AiockptError) -> AiockptError:
    found = copy.copy(error)
    found.detail += "; it is not known whether the checkpoint was committed"
    found.may_be_committed = True
    return found


def absolute_path(path: StrPath) -> str:
    """Return an absolute path, for another process; a URL stays unchanged.

    Raises:
        StorageError: the path is relative, and the working directory cannot be read.
            Or it is too long for any file system, and for a message.
    """
    text = os.fspath(path)
    if "://" not in text or is_address(text):
        try:
            text = absolute(text)
        except OSError as error:
            detail = f"the working directory cannot be read: {error.strerror}"
            raise StorageError(text, detail) from error
    if len(text) > _MAX_PATH_CHARACTERS:
        raise StorageError(f"{text[:100]}…", os.strerror(errno.ENAMETOOLONG))
    return text


def forsaking(lookup: RankLookup, path: str, step: int, reason: str) -> Forsake | None:
    """Return what tells the other ranks that this one saves nothing, if there are any.

    None without other ranks, or if there is nowhere to tell them.
    """
    try:
        ranks = lookup.of_save()
    except ValueError:
        return None
    if ranks.info.global_world_size == 1:
        return None
    try:
        where = absolute_path(path)
    except StorageError:  # then no rank can write it, and each fails by itself
        where = path[:_MAX_PATH_CHARACTERS]
    return Forsake(os.fsencode(where), step, ranks, plain(reason)[:MAX_TEXT_CHARACTERS])
