"""The server process, seen from the trainer: start it, replace it, publish through it.

A published snapshot stays the trainer's memory, which the server process maps. The
trainer stages into it again once the server says that nobody reads it any more.

A publication has two halves, so that a cancel never leaves it half done. First the
server gets everything that it needs, and answers that the snapshot is prepared. Then
the trainer tells it to publish, and waits for nothing.

A server process that dies is replaced at once, and its successor publishes what it
had published. Receivers that connect meanwhile wait, since the trainer holds the
listening sockets too.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from socket import SHUT_RDWR, socket
from typing import Final

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    LocalProtocolError,
    StepNotFoundError,
    WorkerError,
    kept,
)
from aiockpt.events import emit
from aiockpt.http.handlers import CheckpointService, ServerConfig, ServerStatistics
from aiockpt.http.relay import Relay
from aiockpt.http.server import Counters
from aiockpt.http.server_messages import (
    Done,
    EndRelay,
    Event,
    Fail,
    Forget,
    Held,
    LogLine,
    Prepare,
    Publish,
    Ready,
    Relayed,
    RelayEnded,
    Released,
    Retract,
    Setup,
    Spent,
    decode_from_server,
)
from aiockpt.http.store import Failure, StoreStatistics
from aiockpt.memory.arena import Arena
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge, obtain
from aiockpt.runtime.children import Child, Pauses
from aiockpt.runtime.ipc import pack

__all__ = ["ServerProcess"]

logger = logging.getLogger("aiockpt")

_LOGGERS: Final = ("aiockpt", "aiockpt.runtime.bridge", "aiockpt.audit", "aiockpt.http")

_STARTING: Final = 60.0  # seconds until a new process must serve, on a busy machine
_TRIES: Final = 3  # processes in a row that may die before they serve
_LOOK_INTERVAL: Final = 5.0  # seconds between two looks at whether a process is stopped
_HUNG: Final = 60.0  # seconds until a process that runs and does not answer is killed
_MARGIN: Final = 0.15  # seconds beyond the grace in which a retraction is answered
_SHRINKING: Final = 0.05  # seconds to take memory away before the process is paused
_POLL: Final = 0.01  # seconds between two looks at the state of a process


class _State(enum.Enum):
    """What a call may expect of the server process."""

    NEW = "new"  # nobody has called start()
    STARTING = "starting"  # one is being launched, or replaced
    SERVING = "serving"
    BROKEN = "broken"  # several died before they served; start() tries again
    CLOSED = "closed"


class ServerProcess:
    """One server process after another, and what they have been told to serve.

    It does what a `CheckpointServer` and its `Store` do for a transport that serves on
    its own loop. One task supervises: it launches a process, waits for its end, and
    launches the next one.

    Args:
        config: What the processes need to know.
        bridge: Runs what blocks.

    Attributes:
        restarts: How many processes have died without being closed.
        retractions: How often it was told to serve nothing.
    """

    def __init__(self, config: ServerConfig, bridge: Bridge) -> None:
        self.restarts = 0
        self.retractions = 0
        self._bridge = bridge
        self._config = config
        self._state = _State.NEW
        self._pauses = Pauses()
        self._began = 0.0  # when the process was started
        self._settled = asyncio.Event()  # it is serving, broken or closed
        self._child: Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._error: WorkerError | None = None
        self._numbers = itertools.count(1)
        self._given: dict[int, Snapshot] = {}  # the server may read these
        self._current = 0  # the number of what is published; 0: nothing
        self._failure: Failure | None = None
        self._unanswered: dict[int, asyncio.Event] = {}
        self._shrinking: set[asyncio.Task[None]] = set()
        self._relays: dict[Relay, tuple[int, asyncio.Task[None]]] = {}
        self._last = Counters()  # of the process that runs
        self._before = Counters()  # the sum of those that have ended

    def __repr__(self) -> str:
        return (
            f"<ServerProcess {self._state.value} pid={self.pid} "
            f"restarts={self.restarts} given={len(self._given)}>"
        )

    @property
    def pid(self) -> int | None:
        """The id of the process that serves, until it is certainly gone."""
        return self._child.pid if self._child else None

    @property
    def _closed(self) -> bool:
        return self._state is _State.CLOSED

    def counters(self) -> Counters:
        """Return the counters of all processes; the last ones may be 0.1 s old."""
        pairs = zip(self._before.server, self._last.server, strict=True)
        return Counters(
            self.statistics(),
            ServerStatistics(*map(sum, pairs)),
            self._before.lent + self._last.lent,
        )

    def statistics(self) -> StoreStatistics:
        """Return what the process said last about its store."""
        current = self._given.get(self._current)
        step = current.manifest.step if current else None
        return self._last.store._replace(step=step)

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
        if self._state in (_State.NEW, _State.BROKEN):
            self._become(_State.STARTING)
            loop = asyncio.get_running_loop()
            self._supervisor = loop.create_task(self._supervise(sockets))
        await self._serves()

    async def stop(self) -> None:
        """Serve nothing for good; end the process. Idempotent.

        If cancelled, the process ends nevertheless.
        """
        self._become(_State.CLOSED)
        self.retractions += 1
        self._current = 0
        for relay in self._relays:
            relay.end()
        if self._child is not None:
            self._child.kill()  # it has nothing that could get lost
        if self._supervisor is not None:
            await asyncio.wait({self._supervisor})
        self._take_back(*self._given)
        if self._shrinking:
            await asyncio.wait(self._shrinking)

    def _become(self, state: _State) -> None:
        if self._state is not _State.CLOSED:
            self._state = state
        if self._state is _State.STARTING:
            self._settled.clear()
        else:
            self._settled.set()

    async def _serves(self) -> None:
        """Wait until a process serves; raise if none will."""
        assert self._state is not _State.NEW, "a transport starts it first"
        await self._settled.wait()
        self._check()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the transport")
        if self._state is _State.BROKEN:
            assert self._error is not None, "broken with a reason"
            raise kept(self._error)  # a raise adds the caller's frames

    async def _supervise(self, sockets: Sequence[socket]) -> None:
        """Launch processes until the store is closed, or too many die at once."""
        tries, how, cause = 0, "", None
        while not self._closed and tries < _TRIES:
            self._become(_State.STARTING)
            started: list[Child] = []
            served = False
            try:
                await self._bridge.run(_start_into, started)
                served = await self._live(started[0], sockets)
                cause = None
            except (OSError, AiockptError) as error:
                how, cause = str(error), kept(error)
            finally:
                for child in started:
                    ended = await self._end_of(child)
                    how = ended if cause is None else how
                self._child = None
                self._clean_up()
            tries = 0 if served else tries + 1
            if not self._closed:
                logger.warning("the server process has ended: %s", how)
                self.restarts += 1
                if served:
                    await self._rest()
        if not self._closed:
            self._error = WorkerError(f"no server process can be started: {how}")
            self._error.__cause__ = cause
            logger.error("%s", self._error)
            self._current = 0
            self._take_back(*self._given)
            self._become(_State.BROKEN)
        for each in sockets:  # or a receiver that connects would wait for nothing
            with suppress(OSError):
                each.shutdown(SHUT_RDWR)

    async def _rest(self) -> None:
        """Wait before the next process, longer after each short life."""
        pause = self._pauses.next(asyncio.get_running_loop().time() - self._began)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._settled.wait()  # it is closed meanwhile

    async def _live(self, child: Child, sockets: Sequence[socket]) -> bool:
        """Tell a new process everything, and wait for its end; say if it served."""
        if self._closed:
            return False
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._late = loop.call_later(_STARTING, self._kill_if_starting, child)
        try:
            # Nothing is awaited from here until the process has been told all.
            child.listen(self._hear)
            self._child = child
            self._tell(self._setup(), [each.fileno() for each in sockets])
            if self._failure is not None:
                self._tell(Fail(self._failure))
            if self._current:
                snapshot = self._given[self._current]
                self._tell_prepare(self._current, snapshot, _pack(snapshot))
                self._tell(Publish(self._current))
            await child.gone.wait()
        finally:
            self._late.cancel()
            served = self._state is _State.SERVING
            self._become(_State.STARTING)
        return served

    async def _end_of(self, child: Child) -> str:
        """Wait for the end of a process, kill it if need be; say how it ended."""
        if not child.gone.is_set():
            child.kill()
        code = await child.exitcode(_LOOK_INTERVAL)
        if code is None:
            child.kill()
            code = await child.exitcode(math.inf)
        child.close()
        return f"exit code {code}"

    def _kill_if_starting(self, child: Child) -> None:
        if self._state is not _State.STARTING:
            return
        loop = asyncio.get_running_loop()
        # Time without a core is not the process's.
        left = self._began + _STARTING + child.starved - loop.time()
        if left > 0:
            self._late = loop.call_later(left, self._kill_if_starting, child)
        else:
            child.kill()

    def _setup(self) -> Setup:
        levels = {n: logging.getLogger(n).getEffectiveLevel() for n in _LOGGERS}
        return Setup(levels, self._config)

    def _clean_up(self) -> None:
        """Take back what a dead process had; nobody waits for its answers any more."""
        now = self.counters()
        self._before = Counters(
            server=now.server._replace(readers=0, waiting=0), lent=now.lent
        )
        self._last = Counters()
        if self._config.lends:  # it may have died before it said what it had lent
            for number in self._given:
                self._spend(number)
        self._take_back(*self._given.keys() - {self._current})
        for relay in self._relays:
            relay.end()  # the next process does not have it
        for answer in self._unanswered.values():
            answer.set()

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
        parcel = await obtain(self._bridge, lambda: _pack(snapshot), os.close)
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
            self._tell(Forget(number))
            if self._supervisor is None or self._supervisor.done():
                self._take_back(number)  # no process gives it back
            raise
        # Nothing is awaited from here on: what a dying process does not hear, the
        # next one is told.
        if number not in self._given:  # it has died, and the next one may run by now
            self._give(number, snapshot, _pack(snapshot))
        self._current, self._failure = number, None
        self._tell(Publish(number))

    def fail(self, failure: Failure | None) -> None:
        """Tell the receives that wait for a step that its send failed; None forgets."""
        self._failure = failure
        self._tell(Fail(failure))

    async def retract(self, *, grace: float) -> None:
        """Serve nothing; once this returns, no byte of the old memory is read.

        If the process does not answer within the grace and 0.15 s, it may only be
        slow on a busy machine. It goes on, but loses the memory.
        """
        self.retractions += 1
        self._current = 0
        if self.pid is None:  # no process gives anything back
            self._take_back(*self._given)
        elif self._given:
            doomed, number = tuple(self._given), next(self._numbers)
            self._tell(Retract(number, grace))
            if not await self._answered(number, grace + _MARGIN):
                await self._revoke(doomed)

    # ----------------------------------------------------------------- relays

    async def relay(self, relay: Relay) -> None:
        """Serve a checkpoint that is being received, whose memory is shared.

        Once this returns, the process serves it. If the process dies, the relay ends.
        If cancelled, the process may serve it until :meth:`end_relay`.

        Raises:
            ClosedError: after :meth:`stop`.
            WorkerError: no process can be started, or the relay has ended meanwhile.
            LocalProtocolError: the process cannot map the memory.
        """
        memory, number = relay.memory, next(self._numbers)
        if not isinstance(memory, Arena) or memory.fd < 0:
            raise LocalProtocolError(
                "the server process cannot map the memory of this receive: leave out "
                "direct=True"
            )
        header = relay.manifest.header
        parcel = await obtain(self._bridge, lambda: pack(header), os.close)
        try:
            await self._serves()  # as the last thing: a process may die meanwhile
            _check_relay(relay)
            message = Relayed(number, relay.token, dict(relay.headers))
            self._tell(message, [parcel, memory.fd])
        finally:
            os.close(parcel)
        telling = asyncio.create_task(self._tell_held(number, relay))
        self._relays[relay] = number, telling
        await self._prepared(number)
        self._check()
        _check_relay(relay)

    async def end_relay(self, relay: Relay) -> None:
        """Serve it no more; once this returns, no byte of it is read. Idempotent.

        If the process does not answer within 5 s, this returns with a warning, and the
        process may read for longer. What it sends then may have changed, and its
        readers refuse that.
        """
        relay.end()
        found = self._relays.pop(relay, None)
        if found is not None:
            (relayed, telling), number = found, next(self._numbers)
            self._tell(EndRelay(number, relayed))
            if not await self._answered(number, _LOOK_INTERVAL):
                logger.warning("the server process is slow to end a relay")
            await asyncio.wait({telling})

    def _end(self, number: int) -> None:
        for relay, (its_number, _) in self._relays.items():
            if its_number == number:
                relay.end()

    async def _tell_held(self, number: int, relay: Relay) -> None:
        seen, was_lent = 0, False
        while not relay.ended:
            new = relay.order[seen:]
            if new or relay.is_lent is not was_lent:
                seen, was_lent = seen + len(new), relay.is_lent
                self._tell(Held(number, new, relay.is_lent))
            else:
                await relay.news.wait(None)

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
            snapshot = self._given.pop(number, None)
            if snapshot is not None:
                snapshot.release()

    def _spend(self, number: int) -> None:
        snapshot = self._given.get(number)
        if snapshot is not None and snapshot.arena is not None:
            snapshot.arena.spent = True

    async def _prepared(self, number: int) -> None:
        """Wait for the process to answer or to be gone; kill one that hangs."""
        loop = asyncio.get_running_loop()
        hung = loop.time() + _HUNG
        while not await self._answered(number, _LOOK_INTERVAL):
            # A process that was paused is stopped, too, and goes on soon.
            if loop.time() >= hung or (self._is_stopped and not self._shrinking):
                self._kill()

    async def _answered(self, number: int, patience: float) -> bool:
        """Return whether the process answers a message in time, or is gone."""
        if self.pid is None:
            return True
        answer = self._unanswered[number] = asyncio.Event()
        try:
            async with asyncio.timeout(patience):
                await answer.wait()
        except TimeoutError:
            pass  # the answer may have come together with the timer
        finally:
            del self._unanswered[number]
        return answer.is_set()

    async def _revoke(self, numbers: Iterable[int]) -> None:
        """Take memory away from the process, whatever it does.

        A slow process is not killed for that: its memory shrinks to nothing, so that
        the kernel refuses to read it. For gigabytes that takes seconds, which nobody
        waits for: the process is paused meanwhile. Only two kinds are killed: a process
        that is stopped, and one whose memory was lent, which is sealed and cannot
        shrink.
        """
        if self._is_stopped and not self._shrinking:
            self._kill()
            return
        revoked = {n: self._given[n] for n in numbers if n in self._given}
        for snapshot in revoked.values():  # or its memory might be staged into again
            snapshot.acquire()
        shrinking = asyncio.create_task(self._shrink(revoked))
        self._shrinking.add(shrinking)
        await asyncio.wait({shrinking}, timeout=_SHRINKING)
        child = self._child
        if shrinking.done() or child is None:
            return
        child.pause()
        over = child.gone.is_set
        while not (shrinking.done() or child.is_stopped or over()):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(_POLL)

    async def _shrink(self, revoked: Mapping[int, Snapshot]) -> None:
        """Shrink the memory of these; kill a process that keeps it all the same."""
        try:
            for arena in {snapshot.arena for snapshot in revoked.values()}:
                assert arena is not None, "the snapshot is in one piece"
                await self._bridge.run(arena.revoke)
            self._take_back(*revoked)
        except (OSError, ClosedError):  # it was lent; or the transport is closing
            self._kill()
        finally:
            task = asyncio.current_task()
            assert task is not None, "a task of its own"
            self._shrinking.discard(task)
            if not self._shrinking and self._child is not None:
                self._child.resume()
            for snapshot in revoked.values():
                snapshot.release()

    @property
    def _is_stopped(self) -> bool:
        return self._child is not None and self._child.is_stopped

    def _kill(self) -> None:
        if self._child is not None:
            logger.warning("the server process does not answer, and is killed")
            self._child.kill()

    # ---------------------------------------------------------------- messages

    def _tell(self, message: object, fds: Sequence[int] = ()) -> None:
        if self._child is not None:
            self._child.send(message, fds)

    def _tell_prepare(self, number: int, snapshot: Snapshot, parcel: int) -> None:
        assert snapshot.arena is not None, "the snapshot is in one piece"
        try:
            self._tell(Prepare(number), [parcel, snapshot.arena.fd])
        finally:
            os.close(parcel)

    def _hear(self, data: bytes) -> None:
        message = decode_from_server(data)
        if isinstance(message, Ready):
            self._become(_State.SERVING)
        elif isinstance(message, Done):
            if message.number in self._unanswered:
                self._unanswered[message.number].set()
        elif isinstance(message, Released):
            if message.number != self._current:  # else it ends; the next one gets it
                self._take_back(message.number)
        elif isinstance(message, Spent):
            self._spend(message.number)
        elif isinstance(message, RelayEnded):
            self._end(message.number)
        elif isinstance(message, Counters):
            self._last = message
        elif isinstance(message, Event):
            emit(message.event)
        else:
            assert isinstance(message, LogLine)
            log = logging.getLogger(message.name)
            if log.isEnabledFor(message.level):
                log.log(message.level, "%s", message.access or message.text)


def _check_relay(relay: Relay) -> None:
    if relay.ended:
        raise WorkerError("the relay ended before the server process served it")


def _pack(snapshot: Snapshot) -> int:
    """Return a descriptor of memory that holds the snapshot's header."""
    return pack(snapshot.manifest.header)


def _start_into(started: list[Child]) -> None:
    # A cancelled call returns nothing, so the thread leaves its result in a list.
    started.append(Child("aiockpt.http._server_main", quiet=True))
