"""The store of a process that serves, as the trainer sees it.

What is published stays the trainer's memory: it is reused once the process says that
nobody reads it any more. A process that dies is replaced at once. Peers that connect
meanwhile wait, since the sockets on which they arrive are the trainer's as well; the
next process gets what the last one has served.

A publication has two halves, so that a cancel never leaves it half done. The process
gets everything that it needs, and says that it is prepared; then it is told to publish,
which nobody has to wait for.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from socket import socket
from typing import Final

from aiockpt.errors import ClosedError, StepNotFoundError
from aiockpt.events import emit
from aiockpt.http.apart.messages import (
    Counted,
    Done,
    Fail,
    Forget,
    Happened,
    Logged,
    Prepare,
    Publish,
    Released,
    Retract,
    Setup,
    Spent,
)
from aiockpt.http.apart.process import PATIENCE, ServerProcess
from aiockpt.http.handlers import ServerStatistics
from aiockpt.http.store import Failure, StoreStatistics
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.channel import pack

__all__ = ["RemoteStore"]

_LONGEST_GRACE: Final = 1e9
_MOMENT: Final = 0.15
"""Seconds beyond the grace in which a process says that nobody reads any more."""

_HUNG: Final = 60.0
"""Seconds after which a process that runs, and does not answer, is taken for hung."""

_NOTHING: Final = Counted(
    StoreStatistics(None, 0, 0, 0.0, 0), ServerStatistics(0, 0, 0, 0, 0, 0, 0, 0), 0
)


class RemoteStore:
    """Publishes to, and retracts from, a process that serves.

    Args:
        bridge: Where processes are launched.
        setup: What a process is told first.
        lends: Whether the process lends the memory to other processes of this host.
    """

    def __init__(
        self,
        bridge: Bridge,
        setup: Callable[[], Setup],
        *,
        lends: bool,
    ) -> None:
        self._bridge = bridge
        self._setup = setup
        self._lends = lends
        self._process = ServerProcess(
            bridge,
            begin=self._begin,
            hear=self._hear,
            mourn=self._mourn,
            give_up=self._forget,
        )
        self._numbers = itertools.count(1)
        self._given: dict[int, Snapshot] = {}
        self._current = 0
        self._failure: Failure | None = None
        self._retractions = 0
        self._waiting: dict[int, asyncio.Event] = {}
        self._counted = _NOTHING
        self._before = _NOTHING.server
        self._lent_before = 0

    def __repr__(self) -> str:
        return f"<RemoteStore {self._process} given={len(self._given)}>"

    @property
    def process(self) -> ServerProcess:
        """The process that serves."""
        return self._process

    @property
    def retractions(self) -> int:
        """How often it was told to serve nothing."""
        return self._retractions

    def statistics(self) -> StoreStatistics:
        """Return what the process said last about its store."""
        current = self._given.get(self._current)
        step = current.manifest.step if current else None
        return self._counted.store._replace(step=step)

    def served(self) -> ServerStatistics:
        """Return what the processes have counted, the last one a moment ago."""
        both = zip(self._before, self._counted.server, strict=True)
        return ServerStatistics(*map(sum, both))

    @property
    def lent(self) -> int:
        """How often the processes have lent a checkpoint."""
        return self._lent_before + self._counted.lent

    async def start(self, sockets: Sequence[socket]) -> None:
        """Start the process, and wait until it serves ``sockets``; idempotent.

        Raises:
            ClosedError: after :meth:`close`.
            WorkerError: it cannot be started.
        """
        await self._process.start(sockets)

    async def publish(self, snapshot: Snapshot, *, grace: float) -> None:
        """Serve ``snapshot`` from now on, instead of what was served before.

        If cancelled, what was served before still is.

        Raises:
            ClosedError: after :meth:`close`.
            StepNotFoundError: :meth:`retract` was called meanwhile, and holds.
            WorkerError: no process can be started.
        """
        before, step = self._retractions, snapshot.manifest.step
        await self._process.serves()
        number = await self._hand_over(snapshot, before)
        try:
            await self._prepared(number)
            if self._retractions != before:
                raise StepNotFoundError(step)
            self._process.check()
        except BaseException:
            self._process.send(Forget(number))
            if self._process.over:  # nobody gives it back
                self._take_back(number)
            raise
        # Nothing is awaited from here on: what a process that dies does not hear, the
        # next one is told.
        self._current, self._failure = number, None
        if number not in self._given:  # it has died, and the next one may be there
            self._give(number, snapshot, pack(snapshot.manifest.header))
        self._process.send(Publish(number))

    def fail(self, failure: Failure | None) -> None:
        """Tell those who wait for a step that it does not come; None forgets it."""
        self._failure = failure
        self._process.send(Fail(failure))

    async def retract(self, *, grace: float) -> None:
        """Serve nothing; no byte is read any more once this returns.

        A process that does not say so within the grace and a moment may only be slow,
        where all cores are busy. It goes on, but its memory is taken away.
        """
        self._retractions += 1
        self._current = 0
        if self._process.pid is None:  # nobody gives anything back
            self._take_back_all()
        elif self._given:
            doomed, number = tuple(self._given), next(self._numbers)
            self._process.send(Retract(number, min(grace, _LONGEST_GRACE)))
            if not await self._answered(number, grace + _MOMENT):
                await self._revoke(doomed)

    async def close(self) -> None:
        """Serve nothing for good; end the process. Idempotent."""
        self._retractions += 1
        self._current = 0
        await self._process.close()
        self._take_back_all()  # there was none that could give it back

    def _forget(self) -> None:
        """Know that nothing is served, and that no process will."""
        self._current = 0
        self._take_back_all()

    def _take_back_all(self) -> None:
        for number in tuple(self._given):
            self._take_back(number)

    def _begin(self, sockets: Sequence[socket]) -> None:
        """Tell a new process everything that the last one knew."""
        self._process.send(self._setup(), [each.fileno() for each in sockets])
        if self._failure is not None:
            self._process.send(Fail(self._failure))
        if self._current:
            current = self._given[self._current]
            self._prepare(self._current, current, pack(current.manifest.header))
            self._process.send(Publish(self._current))

    async def _hand_over(self, snapshot: Snapshot, before: int) -> int:
        """Have the process prepare a snapshot; return its number."""
        made: list[int] = []
        try:
            await self._bridge.run(_pack, snapshot, made)
            if self._retractions != before:  # it may even be closed by now
                raise StepNotFoundError(snapshot.manifest.step)
        except BaseException:
            for parcel in made:  # a call that is cancelled returns nothing
                os.close(parcel)
            raise
        number = next(self._numbers)
        self._give(number, snapshot, *made)
        return number

    def _give(self, number: int, snapshot: Snapshot, parcel: int) -> None:
        snapshot.acquire()
        self._given[number] = snapshot
        self._prepare(number, snapshot, parcel)

    def _prepare(self, number: int, snapshot: Snapshot, parcel: int) -> None:
        arena = snapshot.arena
        assert arena is not None, "it is not in one piece"
        self._process.send(Prepare(number), [parcel, arena.fd])
        os.close(parcel)

    async def _answered(self, number: int, patience: float) -> bool:
        """Wait until the process has done what it was told, or is gone; say if so."""
        if self._process.pid is None:
            return True
        answer = self._waiting[number] = asyncio.Event()
        try:
            async with asyncio.timeout(patience):
                await answer.wait()
        except TimeoutError:
            return False
        finally:
            del self._waiting[number]
        return True

    async def _prepared(self, number: int) -> None:
        """Wait until the process can publish, or is gone; kill one that hangs."""
        loop = asyncio.get_running_loop()
        hung = loop.time() + _HUNG
        while not await self._answered(number, PATIENCE):
            if loop.time() >= hung or await self._process.is_stopped():
                self._process.kill()

    async def _revoke(self, numbers: Iterable[int]) -> None:
        """Have the process read nothing of these any more, whatever it does.

        A slow process is not killed for that: its memory shrinks to nothing, so that
        the kernel refuses what it would read. Only one that cannot go on by itself is
        killed, and one whose memory was lent: that is sealed, and does not shrink.
        """
        revoked = {n: self._given[n] for n in numbers if n in self._given}
        for snapshot in revoked.values():  # or its memory might be staged into again
            snapshot.acquire()
        try:
            for arena in {snapshot.arena for snapshot in revoked.values()}:
                assert arena is not None, "it is not in one piece"
                await self._bridge.run(arena.revoke)
            if await self._process.is_stopped():
                self._process.kill()
            for number in revoked:
                self._take_back(number)
        except (OSError, ClosedError):  # it was lent; or all of this is being closed
            self._process.kill()
        finally:
            for snapshot in revoked.values():
                snapshot.release()

    def _mourn(self) -> None:
        """Take back what a process had that is gone; nobody waits for it any more."""
        self._before = self.served()._replace(readers=0, waiting=0)
        self._lent_before = self.lent
        self._counted = _NOTHING
        if self._lends:  # it may have died before it said what it had lent
            for number in self._given:
                self._spend(number)
        for number in tuple(self._given):
            if number != self._current:
                self._take_back(number)
        for answer in self._waiting.values():
            answer.set()

    def _take_back(self, number: int) -> None:
        snapshot = self._given.pop(number, None)
        if snapshot is not None:
            snapshot.release()

    def _spend(self, number: int) -> None:
        snapshot = self._given.get(number)
        if snapshot is not None and snapshot.arena is not None:
            snapshot.arena.spent = True

    def _hear(self, message: object) -> None:
        if isinstance(message, Done):
            if message.number in self._waiting:
                self._waiting[message.number].set()
        elif isinstance(message, Released):
            if message.number != self._current:  # else it ends, and the next one has it
                self._take_back(message.number)
        elif isinstance(message, Spent):
            self._spend(message.number)
        elif isinstance(message, Counted):
            self._counted = message
        elif isinstance(message, Happened):
            emit(message.event)
        else:
            assert isinstance(message, Logged)
            _log(message)


def _pack(snapshot: Snapshot, made: list[int]) -> None:
    made.append(pack(snapshot.manifest.header))


def _log(message: Logged) -> None:
    told = logging.getLogger(message.name)
    if told.isEnabledFor(message.level):
        told.log(message.level, "%s", message.access or message.text)
