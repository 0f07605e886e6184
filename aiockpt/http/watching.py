"""Watches an exchange: tells of bytes as they arrive, ends it when none do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from aiockpt.errors import TransferStalledError
from aiockpt.http.filler import Filler

__all__ = ["Watch"]

_MAX_TICK = 0.25
_TICKS = 8  # per stall timeout, where that is short


class Watch:
    """Ends the block that it guards after ``stall_timeout`` seconds without a byte.

    Time is counted in ticks, and a tick that comes late counts as two at most: when
    the loop was busy elsewhere, that is not the peer's silence.

    Args:
        stall_timeout: Seconds of silence.
        allowance: Seconds more that the first byte may take.
        on_bytes: Gets the number of new bytes, at every tick that finds some and at
            the end of the block. It runs on the loop; what it raises ends the block.
        url: Whom the error names.
        chunk: What the error names.

    Attributes:
        filler: What the bytes are counted in, once there is something to receive.
    """

    def __init__(
        self,
        *,
        stall_timeout: float,
        allowance: float,
        on_bytes: Callable[[int], None],
        url: str,
        chunk: int | None,
    ) -> None:
        self.filler: Filler | None = None
        self._seen = 0
        self._url, self._chunk = url, chunk
        self._on_bytes = on_bytes
        self._timeout = stall_timeout
        self._period = min(stall_timeout / _TICKS, _MAX_TICK)
        self._idle = -allowance
        self._scope = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None

    async def __aenter__(self) -> Watch:
        await self._scope.__aenter__()
        self._timer = self._loop.call_later(self._period, self._tick)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look()
        failure, self._failure = self._failure, None
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            if failure is not None:
                raise failure from None
            raise TransferStalledError(
                self._url, idle=self._idle, chunk=self._chunk
            ) from None
        if failure is not None and not isinstance(error, asyncio.CancelledError):
            raise failure

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._period, self._tick)
        now = self._loop.time()
        passed, self._last = now - self._last, now
        if self._look():
            self._idle = 0.0
            if self._failure is not None:
                self._end(now)
            return
        self._idle += min(passed, 2 * self._period)
        if self._idle >= self._timeout:
            self._end(now)

    def _end(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._scope.reschedule(now)

    def _look(self) -> bool:
        """Report what has arrived since the last look; tell whether anything has."""
        if self.filler is None or self.filler.filled == self._seen:
            return False
        new, self._seen = self.filler.filled - self._seen, self.filler.filled
        try:
            self._on_bytes(new)
        except Exception as error:  # noqa: BLE001 - raised at the end of the block
            self._failure = error
        return True
