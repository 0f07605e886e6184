"""CheckpointThread: writes in a thread, for hosts that cannot start a process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from aiockpt.checkpointers.base import Written
from aiockpt.checkpointers.config import CheckpointStagerConfig, RankInfo, SaveRanks
from aiockpt.checkpointers.messages import (
    decode_keywords,
    encode_keywords,
    failure_of,
)
from aiockpt.checkpointers.submission import (
    BackgroundWriter,
    Handover,
    Submission,
    absolute_path,
    find_out,
    known_as,
)
from aiockpt.checkpointers.writer import Writers, tell_ranks, write_by
from aiockpt.errors import AiockptError, WorkerError
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Lifetime
from aiockpt.runtime.system import failing_here

__all__ = ["CheckpointThread"]

logger = logging.getLogger("aiockpt")

_CLOSING: Final = 5.0


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

    def __init__(
        self,
        writers: Writers,
        *,
        shutdown_timeout_secs: float,
        staging_config: CheckpointStagerConfig,
    ) -> None:
        self._writers = writers
        self._timeout = shutdown_timeout_secs
        self._lifetime = Lifetime("the checkpoint thread")
        self._bridge = Bridge(threads=1, name="aiockpt-write")
        self._staging = Bridge(threads=1, name="aiockpt-stage")
        self._handover = Handover(self._staging, staging_config, shared=False)
        self._count = 0
        self._at_work: Any = None  # the writer of the write that is under way
        self._waiting: dict[Submission, asyncio.Task[None]] = {}
        self._lock = threading.Lock()
        self._queued: set[Submission] = set()  # not begun by the thread yet

    def __repr__(self) -> str:
        return f"<CheckpointThread writes={len(self._waiting)}>"

    def own_functions(self) -> Sequence[Callable[..., object]]:
        """Return the functions of the commit hook; anything for a user's writer."""
        return self._writers.own_functions()

    async def submit(
        self,
        staged: Any,
        path: str,
        keywords: Mapping[str, Any],
        progress: Callable[[int], None] | None = None,
    ) -> Submission:
        """Hand over a snapshot or a state dict; see :class:`.BackgroundWriter`."""
        with self._lifetime.call():
            ranks = self.ranks()
            snapshot = await self._handover.snapshot(staged, path, keywords)
            try:
                with failing_here("copying the keywords"):
                    given = await self._staging.run(_travelled, keywords)
                self._count += 1
                where = absolute_path(path)  # now, as the working directory may change
                submission = Submission(self._count, where, snapshot, progress)
            except BaseException:
                snapshot.release()
                raise
            # The thread releases the snapshot, because it may still read it when no
            # caller waits any more.
            loop = asyncio.get_running_loop()
            self._waiting[submission] = loop.create_task(self._outlast(submission))
            self._queued.add(submission)
            self._bridge.post(self._write, loop, submission, ranks, given)
        return submission

    def drop(self, submission: Submission) -> None:
        """Drop a submission, unless it has begun. ``ended`` resolves in either case."""
        if self._call_off(submission):
            submission.finish(None)

    async def forsake(self, path: str, step: int, reason: str) -> None:
        """Tell the other ranks, if there are any, that this one saves nothing."""
        try:
            ranks = self.ranks()
        except ValueError:  # nowhere to tell them
            return
        if ranks.info.global_world_size > 1:
            self._bridge.post(
                tell_ranks, self._writers, ranks, known_as(path), step, reason
            )

    def ranks(self) -> SaveRanks:
        """Return the ranks of a save that begins now."""
        return self._writers.lookup.of_save()

    async def close(self) -> None:
        """Finish the submitted writes within the time limit, then end."""
        await self._lifetime.end(
            partial(self._lifetime.calls_ended, timeout=_CLOSING), self._finish
        )

    # ------------------------------------------------------------ on the loop

    async def _outlast(self, submission: Submission) -> None:
        """Keep the loop running until the write has ended, even if it is closing."""
        while not submission.ended.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({submission.ended})
        del self._waiting[submission]

    def _end(self, submission: Submission, outcome: Written | AiockptError) -> None:
        submission.finish(outcome)
        submission.snapshot.release()

    async def _finish(self) -> None:
        if self._waiting:
            await asyncio.wait(self._waiting.values(), timeout=self._timeout)
        hangs = [*self._waiting]
        for submission in hangs:
            await self._give_up(submission)
        self._handover.close()
        self._bridge.post(self._writers.close)
        await self._bridge.aclose(timeout=0 if hangs else _CLOSING)
        await self._staging.aclose(timeout=_CLOSING)

    async def _give_up(self, submission: Submission) -> None:
        limit = f"{self._timeout:g} s (subprocess_shutdown_timeout_secs)"
        doing = f"writing {submission.path}"
        if self._call_off(submission):
            submission.finish(WorkerError(f"{doing} was not begun within {limit}"))
            return
        error, writer = (
            WorkerError(f"{doing} has not ended within {limit}"),
            self._at_work,
        )
        outcome = await find_out(
            self._staging,
            submission,
            submission.path,
            error,
            rank_info=getattr(writer, "rank_info", RankInfo(0, 1)),
            config=getattr(writer, "config", None),
            at_work=True,
        )
        submission.finish(outcome)

    def _call_off(self, submission: Submission) -> bool:
        if self._take(submission):
            submission.snapshot.release()  # the thread will not read it
            return True
        return False

    def _take(self, submission: Submission) -> bool:
        """Take it from the queue; return False if that was done before."""
        with self._lock:
            is_queued = submission in self._queued
            self._queued.discard(submission)
        return is_queued

    # ---------------------------------------------------------- in the thread

    def _write(
        self,
        loop: asyncio.AbstractEventLoop,
        submission: Submission,
        ranks: SaveRanks,
        keywords: Mapping[str, Any],
    ) -> None:
        if not self._take(submission):
            return
        submission.begun = True
        outcome: Written | AiockptError
        try:
            outcome = self._perform(loop, submission, ranks, keywords)
        except BaseException as error:  # noqa: BLE001 - one failed write ends nothing else
            outcome = _as_process_would(error, submission.path)
        if not _tell(loop, self._end, submission, outcome):
            # The loop was closed, so nobody else can report it.
            submission.snapshot.release()
            if isinstance(outcome, AiockptError):
                said = f"{type(outcome).__name__}: {outcome}"  # which holds no frames
                how = "may not be" if outcome.may_be_committed else "is not"
                logger.error("%s %s saved: %s", submission.path, how, said)

    def _perform(
        self,
        loop: asyncio.AbstractEventLoop,
        submission: Submission,
        ranks: SaveRanks,
        keywords: Mapping[str, Any],
    ) -> Written:
        snapshot = submission.snapshot
        self._at_work = self._writers.of(ranks)
        try:
            return write_by(
                self._at_work,
                submission.path,
                snapshot,
                keywords,
                memory=partial(_memory, snapshot),
                report=lambda done: _tell(loop, submission.advance, done),
                on_kept=partial(setattr, submission, "kept"),
            )
        finally:
            self._at_work = None


def _travelled(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords as they would arrive in another process, or refuse them."""
    return decode_keywords(encode_keywords(keywords))


def _as_process_would(error: BaseException, path: str) -> AiockptError:
    """Return the error that a checkpoint process would have reported."""
    if isinstance(error, AiockptError):
        return error
    facts = failure_of(error)
    said = f"writing {path} raised {facts.kind}: {facts.text}"
    found = WorkerError(said, remote_traceback=facts.traceback)
    found.__cause__ = error
    return found


def _memory(snapshot: Snapshot) -> memoryview:
    (found,) = snapshot.buffers(0, snapshot.manifest.segment_bytes) or [memoryview(b"")]
    return found


def _tell(
    loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object
) -> bool:
    """Have the loop make a call; return False if it is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)
        return True
    return False
