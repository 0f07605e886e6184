"""AsyncCheckpointer: training waits for the copy of the state dict, and no longer.

``save`` stages the state dict into an arena, hands the arena to a background writer (a
process or a thread), and returns a `SaveHandle`. The handle ends when the writer says
that the checkpoint is committed, or why it is not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, Final, Self

from aiockpt.checkpointers.base import (
    Account,
    Checkpointer,
    CheckpointerStatistics,
    meter,
    step_for,
)
from aiockpt.checkpointers.config import BusyPolicy
from aiockpt.checkpointers.reader import CheckpointReader, load
from aiockpt.checkpointers.stager import CheckpointStager, StagedState
from aiockpt.checkpointers.submission import BackgroundWriter, Submission
from aiockpt.errors import (
    ClosedError,
    LocalProtocolError,
    SaveInProgressError,
    TransferTimeoutError,
)
from aiockpt.events import Progress, TransferEvent, emit
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline, Lifetime
from aiockpt.transport import Timeout, seconds

__all__ = ["AsyncCheckpointer", "SaveHandle"]

_SLOTS: Final = 2  # one save is being written, one waits
_SLOTS_TO_REPLACE: Final = 3  # the one that waits stays until its successor is staged
_CLOSING: Final = 5.0


class SaveHandle:
    """One save. It was staged when you get the handle, and is written later.

    Attributes:
        path: The checkpoint's directory.
        step: The checkpoint's step.
        staged: Whether the state dict was copied; False if it was skipped, or failed.
        skipped: Whether the busy policy did not begin it.
        replaced: Whether a newer save took its place before it was written.
        unchanged: Whether, once written, all tensors hold the same bytes as in the
            previous save of this checkpointer.
    """

    def __init__(self, path: str, step: int) -> None:
        self.path = path
        self.step = step
        self.staged = False
        self.skipped = False
        self.replaced = False
        self.unchanged = False
        self.observed = False
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._ended_for_threads = threading.Event()
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
        return self._ended_for_threads.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it has not failed."""
        self.observed = self.observed or self._error is not None
        return self._error

    async def written(self) -> bool:
        """Wait until the checkpoint is durable, and committed by all ranks.

        Returns False for a save that was skipped or replaced, as the policy says.

        Raises:
            StorageError: it could not be written or committed.
            WorkerError: the checkpoint process died or hung while it wrote this.
            StagingError, StateDictError: it could not be staged.

        If cancelled, the write goes on.
        """
        await self._ended.wait()
        return self._outcome()

    def result(self, timeout: Timeout | None = None) -> bool:
        """Block until the checkpoint is durable, and committed by all ranks.

        This is :meth:`written` for threads other than the checkpointer's event loop,
        as a program has that uses a :class:`.BackgroundCheckpointer`.

        Raises:
            TransferTimeoutError: it has not ended after ``timeout``; the write goes on.
            LocalProtocolError: the event loop that would have to go on meanwhile runs
                in this thread.
        """
        limit = threading.TIMEOUT_MAX if timeout is None else seconds(timeout)
        if not self.done() and asyncio._get_running_loop() is self._loop:  # noqa: SLF001 - unlike get_running_loop, it raises nothing
            raise LocalProtocolError(
                "SaveHandle.result() would block the event loop that it waits for: "
                "await SaveHandle.written()"
            )
        if not self._ended_for_threads.wait(min(limit, threading.TIMEOUT_MAX)):
            raise TransferTimeoutError("write", limit, what=f"of {self.path}")
        return self._outcome()

    def _outcome(self) -> bool:
        if (error := self.error) is not None:
            raise error
        return not (self.skipped or self.replaced)

    def end(self, error: BaseException | None = None) -> None:
        """Note the end; for the checkpointer, on its loop."""
        self._error = error
        self._ended.set()
        self._ended_for_threads.set()


class AsyncCheckpointer(Checkpointer, AbstractAsyncContextManager["AsyncCheckpointer"]):
    """Saves in the background. It belongs to the loop that uses it first.

    ``save`` returns when the state dict may be mutated. Digests, writing, fsync and
    commit happen in another process (or thread), one save after another. A second
    save is staged while the first is written; the busy policy decides about a third.

    A save that fails is logged at once. Its handle raises the error, and :meth:`close`
    returns those that nobody has asked for; training goes on.

    Args:
        checkpoint_stager: Copies the state dict.
        checkpoint_process: Writes the copy.
        reader: Loads.
        busy_policy: What a save does while two others are not written yet: ``wait``;
            ``skip`` itself; ``replace`` the one that waits, once it is staged itself;
            or ``fail``.
        raise_on_failure: Raise a failure from ``save``, the next ``save`` or
            ``close`` instead.
        keep_last: The checkpoint process keeps the last staged snapshot if this
            process dies. So its memory is not reused before a newer snapshot was
            handed over.
    """

    def __init__(
        self,
        checkpoint_stager: CheckpointStager,
        checkpoint_process: BackgroundWriter,
        reader: CheckpointReader,
        *,
        busy_policy: BusyPolicy = "wait",
        raise_on_failure: bool = False,
        keep_last: bool = False,
    ) -> None:
        self._stager = checkpoint_stager
        self._writer = checkpoint_process
        self._reader = reader
        self._policy = busy_policy
        self._raises = raise_on_failure
        self._keeps = keep_last
        self._last: StagedState | None = None
        self._lifetime = Lifetime("the checkpointer")
        self._bridge = Bridge(threads=2, name="aiockpt-load")
        self._account = Account()
        self._failures: list[SaveHandle] = []
        self._turn = asyncio.Lock()
        self._under_way: dict[Submission, SaveHandle] = {}

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<AsyncCheckpointer written={now.written} under_way={now.under_way}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            await self.close()
        elif self._keeps:  # the checkpoint process stays, as if this one had died
            await self._end(self._writer.abandon)
        else:
            await self._end(self._writer.close)

    async def save(
        self,
        state_dict: Any,
        path: str | os.PathLike[str],
        *,
        timeout: Timeout | None = None,
        progress: Callable[[Progress], None] | None = None,
        **kwargs: Any,
    ) -> SaveHandle:
        """Stage ``state_dict``, hand it over, and return: it may be mutated then.

        Args:
            state_dict: What to save.
            path: The checkpoint's directory. A number at its end is the step, unless
                ``step`` is among ``kwargs``.
            timeout: Deadline of this call, in seconds or as a ``timedelta``; waiting
                for earlier saves is the largest part of it.
            progress: Called with :class:`.Progress` while it is written.
            kwargs: Go to hooks, and to a stager or a writer of one's own.

        Raises:
            SaveInProgressError: the policy is ``fail``, and two others are under way.
            TypeError, ValueError: ``path`` is not a path, or ``step`` not a step.
            ClosedError: after :meth:`close`.
            TransferTimeoutError: with ``raise_on_failure``. Without, this and all
                other failures fail the handle.

        If cancelled, nothing is saved; other ranks are told, and fail theirs.
        """
        if self._raises:
            self._raise_unobserved()
        handle = SaveHandle(os.fspath(path), step_for(path, kwargs))
        if "step" in kwargs:
            kwargs["step"] = handle.step
        began = time.monotonic()
        submission: Submission | None = None
        try:
            async with self._its_turn(timeout):
                if not await self._find_room(handle):
                    return handle
                keywords = {"step": handle.step, **kwargs}
                staged = await self._stager.stage(state_dict, **keywords)
                submission = await self._submit(staged, handle, progress, kwargs)
                self._note_staged(handle, submission, began)
        except (SaveInProgressError, ClosedError, LocalProtocolError):
            raise
        except asyncio.CancelledError:
            # Once a writer has it, the writer tells the ranks.
            if submission is None:
                await self._writer.forsake(handle.path, handle.step, "it was cancelled")
            raise
        except Exception as error:
            if submission is None:
                await self._writer.forsake(handle.path, handle.step, str(error))
            self._note_failed(handle, error)  # and training goes on
            if self._raises:
                handle.observed = True
                raise
        return handle

    async def load(
        self,
        path: str | os.PathLike[str],
        state_dict: Any = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the state dict at ``path``; see :meth:`.CheckpointReader.read`.

        If cancelled, ``state_dict`` may be filled in part; nothing writes to it after
        that.
        """
        with self._lifetime.call():
            return await load(
                self._bridge,
                self._reader,
                path,
                state_dict,
                map_location=default_map_location,
                strict=strict,
                **kwargs,
            )

    def statistics(self) -> CheckpointerStatistics:
        """Return how many saves there were, and what they took."""
        return self._account.now._replace(
            under_way=len(self._under_way),
            restarts=getattr(self._writer, "restarts", 0),
        )

    async def close(self) -> tuple[BaseException, ...]:
        """Write what was handed over, and close everything.

        Returns the failures that nobody has seen. It takes
        ``subprocess_shutdown_timeout_secs`` at most; then the process is killed, and
        the saves that it had not written have failed. If cancelled, the closing goes
        on.
        """
        await self._end(self._writer.close)
        if self._raises:
            self._raise_unobserved()
        return tuple(self._take_unobserved())

    async def aclose(self) -> tuple[BaseException, ...]:
        """Close it; another name for :meth:`close`."""
        return await self.close()

    # ----------------------------------------------------------------- saving

    @asynccontextmanager
    async def _its_turn(self, timeout: Timeout | None) -> AsyncIterator[None]:
        """Enter when no other save is being staged, and leave before the deadline."""
        limit: AbstractAsyncContextManager[object] = nullcontext()
        if timeout is not None:
            limit = Deadline(seconds(timeout), stop="save")
        async with limit:
            with self._lifetime.call():
                async with self._turn:
                    yield

    async def _find_room(self, handle: SaveHandle) -> bool:
        """Wait for earlier saves; return False if the policy says to skip this one."""
        slots = _SLOTS_TO_REPLACE if self._policy == "replace" else _SLOTS
        while len(self._under_way) >= slots:
            self._lifetime.check()
            if self._policy == "skip":
                self._note_skipped(handle)
                return False
            if self._policy == "fail":
                raise SaveInProgressError(handle.path, under_way=len(self._under_way))
            ends = [submission.ended for submission in self._under_way]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # lets their callbacks remove them
        return True

    async def _submit(
        self,
        staged: Any,
        handle: SaveHandle,
        progress: Callable[[Progress], None] | None,
        kwargs: dict[str, Any],
    ) -> Submission:
        """Hand over what was staged, and release what need not be kept any longer."""
        ours = staged if isinstance(staged, StagedState) else None
        report = meter(progress, ours.nbytes if ours else 0)
        unused = ours
        try:
            submission = await self._writer.submit(staged, handle.path, kwargs, report)
            if self._keeps:
                unused, self._last = self._last, ours
        finally:
            if unused is not None:
                unused.release()
        return submission

    def _note_staged(
        self, handle: SaveHandle, submission: Submission, began: float
    ) -> None:
        handle.staged = True
        now = time.monotonic()
        self._account.count("saves")
        self._account.note_stall(now - began)
        emit(
            TransferEvent(
                stop="stage",
                step=handle.step,
                nbytes=submission.nbytes,
                seconds=now - began,
            )
        )
        if self._policy == "replace" and len(self._under_way) >= _SLOTS:
            # The last one: the one before it is being written, or about to be.
            self._writer.drop(next(reversed(self._under_way)))
        self._under_way[submission] = handle
        submission.ended.add_done_callback(
            lambda _: self._note_end(handle, submission, time.monotonic() - now)
        )

    # -------------------------------------------------------- how a save ended

    def _note_end(
        self, handle: SaveHandle, submission: Submission, took: float
    ) -> None:
        """Count a save that was handed over, announce its end, and end its handle."""
        del self._under_way[submission]
        if (error := submission.ended.exception()) is not None:
            self._note_failed(handle, error)
            return
        written = submission.ended.result()
        if written is None:
            handle.replaced = True
            self._account.count("replaced")
            _announce(handle, "skip", "a newer save takes its place", logging.WARNING)
        else:
            written = written._replace(nbytes=submission.nbytes)
            handle.unchanged = self._account.note_written(
                handle.path, handle.step, written, took
            )
        handle.end()

    def _note_skipped(self, handle: SaveHandle) -> None:
        handle.skipped = True
        self._account.count("saves", "skipped")
        _announce(handle, "skip", "two saves are under way", logging.WARNING)
        handle.end()

    def _note_failed(self, handle: SaveHandle, error: BaseException) -> None:
        """Log the failure, and remember it until somebody asks for it."""
        self._account.count("failed", *([] if handle.staged else ["saves"]))
        self._failures = [one for one in self._failures if not one.observed]
        self._failures.append(handle)
        detail = f"{handle.path} is not saved: {type(error).__name__}: {error}"
        stop = "write" if handle.staged else "stage"
        _announce(handle, stop, detail, logging.ERROR)
        handle.end(error)

    def _take_unobserved(self) -> list[BaseException]:
        """Return the failures that nobody has asked for, once."""
        unseen = [handle for handle in self._failures if not handle.observed]
        self._failures.clear()
        return [error for handle in unseen if (error := handle.error) is not None]

    def _raise_unobserved(self) -> None:
        if unseen := self._take_unobserved():
            first, *others = unseen
            for other in others:
                first.add_note(f"also failed: {other}")
            raise first

    # ---------------------------------------------------------------- the end

    async def _end(self, end_writer: Callable[[], Any]) -> None:
        await self._lifetime.end(
            partial(self._lifetime.calls_ended, timeout=_CLOSING),
            end_writer,
            self._settle,
            self._stager.close,
            partial(self._bridge.aclose, timeout=_CLOSING),
        )

    async def _settle(self) -> None:
        """Let the handles' callbacks run, and release the last snapshot."""
        await asyncio.sleep(0)
        if self._last is not None:
            self._last.release()
            self._last = None


def _announce(handle: SaveHandle, stop: str, detail: str, level: int) -> None:
    emit(TransferEvent(stop=stop, step=handle.step, detail=detail, level=level))
