"""Two of the four ranks of a process group are lost at once, in any phase."""

from __future__ import annotations

import asyncio
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aiockpt.errors import ProcessGroupError
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.ranks import MIB_SENT, ranks, transport
from tests.support.transports import weights

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.timeout(300),
    pytest.mark.allow_leaks("threads", "fds"),  # the waits that nothing ends
]

DEADLINE = 60.0
PROMPT = 5.0
"""Seconds in which a lost rank is noticed."""


def kill(peers: Sequence[Process]) -> None:
    """Kill processes at once."""
    for each in peers:
        with suppress(ProcessLookupError):
            each.send_signal(signal.SIGKILL)


async def heard(peer: Process) -> str:
    """Return what a witness has seen."""
    assert peer.stdout is not None
    async with asyncio.timeout(DEADLINE):
        return (await peer.stdout.readline()).decode().strip()


async def check_broken(ours: Any) -> None:
    """Check that the group says that it cannot be used again."""
    assert "broken" in repr(ours)
    with pytest.raises(ProcessGroupError, match="make a new group"):
        await ours.send_checkpoint([1], 2, weights(), DEADLINE)


@proves("fault 72")
@pytest.mark.parametrize("when", ["before", "half way", "at the end"])
async def test_two_receivers_are_lost(
    tmp_path: Path, record: Record, when: str
) -> None:
    """The third one has all of it; the sender's error names both."""
    dies = {
        "before": "receive",
        "half way": "die_half_way",
        "at the end": "die_at_the_end",
    }[when]
    state = weights(mib=MIB_SENT, count=16)
    async with (
        ranks(tmp_path, dies, dies, "witness") as (group, peers),
        transport(group) as ours,
    ):
        if when == "before":
            kill(peers[:2])
        began = time.monotonic()
        with pytest.raises(ProcessGroupError) as caught:
            await ours.send_checkpoint([1, 2, 3], 1, state, DEADLINE)
        record.within(f"{when}: error after", time.monotonic() - began, PROMPT)
        said = str([str(caught.value), *caught.value.__notes__])
        assert {each for each in (1, 2) if f"rank {each} " in said} == {1, 2}
        assert "rank 3 " not in said
        assert await heard(peers[2]) == "whole"
        await check_broken(ours)
    record.ran()


@proves("fault 72")
async def test_the_sender_and_a_receiver_are_lost(
    tmp_path: Path, record: Record
) -> None:
    """Both receivers that are left know at once that the sender is."""
    async with (
        ranks(tmp_path, "witness_last", "witness_last", "send") as (group, peers),
        transport(group) as ours,
    ):
        killed: list[float] = []

        def strike(progress: Any) -> None:
            if progress.bytes_done > progress.bytes_total / 10 and not killed:
                killed.append(time.monotonic())
                kill(peers[1:])

        with pytest.raises(ProcessGroupError) as caught:
            await ours.recv_checkpoint(3, "", 1, DEADLINE, progress=strike)
        [began] = killed
        record.within("sender: error after", time.monotonic() - began, PROMPT)
        assert caught.value.rank == 3
        assert await heard(peers[0]) == "ProcessGroupError 3"
        await check_broken(ours)
    record.ran()
