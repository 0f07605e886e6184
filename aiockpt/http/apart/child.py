"""What serves: a loop that only serves, and hears the trainer.

Nothing here imports torch. It ends with the trainer, or some time after it, if it is
to keep the last checkpoint for those who come later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from contextlib import suppress
from typing import Any, Final, TypeVar

from aiockpt.http.apart.forwarding import Forwarding
from aiockpt.http.apart.messages import (
    Counted,
    Done,
    Fail,
    Forget,
    FromServer,
    Prepare,
    Publish,
    Ready,
    Released,
    Retract,
    Setup,
    decode_to_server,
)
from aiockpt.http.apart.servable import Servable
from aiockpt.http.lending import Lender
from aiockpt.http.server import CheckpointServer
from aiockpt.http.store import Store
from aiockpt.memory.mapped import trusted_header
from aiockpt.runtime.background import leave_terminal
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.channel import Channel, unpack

__all__ = ["Serving", "main"]

logger = logging.getLogger("aiockpt")

T = TypeVar("T")

_TICK: Final = 0.1
"""Seconds between two looks at the counters, and at who still reads."""


class _RetractedError(Exception):
    """The trainer has retracted what was to be prepared, and did not wait for us."""


def main(fd: int) -> None:
    """Serve what the trainer at the other end of a socket publishes, until its end."""
    leave_terminal()
    asyncio.run(_run(Serving(socket.socket(fileno=fd))))


async def _run(serving: Serving) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.end)
    await serving.run()


class Serving:
    """One life of what serves, on a loop of its own.

    Args:
        sock: Its end of the channel to the trainer.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ended = asyncio.Event()
        self._forwarding = Forwarding(self._forward)
        self._store = Store()
        self._bridge = Bridge(threads=1, name="aiockpt-serve")
        self._server: CheckpointServer | None = None
        self._lender: Lender | None = None
        self._setup: Setup | None = None
        self._counted: Counted | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._prepared: dict[int, asyncio.Task[Servable]] = {}
        self._trainer = -1
        self._alone = False

    def __repr__(self) -> str:
        return f"<Serving {self._server}>"

    async def run(self) -> None:
        """Serve until the trainer says so, or has gone."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._channel = Channel(self._sock, self._hear, self._trainer_gone)
        ticking = self._loop.create_task(self._tick())
        try:
            await self._ended.wait()
        finally:
            ticking.cancel()
            await self._stop()

    def end(self) -> None:
        """Have it end."""
        self._ended.set()

    def say(self, message: FromServer) -> None:
        """Tell the trainer, if there is one."""
        if not self._alone:
            self._channel.send(message)

    def _forward(self, message: FromServer) -> None:
        """Tell the trainer what a thread has told, which may not be the loop's."""
        if threading.get_ident() == self._thread:
            self.say(message)
        else:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self.say, message)

    async def _stop(self) -> None:
        try:
            await self._stop_serving()
        finally:
            for preparing in self._prepared.values():
                preparing.add_done_callback(_let_go)
            self._channel.close()
            if self._trainer >= 0:
                self._loop.remove_reader(self._trainer)
                os.close(self._trainer)
            await self._bridge.aclose(timeout=_TICK)

    async def _stop_serving(self) -> None:
        await self._store.close()
        if self._lender is not None:
            await self._lender.aclose()
        if self._server is not None:
            await self._server.stop()

    # ------------------------------------------------------------ the trainer

    def _hear(self, data: bytes, fds: list[int]) -> None:
        message = decode_to_server(data)
        if isinstance(message, Setup):
            self._start(self._set_up(message, [socket.socket(fileno=fd) for fd in fds]))
        elif isinstance(message, Prepare):
            preparing = self._start(self._prepare(message, *fds))
            self._prepared[message.number] = preparing
        elif isinstance(message, Publish):
            self._publish(self._prepared.pop(message.number))
        elif isinstance(message, Forget):
            self._prepared.pop(message.number).add_done_callback(_let_go)
        elif isinstance(message, Retract):
            self._start(self._retract(message))
        else:
            assert isinstance(message, Fail)
            self._store.fail(message.failure)

    def _start(self, coroutine: asyncio._CoroutineLike[T]) -> asyncio.Task[T]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, _RetractedError):
            logger.error("what serves ends", exc_info=error)
            self._ended.set()

    async def _set_up(self, setup: Setup, sockets: list[socket.socket]) -> None:
        self._setup = setup
        self._forwarding.start(setup.levels)
        # A process that the trainer has forked holds the channel open after its death.
        with suppress(OSError, AttributeError):
            self._trainer = os.pidfd_open(setup.trainer)
            self._loop.add_reader(self._trainer, self._trainer_gone)
        if os.getppid() != setup.trainer:
            self._trainer_gone()
        if setup.lends:
            most = setup.config.max_readers
            self._lender = Lender(self._store, self._bridge, most=most)
        await self._be_nice(setup.nice)
        self._store.keep_superseded = setup.config.keep_superseded
        self._server = CheckpointServer(self._store, setup.config, self._lender)
        await self._server.start(sockets)
        self.say(Ready())

    async def _be_nice(self, nice: int) -> None:
        """Leave the cores to others, but not where something is prepared in time.

        A niceness is a thread's, which hands it to those that it starts: the bridge
        has its thread by now.
        """
        await self._bridge.run(threading.get_ident)
        os.nice(nice)

    async def _prepare(self, message: Prepare, parcel: int, arena: int) -> Servable:
        number, lends = message.number, self._lender is not None
        try:
            manifest = await self._bridge.run(trusted_header, unpack(parcel))
            servable = Servable(manifest, arena, number, self.say, lends=lends)
        except ValueError:  # it has shrunk: the trainer has retracted it meanwhile
            self.say(Released(number))
            raise _RetractedError from None
        finally:
            os.close(arena)
            self.say(Done(number))
        return servable

    def _publish(self, preparing: asyncio.Task[Servable]) -> None:
        before = self._store.retractions

        def publish(prepared: asyncio.Task[Servable]) -> None:
            wanted = not self._ended.is_set() and self._store.retractions == before
            if wanted and prepared.exception() is None:
                self._store.replace(prepared.result())
            _let_go(prepared)

        if preparing.done():
            publish(preparing)  # now: who asks next has heard of it
        else:
            preparing.add_done_callback(publish)

    async def _retract(self, message: Retract) -> None:
        await self._store.retract(grace=message.grace)
        self.say(Done(message.number))

    def _trainer_gone(self) -> None:
        """End, or keep the last checkpoint for those who come."""
        if self._alone:
            return
        self._channel.read()  # what it said last
        self._alone = True
        if self._trainer >= 0:
            self._loop.remove_reader(self._trainer)
        if self._setup is None or not self._setup.keep_last or not self._store.latest:
            self._ended.set()
        else:
            _let_go_of_stderr()
            self._start(self._outlive(self._setup.keep_last))

    async def _outlive(self, keep_last: float) -> None:
        """Serve until nobody has read anything for a while."""
        until = self._loop.time() + keep_last
        seen = 0
        while self._loop.time() < until:
            await asyncio.sleep(min(_TICK, keep_last))
            assert self._server is not None
            now = self._server.statistics()
            if now.readers or now.requests != seen:
                seen, until = now.requests, self._loop.time() + keep_last
        self._ended.set()

    # ------------------------------------------------ what there is to be seen

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            if self._server is not None and not self._channel.full:
                lent = self._lender.count if self._lender else 0
                now = Counted(self._store.statistics(), self._server.statistics(), lent)
                if now != self._counted:
                    self._counted = now
                    self.say(now)


def _let_go(preparing: asyncio.Task[Servable]) -> None:
    if not preparing.cancelled() and preparing.exception() is None:
        preparing.result().release()


def _let_go_of_stderr() -> None:
    """Close the trainer's pipe, whose reader would take us for the trainer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
