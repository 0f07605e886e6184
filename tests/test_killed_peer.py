"""A sender in a process of its own, which is killed in the middle of a transfer."""

from __future__ import annotations

import asyncio
import time
from asyncio.subprocess import Process

import pytest

from aiockpt import Progress, TransportError
from aiockpt.testing import assert_same
from tests.support.senders import MIB_SERVED, TOKEN, serving_process
from tests.support.transports import MIB, transport, weights

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


class Killing:
    """A ``progress`` that kills the sender once a tenth has arrived."""

    def __init__(self, process: Process) -> None:
        self.seen: list[Progress] = []
        self.since = 0.0
        self._process = process

    def __call__(self, progress: Progress) -> None:
        self.seen.append(progress)
        if not self.since and progress.bytes_done > MIB_SERVED * MIB / 10:
            self._process.kill()
            self.since = time.monotonic()


async def test_it_is_an_error_at_once() -> None:
    """For who does not want to wait for its return: ``reconnect_timeout=0``."""
    async with (
        transport(token=TOKEN, reconnect_timeout=0, connections=1) as receiver,
        serving_process() as (process, url),
    ):
        killing = Killing(process)
        with pytest.raises(TransportError):
            await receiver.recv_checkpoint(0, url, 1, progress=killing)
        assert time.monotonic() - killing.since < 5


async def test_a_restarted_process_lets_the_receive_finish() -> None:
    """The same state has the same identity: nothing that arrived is fetched again."""
    async with (
        transport(token=TOKEN, reconnect_timeout=60, timeout=90) as receiver,
        serving_process() as (process, url),
    ):
        killing = Killing(process)
        fetch = receiver.recv_checkpoint(0, url, 1, progress=killing)
        receiving = asyncio.create_task(fetch)
        await process.wait()
        port = int(url.split(":")[2].split("/")[0])
        async with serving_process(port):
            assert_same(await receiving, weights(mib=MIB_SERVED))
    done = [progress.bytes_done for progress in killing.seen]
    assert done == sorted(done)
    assert done[-1] == MIB_SERVED * MIB
