"""How a trainer takes the answers of its server process."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from aiockpt.local.server_process import ServerProcess
from tests.support.servers import settle
from tests.support.transports import transport, weights


@pytest.mark.asyncio
async def test_an_answer_that_comes_together_with_the_timer_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the trainer's loop that stood still, and not the process."""
    monkeypatch.setattr("aiockpt.local.server_process._LOOK_INTERVAL", 1.0)
    async with transport(process=True) as sender:
        await sender.start()
        process = sender._store
        assert isinstance(process, ServerProcess)
        assert process.pid is not None
        running = process._running
        assert running is not None
        os.kill(process.pid, signal.SIGSTOP)
        sending = asyncio.create_task(sender.send_checkpoint([], 1, weights()))
        await settle(lambda: running.unanswered)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(1.5)  # noqa: ASYNC251 - that is the point
        await sending
        assert process.restarts == 0
