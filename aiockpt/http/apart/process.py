"""Keeps one process serving: starts it, and replaces it when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from socket import SHUT_RDWR, socket
from typing import Final

from aiockpt.errors import AiockptError, ClosedError, LocalProtocolError, WorkerError
from aiockpt.http.apart.launch import Child
from aiockpt.http.apart.messages import Ready, decode_from_server
from aiockpt.runtime.bridge import Bridge

__all__ = ["PATIENCE", "ServerProcess"]

logger = logging.getLogger("aiockpt")

PATIENCE: Final = 5.0
"""Seconds in which a process that is stopped could go on, or one that ends be gone."""

_STARTING: Final = 60.0
"""Seconds in which a process is to be ready; a machine may be busy."""

_TRIES: Final = 3
"""How many processes in a row may die before they were ready."""


class ServerProcess:
    """One process after the other, of which each serves.

    Args:
        bridge: Where they are launched.
        begin: Called with the sockets once there is a new one, to tell it everything;
            nothing is awaited between that and the next call of :meth:`send`.
        hear: Called with every message of one, but the first.
        mourn: Called when one has gone.
        give_up: Called when no other one follows, though it was not closed.
    """

    def __init__(
        self,
        bridge: Bridge,
        *,
        begin: Callable[[Sequence[socket]], None],
        hear: Callable[[object], None],
        mourn: Callable[[], None],
        give_up: Callable[[], None],
    ) -> None:
        self.restarts = 0
        self._bridge = bridge
        self._begin, self._hear, self._mourn = begin, hear, mourn
        self._given_up = give_up
        self._child: Child | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._broken: WorkerError | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<ServerProcess pid={self.pid} restarts={self.restarts}>"

    @property
    def pid(self) -> int | None:
        """The id of the process that serves, until it is certainly gone."""
        return self._child.pid if self._child else None

    @property
    def over(self) -> bool:
        """Whether there is no process any more, and no other one follows by itself."""
        return self._watching is not None and self._watching.done()

    @property
    def may_begin_again(self) -> bool:
        """Whether it has given up, on sockets that are of no use now."""
        return self.over and not self._closed

    async def start(self, sockets: Sequence[socket]) -> None:
        """Start one, and wait until it serves ``sockets``; idempotent.

        Raises:
            ClosedError: after :meth:`close`.
            WorkerError: it cannot be started; another call tries again.
        """
        if self.may_begin_again or (self._watching is None and not self._closed):
            self._broken = None
            self._ready.clear()
            loop = asyncio.get_running_loop()
            self._watching = loop.create_task(self._watch(sockets))
        await self.serves()

    async def serves(self) -> None:
        """Wait until one serves; returns at once while one does.

        Raises:
            ClosedError: after :meth:`close`.
            WorkerError: none can be started.
        """
        if self._watching is None and not self._closed:
            raise LocalProtocolError("the process that serves was not started")
        if not self._closed:
            await self._ready.wait()
        self.check()

    def check(self) -> None:
        """Raise what :meth:`serves` does, if none serves and none will."""
        if self._closed:
            raise ClosedError("the transport")
        if self._broken is not None:
            raise self._broken

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Tell the process, if there is one."""
        if self._child is not None:
            self._child.channel.send(message, fds)

    async def is_stopped(self) -> bool:
        """Tell whether a signal has stopped the process, which then never answers."""
        return await self._bridge.run(_is_stopped, self.pid)

    def kill(self) -> None:
        """End the process at once, since it hangs; the next one takes over."""
        if self._child is not None:
            logger.warning("the process that serves does not answer, and is killed")
            self._child.kill()

    async def close(self) -> None:
        """End the process, and start no other. Idempotent.

        If cancelled, it ends nevertheless.
        """
        self._closed = True
        if self._child is not None:
            self._child.kill()  # it has nothing that could get lost
        if self._watching is not None:
            await asyncio.wait({self._watching})

    async def _watch(self, sockets: Sequence[socket]) -> None:
        tries, why = 0, ""
        last: Exception | None = None
        while not self._closed and tries < _TRIES:
            try:
                was_ready, why = await self._live(sockets)
                last = None
            except (OSError, AiockptError) as error:
                was_ready, why, last = False, str(error), error
            tries = 0 if was_ready else tries + 1
            if not self._closed:
                logger.warning("the process that serves has ended: %s", why)
                self.restarts += 1
        if not self._closed:
            self._broken = WorkerError(f"no process can be started that serves: {why}")
            self._broken.__cause__ = last
            logger.error("%s", self._broken)
            self._given_up()
        for each in sockets:  # or who connects would wait for nothing
            with suppress(OSError):
                each.shutdown(SHUT_RDWR)
        self._ready.set()

    async def _live(self, sockets: Sequence[socket]) -> tuple[bool, str]:
        """Have one process from its start to its end; return if it served, and why."""
        child = Child(self._receive)
        try:
            await child.launch(self._bridge)
            if self._closed:
                child.kill()
            else:
                await self._serve(child, sockets)
        finally:
            was_ready = self._ready.is_set()
            self._ready.clear()
            how = await _reaped(child)
            self._child = None
            self._mourn()
        return was_ready, how

    async def _serve(self, child: Child, sockets: Sequence[socket]) -> None:
        loop = asyncio.get_running_loop()
        late = loop.call_later(_STARTING, self._late, child)
        try:
            self._child = child
            self._begin(sockets)
            await child.gone()
        finally:
            late.cancel()

    def _late(self, child: Child) -> None:
        if not self._ready.is_set():
            child.kill()

    def _receive(self, data: bytes, _: list[int]) -> None:
        message = decode_from_server(data)
        if isinstance(message, Ready):
            self._ready.set()
        else:
            self._hear(message)


def _is_stopped(pid: int | None) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] in (b"T", b"t")


async def _reaped(child: Child) -> str:
    """Wait for a process that has ended, or is about to; kill it if it does not."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            return await child.reaped()
    child.kill()
    return await child.reaped()
