"""PGTransport passes those parts of the public suite that hold for any transport.

`Offers` and some of `Endings` do not: nothing stays offered after a send, and a call
that times out breaks the group. What holds instead is in this directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 - an optimizer imports it: early, so that leak checks skip it

import groups
from aiockpt import PeerFailedError, PGTransport
from aiockpt.testing.conformance import Endings, RoundTrips, Templates
from aiockpt.transport import Timeout

Transport = PGTransport[Any]


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


@pytest.mark.asyncio
class TestPGTransport(Rendezvous):
    """Two ranks in one process, over gloo."""

    @asynccontextmanager
    async def transports(self, count: int) -> AsyncIterator[Sequence[Transport]]:
        """Make a group for every test."""
        async with groups.transports(count) as made:
            yield made

    test_a_senseless_timeout_is_refused = Endings.test_a_senseless_timeout_is_refused
    test_shutdown_is_idempotent = Endings.test_shutdown_is_idempotent
    test_a_cancelled_shutdown_can_be_repeated = (
        Endings.test_a_cancelled_shutdown_can_be_repeated
    )

    @pytest.mark.allow_error_logs
    @pytest.mark.allow_leaks("fds")  # pytest keeps the log, whose frames keep the group
    async def test_a_progress_that_raises_disturbs_nothing(self) -> None:
        """Somebody else's bug is logged."""
        await super().test_a_progress_that_raises_disturbs_nothing()
