"""What runs in the checkpoint process: the init functions, then write after write.

Nothing here needs torch unless a writer has a ``write`` of its own.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import multiprocessing.spawn  # noqa: TID251 - this is the checkpoint process
import os
import platform
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler  # noqa: TID251 - as above
from typing import Any, Final

import msgspec

from aiockpt.checkpointers.control import Control
from aiockpt.checkpointers.failures import failure_of, plain
from aiockpt.checkpointers.inbox import Inbox, Preparation
from aiockpt.checkpointers.jobs import (
    Job,
    Watch,
    decode_keywords,
    forsake,
    perform,
)
from aiockpt.checkpointers.messages import (
    Begun,
    Ended,
    Forsake,
    Progressed,
    Ready,
    Setup,
)
from aiockpt.checkpointers.writer import Written
from aiockpt.memory.mapped import MappedSnapshot, trusted_header
from aiockpt.runtime.background import leave_terminal
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.channel import unpack

__all__ = ["main"]

logger = logging.getLogger("aiockpt")

# ioprio_set(2) has no name in the C library.
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_IDLE: Final = 3 << 13

_REPORT_EVERY: Final = 0.1
_LONGEST: Final = 4096


def main(fd: int) -> None:
    """Serve the trainer at the other end of a socket until it is gone, or says so."""
    signals = _divert_signals()
    inbox = Inbox()
    control = Control(socket.socket(fileno=fd), inbox, signals)
    bridge = Bridge(threads=1, name="aiockpt-control")
    bridge.post(control.run)
    try:
        _work(inbox, control)
    finally:
        control.finish()
        bridge.close()


def _divert_signals() -> int:
    """Leave the terminal to the trainer, and make SIGTERM a request.

    Returns what that is read from.
    """
    leave_terminal()
    reader, writer = socket.socketpair()
    writer.settimeout(0)
    reader.settimeout(0)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    return reader.detach()


def _work(inbox: Inbox, control: Control) -> None:
    preparation = inbox.take()
    if not isinstance(preparation, Preparation):
        return
    try:
        writer = _prepare(preparation)
    except BaseException as error:  # noqa: BLE001 - it is the trainer's to know
        control.report(Ended(0, failure=failure_of(error)))
        return
    control.declare(Ready())
    while (work := inbox.take()) is not None:
        if isinstance(work, Job):
            _write(writer, work, control)
        elif isinstance(work, Forsake):
            path = os.fsdecode(work.path)
            forsake(writer, path, work.step, work.reason, begun=work.begun)
    if callable(close := getattr(writer, "close", None)):
        close()


def _prepare(preparation: Preparation) -> Any:
    spared = _threads() - {threading.get_native_id()}
    content = unpack(preparation.parcel)
    size = int.from_bytes(content[:8], "little")
    facts = msgspec.json.decode(content[8 : 8 + size])
    init, init_args, make_writer, writer_args = _imported(facts, content[8 + size :])
    init(*init_args)
    writer = make_writer(**writer_args)
    # Not before: beside busy processes the imports alone would take minutes.
    _lower_priority(preparation.setup, _threads() - spared)
    return writer


def _imported(facts: dict[str, Any], pickled: bytes) -> Any:
    own: Any = multiprocessing.process.current_process()
    own._inheriting = True  # noqa: SLF001 - so that a process made now is refused
    try:
        # Also imports the trainer's main module, if the functions are in it.
        multiprocessing.spawn.prepare(facts)
        return ForkingPickler.loads(pickled)
    finally:
        del own._inheriting  # noqa: SLF001 - as above


def _threads() -> set[int]:
    return {int(each) for each in os.listdir("/proc/self/task")}


def _lower_priority(setup: Setup, threads: set[int]) -> None:
    """Lower the priority of the thread that writes, and of those that init has left.

    The control thread keeps its priority, so that it answers quickly.
    """
    number = _IOPRIO_SET.get(platform.machine())
    libc = ctypes.CDLL(None)
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended
            lowered = os.getpriority(os.PRIO_PROCESS, thread) + setup.nice
            os.setpriority(os.PRIO_PROCESS, thread, lowered)
            if setup.io_idle and number is not None:
                libc.syscall(number, _IOPRIO_WHO_PROCESS, thread, _IOPRIO_IDLE)


def _write(writer: Any, job: Job, control: Control) -> None:
    number = job.request.number
    control.declare(Begun(number))
    began = time.monotonic()
    failure, written = None, Written()
    try:
        written = _perform(writer, job, control)
    except BaseException as error:  # noqa: BLE001 - one failed write ends nothing else
        failure = failure_of(error)
    finally:
        job.close()
    warning = plain(written.warning)[:_LONGEST]
    seconds = time.monotonic() - began
    control.report(Ended(number, seconds, failure, warning, written.content))
    if not control.unheard:
        return
    if failure is not None:
        path = plain(os.fsdecode(job.request.path))
        logger.error("%s is not saved: %s: %s", path, failure.kind, failure.text)
    elif warning:
        logger.warning("%s", warning)


def _perform(writer: Any, job: Job, control: Control) -> Written:
    path = os.fsdecode(job.request.path)
    snapshot = MappedSnapshot(trusted_header(job.header), job.arena)
    try:
        keywords = decode_keywords(job.keywords)
    except Exception as error:
        forsake(writer, path, snapshot.manifest.step, str(error))
        snapshot.close()
        raise
    try:
        return perform(
            writer,
            path,
            snapshot,
            keywords,
            memory=lambda: _private(snapshot, job.arena),
            watch=Watch(
                report=_Meter(job.request.number, control),
                on_seal=partial(control.sealed, job.request.number),
            ),
        )
    finally:
        snapshot.close()


def _private(snapshot: MappedSnapshot, arena: int) -> mmap.mmap:
    """Map the segment so that a writer may change what it is given."""
    size = max(snapshot.manifest.segment_bytes, 1)
    return mmap.mmap(arena, size, access=mmap.ACCESS_COPY)


class _Meter:
    """Tells the trainer how far a write is, but not all the time."""

    def __init__(self, number: int, control: Control) -> None:
        self._number = number
        self._control = control
        self._next = 0.0

    def __call__(self, nbytes: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REPORT_EVERY
            self._control.report(Progressed(self._number, nbytes))
