"""CheckpointThread: writes in a thread, for hosts that cannot start a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from aiockpt.checkpointers.base import Written
from aiockpt.checkpointers.config import (
    CLOSING_S,
    CheckpointStagerConfig,
    SaveRanks,
)
from aiockpt.checkpointers.handle import (
    BackgroundWriter,
    SaveHandle,
    absolute_path,
    find_out,
    forsaking,
)
from aiockpt.checkpointers.messages import (
    Forsake,
    Kept,
    Progressed,
    encode_keywords,
    failure_of,
)
from aiockpt.checkpointers.stager import DefaultStager
from aiockpt.checkpointers.worker import WorkQueue, work
from aiockpt.checkpointers.writer import WriteJob, Writers
from aiockpt.errors import AiockptError, WorkerError
from aiockpt.format.manifest import Manifest
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Lifetime
from aiockpt.runtime.system import failing_here


class CheckpointThread(BackgroundWriter):
    """Writes checkpoints in one thread. Nothing survives this process.

    The thread competes with training for the interpreter lock. A write that hangs
    cannot be ended, so it is left behind after ``shutdown_timeout_secs``. A loop that
    ends without :meth:`close` first waits for the submitted writes.

    Args:
        writers: The writers; the thread makes them.
        shutdown_timeout_secs: How long closing waits for the submitted writes.
        staging_config: How a state dict that is not staged yet is staged.
    """

    writers: Writers

    def __init__(
        self,
        writers: Writers,
        *,
        shutdown_timeout_secs: float,
        staging_config: CheckpointStagerConfig,
    ) -> None:
        self.writers = writers
        self._timeout = shutdown_timeout_secs
        self._lifetime = Lifetime("the checkpoint thread")
        self._bridge = Bridge(threads=1, name="aiockpt-write")
        self._helper = Bridge(threads=1, name="aiockpt-handover")
        self._stager = DefaultStager(staging_config, shared=False)
        self._queue = WorkQueue()
        self._waiting: dict[_ThreadJob, asyncio.Task[None]] = {}

    async def submit(
        self, handle: SaveHandle, staged: Any, keywords: Mapping[str, Any]
    ) -> None:
        """Take over a save; see :class:`.BackgroundWriter`."""
        with self._lifetime.call():
            ranks = self.writers.lookup.of_save()
            snapshot = await self._stager.snapshot(staged, step=handle.step)
            try:
                with failing_here("copying the keywords"):
                    given = await self._helper.run(encode_keywords, keywords)
                path = absolute_path(handle.path)  # now: the directory may change
                handle.hand_over(snapshot)
            finally:
                snapshot.release()
            job = _ThreadJob(handle, path, ranks, given)
            loop = asyncio.get_running_loop()
            self._waiting[job] = loop.create_task(self._outlast(job))
            self._do(job)

    def drop(self, handle: SaveHandle) -> None:
        """Drop a save, unless its write has begun. The handle ends in either case."""
        if self._queue.drop(handle.number):
            handle.end("replaced")

    async def forsake(self, path: str, step: int, reason: str) -> None:
        """Tell the other ranks, if there are any, that this one saves nothing."""
        if (message := forsaking(self.writers.lookup, path, step, reason)) is not None:
            self._do(message)

    async def close(self) -> None:
        """Finish the submitted writes within the time limit, then end."""
        await self._lifetime.end(
            partial(self._lifetime.calls_ended, timeout=CLOSING_S), self._finish
        )

    def _do(self, task: WriteJob | Forsake) -> None:
        # The thread returns when there is no task: if it waited for the next one, a
        # program that does not close its checkpointer would never exit.
        self._queue.put(task)
        self._bridge.post(work, partial(self._queue.take, wait=False), self.writers)

    async def _outlast(self, job: _ThreadJob) -> None:
        """Keep the loop running until the write has ended, even if it is closing."""
        while not job.handle.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({job.handle.ended})
        del self._waiting[job]

    async def _finish(self) -> None:
        if self._waiting:
            await asyncio.wait(self._waiting.values(), timeout=self._timeout)
        hangs = [*self._waiting]
        for job in hangs:
            await self._give_up(job)
        self._bridge.post(self.writers.close)
        await self._bridge.aclose(timeout=0 if hangs else CLOSING_S)
        await self._helper.aclose(timeout=CLOSING_S)
        await self._stager.close()

    async def _give_up(self, job: _ThreadJob) -> None:
        limit = f"{self._timeout:g} s (subprocess_shutdown_timeout_secs)"
        doing = f"writing {job.path}"
        if self._queue.drop(job.number):
            job.handle.end(WorkerError(f"{doing} was not begun within {limit}"))
            return
        outcome = await find_out(
            self._helper,
            job.handle,
            job.path,
            WorkerError(f"{doing} has not ended within {limit}"),
            rank_info=job.ranks.info,
            config=self.writers.config,
            at_work=True,
        )
        job.handle.end(outcome)


class _ThreadJob(WriteJob):
    """A write in this process. It belongs to the loop of the handle.

    It keeps the snapshot beside the handle: the thread may still read the memory when
    the handle has ended, because nobody waits for the thread any more.
    """

    def __init__(
        self, handle: SaveHandle, path: str, ranks: SaveRanks, keywords: bytes
    ) -> None:
        assert handle.snapshot is not None
        self.handle, self.number = handle, handle.number
        self.path, self.ranks, self.keywords = path, ranks, keywords
        self._snapshot = handle.snapshot
        self._snapshot.acquire()
        self._loop = asyncio.get_running_loop()

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def memory(self) -> memoryview:
        size = self._snapshot.manifest.segment_bytes
        (found,) = self._snapshot.buffers(0, size) or [memoryview(b"")]
        return found

    def tell(self, message: Progressed | Kept) -> None:
        self._on_loop(self.handle.hear, message)

    def seal(self, manifest: Manifest) -> None:
        """Nobody needs the digests: the snapshot ends with this process."""

    def close(self) -> None:
        if not self._on_loop(self._snapshot.release):
            self._snapshot.release()

    def end(self, outcome: Written | BaseException) -> bool:
        if isinstance(outcome, BaseException):
            outcome = _as_process_would(outcome, self.path)
        return self._on_loop(self.handle.end, outcome)

    def _on_loop(self, call: Callable[..., object], *args: object) -> bool:
        """Make a call on the loop; return False if that is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)
            return True
        return False


def _as_process_would(error: BaseException, path: str) -> AiockptError:
    """Return the error that a checkpoint process would have reported."""
    if isinstance(error, AiockptError):
        return error
    facts = failure_of(error)
    said = f"writing {path} raised {facts.kind}: {facts.text}"
    found = WorkerError(said, remote_traceback=facts.traceback)
    found.__cause__ = error
    return found
