"""Threads that move bytes between sockets and memory, for a turn each.

A loop that moves the bytes of two connections keeps one core busy, and wakes for each
mebibyte; threads that wait in the kernel, one for each connection, move half as many
again. Coming back from one costs the loop a millisecond or more while all cores are
busy, so a turn takes long, as long as the peer keeps up and nobody cancels. A peer that
does not is waited for by the loop, which also does the work where no thread is free.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import Callable
from typing import Final, TypeVar

from aiockpt.runtime.bridge import Bridge

__all__ = ["WORTH", "Pumps", "Turn"]

T = TypeVar("T")

WORTH: Final = 2 << 20
"""Fewer bytes are not worth a turn."""

_THREADS: Final = 4
_TURN: Final = 0.5  # seconds after which another connection may get the thread
_PATIENCE: Final = 10  # milliseconds that a thread waits for a peer


class Pumps:
    """A few threads, started when there is work; see the module.

    Args:
        name: What they are called.
    """

    def __init__(self, name: str) -> None:
        self._bridge = Bridge(threads=_THREADS, name=name)
        self._free = _THREADS
        self._closed = False

    def __repr__(self) -> str:
        return f"<Pumps free={self._free}>"

    @property
    def free(self) -> bool:
        """Whether a thread could begin at once."""
        return self._free > 0 and not self._closed

    async def turn(self, work: Callable[[Turn], T]) -> T:
        """Return ``work(turn)``, which a thread does until its turn is over.

        If cancelled, it is over, and ends first.

        Raises:
            ClosedError: `close` was called.
        """
        self._free -= 1
        try:
            return await self._bridge.run(work, Turn())
        finally:
            self._free += 1

    def close(self) -> None:
        """Have no thread begin again; each ends after its turn. Idempotent."""
        self._closed = True
        self._bridge.close(wait=False)


class Turn:
    """What the current task lets a thread do with a socket that does not block."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancels = task, task.cancelling()
        self._end = time.monotonic() + _TURN
        self._poll = select.poll()

    def __repr__(self) -> str:
        return f"<Turn over={self.over}>"

    @property
    def over(self) -> bool:
        """Whether it has taken long enough, or the task has been cancelled since."""
        return self._task.cancelling() > self._cancels or time.monotonic() >= self._end

    def wait(self, sock: socket.socket, event: int) -> bool:
        """Wait for the peer for a moment; say whether it is worth another call.

        Args:
            event: What to wait for, a flag of ``select``.
        """
        self._poll.register(sock, event)
        return bool(self._poll.poll(_PATIENCE))
