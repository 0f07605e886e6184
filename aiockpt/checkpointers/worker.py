"""The worker: makes one write after another, in a process or in a thread.

`work` is the loop of both. In a thread of the trainer, `CheckpointThread` calls it. In
the checkpoint process, it runs in the main thread. There a second thread runs an event
loop, `_Control`. It receives the trainer's messages, sends signs of life, and notices
when the trainer is gone, whatever the writer does. Nothing here needs torch, unless a
writer overrides ``write``.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import platform
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

from aiockpt.checkpointers.base import Written
from aiockpt.checkpointers.config import CheckpointProcessConfig
from aiockpt.checkpointers.messages import (
    DropWrite,
    Ended,
    Forsake,
    FromWorker,
    Kept,
    Progressed,
    WorkerSetup,
    Write,
    decode_to_worker,
    ended,
    failure_of,
    plain,
)
from aiockpt.checkpointers.recovery import LastSnapshot, SharedSnapshot
from aiockpt.checkpointers.spawning import make_writers
from aiockpt.checkpointers.writer import WriteJob, Writers, tell_ranks, write_job
from aiockpt.format.manifest import Manifest
from aiockpt.memory.snapshot import MappedSnapshot
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.children import Parent, ignore_signals_of_trainer
from aiockpt.runtime.ipc import unpack

logger = logging.getLogger("aiockpt")

_BEAT_S: Final = 1.0
"""Seconds between two signs of life while something is being written."""

_REPORT_EVERY_S: Final = 0.1

# ioprio_set(2) has no wrapper in the C library.
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_IDLE: Final = 3 << 13


# ----------------------------------------------------------- the loop of every worker


Task: TypeAlias = WriteJob | Forsake


class WorkQueue:
    """What a worker has to do, in order. Any thread may call the methods.

    Attributes:
        at_work: Whether the worker has a task.
        ending: Whether no task will be added.
    """

    def __init__(self) -> None:
        self.at_work = self.ending = False
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def put(self, task: Task) -> None:
        """Add a task."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def take(self, *, wait: bool) -> Task | None:
        """Return the next task, or None; with ``wait``, None only after the last."""
        with self._changed:
            self.at_work = False
            if wait:
                self._changed.wait_for(lambda: self._tasks or self.ending)
            self.at_work = bool(self._tasks)
            return self._tasks.popleft() if self._tasks else None

    def drop(self, number: int) -> bool:
        """Drop a write that the worker has not taken; return False if it has."""
        with self._changed:
            for task in self._tasks:
                if isinstance(task, WriteJob) and task.number == number:
                    self._tasks.remove(task)
                    break
            else:
                return False
        task.close()
        return True

    def end(self) -> None:
        """Let the worker end after the tasks that are there."""
        with self._changed:
            self.ending = True
            self._changed.notify()


def work(take: Callable[[], Task | None], writers: Writers) -> None:
    """Do one task after another, until ``take`` returns None."""
    while (task := take()) is not None:
        if isinstance(task, WriteJob):
            _write(writers, task)
        else:
            path = os.fsdecode(task.path)
            facts = writers, task.ranks, path, task.step, task.reason
            tell_ranks(*facts, begun=task.begun)


def _write(writers: Writers, job: WriteJob) -> None:
    job.advance()  # it begins; the next step may end this process
    outcome: Written | BaseException
    try:
        outcome = write_job(job, writers)
    except BaseException as error:  # noqa: BLE001 - a failed write ends nothing else
        outcome = error
    try:
        job.close()
        if job.end(outcome):
            return
        path = plain(job.path)
        if isinstance(outcome, BaseException):
            unsure = getattr(outcome, "may_be_committed", False)
            said = "may not be saved" if unsure else "is not saved"
            failure = failure_of(outcome)
            logger.error("%s %s: %s: %s", path, said, failure.kind, failure.text)
        elif outcome.warning:
            logger.warning("%s", outcome.warning)
    finally:
        del outcome  # an error refers to this frame


# ------------------------------------------------- the main thread of a process


def main(fd: int, trainer: int) -> None:
    """Serve the trainer until it closes the process or is gone; see `Parent`."""
    control = _Control(fd, trainer, _divert_signals())
    bridge = Bridge(threads=1, name="aiockpt-control")
    bridge.post(control.run)
    try:
        if (setup := control.setup()) is not None:
            try:
                writers = _prepare(*setup)
            except BaseException as error:  # noqa: BLE001 - the trainer raises it
                control.send(Ended(0, failure=failure_of(error)))
            else:
                control.send_now(Ended(0))
                work(control.take, writers)
                writers.close()
    finally:
        control.finish()
        bridge.close()


def _prepare(setup: WorkerSetup, parcel: int) -> Writers:
    """Call the init functions in the parcel; return the writers."""
    spared = _threads() - {threading.get_native_id()}
    writers = make_writers(parcel)
    if setup.ranks is not None:
        writers.of(setup.ranks)
    # Only now: with a low priority, the imports could take minutes.
    _lower_priority(setup.config, _threads() - spared)
    return writers


class _SharedJob(WriteJob):
    """A write that the trainer has sent, with its parcel and its arena."""

    def __init__(self, control: _Control, message: Write, fds: list[int]) -> None:
        parcel, arena = fds
        content, cut = unpack(parcel), message.header_bytes
        self.number, self.ranks = message.number, message.ranks
        self.path = os.fsdecode(message.path)
        rank = self.ranks.info.global_rank
        self.shared = SharedSnapshot(self.number, self.path, rank, content[:cut], arena)
        self.keywords = content[cut:]
        self._control = control
        self._mapped: MappedSnapshot | None = None
        self._report_at = 0.0  # the first report is that the write begins

    def snapshot(self) -> MappedSnapshot:
        self._mapped = self.shared.mapped()
        return self._mapped

    def memory(self) -> mmap.mmap:
        assert self._mapped is not None
        size = max(self._mapped.manifest.segment_bytes, 1)
        # A private mapping: the trainer's memory stays as it is.
        return mmap.mmap(self.shared.arena, size, access=mmap.ACCESS_COPY)

    def tell(self, message: Progressed | Kept) -> None:
        now = time.monotonic()
        if isinstance(message, Kept) or not self._report_at:
            self._report_at = now
            self._control.send_now(message)
        elif now >= self._report_at:
            self._report_at = now + _REPORT_EVERY_S
            self._control.send(message)

    def seal(self, manifest: Manifest) -> None:
        self._control.note_sealed(self.number, manifest)

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
        self.shared.close()

    def end(self, outcome: Written | BaseException) -> bool:
        self._control.send(ended(self.number, outcome))
        return not self._control.trainer_is_gone


# ------------------------------------------------------------------- signals, priority


def _divert_signals() -> int:
    """Ignore the signals of the trainer, and make SIGTERM a request.

    Returns the descriptor from which the request is read.
    """
    ignore_signals_of_trainer()
    reader, writer = socket.socketpair()
    writer.settimeout(0)
    reader.settimeout(0)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    return reader.detach()


def _threads() -> set[int]:
    """Return the threads of this process; without /proc, those that Python knows."""
    try:
        return {int(each) for each in os.listdir("/proc/self/task")}
    except OSError:
        known = [each.native_id for each in threading.enumerate()]
        return {each for each in known if each is not None}


def _lower_priority(config: CheckpointProcessConfig, threads: set[int]) -> None:
    """Lower the priority of the writing thread, and of threads that init has started.

    The control thread keeps its priority, so that it answers quickly.
    """
    number = _IOPRIO_SET.get(platform.machine())
    libc = ctypes.CDLL(None)
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended
            lowered = os.getpriority(os.PRIO_PROCESS, thread) + config.nice
            os.setpriority(os.PRIO_PROCESS, thread, lowered)
            if config.io_idle and number is not None:
                libc.syscall(number, _IOPRIO_WHO_PROCESS, thread, _IOPRIO_IDLE)


# --------------------------------------------------------------- the control thread


class _Control:
    """Serves the trainer until it closes the process, or is gone.

    Args:
        fd, trainer: As of `Parent`.
        signals: Readable when the process was told to exit.
    """

    def __init__(self, fd: int, trainer: int, signals: int) -> None:
        self._fd, self._pid = fd, trainer
        self._signals = signals
        self._queue = WorkQueue()
        self._setup: tuple[WorkerSetup, int] | None = None
        self._is_set_up = threading.Event()  # or will never be
        self._trainer_died = False
        self._write_timeout = _BEAT_S
        self._limit: asyncio.TimerHandle | None = None
        self._last: LastSnapshot | None = None

    @property
    def trainer_is_gone(self) -> bool:
        """Whether the trainer is gone, so that a failure must be logged here.

        This asks the system for the parent, because the loop may notice late.
        """
        return self._trainer_died or os.getppid() != self._pid

    def run(self) -> None:
        """Serve until :meth:`finish`. This is the control thread."""
        try:
            asyncio.run(self._serve())
        except BaseException:
            logger.exception("the checkpoint process lost its trainer, and exits")
            os._exit(1)

    # ---------------------------------------------------- for the main thread

    def setup(self) -> tuple[WorkerSetup, int] | None:
        """Wait for the first message and its parcel; None if the trainer is gone."""
        self._is_set_up.wait()
        return self._setup

    def take(self) -> Task | None:
        """Wait for the next task; None if there will be no more."""
        task = self._queue.take(wait=True)
        if task is not None and self._queue.ending:
            self._loop.call_soon_threadsafe(self._limit_task)
        return task

    def send(self, message: FromWorker) -> None:
        """Queue a message to the trainer. The loop is running."""
        self._loop.call_soon_threadsafe(self._trainer.send, message)

    def send_now(self, message: FromWorker) -> None:
        """Send a message before this returns; the next step may kill the process."""
        self.send(message)
        sent = threading.Event()
        self._loop.call_soon_threadsafe(sent.set)
        sent.wait()

    def note_sealed(self, number: int, manifest: Manifest) -> None:
        """Remember the digests of a snapshot, which a restarted trainer may ask for."""
        if self._last is not None:
            self._loop.call_soon_threadsafe(self._last.seal, number, manifest)

    def finish(self) -> None:
        """Note that the main thread has finished."""
        self._loop.call_soon_threadsafe(self._finished.set)

    # ------------------------------------------------------------ on the loop

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        self._trainer = Parent(self._fd, self._pid, self._hear, self._trainer_gone)
        self._loop.add_reader(self._signals, self._told_to_exit)
        beat = self._loop.create_task(self._beat())
        try:
            await self._finished.wait()
            if self._limit is not None:
                self._limit.cancel()
            if self._trainer_died and self._last is not None:
                await self._last.ended()
        finally:
            beat.cancel()
            await self._drain()
            self._trainer.close()
            if self._last is not None:
                await self._last.close()

    async def _drain(self) -> None:
        """Wait until the last messages are sent, at most a second."""
        for _ in range(100):
            if not self._trainer.full:
                return
            await asyncio.sleep(0.01)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            if (self._queue.at_work or self._queue) and not self._trainer.full:
                self._trainer.send(Progressed())

    def _hear(self, data: bytes, fds: list[int]) -> None:
        message = decode_to_worker(data)
        if isinstance(message, WorkerSetup):
            self._set_up(message, *fds)
        elif isinstance(message, Write):
            job = _SharedJob(self, message, fds)
            if self._last is not None:
                self._last.hold(job.shared)
            self._queue.put(job)
        elif isinstance(message, Forsake):
            self._queue.put(message)
        elif isinstance(message, DropWrite):
            if self._queue.drop(message.number):
                if self._last is not None:
                    self._last.drop(message.number)
                self._trainer.send(Ended(message.number, dropped=True))
        elif message.keep:
            self._trainer_gone()
        else:
            self._end()

    def _set_up(self, setup: WorkerSetup, parcel: int) -> None:
        config = setup.config
        self._write_timeout = config.write_timeout_secs
        if config.keep_last_seconds:
            assert config.runtime_dir is not None, "the trainer has chosen it"
            self._last = LastSnapshot(config.runtime_dir, config.keep_last_seconds)
        self._setup = setup, parcel
        self._is_set_up.set()

    def _told_to_exit(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._signals, 512)
        self._trainer_died = False  # a signal asks the process to end
        self._end()

    def _trainer_gone(self) -> None:
        """Finish all writes, and keep the last snapshot if configured."""
        if self._queue.ending:
            return
        self._trainer_died = True
        self._end()
        if self._last is not None:
            self._last.offer()

    def _end(self) -> None:
        if not self._queue.ending:
            self._queue.end()
            self._is_set_up.set()
            self._limit_task()

    def _limit_task(self) -> None:
        """Limit the task that has begun: no trainer can kill a writer that hangs."""
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self._loop.call_later(self._write_timeout, os._exit, 1)
