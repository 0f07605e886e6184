"""One deadline for a whole call, and the stop at which it caught the call."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from aiockpt.errors import TransferTimeoutError

__all__ = ["Deadline"]


class Deadline(AbstractAsyncContextManager["Deadline"]):
    """Ends its block after ``timeout`` seconds with ``TransferTimeoutError``.

    A timeout of 0 fails on entry, before any I/O. The call keeps ``stop`` and
    ``last_error`` up to date: where it is, and what has failed last. ``what`` names the
    step and the peer for the message.
    """

    def __init__(self, timeout: float, *, stop: str, what: str = "") -> None:
        self.timeout = timeout
        self.stop = stop
        self.what = what
        self.last_error = ""
        self.when = 0.0
        self._scope: asyncio.Timeout | None = None

    @property
    def expired(self) -> bool:
        """Whether it has passed within its block."""
        return self._scope is not None and self._scope.expired()

    async def __aenter__(self) -> Deadline:
        if not self.timeout:
            raise self._expired()
        self.when = asyncio.get_running_loop().time() + self.timeout
        self._scope = asyncio.timeout_at(self.when)
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._scope is not None
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:
            if self._scope.expired():
                raise self._expired() from late
            raise

    def _expired(self) -> TransferTimeoutError:
        return TransferTimeoutError(
            self.stop, self.timeout, what=self.what, last_error=self.last_error
        )
