"""The servers of transports that run in the checkpoint process, beside its writer."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from aiockpt._bridge import Bridge
from aiockpt.http.apart.hosted import ENDING, HostedServer

__all__ = ["Servers"]

logger = logging.getLogger("aiockpt")


class Servers:
    """Runs each in a thread of its own, which has the niceness of who starts it."""

    def __init__(self) -> None:
        self._bridge = Bridge(threads=1, name="aiockpt-host")
        self._running: dict[asyncio.Task[None], HostedServer] = {}
        self._over = False

    def __repr__(self) -> str:
        return f"<Servers running={len(self._running)}>"

    @property
    def running(self) -> int:
        """How many there are."""
        return len(self._running)

    def start(self, fd: int) -> None:
        """Run one whose trainer is at the other end of a socket; unless all end."""
        if self._over:
            os.close(fd)
            return
        server = HostedServer(socket.socket(fileno=fd))
        task = asyncio.get_running_loop().create_task(self._run(server))
        self._running[task] = server
        task.add_done_callback(self._running.pop)

    def end(self) -> None:
        """Have all of them end, and run no other; what hangs is left. Idempotent."""
        if not self._over:
            self._over = True
            asyncio.get_running_loop().call_later(ENDING, self._leave)
        for server in self._running.values():
            server.end()

    async def ended(self) -> None:
        """Wait until none runs any more, or is waited for."""
        while self._running:
            await asyncio.wait([*self._running])

    def _leave(self) -> None:
        for task in self._running:
            task.cancel()

    async def _run(self, server: HostedServer) -> None:
        try:
            await self._bridge.run_apart(server.run)
        except Exception:  # the trainer hears of its end, and wants another one
            logger.exception("a server in the checkpoint process has failed")
