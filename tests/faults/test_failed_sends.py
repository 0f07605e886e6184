"""What receivers of a send that fails are told, whoever asks how often."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from aiockpt.errors import PeerFailedError, UnsupportedLeafError
from aiockpt.testing import assert_same
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.servers import settle
from tests.support.transports import receive, transport, weights

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


@proves("fault 48")
@pytest.mark.parametrize("server", ["loop", "process"])
async def test_a_receiver_that_asks_again_is_not_counted_again(
    record: Record, server: str
) -> None:
    """It waits for the next attempt; the other one is told of this one."""
    options: dict[str, Any] = {"process": server == "process"}
    async with (
        transport(**options) as sender,
        transport() as first,
        transport() as second,
    ):
        for step in range(record.pick(1, 20)):
            with pytest.raises(UnsupportedLeafError):
                await sender.send_checkpoint([1, 2], step, {"bad": object()})
            with pytest.raises(PeerFailedError):
                await receive(sender, first, step)
            again = asyncio.ensure_future(receive(sender, first, step))
            await settle(lambda: sender.statistics().waiting > 0)
            began = time.monotonic()
            with pytest.raises(PeerFailedError):
                await receive(sender, second, step, timeout=5)
            record.within("told after", time.monotonic() - began, 0.5)
            assert not again.done()
            await sender.send_checkpoint([1, 2], step, weights())
            assert_same(await again, weights())
            record.ran()
