"""A server in a thread of a process that has other things to do, too."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from aiockpt.http.forks import close_in_forks

__all__ = ["ENDING", "HostedServer"]

ENDING: Final = 5.0
"""Seconds in which a server that was told to end does; nothing waits for it longer."""


class HostedServer:
    """Serves what the trainer at the other end of a socket publishes.

    Args:
        sock: Its end of the channel to the trainer.
    """

    def __init__(self, sock: socket.socket) -> None:
        close_in_forks([sock])  # what the process forks must not keep it open
        self._sock = sock
        self._told = False
        self._end: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        return f"<HostedServer told={self._told}>"

    def run(self) -> None:
        """Serve until it is told to end, or the trainer has gone. For a thread."""
        # Here, since it takes a while, and most processes never serve.
        from aiockpt.http.apart.child import Serving

        with self._sock, asyncio.Runner() as runner:
            serving = Serving(self._sock, hosted=True)
            loop = runner.get_loop()
            self._end = partial(loop.call_soon_threadsafe, serving.end)
            if not self._told:  # who tells it now finds what ends it
                runner.run(serving.run())

    def end(self) -> None:
        """Have it end at once. From any thread; idempotent."""
        self._told = True
        with suppress(RuntimeError):  # it has ended, and its loop is closed
            self._end()
