"""AsyncCheckpointer: training waits for the copy, and for nothing else."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, Final, Self

from aiockpt.checkpointers.base import Checkpointer, step_for
from aiockpt.checkpointers.config import BusyPolicy
from aiockpt.checkpointers.handle import (
    Account,
    CheckpointerStatistics,
    SaveHandle,
    meter,
)
from aiockpt.checkpointers.loading import load
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.checkpointers.stager import CheckpointStager, StagedState
from aiockpt.checkpointers.submission import BackgroundWriter, Submission
from aiockpt.errors import ClosedError, LocalProtocolError, SaveInProgressError
from aiockpt.events import Progress
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.deadline import Deadline
from aiockpt.runtime.lifetime import Lifetime
from aiockpt.transport import Timeout, seconds

__all__ = ["AsyncCheckpointer"]

_SLOTS: Final = 2  # one is being written, one waits
_WITH_ITS_HEIR: Final = 3  # the one that waits stays until another was handed over
_CLOSING: Final = 5.0


class AsyncCheckpointer(Checkpointer, AbstractAsyncContextManager["AsyncCheckpointer"]):
    """Saves in the background, and belongs to the loop that uses it first.

    ``save`` returns when the state dict may be mutated. Writing, digests, fsync and
    commit happen in another process (or thread), one save after another. A second
    save is staged while the first is written; the policy decides about a third.

    A save that fails is logged at once. Its handle raises the error, and :meth:`close`
    returns those that nobody has asked for; training goes on.

    Args:
        checkpoint_stager: Copies the state dict.
        checkpoint_process: Writes what was copied.
        reader: Loads.
        busy_policy: What a save does while two others are not written yet: ``wait``,
            ``skip`` itself, ``replace`` the one that waits as soon as it was handed
            over itself, or ``fail``.
        raise_on_failure: Raise a failure from ``save``, the next ``save`` or
            ``close`` instead.
        keep_last: The process keeps the last staged snapshot when this one dies: its
            memory must not be staged into before a newer one was handed over.
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
        else:
            await self._end(crashed=True)

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
            TypeError, ValueError: ``path`` is no path, or ``step`` no step.
            ClosedError: after :meth:`close`.
            TransferTimeoutError: with ``raise_on_failure``; as all other failures do,
                it fails the handle otherwise.

        If cancelled, nothing is saved; other ranks are told, and fail theirs.
        """
        if self._raises:
            self._raise_unobserved()
        handle = SaveHandle(os.fspath(path), step_for(path, kwargs))
        if "step" in kwargs:
            kwargs["step"] = handle.step
        began = time.monotonic()
        try:
            async with self._in_time(timeout), self._its_turn(handle) as goes:
                if goes:
                    await self._save(handle, began, state_dict, progress, kwargs)
        except (SaveInProgressError, ClosedError, LocalProtocolError):
            raise
        except asyncio.CancelledError:
            await self._forsake(handle, "it was cancelled")
            raise
        except Exception as error:
            await self._forsake(handle, str(error))
            self._account.failed(handle, error)  # and training goes on
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

        If cancelled, ``state_dict`` may be filled in part, and is left alone from
        then on.
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
        restarts = getattr(self._writer, "restarts", 0)
        under_way = len(self._under_way)
        return self._account.statistics(under_way=under_way, restarts=restarts)

    async def close(self) -> tuple[BaseException, ...]:
        """Write what was handed over, and close everything.

        Returns the failures that nobody has seen. It takes
        ``subprocess_shutdown_timeout_secs`` at most; then the process is killed, and
        what it had not written has failed. If cancelled, the closing goes on.
        """
        await self._end(crashed=False)
        if self._raises:
            self._raise_unobserved()
        return tuple(self._account.unobserved())

    async def aclose(self) -> tuple[BaseException, ...]:
        """Close it; another name for :meth:`close`."""
        return await self.close()

    # ----------------------------------------------------------------- saving

    def _in_time(self, timeout: Timeout | None) -> AbstractAsyncContextManager[object]:
        if timeout is None:
            return nullcontext()
        return Deadline(seconds(timeout), stop="save")

    @asynccontextmanager
    async def _its_turn(self, handle: SaveHandle) -> AsyncIterator[bool]:
        """Wait for what is before it; say whether it may go on."""
        with self._lifetime.call():
            async with self._turn:
                yield await self._find_room(handle)

    async def _find_room(self, handle: SaveHandle) -> bool:
        slots = _WITH_ITS_HEIR if self._policy == "replace" else _SLOTS
        while len(self._under_way) >= slots:
            self._lifetime.check()
            if self._policy == "skip":
                self._account.skipped(handle)
                return False
            if self._policy == "fail":
                raise SaveInProgressError(handle.path, under_way=len(self._under_way))
            ends = [submission.ended for submission in self._under_way]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # those that ended leave
        return True

    async def _save(
        self,
        handle: SaveHandle,
        began: float,
        state_dict: Any,
        progress: Callable[[Progress], None] | None,
        kwargs: dict[str, Any],
    ) -> None:
        known = {"step": handle.step, **kwargs}
        staged = await self._stager.stage(state_dict, **known)
        nbytes = staged.nbytes if isinstance(staged, StagedState) else 0
        told = meter(progress, nbytes)
        try:
            submission = await self._writer.submit(staged, handle.path, kwargs, told)
        except BaseException:
            _release(staged)
            raise
        handle.handed_over = True
        self._keep(staged)
        self._account.staged(handle, submission.nbytes, began)
        if self._policy == "replace" and len(self._under_way) >= _SLOTS:
            # The last one: the one before it is being written, or about to be.
            self._writer.drop(next(reversed(self._under_way)))
        self._follow(handle, submission)

    async def _forsake(self, handle: SaveHandle, reason: str) -> None:
        """Tell the ranks that wait for it, unless a writer has it, which tells them."""
        if not handle.handed_over:
            await self._writer.forsake(handle.path, handle.step, reason)

    def _keep(self, staged: Any) -> None:
        """Let go of the snapshot before, which is not the last one any more."""
        if not self._keeps:
            _release(staged)
            return
        _release(self._last)
        self._last = staged if isinstance(staged, StagedState) else None

    def _follow(self, handle: SaveHandle, submission: Submission) -> None:
        since = time.monotonic()
        self._under_way[submission] = handle

        def end(ended: asyncio.Future[bool]) -> None:
            del self._under_way[submission]
            if (error := ended.exception()) is not None:
                self._account.failed(handle, error)
            elif ended.result():
                self._account.written(handle, submission, since)
            else:
                self._account.replaced(handle)

        submission.ended.add_done_callback(end)

    def _raise_unobserved(self) -> None:
        if unseen := self._account.unobserved():
            first, *others = unseen
            for other in others:
                first.add_note(f"also failed: {other}")
            raise first

    # ---------------------------------------------------------------- the end

    async def _end(self, *, crashed: bool) -> None:
        leave = crashed and self._keeps
        await self._lifetime.end(
            partial(self._lifetime.calls_ended, timeout=_CLOSING),
            self._writer.abandon if leave else self._writer.close,
            self._settle,
            self._stager.close,
            partial(self._bridge.aclose, timeout=_CLOSING),
        )

    async def _settle(self) -> None:
        """Let the handles know, and let go of the last snapshot."""
        await asyncio.sleep(0)
        _release(self._last)
        self._last = None


def _release(staged: Any) -> None:
    """Let go of what a stager has returned, if that is ours to do."""
    if isinstance(staged, StagedState):
        staged.release()
