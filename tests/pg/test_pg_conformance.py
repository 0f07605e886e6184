"""PGTransport passes those parts of the public suite that hold for any transport.

`Offers` and some of `Endings` do not: nothing stays offered after a send, and a call
that times out breaks the group. What holds instead is in this directory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import torch._dynamo  # noqa: F401 - an optimizer imports it: early, so that leak checks skip it

import groups
from aiockpt.testing.conformance import Endings
from groups import Transport
from rendezvous import Rendezvous


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
