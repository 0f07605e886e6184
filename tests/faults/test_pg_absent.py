"""A receiver of a process group that is not there when there is nothing to send it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aiockpt.errors import UnsupportedLeafError
from aiockpt.testing import assert_same
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.ranks import ranks
from tests.support.ranks import transport as rank_transport
from tests.support.transports import weights

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

DEADLINE = 60.0


@asynccontextmanager
async def joined(place: Path, run: int) -> AsyncIterator[tuple[Any, Any]]:
    """Give rank 0's transport, and the process of rank 1, which receives."""
    (place / str(run)).mkdir()
    async with (
        ranks(place / str(run), "insist") as (group, (peer,)),
        rank_transport(group) as ours,
    ):
        yield ours, peer


async def refused(ours: Any, record: Record, what: str) -> None:
    """Send what cannot be sent: the error is that of the state, and comes at once."""
    began = time.monotonic()
    with pytest.raises(UnsupportedLeafError, match=r"layers\[0\]"):
        await ours.send_checkpoint([1], 1, {"layers": [object()]}, DEADLINE)
    record.within(f"{what}: error after", time.monotonic() - began, 0.5)


@proves("fault 43")
async def test_a_receiver_that_stands_still_is_told_later(
    tmp_path: Path, record: Record
) -> None:
    """It gets the next send then, and the group is as good as before."""
    for run in range(record.pick(1, 10)):
        async with joined(tmp_path, run) as (ours, peer):
            peer.send_signal(signal.SIGSTOP)
            await refused(ours, record, "stopped")
            assert "broken" not in repr(ours)
            peer.send_signal(signal.SIGCONT)
            async with asyncio.timeout(DEADLINE):
                assert b"UnsupportedLeafError" in await peer.stdout.readline()
            await ours.send_checkpoint([1], 1, weights(), DEADLINE)
            assert_same(await ours.recv_checkpoint(1, "", 1, DEADLINE), weights())
        record.ran()


@proves("fault 43")
async def test_a_receiver_that_was_killed(tmp_path: Path, record: Record) -> None:
    """Nobody has to be told; the error is the same."""
    for run in range(record.pick(1, 10)):
        async with joined(tmp_path, run) as (ours, peer):
            peer.kill()
            await peer.wait()
            await refused(ours, record, "killed")
        record.ran()
