"""A trainer that replaces what is being received, and one that starts again."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from aiockpt.testing import Drip
from tests.support.matrix import Record
from tests.support.ports import free_port
from tests.support.proofs import proves
from tests.support.transports import (
    MIB,
    TOKEN,
    Trainer,
    attempts,
    check,
    proxied,
    publish,
    soon,
    through,
    transport,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(900)]


@proves("fault 44")
@pytest.mark.parametrize("server", ["loop", "process"])
async def test_a_trainer_publishes_faster_than_its_followers_receive(
    record: Record, server: str
) -> None:
    """Three followers, which begin at different times."""
    count = record.pick(4, 12)
    async with (
        transport(process=server == "process") as sender,
        proxied(sender, otherwise=Drip(MIB, burst=64 << 10)) as proxy,
    ):
        trainer, metadata = Trainer(sender, mib=2), through(proxy, sender)
        await trainer.measure(metadata)

        async def follow(number: int) -> int:
            await asyncio.sleep(1.4 * trainer.every * number)
            return await attempts(sender, metadata, count)

        async with trainer.training():
            alone = await attempts(sender, metadata, count)
            done = await asyncio.gather(*map(follow, range(3)))
    record.ran(4 * count)
    record.at_least("alone: receives that end", alone / count, 0.75)
    record.at_least("of three: receives that end", min(done) / count, 0.5)
    assert min(alone, *done) >= 1


@proves("fault 45")
async def test_a_sender_starts_again_at_a_lower_step(record: Record) -> None:
    """The follower gets it as soon as it is published."""
    loop = asyncio.get_running_loop()
    for step in record.pick([90], [1, 90, 101, 103, 1000]):
        port = free_port()
        before = transport(token=TOKEN, port=port)
        async with before, transport(token=TOKEN) as receiver:
            await publish(before, 102)
            async with aclosing(receiver.follow(before.metadata())) as follower:
                assert (await soon(follower))[0] == 102
                await before.shutdown(wait=False)
                async with transport(token=TOKEN, port=port) as after:
                    waiting = asyncio.ensure_future(soon(follower))
                    await publish(after, step)
                    began = loop.time()
                    found, state = await waiting
                    check(found, state)
                    assert found == step
                    record.within("received after", loop.time() - began, 3.0)
                    record.ran()
