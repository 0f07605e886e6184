"""The checkpoint process's end of the socket: an event loop in a thread of its own.

The main thread is the writer's. Whatever it does, this one hears the trainer, says that
nothing hangs, and notices when the trainer has gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from contextlib import suppress
from typing import Final

from aiockpt.checkpointers.inbox import Inbox, Preparation
from aiockpt.checkpointers.jobs import Job
from aiockpt.checkpointers.keeper import Keeper
from aiockpt.checkpointers.messages import (
    Alive,
    Close,
    Drop,
    Dropped,
    Forsake,
    FromWorker,
    Setup,
    Write,
    decode_to_worker,
)
from aiockpt.format.manifest import Manifest
from aiockpt.runtime.channel import Channel

__all__ = ["Control"]

logger = logging.getLogger("aiockpt")

BEAT: Final = 1.0
"""Seconds between two signs of life while something is being written."""


class Control:
    """Hears the trainer until it closes the process, or is gone.

    Args:
        sock: The process's end.
        inbox: What the main thread is given.
        signals: Readable when the process was told to end.
    """

    def __init__(self, sock: socket.socket, inbox: Inbox, signals: int) -> None:
        self._sock = sock
        self._inbox = inbox
        self._signals = signals
        self._patience = BEAT
        self._limit: asyncio.TimerHandle | None = None
        self._keeper: Keeper | None = None
        self._trainer = -1
        self._started = threading.Event()
        self._ending = False
        self._keep = True

    def __repr__(self) -> str:
        return f"<Control ending={self._ending}>"

    @property
    def unheard(self) -> bool:
        """Whether the trainer has gone, whom a failure would be told to."""
        return self._ending and self._keep

    def run(self) -> None:
        """Serve until :meth:`finish`. For a thread."""
        try:
            asyncio.run(self._serve())
        except BaseException:
            logger.exception("the checkpoint process is deaf, and ends")
            os._exit(1)

    # ---------------------------------------------------- for the main thread

    def report(self, message: FromWorker) -> None:
        """Tell the trainer soon."""
        self._started.wait()
        self._loop.call_soon_threadsafe(self._channel.send, message)

    def declare(self, message: FromWorker) -> None:
        """Tell the trainer now: what comes next may be the end of this process."""
        self.report(message)
        sent = threading.Event()
        self._loop.call_soon_threadsafe(sent.set)
        sent.wait()

    def sealed(self, number: int, manifest: Manifest) -> None:
        """Remember the digests of the last snapshot, if somebody may ask for it."""
        self._loop.call_soon_threadsafe(self._seal, number, manifest)

    def finish(self) -> None:
        """Say that the main thread has done everything."""
        self._started.wait()
        self._loop.call_soon_threadsafe(self._finished.set)

    # ------------------------------------------------------------ on the loop

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        self._channel = Channel(self._sock, self._hear, self._trainer_gone)
        self._loop.add_reader(self._signals, self._told_to_end)
        self._started.set()
        beat = self._loop.create_task(self._beat())
        try:
            await self._finished.wait()
            if self._limit is not None:
                self._limit.cancel()
            if self.unheard and self._keeper is not None:
                await self._keeper.ended()
        finally:
            beat.cancel()
            await self._drain()
            self._channel.close()
            if self._keeper is not None:
                self._keeper.close()
            if self._trainer >= 0:
                self._loop.remove_reader(self._trainer)
                os.close(self._trainer)

    async def _drain(self) -> None:
        """Let the last messages go, if the trainer still reads."""
        for _ in range(100):
            if not self._channel.full:
                return
            await asyncio.sleep(0.01)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            if self._inbox.busy and not self._channel.full:
                self._channel.send(Alive())

    def _hear(self, data: bytes, fds: list[int]) -> None:
        message = decode_to_worker(data)
        if isinstance(message, Setup):
            self._set_up(message, *fds)
        elif isinstance(message, Write):
            self._take(Job.of(message, fds))
        elif isinstance(message, Forsake):
            self._inbox.put(message)
        elif isinstance(message, Drop):
            self._drop(message.number)
        else:
            self._close(message)

    def _set_up(self, setup: Setup, parcel: int) -> None:
        self._patience = setup.write_timeout
        if setup.keep_last:
            self._keeper = Keeper(setup.runtime_dir, setup.rank, setup.keep_last)
        # A process that the trainer has forked holds the socket open after its death.
        with suppress(OSError):
            self._trainer = os.pidfd_open(setup.trainer)
            self._loop.add_reader(self._trainer, self._trainer_gone)
        if os.getppid() != setup.trainer:
            self._trainer_gone()
        self._inbox.put(Preparation(setup, parcel))

    def _take(self, job: Job) -> None:
        if self._keeper is not None:
            self._keeper.hold(job)
        self._inbox.put(job)

    def _drop(self, number: int) -> None:
        job = self._inbox.drop(number)
        if job is not None:
            if self._keeper is not None:
                self._keeper.let_go(number)
            job.close()
            self._channel.send(Dropped(number))

    def _close(self, message: Close) -> None:
        if message.keep:
            self._trainer_gone()
        else:
            self._told_to_end()

    def _told_to_end(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._signals, 512)
        self._keep = False
        self._end()

    def _trainer_gone(self) -> None:
        """Finish what was handed over, and keep the last snapshot if told to."""
        if self._trainer >= 0:  # it would be told again and again
            self._loop.remove_reader(self._trainer)
        self._channel.read()  # what it said last
        if self._ending:
            return
        self._end()
        if self._keeper is not None:
            self._keeper.start()

    def _end(self) -> None:
        if not self._ending:
            self._ending = True
            self._inbox.close()
            # Nobody is left to kill a writer that hangs.
            self._limit = self._loop.call_later(self._patience, os._exit, 1)

    def _seal(self, number: int, manifest: Manifest) -> None:
        if self._keeper is not None:
            self._keeper.seal(number, manifest)
