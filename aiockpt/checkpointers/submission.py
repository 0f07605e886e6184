"""What a checkpointer hands over, and to whom: a process or a thread that writes.

`BackgroundWriter` is the interface of both. `Submission` is one write on its way.
`Handover` makes sure that the writer can read what was staged.
"""

from __future__ import annotations

import asyncio
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from aiockpt.checkpointers.base import step_for
from aiockpt.checkpointers.config import CheckpointStagerConfig
from aiockpt.checkpointers.messages import encode_keywords
from aiockpt.checkpointers.stager import StagedState, stager_of
from aiockpt.checkpointers.writer import Written
from aiockpt.errors import StorageError
from aiockpt.events import call_guarded
from aiockpt.memory.arena import Arena
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.ipc import pack
from aiockpt.runtime.system import failing_here

__all__ = ["BackgroundWriter", "Handover", "Submission", "absolute_path", "known_as"]

_BLOCK: Final = 64 << 20
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

        If cancelled, either nothing was handed over, or everything was and is written.
        """

    @abstractmethod
    def drop(self, submission: Submission) -> None:
        """Call off a submission, unless it has begun. It ends either way."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what was handed over within a time limit of its own, then end."""

    @abstractmethod
    async def forsake(self, path: str, step: int, reason: str) -> None:
        """Tell the other ranks, if there are any, that this one saves nothing."""

    async def abandon(self) -> None:
        """End as if this process had died, if the writer can outlive it."""
        await self.close()


class Submission:
    """One write on its way. It belongs to one event loop.

    Attributes:
        number: Counts a writer's submissions, from 1.
        begun: Whether the writer has begun; then it cannot be dropped any more.
        seconds: How long the writer took.
        outcome: What there is to say about it once it is written.
        ended: Resolves to True if it was written and to False if it was dropped, or
            fails.
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
        """What is written; valid until the submission has ended."""
        return self._snapshot

    def begin(self) -> None:
        """Note that the writer has begun."""
        self.begun = True
        self._settled.set()

    def advance(self, nbytes: int) -> None:
        """Report how far the writer is."""
        if self._progress is not None:
            call_guarded(self._progress, nbytes)

    def finish(
        self, error: BaseException | None = None, *, written: bool = True
    ) -> None:
        """Note the end, and release the snapshot. Only the first end counts."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(written)
        else:
            self.ended.set_exception(error)
            # Mark it as retrieved: the checkpointer reports failures itself.
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
        """Wait until it has begun, or has ended without."""
        await self._settled.wait()


class Handover:
    """Makes snapshots of what is handed over, in memory that the writer can read.

    Args:
        bridge: Where copies run.
        config: How a plain state dict is staged.
        shared: Whether another process is to map the memory.
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
        arena = found.arena
        if not self._shared or (arena is not None and arena.fd >= 0):
            found.acquire()
            return found
        with failing_here("sharing what was staged"):
            made: list[Arena] = []  # a cancel drops the result, and this is left
            try:
                await self._bridge.run(_copy, found, made)
            except BaseException:
                for each in made:
                    self._bridge.post(each.close)
                raise
        (copied,) = made
        free = partial(self._bridge.post, copied.close)
        return Snapshot(found.manifest, copied, live=False, on_free=free)

    async def parcel(
        self, snapshot: Snapshot, path: str, keywords: Mapping[str, Any]
    ) -> tuple[str, int]:
        """Return the path for another process, and the parcel for the snapshot.

        Raises:
            UnsupportedLeafError: a keyword is not data.
            StorageError: the path is too long for any file system.
        """
        made: list[int] = []  # as above
        try:
            with failing_here("handing over what was staged"):
                text = await self._bridge.run(_pack, made, snapshot, path, keywords)
        except BaseException:
            for fd in made:
                os.close(fd)
            raise
        return text, made[0]

    def close(self) -> None:
        """Keep no memory from now on."""
        self._stager.close()


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same in another process; keep an address as it is.

    Raises:
        StorageError: the path is relative, and the working directory cannot be read.
    """
    text = os.fspath(path)
    if "://" in text:
        return text
    try:
        return os.path.abspath(text)
    except OSError as error:
        detail = f"the working directory cannot be read: {error.strerror}"
        raise StorageError(text, detail) from error


def known_as(path: str | os.PathLike[str]) -> str:
    """Return the path by which other ranks know a save that this rank cannot write."""
    try:
        text = absolute_path(path)
    except StorageError:
        text = os.fspath(path)
    if len(text) > _LONGEST_PATH:  # ranks find each other by the last name only
        text = os.path.basename(text)[-_LONGEST_PATH:]
    return text


def _copy(snapshot: Snapshot, made: list[Arena]) -> None:
    size = snapshot.manifest.segment_bytes
    arena = Arena(size, shared=True, staging=True)
    made.append(arena)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        _copy_to(arena.fd, snapshot.views(start, stop), start)


def _copy_to(fd: int, views: Iterable[memoryview], at: int) -> None:
    # A slice assignment would hold the interpreter lock; a system call does not.
    for view in views:
        rest = view
        while rest:
            done = os.pwrite(fd, rest, at)
            rest, at = rest[done:], at + done


def _pack(
    made: list[int], snapshot: Snapshot, path: str, keywords: Mapping[str, Any]
) -> str:
    absolute = absolute_path(path)
    if len(absolute) > _LONGEST_PATH:  # it would not fit a message
        raise StorageError(f"{absolute[:100]}…", os.strerror(errno.ENAMETOOLONG))
    encoded = encode_keywords(keywords)
    made.append(pack(snapshot.manifest.header, encoded))
    return absolute
