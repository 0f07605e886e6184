"""Deltas to a base that a receiver does not hold, or over a line that breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiockpt import AiockptError
from aiockpt.testing import CutAfter, FlipBit, assert_same
from tests.support.faultpeers import next_faults
from tests.support.matrix import Record
from tests.support.ports import free_port
from tests.support.proofs import proves
from tests.support.transports import (
    MIB,
    Transport,
    proxied,
    through,
    transport,
    weights_of,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

KEEPS = {"keep_base": True, "chunk_bytes": 256 << 10}
NBYTES = 4 * MIB
DRIFTS = ["a hole", "a step missed", "another model", "a restarted sender"]


@proves("fault 55", "invariant 1")
@pytest.mark.parametrize("drift", DRIFTS)
async def test_a_receiver_that_does_not_hold_the_base(
    record: Record, drift: str
) -> None:
    """Every bit is right, and at most the checkpoint itself is sent."""
    for seed in record.part_of(range(20), few=2):
        chance = torch.Generator().manual_seed(seed)
        held: dict[str, Any] = weights_of(1)
        async with transport(same_host=False) as receiver:
            port = free_port()
            sender = transport(port=port, **KEEPS)
            async with sender:
                for step in (1, 3 if drift == "a step missed" else 2):
                    await sender.send_checkpoint(step=step, state_dict=weights_of(step))
                if drift == "a step missed":
                    await sender.send_checkpoint(step=4, state_dict=weights_of(4))
                elif drift == "a hole":
                    place = int(torch.randint(MIB // 2, (), generator=chance))
                    held[f"layer{seed % 4}"][place] += 1
                elif drift == "another model":
                    held = weights_of(1, seed=seed + 1)
                if drift != "a restarted sender":
                    await fetched(record, receiver, sender, held)
            if drift == "a restarted sender":
                async with transport(port=port, **KEEPS) as sender:
                    await sender.send_checkpoint(step=2, state_dict=weights_of(2))
                    await fetched(record, receiver, sender, held)


async def fetched(
    record: Record, receiver: Transport, sender: Transport, held: Any
) -> None:
    """Receive the newest step into what is held, and compare."""
    before = sender.statistics().bytes_sent
    metadata = sender.metadata()
    got = await receiver.recv_checkpoint(metadata=metadata, into=held, have=True)
    assert_same(got, weights_of(int(got["step"])))
    sent = sender.statistics().bytes_sent - before
    record.within("sent", sent / NBYTES, 1.05, unit=" checkpoints")
    record.ran()


@proves("fault 56", "invariant 1")
@pytest.mark.parametrize("fault", [CutAfter, FlipBit])
async def test_a_line_that_breaks_while_deltas_travel(
    record: Record, fault: type
) -> None:
    """The template is as before or holds every bit of the new step."""
    async with (
        transport(**KEEPS) as sender,
        transport(same_host=False, reconnect_timeout=0, timeout=30) as receiver,
        proxied(sender) as proxy,
    ):
        await sender.send_checkpoint(step=1, state_dict=weights_of(1))
        await sender.send_checkpoint(step=2, state_dict=weights_of(2))
        for seed in record.part_of(range(100), few=6):
            next_faults(proxy, *[fault(400 + 997 * seed)] * 4)
            held: dict[str, Any] = weights_of(1)
            try:
                await receiver.recv_checkpoint(
                    metadata=through(proxy, sender), step=2, into=held, have=True
                )
            except AiockptError:
                record.note("some end with a typed error")
                assert_same(held, weights_of(1))
            else:
                assert_same(held, weights_of(2))
            record.ran()
