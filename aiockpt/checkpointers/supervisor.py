"""Watches the checkpoint process: what it says, whether it hangs, when it dies.

A process that dies takes the write with it that it had begun, and no other: the next
process is started at once and gets those that wait. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from aiockpt.checkpointers.config import CheckpointProcessConfig
from aiockpt.checkpointers.failures import plain
from aiockpt.checkpointers.messages import Close, Drop, Forsake, Write
from aiockpt.checkpointers.process_launch import Child, Recipe
from aiockpt.checkpointers.submission import Submission
from aiockpt.checkpointers.watched import Sent, Watched
from aiockpt.errors import AiockptError, WorkerError, WorkerTimeoutError
from aiockpt.runtime.bridge import Bridge

__all__ = ["Supervisor"]

logger = logging.getLogger("aiockpt")

_TRIES: Final = 3
"""How many processes may die with a write that they have not begun."""

_DYING: Final = 5.0
"""How long a killed process is waited for: it may be inside of a system call."""


class Supervisor:
    """Keeps one checkpoint process running, and speaks to it.

    Args:
        recipe: What the process is made of.
        bridge: Where it is launched.
        config: The deadlines.
    """

    def __init__(
        self, recipe: Recipe, bridge: Bridge, config: CheckpointProcessConfig
    ) -> None:
        self.restarts = 0
        self._recipe = recipe
        self._bridge = bridge
        self._config = config
        self._sent: dict[int, Sent] = {}
        self._watching: asyncio.Task[None] | None = None
        self._closing = False
        self._close_by = float("inf")
        self._child: Watched | None = None
        # Early, and before there is a loop: it takes a while to start.
        self._next: Child | None = Child(recipe)
        bridge.post(_launch_quietly, self._next)

    def __repr__(self) -> str:
        return f"<Supervisor pid={self.pid} writes={len(self._sent)}>"

    @property
    def pid(self) -> int | None:
        """The process's id, while there is one."""
        child = self._child.child if self._child else self._next
        return child.pid if child else None

    async def ready(self) -> None:
        """Wait until the process's init functions have returned.

        Raises:
            WorkerError: they failed, or it could not be started.
        """
        child = await self.running()
        await child.prepared.wait()
        if child.failure is not None:
            raise child.failure

    async def running(self) -> Watched:
        """Return the process that is watched; start one if there is none.

        Raises:
            WorkerError: none can be started.
        """
        while self._child is None:
            child = self._next or Child(self._recipe)
            self._next = child
            try:
                await self._bridge.run(child.launch)
            except OSError as error:
                self._give_up(child)
                raise WorkerError(
                    f"the checkpoint process cannot be started: {error}"
                ) from error
            except AiockptError:
                self._give_up(child)
                raise
            if self._next is child:
                self._watch(child)
        return self._child

    def send(self, submission: Submission, message: Write, parcel: int) -> None:
        """Hand over a write to the process that :meth:`running` returned, right after.

        The parcel is the supervisor's from now on.
        """
        assert self._child is not None
        sent = Sent(submission, message, parcel)
        self._sent[submission.number] = sent
        self._child.post(sent)

    def drop(self, submission: Submission) -> None:
        """Ask to forget a write; the submission settles either way."""
        if self._child is not None:
            self._child.channel.send(Drop(submission.number))

    async def forsake(self, message: Forsake) -> None:
        """Tell the process that a save will not come."""
        child = await self.running()
        child.channel.send(message)

    async def close(self, *, timeout: float) -> None:
        """Have the process finish and end; kill it after ``timeout`` seconds."""
        self._closing = True
        if self._next is not None:  # it was never watched
            await self.running()
        if self._child is not None:
            self._close_by = asyncio.get_running_loop().time() + timeout
            self._child.channel.send(Close())
            self._child.changed.set()
        if self._watching is not None:
            await asyncio.wait({self._watching})

    async def abandon(self) -> None:
        """Leave the process to itself, as if this one had died."""
        self._closing = True
        child = await self.running()
        child.channel.send(Close(keep=True))
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        child.leave()
        self._fail_all(
            WorkerError(
                "it was left to the checkpoint process, which this one has left"
            )
        )

    # ------------------------------------------------------------ one process

    def _give_up(self, child: Child) -> None:
        child.close()
        if self._next is child:
            self._next = None

    def _watch(self, child: Child) -> None:
        self._next = None
        self._child = Watched(child, self._sent, self._config)
        loop = asyncio.get_running_loop()
        self._watching = loop.create_task(self._supervise(self._child))

    async def _supervise(self, child: Watched) -> None:
        reason = await self._outlive(child)
        exitcode = await self._bridge.run(child.child.reap)
        child.leave()
        error = child.failure
        if error is None:
            cls = WorkerTimeoutError if reason else WorkerError
            error = cls(_obituary(reason, exitcode))
        if isinstance(error, WorkerError):
            error.exitcode = exitcode
        self._child = None
        child.failure = error
        child.prepared.set()
        if self._closing:
            self._fail_all(error)
        elif not child.ready:
            logger.error("%s", error)
            self._fail_all(error)
        else:
            logger.warning("%s; another one is started", error)
            lost = self._fail_begun(error)
            self.restarts += 1
            await self._replace([_forsaken(each, error) for each in lost])

    async def _outlive(self, child: Watched) -> str:
        """Wait for the end of a process; kill it when something is overdue."""
        while not child.gone:
            child.changed.clear()
            reason, when = child.overdue(self._close_by)
            if reason:
                child.child.kill()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_DYING):
                        await child.ended.wait()
                return reason
            with suppress(TimeoutError):
                async with asyncio.timeout_at(when):
                    await child.changed.wait()
        return ""

    async def _replace(self, lost: Iterable[Forsake]) -> None:
        """Start the next process, and hand it what the last one has not begun.

        It also tells the ranks that wait for what is lost.
        """
        waiting = list(self._sent)
        try:
            child = await self.running()
        except AiockptError as error:
            logger.error("%s", error)
            self._fail_all(error)
            return
        for forsaken in lost:
            child.channel.send(forsaken)
        for number in waiting:
            sent = self._sent[number]
            if sent.tries < _TRIES:
                child.post(sent)
            else:
                self._fail(sent, WorkerError("the checkpoint process dies of it"))

    def _fail_begun(self, error: AiockptError) -> list[Sent]:
        lost = [sent for sent in self._sent.values() if sent.submission.begun]
        for sent in lost:
            self._fail(sent, error)
        return lost

    def _fail_all(self, error: AiockptError) -> None:
        for sent in [*self._sent.values()]:
            self._fail(sent, error)

    def _fail(self, sent: Sent, error: AiockptError) -> None:
        del self._sent[sent.submission.number]
        sent.end(error)


def _forsaken(lost: Sent, error: AiockptError) -> Forsake:
    reason = plain(str(error))
    return Forsake(lost.message.path, lost.submission.step, reason, begun=True)


def _obituary(reason: str, exitcode: int | None) -> str:
    if reason:
        return f"the checkpoint process {reason} and was killed"
    how = "unexpectedly" if exitcode is None else f"with exit code {exitcode}"
    if exitcode is not None and exitcode < 0:
        how = f"by signal {-exitcode}"
    return f"the checkpoint process ended {how}"


def _launch_quietly(child: Child) -> None:
    """Start it; whoever needs it first is told why it did not work."""
    with suppress(OSError, AiockptError):
        child.launch()
