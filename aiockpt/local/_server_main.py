"""The server process: a loop that only serves, and obeys its trainer.

Nothing here imports torch. The process ends with the trainer, or some time after it
if it is to keep the last checkpoint for receivers that come later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypeVar

from aiockpt.errors import PeerFailedError
from aiockpt.events import TransferEvent, add_hook
from aiockpt.format.manifest import Manifest
from aiockpt.http.audit import Access
from aiockpt.http.fingerprint_tasks import PassingFailureError
from aiockpt.http.server import CheckpointServer
from aiockpt.http.store import Statistics, Store
from aiockpt.local import messages
from aiockpt.local.lender import Lender
from aiockpt.local.messages import FromServer
from aiockpt.memory.arena import Lendable, sealed
from aiockpt.memory.snapshot import MappedSnapshot, trusted_header
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.children import Parent, ignore_signals_of_trainer
from aiockpt.runtime.ipc import close_all, unpack
from aiockpt.runtime.system import raise_descriptor_limit
from aiockpt.swarm.endpoint import SwarmEndpoint

logger = logging.getLogger("aiockpt")

T = TypeVar("T")
Tell: TypeAlias = Callable[[FromServer], None]

_TICK_S: Final = 0.1  # between two looks at the counters
_NO_TRAINER: Final = "the trainer has ended, which computes fingerprints"


def main(fd: int, trainer: int) -> None:
    """Serve what the trainer publishes, until its end; see `Parent`."""

    async def serve() -> None:
        await ServerMain(fd, trainer).run()

    ignore_signals_of_trainer()
    raise_descriptor_limit()
    asyncio.run(serve())


class ServerMain:
    """The life of a server process: set up, serve, end.

    Args:
        fd, trainer: As of `Parent`.
    """

    def __init__(self, fd: int, trainer: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._ended = asyncio.Event()
        self._bridge = Bridge(threads=1, name="aiockpt-serve")
        self._server: CheckpointServer | None = None
        self._keep_last = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._prepared: dict[int, asyncio.Task[TrainersSnapshot]] = {}
        self._fingerprints: dict[int, asyncio.Future[bytes]] = {}
        self._is_orphan = False
        self._trainer = Parent(fd, trainer, self._hear, self._outlive_trainer)
        self._loop.add_signal_handler(signal.SIGTERM, self._ended.set)

    async def run(self) -> None:
        """Serve until the trainer ends this process, or has ended itself."""
        counting = self._loop.create_task(self._tell_statistics())
        try:
            await self._ended.wait()
        finally:
            counting.cancel()
            try:
                if self._server is not None:
                    await self._server.stop()
            finally:
                for preparing in self._prepared.values():
                    preparing.add_done_callback(_release)
                self._trainer.close()
                await self._bridge.aclose(timeout=_TICK_S)

    @property
    def _store(self) -> Store:
        assert self._server is not None, "the setup is the first message"
        return self._server.store

    # ------------------------------------------------------- to the trainer

    def _tell_from_any_thread(self, message: FromServer) -> None:
        if threading.get_ident() == self._thread:
            self._trainer.send(message)
        else:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._trainer.send, message)

    async def _tell_statistics(self) -> None:
        told: Statistics | None = None
        while True:
            await asyncio.sleep(_TICK_S)
            if self._server is None or self._trainer.full:
                continue
            now = self._server.statistics()
            if now != told:
                told = now
                self._trainer.send(now)

    # ----------------------------------------------------- from the trainer

    def _hear(self, data: bytes, fds: list[int]) -> None:
        message = messages.decode_to_server(data)
        if isinstance(message, messages.Setup):
            config, options = message.config, message.config.options
            self._keep_last, store = options.keep_last, Store(options)
            extension = SwarmEndpoint(config, self._bridge, store)
            lender = Lender(config, self._bridge, store) if config.lends else None
            self._server = CheckpointServer(
                config, store, extension, lender, self._ask_fingerprint
            )
            _forward_logs(message.levels, self._tell_from_any_thread)
            self._spawn(self._start(self._server, fds, options.nice))
        elif isinstance(message, messages.Prepare):
            preparing = self._spawn(self._prepare(message.number, *fds))
            self._prepared[message.number] = preparing
        elif isinstance(message, messages.Publish):
            self._publish(self._prepared.pop(message.number))
        elif isinstance(message, messages.Forget):
            self._prepared.pop(message.number).add_done_callback(_release)
        elif isinstance(message, messages.Retract):
            self._spawn(self._retract(message))
        elif isinstance(message, messages.Fingerprinted):
            self._take_fingerprint(message, fds)
        else:
            assert isinstance(message, messages.Fail)
            self._store.fail(message.failure)

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the server process ends", exc_info=error)
            self._ended.set()

    async def _start(self, server: CheckpointServer, fds: list[int], nice: int) -> None:
        # A thread inherits the niceness of the thread that starts it. The trainer
        # waits for the bridge's thread, so that starts first and stays as it is.
        await self._bridge.run(threading.get_ident)
        os.nice(nice)
        sockets = [socket.socket(fileno=fd) for fd in fds]
        await server.start(sockets)
        for each in sockets:  # it has copies
            each.close()
        self._trainer.send(messages.Ready())

    async def _prepare(self, number: int, header: int, arena: int) -> TrainersSnapshot:
        try:
            manifest = await self._bridge.run(trusted_header, unpack(header))
            return TrainersSnapshot(manifest, arena, number, self._trainer.send)
        except BaseException:
            os.close(arena)
            raise
        finally:
            self._trainer.send(messages.Obeyed(number))

    def _publish(self, preparing: asyncio.Task[TrainersSnapshot]) -> None:
        before = self._store.retractions

        def publish(prepared: asyncio.Task[TrainersSnapshot]) -> None:
            wanted = not self._ended.is_set() and self._store.retractions == before
            if wanted and prepared.exception() is None:
                self._store.replace(prepared.result())
            _release(prepared)

        if preparing.done():
            publish(preparing)  # at once: a receiver may have heard of it already
        else:
            preparing.add_done_callback(publish)

    async def _ask_fingerprint(self, snapshot: TrainersSnapshot) -> bytes:
        """Return the fingerprint of a snapshot, which the trainer computes."""
        if self._is_orphan:
            raise PeerFailedError(None, _NO_TRAINER)
        number = snapshot.number
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._fingerprints[number] = answer
        try:
            self._trainer.send(messages.AskFingerprint(number))
            return await answer
        finally:
            del self._fingerprints[number]

    def _take_fingerprint(
        self, message: messages.Fingerprinted, fds: list[int]
    ) -> None:
        answer = self._fingerprints.get(message.number)
        if answer is None or answer.done():  # nobody waits for it any more
            close_all(fds)
        elif fds:
            answer.set_result(unpack(*fds))
        else:
            kind = PassingFailureError if message.passes else PeerFailedError
            answer.set_exception(kind(None, message.error))

    async def _retract(self, message: messages.Retract) -> None:
        await self._store.retract(grace=message.grace)
        self._trainer.send(messages.Obeyed(message.number))

    # -------------------------------------------------- the trainer has gone

    def _outlive_trainer(self) -> None:
        """End, or keep the last checkpoint for receivers that come later."""
        self._is_orphan = True
        for answer in self._fingerprints.values():
            if not answer.done():
                answer.set_exception(PeerFailedError(None, _NO_TRAINER))
        if not self._keep_last or not self._store.latest:
            self._ended.set()
        else:
            self._spawn(self._serve_on(self._keep_last))

    async def _serve_on(self, keep_last: float) -> None:
        """Serve until nobody has read anything for ``keep_last`` seconds."""
        assert self._server is not None, "it has a checkpoint to serve"
        # The reader of the trainer's pipe must not take this process for the trainer.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        until, seen = self._loop.time() + keep_last, 0
        while self._loop.time() < until:
            await asyncio.sleep(min(_TICK_S, keep_last))
            now = self._server.statistics()
            if now.readers or now.requests != seen:
                seen, until = now.requests, self._loop.time() + keep_last
        self._ended.set()


def _release(preparing: asyncio.Task[TrainersSnapshot]) -> None:
    if not preparing.cancelled() and preparing.exception() is None:
        preparing.result().release()


def _forward_logs(levels: Mapping[str, int], tell: Tell) -> None:
    """Send the records of these loggers, and all events, to the trainer.

    ``tell`` is called from any thread. An event's own record is left out, since the
    trainer logs the event.
    """
    formatted = logging.Formatter().format

    def forward(record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        first = args[0] if args else None
        if not isinstance(first, TransferEvent):
            access = first if isinstance(first, Access) else None
            text, level = formatted(record), record.levelno
            tell(messages.LogLine(record.name, level, text, access))
        return False  # not logged here

    for name, level in levels.items():
        logging.getLogger(name).addFilter(forward)
        logging.getLogger(name).setLevel(level)
    add_hook(lambda event: tell(messages.Emit(event)))


class TrainersSnapshot(MappedSnapshot):
    """A snapshot in the trainer's memory, until its last reader has gone.

    It is `Lendable`, too: the trainer is told when another process keeps the memory.

    Args:
        manifest: The manifest of the snapshot.
        fd: A descriptor of its memory, which belongs to the snapshot from now on.
        number: The trainer's number for it.
        tell: Sends a message to the trainer.

    Attributes:
        number: As given.
    """

    live = False

    def __init__(self, manifest: Manifest, fd: int, number: int, tell: Tell) -> None:
        super().__init__(manifest, fd)
        self.have = (1 << len(manifest.grid)) - 1
        self.fd, self._lent_fd, self._spent = fd, -1, False
        self._references = 1
        self.number, self._tell = number, tell

    @property
    def arena(self) -> Lendable:
        """The memory, to lend it."""
        return self

    @property
    def spent(self) -> bool:
        """Whether another process keeps the memory."""
        return self._spent

    @spent.setter
    def spent(self, spent: bool) -> None:
        if spent and not self._spent:
            self._tell(messages.Spent(self.number))
        self._spent = spent

    def lend(self) -> int:
        """Return a read-only descriptor, which stays ours; runs in a thread.

        Raises:
            OSError: the kernel cannot seal the memory.
        """
        if self._lent_fd < 0:
            self._lent_fd = sealed(self.fd)
        return self._lent_fd

    def acquire(self) -> None:
        """Keep the memory unchanged until :meth:`release`; calls are counted."""
        self._references += 1

    def release(self) -> None:
        """Undo one :meth:`acquire`; after the last one the trainer may reuse it."""
        self._references -= 1
        if not self._references:
            close_all(fd for fd in (self.fd, self._lent_fd) if fd >= 0)
            self.fd = self._lent_fd = -1
            self.close()
            self._tell(messages.Released(self.number))
