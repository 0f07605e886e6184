"""The checkpoint process: calls the init functions, then makes write after write.

The main thread runs the writer. A second thread runs an event loop, `_Control`. It
receives the trainer's messages, sends signs of life, and notices when the trainer is
gone, whatever the writer does. Nothing here needs torch, unless a writer overrides
``write``.
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
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Self, TypeAlias

from aiockpt.checkpointers.base import Written
from aiockpt.checkpointers.config import CheckpointProcessConfig, SaveRanks
from aiockpt.checkpointers.messages import (
    LONGEST_TEXT,
    Close,
    Drop,
    Ended,
    Forsake,
    FromWorker,
    Kept,
    Progressed,
    Setup,
    Write,
    decode_keywords,
    decode_to_worker,
    failure_of,
    plain,
)
from aiockpt.checkpointers.recovery import LastSnapshot
from aiockpt.checkpointers.spawning import make_writers
from aiockpt.checkpointers.writer import Writers, tell_ranks, write_by
from aiockpt.format.manifest import Manifest
from aiockpt.memory.snapshot import MappedSnapshot, trusted_header
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.children import Parent, leave_terminal
from aiockpt.runtime.ipc import unpack

__all__ = ["main"]

logger = logging.getLogger("aiockpt")

_BEAT: Final = 1.0
"""Seconds between two signs of life while something is being written."""

_REPORT_EVERY: Final = 0.1

# ioprio_set(2) has no wrapper in the C library.
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_IDLE: Final = 3 << 13


def main(fd: int, trainer: int) -> None:
    """Serve the trainer until it closes the process or is gone; see `Parent`."""
    control = _Control(fd, trainer, _divert_signals())
    bridge = Bridge(threads=1, name="aiockpt-control")
    bridge.post(control.run)
    try:
        _work(control)
    finally:
        control.finish()
        bridge.close()


# -------------------------------------------------------------- what there is to do


@dataclass(frozen=True, slots=True)
class _Preparation:
    """The setup before the first write: the init functions, in a parcel."""

    config: CheckpointProcessConfig
    ranks: SaveRanks | None
    parcel: int


@dataclass(slots=True)
class _Job:
    """A write to be made. It owns the arena's descriptor."""

    number: int
    path: str
    ranks: SaveRanks
    header: bytes
    keywords: bytes
    arena: int

    @classmethod
    def of(cls, request: Write, fds: list[int]) -> Self:
        """Take the parcel and the arena that came with the message."""
        parcel, arena = fds
        content = unpack(parcel)
        cut = request.header_bytes
        path, ranks = os.fsdecode(request.path), request.ranks
        return cls(request.number, path, ranks, content[:cut], content[cut:], arena)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.arena >= 0:
            os.close(self.arena)
            self.arena = -1


_Task: TypeAlias = _Preparation | _Job | Forsake


# ------------------------------------------------------------------ the main thread


def _work(control: _Control) -> None:
    preparation = control.take()
    if not isinstance(preparation, _Preparation):
        return
    try:
        writers = _prepare(preparation)
    except BaseException as error:  # noqa: BLE001 - the trainer raises it
        control.send(Ended(0, failure=failure_of(error)))
        return
    control.send_now(Ended(0))
    while (task := control.take()) is not None:
        if isinstance(task, _Job):
            _write(writers, task, control)
        elif isinstance(task, Forsake):
            path = os.fsdecode(task.path)
            tell_ranks(
                *(writers, task.ranks, path, task.step, task.reason), begun=task.begun
            )
    writers.close()


def _prepare(preparation: _Preparation) -> Writers:
    """Call the init functions; return the writers."""
    spared = _threads() - {threading.get_native_id()}
    writers = make_writers(preparation.parcel)
    if preparation.ranks is not None:
        writers.of(preparation.ranks)
    # Only now: with a low priority, the imports could take minutes.
    _lower_priority(preparation.config, _threads() - spared)
    return writers


def _write(writers: Writers, job: _Job, control: _Control) -> None:
    control.send_now(Progressed(job.number))
    failure, written, said = None, Written(), "is not saved"
    try:
        written = _perform(writers, job, control)
    except BaseException as error:  # noqa: BLE001 - a failed write ends nothing else
        failure = failure_of(error)
        if getattr(error, "may_be_committed", False):
            said = "may not be saved"
    finally:
        job.close()
    control.send(
        Ended(
            job.number,
            failure=failure,
            warning=plain(written.warning)[:LONGEST_TEXT],
            content=written.content,
        )
    )
    if not control.trainer_is_gone:
        return
    if failure is not None:
        path = plain(job.path)
        logger.error("%s %s: %s: %s", path, said, failure.kind, failure.text)
    elif written.warning:
        logger.warning("%s", written.warning)


def _perform(writers: Writers, job: _Job, control: _Control) -> Written:
    snapshot = MappedSnapshot(trusted_header(job.header), job.arena)
    try:
        try:
            keywords = decode_keywords(job.keywords)
        except Exception as error:
            step = snapshot.manifest.step
            tell_ranks(writers, job.ranks, job.path, step, str(error))
            raise
        return write_by(
            writers.of(job.ranks),
            job.path,
            snapshot,
            keywords,
            memory=partial(_private, snapshot, job.arena),
            report=_Meter(job.number, control),
            on_seal=partial(control.note_sealed, job.number),
            on_kept=lambda file: control.send_now(Kept(job.number, *file)),
        )
    finally:
        snapshot.close()


def _private(snapshot: MappedSnapshot, arena: int) -> mmap.mmap:
    """Map the segment privately, so that a writer may modify its state dict."""
    size = max(snapshot.manifest.segment_bytes, 1)
    return mmap.mmap(arena, size, access=mmap.ACCESS_COPY)


class _Meter:
    """Reports the progress of a write to the trainer, at most ten times a second."""

    def __init__(self, number: int, control: _Control) -> None:
        self._number = number
        self._control = control
        self._next = 0.0

    def __call__(self, nbytes: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REPORT_EVERY
            self._control.send(Progressed(self._number, nbytes))


# ------------------------------------------------------------------- signals, priority


def _divert_signals() -> int:
    """Leave the terminal to the trainer, and make SIGTERM a request.

    Returns the descriptor from which the request is read.
    """
    leave_terminal()
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
        self._tasks_changed = threading.Condition()
        self._tasks: deque[_Task] = deque()
        self._at_work = False
        self._ending = False
        self._trainer_died = False
        self._patience = _BEAT
        self._limit: asyncio.TimerHandle | None = None
        self._last: LastSnapshot | None = None

    def __repr__(self) -> str:
        return f"<Control waiting={len(self._tasks)} ending={self._ending}>"

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

    def take(self) -> _Task | None:
        """Wait for the next task; None if there will be no more."""
        with self._tasks_changed:
            self._at_work = False
            self._tasks_changed.wait_for(lambda: self._tasks or self._ending)
            self._at_work = bool(self._tasks)
            if self._at_work and self._ending:
                self._loop.call_soon_threadsafe(self._limit_task)
            return self._tasks.popleft() if self._tasks else None

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
            await asyncio.sleep(_BEAT)
            if (self._at_work or self._tasks) and not self._trainer.full:
                self._trainer.send(Progressed())

    def _hear(self, data: bytes, fds: list[int]) -> None:
        message = decode_to_worker(data)
        if isinstance(message, Setup):
            self._set_up(message, *fds)
        elif isinstance(message, Write):
            job = _Job.of(message, fds)
            if self._last is not None:
                rank = job.ranks.info.global_rank
                self._last.hold(job.number, job.path, rank, job.header, job.arena)
            self._put(job)
        elif isinstance(message, Forsake):
            self._put(message)
        elif isinstance(message, Drop):
            self._drop(message.number)
        elif isinstance(message, Close):
            if message.keep:
                self._trainer_gone()
            else:
                self._end()

    def _set_up(self, setup: Setup, parcel: int) -> None:
        config = setup.config
        self._patience = config.write_timeout_secs
        if config.keep_last_seconds:
            assert config.runtime_dir is not None, "the trainer has chosen it"
            self._last = LastSnapshot(config.runtime_dir, config.keep_last_seconds)
        self._put(_Preparation(config, setup.ranks, parcel))

    def _put(self, task: _Task) -> None:
        with self._tasks_changed:
            self._tasks.append(task)
            self._tasks_changed.notify()

    def _drop(self, number: int) -> None:
        """Drop a write that the main thread has not taken."""
        with self._tasks_changed:
            found = [
                task
                for task in self._tasks
                if isinstance(task, _Job) and task.number == number
            ]
            for job in found:
                self._tasks.remove(job)
        for job in found:
            if self._last is not None:
                self._last.drop(number)
            job.close()
            self._trainer.send(Ended(number, dropped=True))

    def _told_to_exit(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._signals, 512)
        self._trainer_died = False  # a signal asks the process to end
        self._end()

    def _trainer_gone(self) -> None:
        """Finish all writes, and keep the last snapshot if configured."""
        if self._ending:
            return
        self._trainer_died = True
        self._end()
        if self._last is not None:
            self._last.offer()

    def _end(self) -> None:
        if not self._ending:
            with self._tasks_changed:
                self._ending = True
                self._tasks_changed.notify()
            self._limit_task()

    def _limit_task(self) -> None:
        """Limit the task that has begun: no trainer can kill a writer that hangs."""
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self._loop.call_later(self._patience, os._exit, 1)
