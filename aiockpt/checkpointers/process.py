"""CheckpointProcess: writes checkpoints in a child process, which may die.

One process runs at a time: it is starting, ready, or gone. `_Running` holds its state
on the event loop, and `CheckpointProcess` supervises it. If the process dies or hangs,
only the write that it had begun fails. The next process is started, and gets the
waiting writes. If processes die again and again, the pauses between them grow. Every
wait has a deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from aiockpt.checkpointers.base import Written, path_for
from aiockpt.checkpointers.config import (
    CheckpointProcessConfig,
    CheckpointStagerConfig,
    RankInfo,
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
    LONGEST_TEXT,
    Close,
    DropWrite,
    Ended,
    Forsake,
    Kept,
    WorkerSetup,
    Write,
    decode_from_worker,
    encode_keywords,
    error_of,
    outcome_of,
    plain,
)
from aiockpt.checkpointers.recovery import socket_directory
from aiockpt.checkpointers.spawning import InitFunctions
from aiockpt.checkpointers.stager import DefaultStager
from aiockpt.checkpointers.writer import (
    Writers,
    configured_writer,
    default_subprocess_init_fn,
)
from aiockpt.errors import (
    AiockptError,
    ClosedError,
    WorkerError,
    WorkerTimeoutError,
    kept,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.runtime.bridge import Bridge, Future, obtain
from aiockpt.runtime.children import Child, Pauses
from aiockpt.runtime.ipc import pack
from aiockpt.runtime.lifetime import Lifetime
from aiockpt.runtime.system import failing_here, refused_by_host

__all__ = ["CheckpointProcess"]

_CLOSING_S: Final = 5.0

_MAX_TRIES: Final = 3
"""A waiting write fails when so many processes have died before beginning it."""

_DYING_S: Final = 5.0
"""How long to wait for a killed process, which may be inside a system call."""


@dataclass(slots=True)
class _Delivery:
    """What a process needs for a save, until that has ended: another may need it."""

    handle: SaveHandle
    message: Write
    parcel: int
    deadline: float = float("inf")
    tries: int = 0


class CheckpointProcess(BackgroundWriter):
    """Writes checkpoints in a child process. It belongs to the loop that uses it first.

    The process starts in the background when this object is made. A write that fails
    does not end it. If the process dies or hangs, only the write that it had begun
    fails: another process is started, and takes over the writes that wait. If the
    trainer dies, the process finishes what it was given.

    Args:
        rank_info: The rank whose files it writes; given to
            ``checkpoint_writer_init_fn`` unless the arguments have a ``rank_info``.
            None: the rank in ``torch.distributed``, looked up at each save.
        config: Timeouts and priorities.
        subprocess_init_fn: Called first in the child, with ``subprocess_init_args``.
        checkpoint_writer_init_fn: Makes the child's writer, from
            ``checkpoint_writer_init_args``, and another one if the rank changes.
            Functions and arguments are pickled as ``multiprocessing``'s spawn does. A
            main module that defines one of them is imported in the child, and needs its
            ``if __name__ == "__main__":``.
        staging_config: How a state dict that is not staged yet is staged.

    Raises:
        LocalProtocolError: a function or an argument cannot be pickled.
    """

    def __init__(
        self,
        rank_info: RankInfo | None,
        config: CheckpointProcessConfig = CheckpointProcessConfig(),  # noqa: B008 - frozen
        subprocess_init_fn: Callable[..., object] = default_subprocess_init_fn,
        subprocess_init_args: tuple[Any, ...] = (),
        checkpoint_writer_init_fn: Callable[..., Any] = configured_writer,
        checkpoint_writer_init_args: Mapping[str, Any] | None = None,
        *,
        staging_config: CheckpointStagerConfig = CheckpointStagerConfig(),  # noqa: B008 - frozen
    ) -> None:
        self._init = InitFunctions(
            subprocess_init_fn,
            subprocess_init_args,
            checkpoint_writer_init_fn,
            checkpoint_writer_init_args or {},
        )
        # It makes no writer here; it knows what the process will make.
        self._writers = Writers(
            checkpoint_writer_init_fn, checkpoint_writer_init_args or {}, rank_info
        )
        self._settling: set[asyncio.Task[None]] = set()
        self._restarts = 0
        self._config = config
        self._lifetime = Lifetime("the checkpoint process")
        self._bridge = Bridge(threads=2, name="aiockpt-process")
        self._stager = DefaultStager(staging_config)
        self._count = 0
        self._writes: dict[int, _Delivery] = {}  # those that have not ended
        self._untold: list[Forsake] = []  # failed writes to report to other ranks
        self._running: _Running | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._pauses = Pauses()
        self._rested = asyncio.Event()  # unset: no process is started for a while
        self._rested.set()
        self._closing: Close | None = None  # what the process is told last
        self._close_by = float("inf")
        # A process takes a while to start, so it starts before there is a loop.
        self._starting: Future[Child] | None = self._start()

    def __repr__(self) -> str:
        return f"<CheckpointProcess pid={self.pid} writes={len(self._writes)}>"

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is a child."""
        if self._running is not None:
            return self._running.child.pid
        starting = self._starting
        if starting is None or not starting.done() or starting.exception():
            return None
        return starting.result().pid

    @property
    def restarts(self) -> int:
        """How often the child was replaced."""
        return self._restarts

    async def ready(self) -> None:
        """Wait until the child's init functions have returned.

        Raises:
            WorkerError: they failed; a ``WorkerTimeoutError`` if they took too long.
        """
        with self._lifetime.call():
            running = await self._reach()
            await running.settled.wait()
            if running.failure is not None:
                raise kept(running.failure)  # a raise adds the caller's frames

    async def write(
        self, state_dict: Any, path: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Write a state dict, staged or not; return when it is committed.

        ``state_dict`` may be a future of one: a `concurrent.futures.Future`, or
        anything that can be awaited. If that fails, this raises its exception, and
        nothing is written.

        If nothing is handed over to the process, the other ranks of the save are told.
        If cancelled before the handover, nothing is written, and a future goes on by
        itself. If cancelled later, the checkpoint is still written.
        """
        handle = SaveHandle(path_for(state_dict, path), kwargs.get("step"))
        step = handle.step
        try:
            self._lifetime.check()  # before it waits for a future
            await self.submit(handle, await _resolved(state_dict), kwargs)
        except BaseException as error:
            await self.forsake(handle.path, step, str(error) or type(error).__name__)
            raise
        await handle.written()
        if handle.warning:
            emit(
                TransferEvent(
                    stop="write",
                    step=step,
                    detail=handle.warning,
                    level=logging.WARNING,
                )
            )

    def own_functions(self) -> Sequence[Callable[..., object]]:
        """Return the functions of the commit hook; anything for a user's writer."""
        return self._writers.own_functions()

    async def submit(
        self, handle: SaveHandle, staged: Any, keywords: Mapping[str, Any]
    ) -> None:
        """Take over a save; see :class:`.BackgroundWriter`."""
        with self._lifetime.call():
            ranks = self.ranks()
            snapshot = await self._stager.snapshot(staged, step=handle.step)
            try:
                header = snapshot.manifest.header

                def packed() -> tuple[str, int]:
                    path = absolute_path(handle.path)
                    return path, pack(header, encode_keywords(keywords))

                with failing_here("handing over what was staged"):
                    path, parcel = await obtain(
                        self._bridge, packed, lambda made: os.close(made[1])
                    )
                try:
                    resting = not self._rested.is_set()
                    running = None if resting else await self._reach()
                except BaseException:
                    os.close(parcel)
                    raise
                # Nothing is awaited from here on, so a cancel cannot cut in.
                self._count += 1
                handle.hand_over(self._count, snapshot)
            finally:
                snapshot.release()
            message = Write(
                number=handle.number,
                path=os.fsencode(path),
                ranks=ranks,
                header_bytes=len(header),
                segment_bytes=handle.nbytes,
            )
            self._writes[handle.number] = write = _Delivery(handle, message, parcel)
            if running is not None:  # else the next process gets it
                self._post(running, write)

    def drop(self, handle: SaveHandle) -> None:
        """Drop a save, unless its write has begun. The handle ends in either case."""
        if handle.begun:
            return
        if self._running is not None:
            self._running.child.send(DropWrite(handle.number))
        elif (write := self._writes.pop(handle.number, None)) is not None:
            os.close(write.parcel)
            handle.end("replaced")

    async def forsake(self, path: str, step: int, reason: str) -> None:
        """Tell the other ranks, if there are any, that this one saves nothing."""
        if (message := forsaking(self._writers.lookup, path, step, reason)) is None:
            return
        if not self._rested.is_set():
            self._untold.append(message)
            return
        # Without a process, the other ranks cannot be told.
        with suppress(WorkerError, ClosedError), self._lifetime.call():
            (await self._reach()).child.send(message)

    def ranks(self) -> SaveRanks:
        """Return the ranks of a save that begins now."""
        return self._writers.lookup.of_save()

    async def close(self) -> None:
        """Let the child finish what it was given, and end it.

        It is killed after ``subprocess_shutdown_timeout_secs``. If cancelled, the
        closing goes on by itself.
        """
        await self._end(self._finish)

    async def aclose(self) -> None:
        """Close it; another name for :meth:`close`."""
        await self.close()

    async def abandon(self) -> None:
        """Stop supervising the child, as if this process had died."""
        await self._end(self._leave)

    # ---------------------------------------------------------------- the end

    async def _end(self, last: Callable[[], Any]) -> None:
        self._lifetime.bind()
        await self._lifetime.end(
            partial(self._lifetime.calls_ended, timeout=_CLOSING_S),
            last,
            self._stager.close,
            partial(self._bridge.aclose, timeout=_CLOSING_S),
        )

    async def _finish(self) -> None:
        self._closing = Close()
        limit = self._config.subprocess_shutdown_timeout_secs
        self._close_by = asyncio.get_running_loop().time() + limit
        if self._starting is not None and self._rested.is_set():  # never used
            with suppress(AiockptError):  # or it could not be, and nothing is left
                await self._reach()
        self._rested.set()
        if self._running is not None:
            self._running.child.send(self._closing)
            self._running.changed.set()
        if self._supervision is not None:
            await asyncio.wait({self._supervision})
        if self._settling:
            await asyncio.wait(self._settling)

    async def _leave(self) -> None:
        self._closing = Close(keep=True)
        self._rested.set()
        running = await self._reach()
        running.child.send(self._closing)
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait({self._supervision})
        running.child.read()  # its last messages
        running.child.close()
        detail = "it was left to the checkpoint process, which this process has left"
        left = WorkerError(detail)
        left.may_be_committed = True
        for write in [*self._writes.values()]:
            self._take(write).end(left)

    # -------------------------------------------------------------- supervision

    async def _reach(self) -> _Running:
        """Return the process that runs; start one if there is none.

        Raises:
            WorkerError: it cannot be started.
        """
        while self._running is None:
            await self._rested.wait()
            starting = self._starting
            if starting is None or (starting.done() and starting.exception()):
                starting = self._starting = self._start()
            try:
                child = await self._bridge.run(starting.result)
            except Exception as error:
                if self._starting is starting:  # it would keep the frames of its error
                    self._starting = None
                if not isinstance(error, OSError):
                    raise
                detail = f"the checkpoint process cannot be started: {error}"
                raise WorkerError(detail) from error
            if self._starting is starting:  # no other call has taken it meanwhile
                self._starting = None
                self._running = _Running(child, self._writes, self._config)
                self._take_over(self._running)
                if self._supervision is None or self._supervision.done():
                    loop = asyncio.get_running_loop()
                    self._supervision = loop.create_task(self._supervise())
        return self._running

    def _start(self) -> Future[Child]:
        """Start a process in a thread; the first call that needs it gets its error."""
        ranks = self._writers.lookup.at_start()

        def start() -> Child:
            ours, directory = self._config, None
            if ours.keep_last_seconds:  # or it needs no such directory
                directory = socket_directory(ours.runtime_dir)
            config = CheckpointProcessConfig(  # only the fields that the process needs
                write_timeout_secs=ours.write_timeout_secs,
                nice=ours.nice,
                io_idle=ours.io_idle,
                keep_last_seconds=ours.keep_last_seconds,
                runtime_dir=directory,
            )
            return self._init.start(WorkerSetup(config, ranks))

        return self._bridge.begin(start)

    def _take_over(self, running: _Running) -> None:
        """Give a new process the writes that the previous one has left."""
        for message in self._untold:
            running.child.send(message)
        self._untold.clear()
        for write in [*self._writes.values()]:
            if write.tries < _MAX_TRIES:
                self._post(running, write)
            else:
                detail = "each checkpoint process dies before it begins this write"
                self._fail([write], WorkerError(detail))

    def _post(self, running: _Running, write: _Delivery) -> None:
        """Send a write to a process, or fail it if no descriptor is left for it."""
        try:
            running.post(write)
        except OSError as error:
            what = "handing over what was staged"
            self._fail([write], refused_by_host(what, error))

    async def _supervise(self) -> None:
        """Replace each process that ends, until `close` or a failed start."""
        while (running := self._running) is not None:
            overdue = await self._until_gone(running)
            exitcode = await running.child.exitcode(_DYING_S)
            running.child.close()
            error = running.failure or _why_gone(overdue, exitcode)
            if isinstance(error, WorkerError):
                error.exitcode = exitcode
            running.failure = error
            running.settled.set()
            self._running = None
            if self._closing:
                if exitcode:
                    _tell(str(error))
                self._fail([*self._writes.values()], error)
            elif not running.ready:
                _tell(str(error), logging.ERROR)
                self._fail([*self._writes.values()], error)
            else:
                pause = self._pauses.next(running.lived)
                when = f" in {pause:g} s" if pause else ""
                _tell(f"{error}; another one is started{when}")
                self._restarts += 1
                self._fail_begun(error)
                await self._rest(pause)
                if self._closing == Close() and not self._writes:
                    return
                try:
                    successor = await self._reach()
                except AiockptError as failure:
                    _tell(str(failure), logging.ERROR)
                    self._fail([*self._writes.values()], failure)
                else:
                    if self._closing:
                        successor.child.send(self._closing)

    async def _rest(self, pause: float) -> None:
        """Start no process for so long; `close` and `abandon` cut it short."""
        if not pause or self._closing is not None:
            return
        self._rested.clear()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._rested.wait()
        finally:
            self._rested.set()

    async def _until_gone(self, running: _Running) -> str:
        """Wait for the end of a process; kill it, and say why, if it is overdue."""
        while not running.child.gone.is_set():
            running.changed.clear()
            overdue, when = running.overdue(self._close_by)
            if overdue:
                running.child.kill()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_DYING_S):
                        await running.child.gone.wait()
                return overdue
            with suppress(TimeoutError):
                async with asyncio.timeout_at(when):
                    await running.changed.wait()
        return ""

    def _fail_begun(self, error: AiockptError) -> None:
        """Fail the write that a dead process had begun; tell the other ranks later."""
        lost = [write for write in self._writes.values() if write.handle.begun]
        reason = plain(str(error))[:LONGEST_TEXT]
        self._untold += [
            Forsake(
                write.message.path,
                write.handle.step,
                write.message.ranks,
                reason,
                begun=True,
            )
            for write in lost
        ]
        self._fail(lost, error)

    def _fail(self, writes: Iterable[_Delivery], error: AiockptError) -> None:
        """Fail writes; of one that had begun, the disk is asked first."""
        lost = [*writes]
        handles = [self._take(write) for write in lost]
        if not any(handle.begun for handle in handles):
            for handle in handles:
                handle.end(error)
            return
        task = asyncio.get_running_loop().create_task(self._settle(lost, error))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def _take(self, write: _Delivery) -> SaveHandle:
        """Forget a write that ends; return its handle."""
        del self._writes[write.handle.number]
        os.close(write.parcel)
        return write.handle

    async def _settle(self, lost: Iterable[_Delivery], error: AiockptError) -> None:
        """End the writes of a dead process, in their order."""
        killed = isinstance(error, WorkerError) and error.exitcode is not None
        for write in lost:
            handle, message = write.handle, write.message
            outcome: Written | AiockptError = error
            told = handle.file is not None or self._writers.are_default
            try:
                if handle.begun:
                    outcome = await find_out(
                        self._bridge,
                        handle,
                        os.fsdecode(message.path),
                        error,
                        rank_info=message.ranks.info,
                        config=self._writers.config,
                        at_work=not (killed and told),
                    )
            finally:
                handle.end(outcome)


class _Running:
    """A process as the event loop knows it: starting, then ready, then gone.

    Attributes:
        child: The process.
        ready: Whether its init functions have returned.
        settled: Set when it is ready, or gone before it was.
        changed: Set by events that may move a deadline.
        failure: Why it is gone, or will be.
    """

    def __init__(
        self,
        child: Child,
        writes: dict[int, _Delivery],
        config: CheckpointProcessConfig,
    ) -> None:
        self.child = child
        self.ready = False
        self.settled = asyncio.Event()
        self.changed = asyncio.Event()
        self.failure: AiockptError | None = None
        self._writes = writes
        self._posted: set[int] = set()
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._began = self._heard = self._loop.time()
        self._ready_by = self._began + config.subprocess_init_timeout_secs
        child.listen(self._hear, self.changed.set)

    @property
    def lived(self) -> float:
        """For how many seconds there has been this process."""
        return self._loop.time() - self._began

    def post(self, write: _Delivery) -> None:
        """Send a write to the process.

        Raises:
            OSError: the message has to wait, and no descriptor is left for it.
        """
        handle = write.handle
        assert handle.snapshot is not None
        arena = handle.snapshot.arena
        assert arena is not None
        self.child.send(write.message, [write.parcel, arena.fd])
        if not self._posted:
            self._heard = self._loop.time()  # it need not have said anything before
        write.tries += 1
        self._posted.add(handle.number)
        self.changed.set()

    def overdue(self, close_by: float) -> tuple[str, float]:
        """Return what is overdue, or an empty text, and when to check again."""
        self.child.read()  # the loop may have been blocked, and not the process
        config, waits, now = self._config, [], self._loop.time()
        if not self.ready:
            if now >= self._ready_by:  # time without a core is not the child's
                limit = config.subprocess_init_timeout_secs + self.child.starved
                self._ready_by = self._began + limit
            waits.append((self._ready_by, "did not start", "subprocess_init"))
        elif self._posted:
            silent = self._heard + config.hang_timeout_secs
            waits.append((silent, "hung", "hang"))
        for number in self._posted:
            late = self._writes[number].deadline
            waits.append((late, "did not finish a write", "write"))
        waits.append((close_by, "did not end", "subprocess_shutdown"))
        when, what, option = min(waits)
        if now < when:
            return "", when
        limit = getattr(config, f"{option}_timeout_secs")
        return f"{what} within {limit:g} s ({option}_timeout_secs)", when

    def _hear(self, data: bytes) -> None:
        self._heard = self._loop.time()
        self.changed.set()
        message = decode_from_worker(data)
        if not message.number:  # a sign of life, or the end of the setup
            if isinstance(message, Ended) and message.failure is not None:
                what = "the subprocess's init function"
                self.failure = error_of(message.failure, what)
            elif isinstance(message, Ended):
                self.ready = True
                self.settled.set()
            return
        if (write := self._writes.get(message.number)) is None:
            return
        handle = write.handle
        if isinstance(message, Kept):
            handle.file = message.device, message.inode
        elif isinstance(message, Ended):
            self._posted.discard(message.number)
            del self._writes[message.number]
            os.close(write.parcel)
            handle.end(outcome_of(message, f"writing {handle.path}"))
        elif handle.begun:
            handle.advance(message.nbytes)
        else:
            write.deadline = self._heard + self._config.write_timeout_secs
            handle.begun = True


def _tell(detail: str, level: int = logging.WARNING) -> None:
    emit(TransferEvent(stop="restart", detail=detail, level=level))


def _why_gone(overdue: str, exitcode: int | None) -> WorkerError:
    if overdue:
        return WorkerTimeoutError(
            f"the checkpoint process {overdue} and was killed; raise that limit if it "
            "is only slow"
        )
    how = "unexpectedly" if exitcode is None else f"with exit code {exitcode}"
    if exitcode is not None and exitcode < 0:
        how = f"by signal {-exitcode}"
    return WorkerError(f"the checkpoint process ended {how}")


async def _resolved(state_dict: Any) -> Any:
    """Wait for a future. It is the caller's, so a cancel here does not cancel it."""
    if hasattr(state_dict, "add_done_callback"):  # of asyncio, or of an executor
        future = asyncio.wrap_future(state_dict)
        future.add_done_callback(_retrieve)
        await asyncio.wait({future})
        return future.result()
    if inspect.isawaitable(state_dict):
        return await state_dict
    return state_dict


def _retrieve(future: asyncio.Future[Any]) -> None:
    # A cancelled write never retrieves the exception, and asyncio would warn.
    if not future.cancelled():
        future.exception()
