"""The handover of a checkpoint to a process or a thread that writes it.

`BackgroundWriter` is the interface of both. `Submission` is one write. `Handover` puts
the checkpoint into memory that the writer can read.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aiockpt.checkpointers.base import Written, anything, step_for
from aiockpt.checkpointers.config import (
    CheckpointStagerConfig,
    CheckpointWriterConfig,
    RankInfo,
    SaveRanks,
)
from aiockpt.checkpointers.messages import encode_keywords
from aiockpt.checkpointers.stager import StagedState, stager_of
from aiockpt.checkpointers.writer import remove_old
from aiockpt.errors import AiockptError, LocalProtocolError, StorageError, kept
from aiockpt.events import guarded
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge, obtain
from aiockpt.runtime.ipc import pack
from aiockpt.runtime.system import failing_here
from aiockpt.storage.commit import is_committed
from aiockpt.storage.directory import expanded, resolve_target

__all__ = [
    "BackgroundWriter",
    "Handover",
    "Submission",
    "absolute_path",
    "find_out",
    "known_as",
]

_ASKING: Final = 10.0
"""How long to ask a disk, which may hang, for the result of a write."""

_OTHERS_COMMIT: Final = 2.0
"""How long to wait for rank 0 to commit what this rank has written."""

_PAUSE: Final = 0.05
_LONGEST_PATH: Final = 16 << 10


class BackgroundWriter(ABC):
    """Writes snapshots one after another, off the event loop."""

    @abstractmethod
    async def submit(
        self,
        staged: Any,
        path: str,
        keywords: Mapping[str, Any],
        progress: Callable[[int], None] | None = None,
    ) -> Submission:
        """Hand over a snapshot or a state dict, which may be mutated afterwards.

        Raises:
            UnsupportedLeafError: a leaf, or a keyword, cannot be saved as data.
            ClosedError: it is closed.

        If cancelled, either nothing was handed over, or the checkpoint is written.
        """

    def own_functions(self) -> Sequence[Callable[..., object]]:
        """Return the user's own functions that get the keywords of a save."""
        return [anything]  # `submit` gets them

    @abstractmethod
    def drop(self, submission: Submission) -> None:
        """Drop a submission, unless it has begun. ``ended`` resolves in either case."""

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
        return None

    async def abandon(self) -> None:
        """End as if this process had died, if the writer can outlive it."""
        await self.close()


class Submission:
    """One write that was handed over. It belongs to one event loop.

    Attributes:
        number: Counts a writer's submissions, from 1.
        path: The checkpoint's directory.
        step: The checkpoint's step.
        nbytes: The bytes of its tensors.
        snapshot: The checkpoint; valid until the submission has ended.
        begun: Whether the writer has begun, so that it cannot be dropped any more.
        kept: The `Draft.identity` of its complete file, once the writer has told it.
        ended: A future of a `Written`, or of None if the submission was dropped. It
            fails if the write fails.
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
        self.snapshot = snapshot
        self.begun = False
        self.kept: tuple[int, int] | None = None
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Written | None] = loop.create_future()
        self._progress = None if progress is None else guarded(progress)
        snapshot.acquire()

    def __repr__(self) -> str:
        state = "ended" if self.ended.done() else "begun" if self.begun else "waiting"
        return f"<Submission {self.number} {self.path} {state}>"

    def advance(self, nbytes: int) -> None:
        """Report the writer's progress."""
        if self._progress is not None:
            self._progress(nbytes)

    def finish(self, outcome: Written | BaseException | None) -> None:
        """Note the end, and release the snapshot. Only the first end counts.

        Args:
            outcome: What ``ended`` resolves to, or the error with which it fails.
        """
        if self.ended.done():
            return
        if isinstance(outcome, BaseException):
            self.ended.set_exception(kept(outcome))
            # Mark it as retrieved: the checkpointer reports failures itself.
            self.ended.exception()
        else:
            self.ended.set_result(outcome)
        self.snapshot.release()
        if isinstance(outcome, Written):
            self.advance(self.nbytes)
        self._progress = None  # it may refer to anything

    async def written(self) -> Written | None:
        """Wait for the end; return what ``ended`` resolves to.

        Raises:
            StorageError, WorkerError: it is not written.

        If cancelled, the write goes on.
        """
        await asyncio.wait({self.ended})
        if (error := self.ended.exception()) is not None:
            raise kept(error)  # a raise adds the caller's frames
        return self.ended.result()


async def find_out(
    bridge: Bridge,
    submission: Submission,
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
        submission: The write.
        path: The absolute path of the checkpoint.
        error: Why the writer does not report it.
        rank_info: The writer's rank.
        config: Says which old checkpoints stay.
        at_work: Whether the writer may still commit it, or nobody knows what it does.

    Returns:
        The result of the write; or the error, which says if the result is not known.
    """
    rank, kept = rank_info.global_rank, submission.kept
    if kept is None:
        return _unknown(error) if at_work else error

    def ask() -> bool:
        until = time.monotonic() + (_OTHERS_COMMIT if rank else 0.0)
        target = resolve_target(path)
        while not is_committed(target, rank, kept):
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE)
        if not rank and config is not None:
            remove_old(target, config)
        return True

    try:
        async with asyncio.timeout(_ASKING):
            committed = await bridge.run_apart(ask)
    except (TimeoutError, OSError, AiockptError):
        return _unknown(error)
    if committed:
        return Written(f"{Path(path).name} is committed, but {error}")
    # Another rank may commit it later.
    return _unknown(error) if at_work or rank else error


def _unknown(error: AiockptError) -> AiockptError:
    found = copy.copy(error)
    found.detail += "; it is not known whether the checkpoint was committed"
    found.may_be_committed = True
    return found


class Handover:
    """Makes snapshots in memory that the writer can read.

    Args:
        bridge: Runs the threads that copy.
        config: How a plain state dict is staged.
        shared: Whether another process will map the memory.
    """

    def __init__(
        self, bridge: Bridge, config: CheckpointStagerConfig, *, shared: bool
    ) -> None:
        self._bridge = bridge
        self._shared = shared
        self._stager = stager_of(bridge, config, shared=shared, kept=1)

    def __repr__(self) -> str:
        return f"<Handover shared={self._shared}>"

    async def snapshot(
        self, staged: Any, path: str, keywords: Mapping[str, Any]
    ) -> Snapshot:
        """Return a snapshot; the caller releases it."""
        found = staged.snapshot if isinstance(staged, StagedState) else staged
        if not isinstance(found, Snapshot):
            step = step_for(path, keywords)
            return await self._stager.stage(found, step=step)
        if self._shared and (found.arena is None or found.arena.fd < 0):
            raise LocalProtocolError(
                "another process cannot map what was staged: stage it with "
                "DefaultStager(), without shared=False"
            )
        found.acquire()
        return found

    async def parcel(
        self, snapshot: Snapshot, path: str, keywords: Mapping[str, Any]
    ) -> tuple[str, int]:
        """Return the path for another process, and the parcel for the snapshot.

        Raises:
            UnsupportedLeafError: a keyword is not data.
            StorageError: the path is too long for any file system.
        """

        def packed() -> tuple[str, int]:
            absolute = absolute_path(path)
            if len(absolute) > _LONGEST_PATH:  # too long for a message
                raise StorageError(
                    f"{absolute[:100]}…", os.strerror(errno.ENAMETOOLONG)
                )
            return absolute, pack(snapshot.manifest.header, encode_keywords(keywords))

        with failing_here("handing over what was staged"):
            return await obtain(self._bridge, packed, lambda made: os.close(made[1]))

    def close(self) -> None:
        """Keep no memory from now on."""
        self._stager.close()


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path, for another process; a URL stays unchanged.

    Raises:
        StorageError: the path is relative, and the working directory cannot be read.
    """
    text = os.fspath(path)
    if "://" in text:
        return text
    try:
        return os.path.abspath(expanded(text))
    except OSError as error:
        detail = f"the working directory cannot be read: {error.strerror}"
        raise StorageError(text, detail) from error


def known_as(path: str | os.PathLike[str]) -> str:
    """Return the path by which other ranks know a save that this rank cannot write."""
    try:
        text = absolute_path(path)
    except StorageError:
        text = os.fspath(path)
    if len(text) > _LONGEST_PATH:  # no file system has it, so each rank fails by itself
        text = text[:_LONGEST_PATH]
    return text
