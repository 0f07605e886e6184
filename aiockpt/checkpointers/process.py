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
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from aiockpt.checkpointers.base import Written, path_for, warn_of_commit
from aiockpt.checkpointers.config import (
    CLOSING_S,
    CheckpointProcessConfig,
    CheckpointStagerConfig,
    RankInfo,
)
from aiockpt.checkpointers.handle import (
    BackgroundWriter,
    SaveEnd,
    SaveHandle,
    absolute_path,
    find_out,
    forsaking,
)
from aiockpt.checkpointers.messages import (
    MAX_TEXT_CHARACTERS,
    Close,
    DropWrite,
    Ended,
    Forsake,
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

_MAX_TRIES: Final = 3
"""A waiting write fails when so many processes have died before beginning it."""

_DYING_S: Final = 5.0
"""How long to wait for a killed process, which may be inside a system call."""


@dataclass(slots=True)
class _Delivery:
    """What a process needs for a save, until that has ended: another may need it.

    Attributes:
        handle: The save.
        message: What is sent.
        parcel: The descriptor of the parcel that goes with it.
        deadline: When the write must have ended; set when it has begun.
        tries: How many processes have got it.
    """

    handle: SaveHandle
    message: Write
    parcel: int
    deadline: float = math.inf
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

    Attributes:
        restarts: How often the child was replaced.

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
        self.writers: Writers = Writers(
            checkpoint_writer_init_fn, checkpoint_writer_init_args or {}, rank_info
        )
        self.restarts = 0
        self._config = config
        self._lifetime = Lifetime("the checkpoint process")
        self._bridge = Bridge(threads=2, name="aiockpt-process")
        self._stager = DefaultStager(staging_config)
        self._deliveries = _Deliveries(self._bridge, self.writers)
        self._running: _Running | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._pauses = Pauses()
        self._rested = asyncio.Event()  # unset: no process is started for a while
        self._rested.set()
        self._closing: _Closing | None = None
        # A process takes a while to start, so it starts before there is a loop.
        self._starting: Future[Child] | None = self._start()

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is a child."""
        if self._running is not None:
            return self._running.child.pid
        starting = self._starting
        if starting is None or not starting.done() or starting.exception():
            return None
        return starting.result().pid

    async def ready(self) -> None:
        """Wait until the child's init functions have returned.

        Raises:
            WorkerError: they failed; a ``WorkerTimeoutError`` if they took too long.
        """
        with self._lifetime.call():
            running = await self._reach()
            await running.start_ended.wait()
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
        warn_of_commit(step, handle.warning)

    async def submit(
        self, handle: SaveHandle, staged: Any, keywords: Mapping[str, Any]
    ) -> None:
        """Take over a save; see :class:`.BackgroundWriter`."""
        with self._lifetime.call():
            ranks = self.writers.lookup.of_save()
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
                handle.hand_over(snapshot)
            finally:
                snapshot.release()
            message = Write(
                number=handle.number,
                path=os.fsencode(path),
                ranks=ranks,
                header_bytes=len(header),
                segment_bytes=handle.nbytes,
            )
            delivery = _Delivery(handle, message, parcel)
            self._deliveries.add(delivery)
            if running is not None:  # else the next process gets it
                self._deliveries.post(delivery, running)

    def drop(self, handle: SaveHandle) -> None:
        """Drop a save, unless its write has begun. The handle ends in either case."""
        if handle.begun:
            return
        if self._running is not None:
            self._running.child.send(DropWrite(handle.number))
        else:
            self._deliveries.end(handle.number, "replaced")

    async def forsake(self, path: str, step: int, reason: str) -> None:
        """Tell the other ranks, if there are any, that this one saves nothing."""
        if (message := forsaking(self.writers.lookup, path, step, reason)) is None:
            return
        if not self._rested.is_set():
            self._deliveries.untold.append(message)
            return
        # Without a process, the other ranks cannot be told.
        with suppress(WorkerError, ClosedError), self._lifetime.call():
            (await self._reach()).child.send(message)

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
            partial(self._lifetime.calls_ended, timeout=CLOSING_S),
            last,
            self._stager.close,
            partial(self._bridge.aclose, timeout=CLOSING_S),
        )

    async def _finish(self) -> None:
        limit = self._config.subprocess_shutdown_timeout_secs
        by = asyncio.get_running_loop().time() + limit
        self._closing = _Closing(Close(), by)
        if self._starting is not None and self._rested.is_set():  # never used
            with suppress(AiockptError):  # or it could not be, and nothing is left
                await self._reach()
        self._rested.set()
        if self._running is not None:
            self._running.child.send(self._closing.message)
            self._running.changed.set()
        if self._supervision is not None:
            await asyncio.wait({self._supervision})
        await self._deliveries.lost_ended()

    async def _leave(self) -> None:
        self._closing = _Closing(Close(keep=True))
        self._rested.set()
        running = await self._reach()
        running.child.send(self._closing.message)
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait({self._supervision})
        running.child.read()  # its last messages
        running.child.close()
        detail = "it was left to the checkpoint process, which this process has left"
        left = WorkerError(detail)
        left.may_be_committed = True
        self._deliveries.end_all(left)

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
                self._running = _Running(child, self._deliveries, self._config)
                self._deliveries.post_all(self._running)
                if self._supervision is None or self._supervision.done():
                    loop = asyncio.get_running_loop()
                    self._supervision = loop.create_task(self._supervise())
        return self._running

    def _start(self) -> Future[Child]:
        """Start a process in a thread; the first call that needs it gets its error."""
        ranks = self.writers.lookup.at_start()

        def start() -> Child:
            directory = None
            if self._config.keep_last_seconds:  # or it needs no such directory
                directory = socket_directory(self._config.runtime_dir)
            config = replace(self._config, runtime_dir=directory)
            return self._init.start(WorkerSetup(config, ranks))

        return self._bridge.begin(start)

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
            running.start_ended.set()
            self._running = None
            if self._closing:
                if exitcode:
                    _emit_restart(str(error))
                self._deliveries.fail(error)
            elif not running.ready:
                _emit_restart(str(error), logging.ERROR)
                self._deliveries.fail(error)
            else:
                pause = self._pauses.next(running.lived)
                when = f" in {pause:g} s" if pause else ""
                _emit_restart(f"{error}; another one is started{when}")
                self.restarts += 1
                self._deliveries.fail_begun(error)
                await self._rest(pause)
                closing = self._closing
                if closing and not closing.message.keep and not self._deliveries:
                    return
                try:
                    successor = await self._reach()
                except AiockptError as failure:
                    _emit_restart(str(failure), logging.ERROR)
                    self._deliveries.fail(failure)
                else:
                    if self._closing:
                        successor.child.send(self._closing.message)

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
            by = self._closing.by if self._closing else math.inf
            overdue, when = running.overdue(by)
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


@dataclass(frozen=True, slots=True)
class _Closing:
    """What a process is told last, and when it must have ended."""

    message: Close
    by: float = math.inf


class _Deliveries:
    """The writes that have not ended, in their order.

    Args:
        bridge: Runs the thread that asks the disk.
        writers: Say what the process does after a commit.

    Attributes:
        untold: Failures that the next process tells the other ranks.
    """

    def __init__(self, bridge: Bridge, writers: Writers) -> None:
        self.untold: list[Forsake] = []
        self._bridge, self._writers = bridge, writers
        self._by_number: dict[int, _Delivery] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[_Delivery]:
        return iter(self._by_number.values())

    def add(self, delivery: _Delivery) -> None:
        """Note a write that a process will get."""
        self._by_number[delivery.handle.number] = delivery

    def get(self, number: int) -> _Delivery | None:
        """Return a write that has not ended."""
        return self._by_number.get(number)

    def post(self, delivery: _Delivery, running: _Running) -> None:
        """Send a write to a process, or fail it if no descriptor is left for it."""
        try:
            running.post(delivery)
        except OSError as error:
            what = "handing over what was staged"
            self.end(delivery.handle.number, refused_by_host(what, error))

    def post_all(self, running: _Running) -> None:
        """Give a new process the writes that the previous one has left."""
        for message in self.untold:
            running.child.send(message)
        self.untold.clear()
        for delivery in [*self]:
            if delivery.tries < _MAX_TRIES:
                self.post(delivery, running)
            else:
                detail = "each checkpoint process dies before it begins this write"
                self.end(delivery.handle.number, WorkerError(detail))

    def end(self, number: int, outcome: SaveEnd) -> None:
        """End a write, unless it has ended."""
        if (delivery := self._by_number.pop(number, None)) is not None:
            os.close(delivery.parcel)
            delivery.handle.end(outcome)

    def end_all(self, outcome: SaveEnd) -> None:
        """End every write."""
        for number in [*self._by_number]:
            self.end(number, outcome)

    def fail_begun(self, error: AiockptError) -> None:
        """Fail the write that a dead process had begun; tell the other ranks later."""
        lost = [each for each in self if each.handle.begun]
        reason = plain(str(error))[:MAX_TEXT_CHARACTERS]
        self.untold += [
            Forsake(
                each.message.path,
                each.handle.step,
                each.message.ranks,
                reason,
                begun=True,
            )
            for each in lost
        ]
        self._fail(lost, error)

    def fail(self, error: AiockptError) -> None:
        """Fail every write."""
        self._fail([*self], error)

    async def lost_ended(self) -> None:
        """Wait until the disk was asked about every lost write."""
        if self._asking:
            await asyncio.wait(self._asking)

    def _fail(self, lost: Sequence[_Delivery], error: AiockptError) -> None:
        """Fail writes; if one has begun, the disk is asked before any of them ends."""
        if not any(delivery.handle.begun for delivery in lost):
            for delivery in lost:
                self.end(delivery.handle.number, error)
            return
        for delivery in lost:
            del self._by_number[delivery.handle.number]
            os.close(delivery.parcel)
        task = asyncio.get_running_loop().create_task(self._end_lost(lost, error))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _end_lost(self, lost: Sequence[_Delivery], error: AiockptError) -> None:
        """End the writes of a dead process, in their order."""
        killed = isinstance(error, WorkerError) and error.exitcode is not None
        for delivery in lost:
            handle, message = delivery.handle, delivery.message
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
        start_ended: Set when it is ready, or gone before it was.
        changed: Set by events that may move a deadline.
        failure: Why it is gone, or will be.
    """

    def __init__(
        self,
        child: Child,
        deliveries: _Deliveries,
        config: CheckpointProcessConfig,
    ) -> None:
        self.child = child
        self.ready = False
        self.start_ended = asyncio.Event()
        self.changed = asyncio.Event()
        self.failure: AiockptError | None = None
        self._deliveries = deliveries
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._began = self._heard = self._loop.time()
        self._ready_by = self._began + config.subprocess_init_timeout_secs
        child.listen(self._hear, self.changed.set)

    @property
    def lived(self) -> float:
        """For how many seconds there has been this process."""
        return self._loop.time() - self._began

    def post(self, delivery: _Delivery) -> None:
        """Send a write to the process.

        Raises:
            OSError: the message has to wait, and no descriptor is left for it.
        """
        handle = delivery.handle
        assert handle.snapshot is not None
        arena = handle.snapshot.arena
        assert arena is not None
        self.child.send(delivery.message, [delivery.parcel, arena.fd])
        if len(self._deliveries) == 1:
            self._heard = self._loop.time()  # it need not have said anything before
        delivery.tries += 1
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
        elif self._deliveries:
            silent = self._heard + config.hang_timeout_secs
            waits.append((silent, "hung", "hang"))
        late = min((each.deadline for each in self._deliveries), default=math.inf)
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
                self.start_ended.set()
            return
        if (delivery := self._deliveries.get(message.number)) is None:
            return
        if isinstance(message, Ended):
            outcome = outcome_of(message, f"writing {delivery.handle.path}")
            self._deliveries.end(message.number, outcome)
            return
        delivery.handle.hear(message)
        if delivery.handle.begun and delivery.deadline == math.inf:
            delivery.deadline = self._heard + self._config.write_timeout_secs


def _emit_restart(detail: str, level: int = logging.WARNING) -> None:
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
