"""Whatever was staged becomes memory that the checkpoint process can map."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from aiockpt.checkpointers.base import step_for
from aiockpt.checkpointers.config import CheckpointStagerConfig
from aiockpt.checkpointers.jobs import encode_keywords
from aiockpt.checkpointers.stager import StagedState, stager_of
from aiockpt.errors import StorageError
from aiockpt.memory.arena import Arena
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.channel import pack
from aiockpt.runtime.host_limits import failing_here

__all__ = ["Handover", "known_as", "text_of"]

_BLOCK = 64 << 20
_LONGEST_PATH = 16 << 10


def text_of(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same in another process; an address is kept.

    Raises:
        StorageError: there is no working directory that it would be relative to.
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
    """Return a path by which other ranks know a save, if this rank cannot write it."""
    try:
        text = text_of(path)
    except StorageError:
        text = os.fspath(path)
    if len(text) > _LONGEST_PATH:  # the directories do not matter to them
        text = os.path.basename(text)[-_LONGEST_PATH:]
    return text


class Handover:
    """Makes snapshots of what is handed over, in memory of the wanted kind.

    Args:
        bridge: Where copies run.
        config: How a plain state dict is staged.
        shared: Whether another process is to map them.
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
        """Return a snapshot with a reference that is the caller's."""
        found = staged.snapshot if isinstance(staged, StagedState) else staged
        if not isinstance(found, Snapshot):
            step = step_for(path, keywords)
            return await self._stager.stage(found, step=step)
        arena = found.arena
        if not self._shared or (arena is not None and arena.fd >= 0):
            found.acquire()
            return found
        with failing_here("sharing what was staged"):
            made: list[Arena] = []
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
            UnsupportedLeafError: a keyword cannot travel.
        StorageError: nothing can have so long a path.
        """
        made: list[int] = []
        try:
            with failing_here("handing over what was staged"):
                text = await self._bridge.run(_parcel, made, snapshot, path, keywords)
        except BaseException:
            for fd in made:  # a cancel came too late to prevent it
                os.close(fd)
            raise
        return text, made[0]

    def close(self) -> None:
        """Keep no memory from now on."""
        self._stager.close()


def _copy(snapshot: Snapshot, made: list[Arena]) -> None:
    size = snapshot.manifest.segment_bytes
    arena = Arena(size, shared=True, staging=True)
    made.append(arena)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        _copy_to(arena.fd, snapshot.views(start, stop), start)


def _copy_to(fd: int, views: Iterable[memoryview], at: int) -> None:
    # Not by assignment, which would keep the interpreter lock.
    for view in views:
        rest = view
        while rest:
            done = os.pwrite(fd, rest, at)
            rest, at = rest[done:], at + done


def _parcel(
    made: list[int], snapshot: Snapshot, path: str, keywords: Mapping[str, Any]
) -> str:
    absolute = text_of(path)
    if len(absolute) > _LONGEST_PATH:  # it would not fit a message
        raise StorageError(f"{absolute[:100]}…", os.strerror(errno.ENAMETOOLONG))
    encoded = encode_keywords(keywords)
    made.append(pack(snapshot.manifest.header, encoded))
    return absolute
