"""AsyncCheckpointer: training waits only until the state dict is copied.

``save`` stages the state dict into an arena, hands the arena to a background writer (a
process or a thread), and returns a `SaveHandle`. The handle is done when the writer
reports the commit or an error. A `BackgroundCheckpointer` does the same for programs
without an event loop: its `AsyncCheckpointer` runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, Never, Self

from aiockpt.checkpointers.base import (
    Account,
    Checkpointer,
    CheckpointerStatistics,
    Written,
    path_for,
    template_of,
)
from aiockpt.checkpointers.config import (
    CLOSING_S,
    ELSEWHERE,
    BusyPolicy,
    SaveRanks,
)
from aiockpt.checkpointers.handle import BackgroundWriter, SaveEnd, SaveHandle
from aiockpt.checkpointers.reader import (
    CheckpointReader,
    load_in_thread,
    loads_of,
    options_of,
    own_read,
)
from aiockpt.checkpointers.stager import (
    CheckpointStager,
    DefaultStager,
    StagedState,
    stage_after,
)
from aiockpt.errors import (
    ClosedError,
    LimitExceededError,
    LocalProtocolError,
    SaveInProgressError,
    StateDictError,
)
from aiockpt.events import Progress, TransferEvent, emit
from aiockpt.memory.device import Marks, PortFor, marked, port_for
from aiockpt.runtime.background import Background, blocking, direct
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline, Lifetime
from aiockpt.runtime.switching import switching_often
from aiockpt.state.reshard import RankValues
from aiockpt.state.selection import Select
from aiockpt.storage.read import OnBytes, Verify
from aiockpt.transport import Timeout, refuse_unknown, seconds

_SLOTS: Final = 2  # one save is being written, one waits
_SLOTS_TO_REPLACE: Final = 3  # the waiting one stays until its successor is staged
_MAX_FAILURES: Final = 64  # failed saves whose errors nobody has looked at

# The state dict, or a keyword of the call, is wrong: no retry would save it.
_NEVER_SAVED: Final = (StateDictError, LimitExceededError)


class AsyncCheckpointer(Checkpointer, AbstractAsyncContextManager["AsyncCheckpointer"]):
    """Saves in the background. It belongs to the event loop that uses it first.

    ``save`` returns as soon as you may change the state dict. Digests, writing, fsync
    and commit happen in another process (or thread), one save after the other. A
    second save is staged while the first is written; the busy policy decides what
    happens to a third.

    A failed save does not stop training. The error is logged at once, and the handle
    raises it. :meth:`close` returns the errors that no handle has raised. Only a state
    dict that can never be saved raises its error from ``save`` itself.

    Args:
        checkpoint_stager: Copies the state dict.
        checkpoint_process: Writes the copy.
        reader: Loads checkpoints.
        busy_policy: What a save does while two others are not written yet. ``wait``:
            it waits. ``skip``: it is not made. ``replace``: once it is staged, it
            replaces the waiting one. ``fail``: it raises ``SaveInProgressError``.
        raise_on_failure: Raise the error of a failed save from ``save``, the next
            ``save`` or ``close``.
        keep_last: The checkpoint process keeps the last staged snapshot if this
            process dies, so its memory is reused only after the next handover.
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
        self._failures: deque[SaveHandle] = deque(maxlen=_MAX_FAILURES)
        self._turn = asyncio.Lock()
        self._under_way: list[SaveHandle] = []  # the oldest first

    @property
    def ports(self) -> PortFor:
        """What returns the port of a device: the stager's."""
        return getattr(self._stager, "ports", port_for)

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
        /,
        state_dict: Any,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        timeout: Timeout | None = None,
        progress: Callable[[Progress], None] | None = None,
        **own: Never,
    ) -> SaveHandle:
        """Stage ``state_dict``, pass the copy to the writer, and return a handle.

        The copy waits for the device work that the current streams have when this call
        begins to run, and for no later work. You may change the state dict as soon as
        the call returns. If cancelled before the writer has the copy, nothing is saved;
        the other ranks are told, and their saves of this step fail. If cancelled later,
        the save goes on.

        Args:
            state_dict: The state to save.
            path: The checkpoint's directory.
            step: The checkpoint's step. None: the number at the end of ``path``.
            timeout: The deadline of this call, in seconds or as a ``timedelta``. The
                call may wait for earlier saves.
            progress: Called with :class:`.Progress` during the write.
            own: Keywords for a commit hook, a stager or a writer of your own that takes
                them; see :meth:`.Checkpointer.save`.

        Raises:
            UnsupportedLeafError: leaves of types that cannot be saved; it names them.
            StateDictError, LimitExceededError: the state dict cannot be described, is
                nested too deeply or contains itself.
            SaveInProgressError: the policy is ``fail``, and two saves are not written.
            TypeError, ValueError: an unknown keyword; ``path`` is not a path, or
                ``step`` not a step.
            ValueError: several ranks have nowhere to meet, or a policy other than
                ``wait``.
            ClosedError: after :meth:`close`.
            TransferTimeoutError: the deadline passed, with ``raise_on_failure``.
                Without it, this and all other errors are raised by the handle only.
        """
        marks = Marks.of_caller(self.ports)
        if own:
            own_ones = self._own_functions()
            refuse_unknown(AsyncCheckpointer.save, own, *own_ones, elsewhere=ELSEWHERE)
        path = path_for(state_dict, path)
        if self._raises:
            self._raise_unobserved()
        check_policy(self._policy, self._writer.ranks())
        handle = SaveHandle(path, step, progress=progress, on_end=self._note_end)
        self._account.note_step(path, step)
        kwargs: dict[str, Any] = {**own}
        if step is not None:
            kwargs["step"] = handle.step
        began = time.monotonic()
        limit = math.inf if timeout is None else seconds(timeout)
        try:
            async with Deadline(limit, phase="save"):
                with self._lifetime.call():
                    async with self._turn:
                        if not await self._wait_for_slot(handle):
                            handle.end("skipped")
                            return handle
                        with switching_often():
                            await self._stage(handle, marks, state_dict, kwargs)
                        self._note_staged(handle, time.monotonic() - began)
        except (SaveInProgressError, ClosedError, LocalProtocolError):
            raise
        except asyncio.CancelledError:
            if not handle.staged:  # else the writer tells the ranks
                await self._writer.forsake(handle.path, handle.step, "it was cancelled")
            raise
        except Exception as error:
            if handle.staged:
                return handle  # the writer has it, and reports how it ends
            await self._writer.forsake(handle.path, handle.step, str(error))
            if self._raises or isinstance(error, _NEVER_SAVED):
                handle.observed = True
            handle.end(error)  # and training goes on
            if handle.observed:
                raise
        return handle

    async def load(
        self,
        /,
        path: str | os.PathLike[str],
        state_dict: Any = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        into: Any = None,
        select: Select | None = None,
        verify: Verify = "full",
        mmap: bool = False,
        on_bytes: OnBytes | None = None,
        rank: int | None = None,
        full: bool = False,
        rank_values: RankValues = "error",
        **own: Never,
    ) -> Any:
        """Return the state dict at ``path``; see :meth:`.CheckpointReader.read`.

        ``into`` is the template, and ``state_dict`` another name of it. ``own`` are
        keywords for a reader of your own that takes them. The load begins after the
        device work that the current streams have when this call begins to run. If
        cancelled, the template may be partly filled; nothing writes to it after the
        call has ended.
        """
        refuse_unknown(AsyncCheckpointer.load, own, *own_read(self._reader))
        template = template_of(state_dict, into)
        options = options_of(
            select=select,
            verify=verify,
            mmap=mmap,
            on_bytes=on_bytes,
            rank=rank,
            full=full,
            rank_values=rank_values,
        )
        with self._lifetime.call():
            return await load_in_thread(
                self._bridge,
                self._reader,
                path,
                template,
                map_location=default_map_location,
                strict=strict,
                **options,
                **own,
            )

    def statistics(self) -> CheckpointerStatistics:
        """Return the numbers of saves and loads, their bytes, and times of saves."""
        return self._account.now._replace(
            under_way=len(self._under_way),
            restarts=getattr(self._writer, "restarts", 0),
            loads=loads_of(self._reader),
        )

    async def close(self) -> tuple[BaseException, ...]:
        """Finish the staged saves, and close everything. Idempotent.

        This takes at most ``subprocess_shutdown_timeout_secs``. Then the process is
        killed, and the saves that it has not written fail. If cancelled, the closing
        continues in the background.

        Returns:
            The errors of failed saves that no handle has raised; of the last 64.
        """
        await self._end(self._writer.close)
        if self._raises:
            self._raise_unobserved()
        return tuple(self._take_unobserved())

    async def aclose(self) -> tuple[BaseException, ...]:
        """Close the checkpointer; the same as :meth:`close`."""
        return await self.close()

    # ----------------------------------------------------------------- saving

    def _own_functions(self) -> list[Callable[..., object]]:
        """Return the functions of the user that get the keywords of a save."""
        own = [*self._writer.own_functions()]
        if type(self._stager).stage is not DefaultStager.stage:
            own.append(self._stager.stage)
        return own

    async def _wait_for_slot(self, handle: SaveHandle) -> bool:
        """Wait for earlier saves; return False if the policy says to skip this one."""
        slots = _SLOTS_TO_REPLACE if self._policy == "replace" else _SLOTS
        while len(self._under_way) >= slots:
            self._lifetime.check()
            if self._policy == "skip":
                return False
            if self._policy == "fail":
                raise SaveInProgressError(handle.path, under_way=len(self._under_way))
            ends = [each.ended for each in self._under_way]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def _stage(
        self,
        handle: SaveHandle,
        marks: Marks,
        state_dict: Any,
        kwargs: dict[str, Any],
    ) -> None:
        """Stage a copy, pass it to the writer, and release the older kept copy."""
        keywords = {"step": handle.step, **kwargs}
        staged = await stage_after(self._stager, marks, state_dict, **keywords)
        ours = staged if isinstance(staged, StagedState) else None
        unused = ours
        try:
            await self._writer.submit(handle, staged, kwargs)
            if self._keeps:
                unused, self._last = self._last, ours
        finally:
            if unused is not None:
                unused.release()

    def _note_staged(self, handle: SaveHandle, took: float) -> None:
        """Count a save that its writer has; drop the one that it replaces."""
        self._account.count("saves")
        self._account.note_stall(took)
        emit(
            TransferEvent(
                stop="stage", step=handle.step, nbytes=handle.nbytes, seconds=took
            )
        )
        if self._policy == "replace" and len(self._under_way) >= _SLOTS:
            # Replace the last one; the one before it is being written already.
            self._writer.drop(self._under_way[-1])
        if not handle.done():
            self._under_way.append(handle)

    # -------------------------------------------------------- how a save ended

    def _note_end(self, handle: SaveHandle, outcome: SaveEnd) -> None:
        """Count a save that has ended, and emit its event; then its waiters wake."""
        if handle in self._under_way:
            self._under_way.remove(handle)
        if isinstance(outcome, BaseException):
            self._note_failed(handle, outcome)
        elif isinstance(outcome, Written):
            handle.unchanged = self._account.note_written(
                handle.path,
                handle.step,
                outcome._replace(nbytes=handle.nbytes),
                time.monotonic() - handle.staged_at,
            )
        elif outcome == "skipped":
            self._account.count("saves", "skipped")
            _announce(handle, "skip", "two saves are under way", logging.WARNING)
        else:
            self._account.count("replaced")
            _announce(handle, "skip", "a newer save takes its place", logging.WARNING)

    def _note_failed(self, handle: SaveHandle, error: BaseException) -> None:
        """Log the error, and keep it until a handle raises it."""
        self._account.count("failed", *([] if handle.staged else ["saves"]))
        unseen = [one for one in self._failures if not one.observed]
        self._failures = deque([*unseen, handle], maxlen=_MAX_FAILURES)
        how = "may not be" if getattr(error, "may_be_committed", False) else "is not"
        detail = f"{handle.path} {how} saved: {type(error).__name__}: {error}"
        stop = "write" if handle.staged else "stage"
        _announce(handle, stop, detail, logging.ERROR)

    def _take_unobserved(self) -> list[BaseException]:
        """Return the errors that no handle has raised, and forget them."""
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
            partial(self._lifetime.calls_ended, timeout=CLOSING_S),
            end_writer,
            self._release_last,
            self._stager.close,
            partial(self._bridge.aclose, timeout=CLOSING_S),
        )

    async def _release_last(self) -> None:
        if self._last is not None:
            self._last.release()
            self._last = None


def check_policy(policy: BusyPolicy, ranks: SaveRanks | None) -> None:
    """Refuse a busy policy that ranks might apply differently.

    Raises:
        ValueError: there are several ranks, and the policy is not ``wait``.
    """
    if ranks is not None and ranks.info.global_world_size > 1 and policy != "wait":
        raise ValueError(
            f"with busy_policy={policy!r} some ranks might save a step that others "
            "skip: use 'wait' with several ranks"
        )


def _announce(handle: SaveHandle, stop: str, detail: str, level: int) -> None:
    emit(TransferEvent(stop=stop, step=handle.step, detail=detail, level=level))


# ------------------------------------------------- for programs without an event loop


class _BlockingVerbs(Background[AsyncCheckpointer]):
    # Apart from the class below: a type checker would otherwise take the types of the
    # results from `Checkpointer`, where they are `Any`.

    save = blocking(AsyncCheckpointer.save)
    load = blocking(AsyncCheckpointer.load, strict=True)
    statistics = direct(AsyncCheckpointer.statistics)


class BackgroundCheckpointer(_BlockingVerbs, Checkpointer):
    """Saves in the background without an event loop; any thread may use it.

    ``save`` blocks only while the state dict is copied. Then call
    :meth:`.SaveHandle.result` to wait until the checkpoint is committed. The verbs are
    those of :class:`.AsyncCheckpointer`, and so are writes, commits, errors and
    policies. What their descriptions say of a cancelled call is true of a call that
    Ctrl-C interrupts. ``progress`` is called in the checkpointer's thread. ``load`` is
    strict by default, as :func:`.load` is. If a program ends without :meth:`close`, the
    staged saves are written nevertheless.

    Args:
        checkpointer: The checkpointer that does the work. Nothing else may use it.
    """

    def __init__(self, checkpointer: AsyncCheckpointer) -> None:
        super().__init__(
            checkpointer,
            "the checkpointer",
            # A background writer outlasts this thread by itself.
            at_exit=_nothing,
            entered=lambda: marked(checkpointer.ports),
        )

    def close(self) -> tuple[BaseException, ...]:
        """Finish the staged saves, and close everything. Idempotent.

        This takes at most ``subprocess_shutdown_timeout_secs``; see
        :meth:`.AsyncCheckpointer.close`. If interrupted, the closing continues, and a
        later call waits for it.

        Returns:
            The errors of failed saves that no handle has raised.
        """
        return self._end(self._source.close) or ()


async def _nothing() -> None:
    return
