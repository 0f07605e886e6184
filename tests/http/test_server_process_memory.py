"""A server process lends the trainer's memory to the processes of its host."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from aiockpt import TransferEvent
from aiockpt.events import add_hook
from aiockpt.memory.arena import CAN_LEND
from aiockpt.testing import assert_same
from tests.support.serving import settle
from tests.support.transports import (
    Transport,
    in_the_middle,
    receive,
    transport,
    weights,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not CAN_LEND, reason="memory is lent on Linux only"),
]

MEMORY = "shared memory"


@pytest.fixture
def events() -> Iterator[list[TransferEvent]]:
    """Return what happens."""
    found: list[TransferEvent] = []
    remove = add_hook(found.append)
    yield found
    remove()


@asynccontextmanager
async def lending_pair(**options: Any) -> AsyncIterator[tuple[Transport, Transport]]:
    """Make a sender whose process lends, and a receiver."""
    async with (
        transport(process=True, same_host=True, **options) as sender,
        transport() as receiver,
    ):
        yield sender, receiver


def came_by(events: list[TransferEvent]) -> str:
    """Return how the last receive got its bytes."""
    return [each for each in events if each.stop == "recv"][-1].medium


def process_of(sender: Transport) -> Any:
    """Return what keeps the process that serves."""
    return sender._store


def staged_into(sender: Transport) -> Any:
    """Return the memory of what is offered."""
    return sender._offered.arena  # type: ignore[union-attr]


async def kill(sender: Transport) -> None:
    """Kill the process that serves, and wait for the next one."""
    before = process_of(sender).restarts
    os.kill(process_of(sender).pid, signal.SIGKILL)
    await settle(lambda: process_of(sender).restarts > before)


async def send_often(sender: Transport, held: object) -> None:
    """Send other states; what is held stays what it was."""
    for step in range(2, 6):
        await sender.send_checkpoint([1], step, weights(float(step)))
        assert_same(held, weights(1.0))


async def test_the_memory_is_shared_and_counted(events: Any) -> None:
    """No byte of data came over HTTP; the trainer sees who took it."""
    async with lending_pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, weights(1.0))
        assert_same(await receive(sender, receiver, share=True), weights(1.0))
        assert came_by(events) == MEMORY
        await settle(lambda: sender.statistics().lent == 1)
        assert sender.statistics().requests == 1  # the manifest
        await settle(lambda: any(each.medium == MEMORY for each in served(events)))


def served(events: list[TransferEvent]) -> list[TransferEvent]:
    """Return what the sender says that it has served."""
    return [each for each in events if each.stop == "serve"]


async def test_later_sends_do_not_change_what_is_shared() -> None:
    """The trainer stages into other memory, and need not ask who has it."""
    async with lending_pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, weights(1.0))
        held = await receive(sender, receiver, share=True)
        await send_often(sender, held)
        await sender.disallow_checkpoint()
        assert_same(held, weights(1.0))
    assert_same(held, weights(1.0))


async def test_what_was_copied_is_used_again() -> None:
    """It is given back to the process, and by that to the trainer."""
    async with lending_pair() as (sender, receiver):
        for step in range(4):
            await sender.send_checkpoint([1], step, weights(float(step)))
            into = weights(-1.0)
            got = await receive(sender, receiver, step, into=into)
            assert_same(got, weights(float(step)))
            assert not staged_into(sender).spent


async def test_a_process_that_dies_may_have_lent_it() -> None:
    """It had no time to say so: nothing is staged there any more."""
    async with lending_pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, weights(1.0))
        held = await receive(sender, receiver, share=True)
        await kill(sender)
        assert staged_into(sender).spent
        await send_often(sender, held)
        await sender.send_checkpoint([1], 9, weights(9.0))
        assert_same(await receive(sender, receiver, 9, share=True), weights(9.0))


async def test_one_that_dies_does_not_take_it_from_who_copies() -> None:
    """The receiver reads on, and has what was sent."""
    async with lending_pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, weights(1.0, mib=8))

        async def strike() -> None:
            await kill(sender)
            await sender.send_checkpoint([1], 2, weights(2.0, mib=8))

        task, _ = await in_the_middle(
            lambda halfway: receive(sender, receiver, progress=halfway), strike
        )
        assert_same(await task, weights(1.0, mib=8))


async def test_a_retraction_waits_for_nobody_who_has_it() -> None:
    """Neither for who copies nor for who shares."""
    async with lending_pair(grace=60) as (sender, receiver):
        await sender.send_checkpoint([1], 1, weights(1.0, mib=8))
        held = await receive(sender, receiver, share=True)
        task, _ = await in_the_middle(
            lambda halfway: receive(sender, receiver, progress=halfway),
            sender.disallow_checkpoint,
        )
        assert_same(await task, weights(1.0, mib=8))
        assert_same(held, weights(1.0, mib=8))


async def test_a_cancelled_copy_leaves_the_process_serving() -> None:
    """And the memory to nobody: who is gone without a word has it for good."""
    async with lending_pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, weights(1.0, mib=8))
        task, _ = await in_the_middle(
            lambda halfway: receive(sender, receiver, progress=halfway),
            lambda: asyncio.sleep(0),
        )
        task.cancel()
        await asyncio.wait({task})
        got = await receive(sender, receiver)
        assert torch.equal(got["w0"], weights(1.0, mib=8)["w0"])
