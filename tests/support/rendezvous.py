"""The public suite for transports whose two ends must call at the same time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from aiockpt.errors import PeerFailedError
from aiockpt.testing.conformance import RoundTrips, Templates
from aiockpt.transport import Timeout
from tests.support.groups import Transport


class Rendezvous(RoundTrips[Transport], Templates[Transport]):
    """Both ends call at the same time: a send goes out with each receive."""

    def setup_method(self) -> None:
        """Start with nothing to send."""
        self._offers: dict[int, tuple[object, int]] = {}

    async def send(self, sender: Transport, state: object, *, step: int = 1) -> None:
        """Remember what the next receive is going to meet."""
        sender.metadata()  # raises once it is closed
        self._offers[id(sender)] = state, step

    async def receive(
        self,
        sender: Transport,
        receiver: Transport,
        *,
        step: int = 1,
        timeout: Timeout | None = None,
        **options: Any,
    ) -> Any:
        """Send and receive; a receiver's own error counts, not what its peer says."""
        limit = self.timeout if timeout is None else timeout
        receive: Any = receiver.recv_checkpoint
        receiving = receive(0, sender.metadata(), step, limit, **options)
        if id(sender) not in self._offers:
            return await receiving
        state, offered = self._offers[id(sender)]
        sending = asyncio.create_task(
            sender.send_checkpoint([1], offered, state, self.timeout)
        )
        try:
            return await receiving
        finally:
            with suppress(PeerFailedError):
                await sending
