"""CheckpointThread: writes in a thread of this process, where none may be started."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from aiockpt._bridge import Bridge
from aiockpt._lifetime import Lifetime
from aiockpt._snapshot import Snapshot
from aiockpt.checkpointers.config import CheckpointStagerConfig
from aiockpt.checkpointers.handover import Handover, text_of
from aiockpt.checkpointers.jobs import perform, sealed
from aiockpt.checkpointers.submission import BackgroundWriter, Submission

__all__ = ["CheckpointThread"]

_CLOSING: Final = 5.0


class CheckpointThread(BackgroundWriter):
    """Writes checkpoints in one thread; nothing survives this process.

    It costs training some of the interpreter lock, and a write that hangs cannot be
    ended: it is left behind after ``shutdown_timeout_secs``.

    Args:
        make_writer: Makes the writer, in the thread.
        shutdown_timeout_secs: How long closing waits for what was handed over.
        staging_config: How a state dict that is not staged yet is staged.
    """

    def __init__(
        self,
        make_writer: Callable[[], Any],
        *,
        shutdown_timeout_secs: float,
        staging_config: CheckpointStagerConfig,
    ) -> None:
        self._make_writer = make_writer
        self._writer: Any = None
        self._timeout = shutdown_timeout_secs
        self._lifetime = Lifetime("the checkpoint thread")
        self._bridge = Bridge(threads=1, name="aiockpt-write")
        self._staging = Bridge(threads=1, name="aiockpt-stage")
        self._handover = Handover(self._staging, staging_config, shared=False)
        self._count = 0
        self._waiting: dict[Submission, asyncio.Task[None]] = {}
        self._lock = threading.Lock()
        self._dropped: set[Submission] = set()

    def __repr__(self) -> str:
        return f"<CheckpointThread writes={len(self._waiting)}>"

    async def submit(
        self,
        staged: Any,
        path: str,
        keywords: Mapping[str, Any],
        progress: Callable[[int], None] | None = None,
    ) -> Submission:
        """Hand over a snapshot, or a state dict; see :class:`.BackgroundWriter`."""
        with self._lifetime.call():
            snapshot = await self._handover.snapshot(staged, path, keywords)
            self._count += 1
            submission = Submission(self._count, path, snapshot, progress)
            snapshot.release()
            loop = asyncio.get_running_loop()
            task = loop.create_task(self._write(submission, keywords))
            self._waiting[submission] = task
        return submission

    async def drop(self, submission: Submission) -> bool:
        """Call off a submission that has not begun; say whether it was."""
        with self._lock:
            if submission.begun or submission.ended.done():
                return False
            self._dropped.add(submission)
        submission.finish(written=False)
        return True

    async def forsake(self, path: str, step: int, reason: str) -> None:
        """Tell the other ranks, if there are any, that this one saves nothing."""
        self._bridge.post(self._forsake, text_of(path), step, reason)

    async def close(self) -> None:
        """Finish what was handed over within its time, then end."""
        await self._lifetime.end(
            partial(self._lifetime.calls_ended, timeout=_CLOSING), self._finish
        )

    async def _finish(self) -> None:
        if self._waiting:
            await asyncio.wait(self._waiting.values(), timeout=self._timeout)
        self._handover.close()
        if callable(close := getattr(self._writer, "close", None)):
            self._bridge.post(close)
        await self._bridge.aclose(timeout=_CLOSING)
        await self._staging.aclose(timeout=_CLOSING)

    async def _write(self, submission: Submission, keywords: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        try:
            done = await self._bridge.run(self._perform, loop, submission, keywords)
        except BaseException as error:
            submission.finish(error)
            if not isinstance(error, Exception):
                raise
        else:
            submission.seconds = time.monotonic() - began
            submission.finish(written=done)
        finally:
            del self._waiting[submission]

    def _forsake(self, path: str, step: int, reason: str) -> None:
        if callable(abandon := getattr(self._made(), "abandon", None)):
            abandon(path, step, reason)

    def _made(self) -> Any:
        if self._writer is None:
            self._writer = self._make_writer()
        return self._writer

    def _perform(
        self,
        loop: asyncio.AbstractEventLoop,
        submission: Submission,
        keywords: Mapping[str, Any],
    ) -> bool:
        with self._lock:
            if submission in self._dropped:
                self._dropped.remove(submission)
                return False
            submission.begun = True
        loop.call_soon_threadsafe(submission.begin)
        snapshot = submission.snapshot
        perform(
            self._made(),
            text_of(submission.path),
            _Sealed(snapshot),
            keywords,
            memory=partial(_memory, snapshot),
            report=lambda done: _advance(loop, submission, done),
        )
        return True


class _Sealed:
    """A snapshot of this process with its digests."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.manifest = sealed(snapshot)
        self.views = snapshot.views

    def __repr__(self) -> str:
        return f"<Sealed step={self.manifest.step}>"


def _memory(snapshot: Snapshot) -> memoryview:
    (found,) = snapshot.buffers(0, snapshot.manifest.segment_bytes) or [memoryview(b"")]
    return found


def _advance(
    loop: asyncio.AbstractEventLoop, submission: Submission, done: int
) -> None:
    loop.call_soon_threadsafe(submission.advance, done)
