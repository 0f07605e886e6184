"""Very many readers at once, all of whom hold the token: the sender's loop goes on."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from urllib.parse import urlsplit

import pytest

from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.ranks import SUPPORT
from tests.support.transports import Transport, transport, weights

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

MOST = 256
"""How many readers a sender admits unless it is told otherwise."""


class Gaps:
    """Runs once per round of the loop, and notes how long each round took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.readers = 0

    async def watch(self, sender: Transport) -> None:
        """Do so until it is cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            self.seconds.append(now - last)
            self.readers = max(self.readers, sender.statistics().readers)
            last = now


@proves("threat D8")
@proves("fault 42")
async def test_very_many_readers_do_not_stall_the_senders_loop(record: Record) -> None:
    """The admitted ones read, the others wait or come back, and none is cut off."""
    count = record.pick(540, 2000)  # twice as many as are admitted read or wait
    async with transport(timeout=60, chunk_bytes=16 << 20) as sender:
        await sender.send_checkpoint([1], 1, weights(mib=record.pick(5, 8)))
        url, token = urlsplit(sender.address()), urlsplit(sender.metadata()).fragment
        crowd = await asyncio.create_subprocess_exec(
            *(sys.executable, str(SUPPORT / "crowd.py")),
            *(str(url.port), token, str(count)),
            stdin=PIPE,
            stdout=PIPE,
        )
        assert crowd.stdout is not None
        try:
            async with asyncio.timeout(120):
                assert await crowd.stdout.readline() == b"ready\n"
                gaps = Gaps()
                watching = asyncio.create_task(gaps.watch(sender))
                said, _ = await crowd.communicate(b"go\n")
            watching.cancel()
        finally:
            if crowd.returncode is None:
                crowd.kill()
                await crowd.wait()
    seen = json.loads(said)
    assert seen["wrong"] == {}
    assert seen["whole"] == count
    assert seen["refused"] > 0  # as many as read may wait, and more as those end
    assert gaps.readers <= MOST
    record.within("longest stall", max(gaps.seconds), 0.5)
    record.ran(count)
