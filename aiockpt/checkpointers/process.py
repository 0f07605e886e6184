"""CheckpointProcess: writes in a process of its own, which may die without harm."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from aiockpt.checkpointers.base import step_for
from aiockpt.checkpointers.config import (
    CheckpointProcessConfig,
    CheckpointStagerConfig,
    RankInfo,
)
from aiockpt.checkpointers.failures import plain
from aiockpt.checkpointers.handover import Handover, known_as
from aiockpt.checkpointers.messages import Forsake, Setup, Write
from aiockpt.checkpointers.process_launch import Recipe
from aiockpt.checkpointers.rendezvous import runtime_dir
from aiockpt.checkpointers.submission import BackgroundWriter, Submission
from aiockpt.checkpointers.supervisor import Supervisor
from aiockpt.checkpointers.writer import (
    default_subprocess_init_fn,
    default_writer_init_fn,
)
from aiockpt.errors import ClosedError, WorkerError
from aiockpt.events import TransferEvent, emit
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Lifetime

__all__ = ["CheckpointProcess"]

_CLOSING: Final = 5.0
_LONGEST: Final = 4096


class CheckpointProcess(BackgroundWriter):
    """Writes checkpoints in a child process; it belongs to the loop that uses it first.

    The process starts when this object is made, in the background. A write that fails
    does not end it; one that ends it (or hangs) fails alone: another process is
    started, and takes over what waits. When this process dies, the child finishes what
    it was given.

    Args:
        rank_info: Whose files it writes; given to ``checkpoint_writer_init_fn`` unless
            the arguments have a ``rank_info``.
        config: Timeouts and priorities.
        subprocess_init_fn: Called first in the child, with ``subprocess_init_args``.
        checkpoint_writer_init_fn: Makes the child's writer, from
            ``checkpoint_writer_init_args``. Functions and arguments are pickled as
            ``multiprocessing``'s spawn does; a main module that defines one of them is
            imported there and needs its ``if __name__ == "__main__":``.
        staging_config: How a state dict that is not staged yet is staged.

    Raises:
        LocalProtocolError: one of them cannot be pickled.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        config: CheckpointProcessConfig = CheckpointProcessConfig(),  # noqa: B008 - frozen
        subprocess_init_fn: Callable[..., object] = default_subprocess_init_fn,
        subprocess_init_args: tuple[Any, ...] = (),
        checkpoint_writer_init_fn: Callable[..., Any] = default_writer_init_fn,
        checkpoint_writer_init_args: Mapping[str, Any] | None = None,
        *,
        staging_config: CheckpointStagerConfig = CheckpointStagerConfig(),  # noqa: B008 - frozen
    ) -> None:
        recipe = Recipe(
            subprocess_init_fn,
            subprocess_init_args,
            checkpoint_writer_init_fn,
            {"rank_info": rank_info, **(checkpoint_writer_init_args or {})},
            partial(_setup, rank_info, config),
        )
        self._ranks = rank_info.global_world_size
        self._config = config
        self._lifetime = Lifetime("the checkpoint process")
        self._bridge = Bridge(threads=2, name="aiockpt-process")
        self._handover = Handover(self._bridge, staging_config, shared=True)
        self._supervisor = Supervisor(recipe, self._bridge, config)
        self._count = 0

    def __repr__(self) -> str:
        return f"<CheckpointProcess pid={self.pid}>"

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._supervisor.pid

    @property
    def restarts(self) -> int:
        """How often the child was replaced."""
        return self._supervisor.restarts

    async def ready(self) -> None:
        """Wait until the child's init functions have returned.

        Raises:
            WorkerError: they failed; a ``WorkerTimeoutError`` if they took too long.
        """
        with self._lifetime.call():
            await self._supervisor.ready()

    async def write(
        self, state_dict: Any, path: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Write a state dict, staged or not; return when it is committed.

        ``state_dict`` may be a future of one: a `concurrent.futures.Future` or anything
        that can be awaited. If that fails, its exception is raised and nothing is
        written.

        Other ranks that save it too are told if nothing is handed over. If cancelled
        before that, nothing is written, and a future goes on by itself; later, it is
        written all the same.
        """
        text, step = os.fspath(path), step_for(path, kwargs)
        try:
            self._lifetime.check()  # before a future is waited for in vain
            staged = await _resolved(state_dict)
            submission = await self.submit(staged, text, kwargs)
        except BaseException as error:
            await self.forsake(text, step, str(error) or type(error).__name__)
            raise
        await submission.written()
        if warning := submission.outcome.warning:
            level = logging.WARNING
            emit(TransferEvent(stop="write", step=step, detail=warning, level=level))

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
            try:
                text, parcel = await self._handover.parcel(snapshot, path, keywords)
                try:
                    await self._supervisor.running()
                except BaseException:
                    os.close(parcel)
                    raise
                # From here to the return nothing is awaited, so nothing can cut in.
                self._count += 1
                submission = Submission(self._count, path, snapshot, progress)
                self._supervisor.send(submission, _message(submission, text), parcel)
            finally:
                snapshot.release()
        return submission

    def drop(self, submission: Submission) -> None:
        """Call off a submission, unless it has begun."""
        if not submission.begun:
            self._supervisor.drop(submission)

    async def forsake(self, path: str, step: int, reason: str) -> None:
        """Tell the other ranks, if there are any, that this one saves nothing."""
        if self._ranks > 1:
            message = Forsake(
                os.fsencode(known_as(path)), step, plain(reason)[:_LONGEST]
            )
            # If it cannot be told, or not any more, it reaches nobody.
            with suppress(WorkerError, ClosedError), self._lifetime.call():
                await self._supervisor.forsake(message)

    async def close(self) -> None:
        """Let the child finish what it was given, and end it.

        It is killed after ``subprocess_shutdown_timeout_secs``. If cancelled, the
        closing goes on by itself.
        """
        limit = self._config.subprocess_shutdown_timeout_secs
        await self._end(partial(self._supervisor.close, timeout=limit))

    async def aclose(self) -> None:
        """Close it; another name for :meth:`close`."""
        await self.close()

    async def abandon(self) -> None:
        """Leave the child to itself, as if this process had died just now."""
        await self._end(self._supervisor.abandon)

    async def _end(self, last: Callable[[], Any]) -> None:
        self._lifetime.bind()
        self._handover.close()
        await self._lifetime.end(
            partial(self._lifetime.calls_ended, timeout=_CLOSING),
            last,
            partial(self._bridge.aclose, timeout=_CLOSING),
        )


async def _resolved(state_dict: Any) -> Any:
    """Wait for a future; it is the caller's, so a cancel here does not cancel it."""
    if hasattr(state_dict, "add_done_callback"):  # of asyncio, or of an executor
        future = asyncio.wrap_future(state_dict)
        future.add_done_callback(_look_at)
        await asyncio.wait({future})
        return future.result()
    if inspect.isawaitable(state_dict):
        return await state_dict
    return state_dict


def _look_at(future: asyncio.Future[Any]) -> None:
    # A write that was cancelled does not; asyncio would complain of it.
    if not future.cancelled():
        future.exception()


def _message(submission: Submission, path: str) -> Write:
    manifest = submission.snapshot.manifest
    return Write(
        number=submission.number,
        path=os.fsencode(path),
        header_bytes=len(manifest.header),
        segment_bytes=manifest.segment_bytes,
    )


def _setup(rank_info: RankInfo, config: CheckpointProcessConfig) -> Setup:
    return Setup(
        trainer=os.getpid(),
        nice=config.nice,
        io_idle=config.io_idle,
        write_timeout=config.write_timeout_secs,
        keep_last=config.keep_last_seconds,
        runtime_dir=runtime_dir(config.runtime_dir),
        rank=rank_info.global_rank,
    )
