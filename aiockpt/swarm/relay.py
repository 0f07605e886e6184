"""A checkpoint that is being received, and is served on while it arrives.

The receiver marks each chunk that it has verified. The server sends these chunks, and
no others, to the members of the swarm.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

from aiockpt.format.chunks import digest
from aiockpt.format.manifest import Manifest
from aiockpt.http.problems import PeerBusy
from aiockpt.http.tuning import SlowAfter, Usual
from aiockpt.memory.arena import Memory
from aiockpt.runtime.secrets import Token
from aiockpt.runtime.tasks import Notifier

_BUSY_RETRY_S: Final = 0.0  # a request that has waited may come again at once
_FULL_RETRY_S: Final = 1.0  # for a request that was not allowed to wait
_MAX_WAITING: Final = 1000  # requests for a slot
_SLOW_BODY: Final = SlowAfter(times=5.0, slack_s=1.0, unknown_s=10.0)
_MIN_USUAL_RATE: Final = 512 << 10  # bytes per second; a slower rate is never usual


class Slots:
    """Admits so many bodies at a time; the others wait in order of arrival.

    A body that takes much longer than usual no longer counts, so that slow readers
    cannot hold all slots. If all bodies become slower, that becomes usual, down to a
    fixed rate per body.

    Args:
        most: How many bodies are sent at a time.
        rate: Bytes per second that all bodies together may take; None: no limit.

    Attributes:
        body_rate: The bytes per second of each body; None: no limit.
    """

    def __init__(self, most: int, rate: float | None = None) -> None:
        self.body_rate = None if rate is None else max(int(rate / most), 1)
        self._free = asyncio.Semaphore(most)
        self._waiting = 0
        self._usual = Usual()

    @asynccontextmanager
    async def take(
        self, nbytes: int, *, wait: float
    ) -> AsyncIterator[Callable[[], None]]:
        """Hold a slot during the block, which calls the result once a body was sent.

        Args:
            nbytes: The length of the body.
            wait: Seconds to wait for a slot.

        Raises:
            PeerBusy: no slot was free within ``wait`` seconds, or too many wait.
        """
        if self._waiting >= _MAX_WAITING:
            raise PeerBusy(retry_after=_FULL_RETRY_S)
        taken = False
        self._waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    taken = await self._free.acquire()
        finally:
            self._waiting -= 1
        if not taken:
            raise PeerBusy(retry_after=_BUSY_RETRY_S)
        usual = min(self._usual.seconds() or 0.0, nbytes / _MIN_USUAL_RATE)
        if self.body_rate is not None:
            usual = max(usual, nbytes / self.body_rate)
        loop, is_held = asyncio.get_running_loop(), True
        began = loop.time()

        def learn() -> None:
            if is_held:
                self._usual.learn(1, loop.time() - began)

        def free() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._free.release()

        def give_up() -> None:
            learn()
            free()

        timer = loop.call_later(_SLOW_BODY.seconds(usual or None), give_up)
        try:
            yield learn
        finally:
            timer.cancel()
            free()


class Copy(NamedTuple):
    """The bytes of some chunks, of which the first one begins at ``start``."""

    start: int
    data: bytes

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment."""
        return [memoryview(self.data)[start - self.start : stop - self.start]]


class Relay:
    """A checkpoint that is being received; the receiver's store serves it.

    Args:
        manifest: The manifest of the whole checkpoint.
        headers: The headers of the source that authenticate the manifest.
        slots: Bounds what is sent at a time.

    Attributes:
        memory: The data segment; None if nothing may be read any more.
        kept: What keeps that memory after the receive; None if it is not the caller's.
        tokens: The tokens that members may send to read from it. This member sends the
            first one to others. There are two while the swarm changes its token.
        have: The verified chunks: bit i is chunk i. Bits are only added.
        began: The loop time at which the receive began to be served.
        order: The verified chunks, in the order in which they were verified.
        news: Wakes those that wait for another chunk.
        changes: Wakes the one that announces it: it was lent or ended, or a member of
            the swarm has lied.
        ended: Whether it serves nothing any more.
        is_lent: Whether the memory may change, because the receive returns. Then only
            copies of it are sent.
    """

    live = True
    arena = None

    def __init__(
        self,
        manifest: Manifest,
        headers: Mapping[str, str],
        slots: Slots,
    ) -> None:
        self.manifest, self.headers, self.slots = manifest, headers, slots
        self.memory: Memory | None = None
        self.kept: object = None
        self.tokens: Sequence[Token] = ()
        self.have = 0
        self.began = asyncio.get_running_loop().time()
        self.order: list[int] = []
        self.news, self.changes = Notifier(), Notifier()
        self.ended = self.is_lent = False

    def add(self, chunk: int) -> None:
        """Serve a chunk that was verified."""
        if not self.have >> chunk & 1:
            self.have |= 1 << chunk
            self.order.append(chunk)
            self.news.notify()

    def opens(self, offered: str) -> bool:
        """Return whether a request with this token may read it."""
        # As bytes: compare_digest takes only ASCII text.
        given = offered.encode("utf-8", "surrogateescape")
        tokens = () if self.ended else self.tokens
        return any(hmac.compare_digest(given, token.encode()) for token in tokens)

    def copied(self, chunks: range) -> Copy | None:
        """Return a copy of chunks; None if one has changed. For a thread.

        The caller of the receive may change the memory at any moment. So what is sent
        is what was verified.
        """
        manifest = self.manifest
        ranges = [manifest.grid.range(chunk) for chunk in chunks]
        start = ranges[0][0]
        copy = Copy(start, b"".join(self._buffers(start, ranges[-1][1])))
        for chunk, (first, last) in zip(chunks, ranges, strict=True):
            actual = digest(copy.views(first, last), manifest.algorithm)
            if actual != manifest.digests[chunk]:
                return None
        return copy

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment.

        Raises:
            PeerBusy: the memory may change; only copies may be sent.
            ConnectionResetError: nothing may be read any more.
        """
        if self.is_lent:
            raise PeerBusy(retry_after=_BUSY_RETRY_S)
        return self._buffers(start, stop)

    def _buffers(self, start: int, stop: int) -> list[memoryview]:
        if self.memory is None:
            raise ConnectionResetError("the receive has ended")
        return self.memory.buffers(start, stop)

    def lend(self) -> None:
        """Send only copies from now on: the memory is about to be the caller's."""
        self.is_lent = True
        self.news.notify()
        self.changes.notify()

    def end(self) -> None:
        """Serve nothing from now on."""
        self.ended = True
        self.news.notify()
        self.changes.notify()

    def let_go(self) -> None:
        """Stop reading the memory; bodies end at their next slice."""
        self.memory = self.kept = None

    def acquire(self) -> None:
        """Do nothing: the receive keeps the memory."""

    def release(self) -> None:
        """Do nothing: the receive keeps the memory."""
