"""The server process, seen from the trainer: start it, replace it, publish through it.

A published snapshot stays the trainer's memory, which the server process maps. The
trainer stages into it again once the server says that nobody reads it any more.

A publication has two halves, so that a cancel never leaves it half done. First the
server gets everything that it needs, and answers that the snapshot is prepared. Then
the trainer tells it to publish, and waits for nothing.

A server process that dies is replaced at once, and its successor publishes what it
had published. So the trainer kills a process that does not answer. Receivers that
connect meanwhile wait in the backlog, since the trainer holds the listening sockets
too. The end of a process is an event (``restart``) and a line in the log.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from socket import SHUT_RDWR, socket
from typing import Final, NamedTuple

import msgspec

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    LocalProtocolError,
    StepNotFoundError,
    WorkerError,
    kept,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.http.fingerprint_tasks import PassingFailureError, failure_of
from aiockpt.http.handlers import CheckpointService, ServerConfig
from aiockpt.http.store import Failure, Statistics
from aiockpt.local import messages
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge, obtain
from aiockpt.runtime.children import Child, Pauses
from aiockpt.runtime.ipc import pack

logger = logging.getLogger("aiockpt")

_LOGGERS: Final = ("aiockpt", "aiockpt.runtime.bridge", "aiockpt.audit", "aiockpt.http")

_START_TIMEOUT: Final = 60.0  # seconds in which a process must serve
_MAX_FAILED_STARTS: Final = 3  # processes in a row that may die before they serve
_LOOK_INTERVAL: Final = 5.0  # seconds between two looks at whether a process is stopped
_ANSWER_TIMEOUT: Final = 60.0  # seconds in which a process must answer
_RETRACT_MARGIN: Final = 0.15  # seconds beyond the grace to answer a retraction
_KILL_TIMEOUT: Final = 0.1  # seconds for which a retraction waits for a killed process


@dataclass(slots=True)
class _ServingChild:
    """One process, until it is certainly gone.

    Attributes:
        child: The process.
        is_killed: Whether this side has killed it because it did not answer.
        statistics: Its figures; they may be 0.1 s old.
        unanswered: The messages that it has to answer, by number.
    """

    child: Child
    is_killed: bool = False
    statistics: Statistics = Statistics()  # noqa: RUF009 - frozen
    unanswered: dict[int, asyncio.Event] = field(default_factory=dict)


class _Life(NamedTuple):
    """How a process has ended, how long it lived, and whether it has served."""

    how: str
    seconds: float = 0.0
    served: bool = False
    was_killed: bool = False


class ServerProcess:
    """One server process after another, and what they have been told to serve.

    It is a `Publisher` as a `Store` is, and serves as a `CheckpointServer` does. One
    task supervises: it launches a process, waits for its end, and launches the next
    one. If several die before they serve, it gives up, until the next :meth:`start`.

    Args:
        config: What the processes need to know.
        bridge: Runs what blocks.
        compute: Returns the fingerprint of a snapshot as JSON. The processes ask for
            it, because they have no torch.

    Attributes:
        restarts: How many processes have died without being closed.
        retractions: How often it was told to serve nothing.
    """

    def __init__(
        self,
        config: ServerConfig,
        bridge: Bridge,
        compute: Callable[[Snapshot], Awaitable[bytes]],
    ) -> None:
        self.restarts = 0
        self.retractions = 0
        self._bridge = bridge
        self._config = config
        self._compute = compute
        self._computing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._error: WorkerError | None = None  # why it has given up
        self._started = asyncio.Event()  # a process serves, or none will
        self._running: _ServingChild | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._given: dict[int, Snapshot] = {}  # the process may read these
        self._current = 0  # the number of the published snapshot; 0: none
        self._failure: Failure | None = None
        self._before = Statistics()  # the sum of those of the processes that ended

    @property
    def pid(self) -> int | None:
        """The id of the process that serves, until it is certainly gone."""
        return self._running.child.pid if self._running else None

    @property
    def published(self) -> Snapshot | None:
        """The snapshot that is published now."""
        return self._given.get(self._current)

    @property
    def step(self) -> int | None:
        """The step that is published now."""
        return self.published.manifest.step if self.published else None

    def statistics(self) -> Statistics:
        """Return the figures of all processes; the last ones may be 0.1 s old."""
        found = self._before
        if self._running is not None:
            found += self._running.statistics
        return msgspec.structs.replace(found, step=self.step)

    def mount(self) -> CheckpointService:
        """Refuse: the handlers of an application run in its own process.

        Raises:
            LocalProtocolError: always.
        """
        raise LocalProtocolError(
            "handlers run in the application's process: leave out process=True"
        )

    # --------------------------------------------------- start, replace, close

    async def start(self, sockets: Sequence[socket]) -> None:
        """Start a process, and wait until it serves ``sockets``; idempotent.

        If cancelled, the process starts nevertheless.

        Raises:
            ClosedError: after :meth:`stop`.
            WorkerError: it cannot be started; another call tries again.
        """
        if not self._closed and (self._supervisor is None or self._error):
            self._error = None
            self._started.clear()
            self._supervisor = asyncio.create_task(self._supervise(sockets))
        await self._serves()

    async def stop(self) -> None:
        """Serve nothing for good; end the process. Idempotent.

        If cancelled, the process ends nevertheless.
        """
        self._closed = True
        self._started.set()
        self.retractions += 1
        self._current = 0
        if self._running is not None:
            self._running.child.kill()  # it has nothing that could get lost
        for task in self._computing:
            task.cancel()
        if tasks := {*self._computing, *filter(None, [self._supervisor])}:
            await asyncio.wait(tasks)
        self._take_back(*self._given)

    async def _serves(self) -> None:
        """Wait until a process serves; raise if none will."""
        assert self._supervisor or self._closed, "a transport starts it first"
        await self._started.wait()
        self._check()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the transport")
        if self._error is not None:
            raise kept(self._error)  # a raise adds the caller's frames

    async def _supervise(self, sockets: Sequence[socket]) -> None:
        """Launch processes until this is closed, or too many die at once."""
        pauses, failures = Pauses(), 0
        cause: BaseException | None = None
        while not self._closed and failures < _MAX_FAILED_STARTS:
            try:
                life, cause = await self._live(sockets), None
            except ClosedError:  # the bridge: the transport shuts down, and stops this
                break
            except (OSError, AiockptError) as error:
                life, cause = _Life(str(error)), kept(error)
            failures = 0 if life.served else failures + 1
            if life.was_killed or not self._closed:  # killed by a retraction
                self._emit_end(f"the server process has ended: {life.how}")
                self.restarts += 1
            if life.served and not life.was_killed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pauses.next(life.seconds)):
                        await self._started.wait()  # it is closed meanwhile
        if failures >= _MAX_FAILED_STARTS and not self._closed:
            self._error = WorkerError(f"no server process can be started: {life.how}")
            self._error.__cause__ = cause
            self._emit_end(str(self._error), logging.ERROR)
            self._current = 0
            self._take_back(*self._given)
            self._started.set()
        for each in sockets:  # or a receiver that connects would wait for nothing
            with suppress(OSError):
                each.shutdown(SHUT_RDWR)

    def _emit_end(self, detail: str, level: int = logging.WARNING) -> None:
        emit(TransferEvent(stop="restart", step=self.step, detail=detail, level=level))

    async def _live(self, sockets: Sequence[socket]) -> _Life:
        """Launch a process, tell it everything, and wait for its end."""
        child = await obtain(self._bridge, _launched, _abandon)
        running, loop = _ServingChild(child), asyncio.get_running_loop()
        began = loop.time()
        starting = asyncio.create_task(self._kill_if_starting(child))
        try:
            if not self._closed:
                # Nothing is awaited from here until the process has been told all.
                self._running = running
                child.listen(self._hear)
                levels = {n: logging.getLogger(n).getEffectiveLevel() for n in _LOGGERS}
                fds = [each.fileno() for each in sockets]
                self._tell(messages.Setup(levels, self._config), fds)
                if self._failure is not None:
                    self._tell(messages.Fail(self._failure))
                if (now := self.published) is not None:
                    self._tell_prepare(self._current, now, pack(now.manifest.header))
                    self._tell(messages.Publish(self._current))
                await child.gone.wait()
        finally:
            starting.cancel()
            served = self._started.is_set()
            if not self._closed:
                self._started.clear()
            code = await _end_of(child)
            self._before = self.statistics().counters()
            self._running = None
            if self._config.lends:  # it may have died before it said what it had lent
                for number in self._given:
                    self._spend(number)
            self._take_back(*self._given.keys() - {self._current})
            for answer in running.unanswered.values():
                answer.set()  # nobody waits for an answer any more
        seconds = loop.time() - began
        return _Life(f"exit code {code}", seconds, served, running.is_killed)

    async def _kill_if_starting(self, child: Child) -> None:
        """Kill a process that does not serve in time; waits for a core do not count."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _START_TIMEOUT
        while (left := until + child.starved - loop.time()) > 0:
            await asyncio.sleep(left)
            if self._started.is_set():
                return
        child.kill()

    # ------------------------------------------------------ publish and retract

    async def publish(self, snapshot: Snapshot, *, grace: float) -> None:
        """Serve ``snapshot`` from now on, instead of what was served before.

        If cancelled, the server still serves the old checkpoint.

        Raises:
            ClosedError: after :meth:`stop`.
            StepNotFoundError: :meth:`retract` was called meanwhile, and is final.
            WorkerError: no process can be started.
        """
        before, step = self.retractions, snapshot.manifest.step
        await self._serves()
        header = snapshot.manifest.header
        parcel = await obtain(self._bridge, lambda: pack(header), os.close)
        if self.retractions != before:  # it may even be closed by now
            os.close(parcel)
            raise StepNotFoundError(step)
        number = next(self._numbers)
        self._give(number, snapshot, parcel)
        try:
            await self._prepared(number)
            if self.retractions != before:
                raise StepNotFoundError(step)
            self._check()
        except BaseException:
            self._tell(messages.Forget(number))
            if self._running is None:  # no process gives it back
                self._take_back(number)
            raise
        # Nothing is awaited from here on. A dying process may not hear the message;
        # the next process gets the published snapshot at its start.
        if number not in self._given:  # it has died, and the next one may run by now
            self._give(number, snapshot, pack(header))
        self._current, self._failure = number, None
        self._tell(messages.Publish(number))

    def fail(self, failure: Failure | None) -> None:
        """Tell the receives that wait for a step that its send failed; None forgets."""
        self._failure = failure
        self._tell(messages.Fail(failure))

    async def retract(self, *, grace: float) -> None:
        """Serve nothing; once this returns, no byte of the old memory is read.

        A process that does not answer within the grace and 0.15 s is killed. This waits
        0.1 s for its end, which a starved system may delay. Memory that the process
        maps is neither changed nor taken away before that. Receivers that
        connect meanwhile wait in the backlog of the sockets, which the next process
        gets.
        """
        self.retractions += 1
        self._current = 0
        if self._running is None:  # no process gives anything back
            self._take_back(*self._given)
        elif self._given:
            number = next(self._numbers)
            self._tell(messages.Retract(number, grace))
            if not await self._answered(number, grace + _RETRACT_MARGIN):
                self._kill()
                await self._answered(number, _KILL_TIMEOUT)

    # ---------------------------------------------------------------- snapshots

    def _give(self, number: int, snapshot: Snapshot, parcel: int) -> None:
        snapshot.acquire()
        self._given[number] = snapshot
        try:
            self._tell_prepare(number, snapshot, parcel)
        except BaseException:  # no descriptor is left
            self._take_back(number)
            raise

    def _take_back(self, *numbers: int) -> None:
        for number in numbers:
            if (snapshot := self._given.pop(number, None)) is not None:
                snapshot.release()

    def _spend(self, number: int) -> None:
        if (snapshot := self._given.get(number)) and snapshot.arena:
            snapshot.arena.spent = True

    async def _prepared(self, number: int) -> None:
        """Wait for the process to answer or to be gone; kill one that hangs."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _ANSWER_TIMEOUT
        while not await self._answered(number, _LOOK_INTERVAL):
            is_late, running = loop.time() >= until, self._running
            if is_late or (running and running.child.is_stopped):
                self._kill()

    async def _answered(self, number: int, wait: float) -> bool:
        """Return whether the process answers a message in time, or is gone."""
        if self._running is None:
            return True
        unanswered = self._running.unanswered
        answer = unanswered[number] = asyncio.Event()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await answer.wait()
        finally:
            del unanswered[number]
        return answer.is_set()  # it may have come together with the timer

    def _kill(self) -> None:
        if self._running is not None:
            logger.warning("the server process does not answer, and is killed")
            self._running.is_killed = True
            self._running.child.kill()

    async def _fingerprint(self, number: int) -> None:
        """Answer a process that asks for the fingerprint of a snapshot."""
        snapshot = self._given.get(number)
        if snapshot is None:  # the process has released it meanwhile
            return
        snapshot.acquire()
        parcel = -1
        try:
            text = await self._compute(snapshot)
            parcel = await obtain(self._bridge, lambda: pack(text), os.close)
            self._tell(messages.Fingerprinted(number), [parcel])
        except Exception as error:  # noqa: BLE001 - the process waits for an answer
            failure = failure_of(snapshot.manifest.step, error)
            passes = isinstance(failure, PassingFailureError)
            self._tell(messages.Fingerprinted(number, failure.reason, passes))
        finally:
            snapshot.release()
            if parcel >= 0:
                os.close(parcel)

    # ---------------------------------------------------------------- messages

    def _tell(self, message: object, fds: Sequence[int] = ()) -> None:
        if self._running is not None:
            self._running.child.send(message, fds)

    def _tell_prepare(self, number: int, snapshot: Snapshot, parcel: int) -> None:
        """Send a snapshot; ``parcel`` has its header, and is closed."""
        assert snapshot.arena is not None, "the snapshot is in one piece"
        try:
            self._tell(messages.Prepare(number), [parcel, snapshot.arena.fd])
        finally:
            os.close(parcel)

    def _hear(self, data: bytes) -> None:
        assert self._running is not None, "it is heard until it is gone"
        message = messages.decode_from_server(data)
        if isinstance(message, messages.Ready):
            self._started.set()
        elif isinstance(message, messages.Obeyed):
            if answer := self._running.unanswered.get(message.number):
                answer.set()
        elif isinstance(message, messages.Released):
            if message.number != self._current:  # else it ends; the next one gets it
                self._take_back(message.number)
        elif isinstance(message, messages.Spent):
            self._spend(message.number)
        elif isinstance(message, messages.AskFingerprint):
            task = asyncio.create_task(self._fingerprint(message.number))
            self._computing.add(task)
            task.add_done_callback(self._computing.discard)
        elif isinstance(message, Statistics):
            self._running.statistics = message
        elif isinstance(message, messages.Emit):
            emit(message.event)
        else:
            assert isinstance(message, messages.LogLine)
            log = logging.getLogger(message.name)
            if log.isEnabledFor(message.level):
                log.log(message.level, "%s", message.access or message.text)


def _launched() -> Child:
    return Child("aiockpt.local._server_main", quiet=True)


def _abandon(child: Child) -> None:
    child.kill()
    child.close()


async def _end_of(child: Child) -> int | None:
    """Return the exit code of a process once it has ended; kill it if need be."""
    if not child.gone.is_set():
        child.kill()
    code = await child.exitcode(_LOOK_INTERVAL)
    if code is None:
        child.kill()
        code = await child.exitcode(math.inf)
    child.close()
    return code
