"""Ranges of a file's data segment, read into where they belong, and verified.

Threads read block by block and digest each one while it is in the cache. Everything
here blocks; nothing needs tensors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias, get_args

from aiockpt.errors import StorageError
from aiockpt.format.chunks import ChunkGrid, ChunkHasher
from aiockpt.runtime.bridge import Bridge
from aiockpt.storage.checkpoint_file import after, named

__all__ = [
    "Filed",
    "Landing",
    "OnBytes",
    "Spare",
    "Verify",
    "check_verify",
    "read_ranges",
]

Verify: TypeAlias = Literal["full", "none"]
"""Which digests are compared: of every chunk that is read, or of none."""

OnBytes: TypeAlias = Callable[[int], None]

_BLOCK: Final = 2 << 20  # what is digested while it is in the cache
_SPAN: Final = 32 << 20  # of what a thread takes at once where no digest says
_MAX_VIEWS: Final = 1024
_THREADS: Final = 2


class Spare(Protocol):
    """A thread's memory for bytes that go elsewhere, or nowhere."""

    def turn(self, nbytes: int) -> memoryview:
        """Return as many bytes that nothing uses any more."""

    def landed(self, start: int, stop: int) -> None:
        """Say that the bytes are there, some of them perhaps in the last `turn`."""

    def close(self) -> None:
        """Wait until nothing uses its memory; give it back."""


class Landing(Protocol):
    """Where the ranges of a data segment go."""

    def ranges(self) -> Iterable[tuple[int, int]]:
        """Return the ranges that are wanted, ascending and apart."""

    def spare(self, nbytes: int) -> Spare:
        """Return spare memory for one thread; no more is asked of it at once."""

    def lay(self, start: int, stop: int, spare: memoryview) -> Sequence[memoryview]:
        """Return writable views of ``[start, stop)``; ``spare`` is as long."""

    def pass_on(self, memory: memoryview) -> None:
        """Say that everything is, and what was not for host memory in ``memory``."""


@dataclass(frozen=True, slots=True)
class Filed:
    """A data segment in an open file; no ``digests`` where another tool wrote it."""

    path: Path
    fd: int
    base: int
    grid: ChunkGrid
    digests: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Task:
    """What one thread reads at once: a whole chunk if it is to be verified."""

    start: int
    stop: int
    verified: bool = False


def read_ranges(
    file: Filed, landing: Landing, *, verify: Verify, on_bytes: OnBytes | None = None
) -> None:
    """Read what ``landing`` wants. ``on_bytes`` may raise, which ends the reading.

    Raises:
        StorageError: the file cannot be read, or ends too early.
        IntegrityError: a chunk has another digest; its bytes may have been landed.
    """
    tasks = [*_tasks(file, landing.ranges(), verify)]
    with named(file.path):
        _Reading(file, landing, on_bytes).run(tasks)


def _tasks(
    file: Filed, ranges: Iterable[tuple[int, int]], verify: Verify
) -> Iterator[_Task]:
    """Plan: whole chunks where they are verified, else no more than what is wanted."""
    verified = verify == "full" and bool(file.digests)
    last = -1
    for first, final in ranges:
        start = first
        while start < final:
            chunk = file.grid.index_of(start)
            lower, upper = file.grid.range(chunk)
            if not verified:
                upper = min(upper, final)
                for at in range(start, upper, _SPAN):
                    yield _Task(at, min(at + _SPAN, upper))
            elif chunk != last:
                yield _Task(lower, upper, verified=True)
                last = chunk
            start = upper


def check_verify(verify: Verify) -> Verify:
    """Return ``verify`` if it is one of its values.

    Raises:
        ValueError: it is not.
    """
    if verify not in get_args(Verify):
        raise ValueError(f"verify is 'full' or 'none', not {verify!r}")
    return verify


class _Reading:
    """One call of `read_ranges`."""

    def __init__(self, file: Filed, landing: Landing, on_bytes: OnBytes | None) -> None:
        self._file = file
        self._landing = landing
        self._on_bytes = on_bytes
        self._telling = threading.Lock()
        self._failures: list[BaseException] = []

    def run(self, tasks: Sequence[_Task]) -> None:
        remaining = iter(tasks)
        helpers = min(_THREADS, len(tasks)) - 1
        with ExitStack() as stack:
            if helpers > 0:
                bridge = Bridge(threads=helpers, name="aiockpt-read")
                stack.callback(bridge.close)
                for _ in range(helpers):
                    bridge.post(self._work, remaining)
            self._work(remaining)
        for failure in self._failures:
            raise failure

    def _work(self, remaining: Iterator[_Task]) -> None:
        try:
            spare = self._landing.spare(_BLOCK)
            try:
                for task in remaining:
                    if self._failures:
                        return
                    self._read(task, spare)
            finally:
                spare.close()
        except BaseException as error:  # noqa: BLE001 - the first one is raised by `run`
            self._failures.append(error)

    def _read(self, task: _Task, spare: Spare) -> None:
        hasher = ChunkHasher(self._file.grid, self._file.digests)
        for start in range(task.start, task.stop, _BLOCK):
            stop = min(start + _BLOCK, task.stop)
            views = self._landing.lay(start, stop, spare.turn(stop - start))
            self._fill(views, self._file.base + start)
            hashed = hasher.update(start, *views) if task.verified else ()
            spare.landed(start, stop)
            self._tell(stop - start)
            for chunk in hashed:
                if not chunk.matches:
                    raise chunk.error(str(self._file.path))

    def _fill(self, views: Sequence[memoryview], at: int) -> None:
        for first in range(0, len(views), _MAX_VIEWS):
            left = [*views[first : first + _MAX_VIEWS]]
            while left:
                got = os.preadv(self._file.fd, left, at)
                if not got:
                    raise StorageError(str(self._file.path), f"it ends at byte {at}")
                at += got
                left = after(left, got)

    def _tell(self, nbytes: int) -> None:
        if self._on_bytes is not None:
            with self._telling:
                self._on_bytes(nbytes)
