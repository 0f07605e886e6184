"""How long a follower waits for one of several senders; the waits are short here."""

from __future__ import annotations

import asyncio

import pytest

from aiockpt.errors import TransferStalledError, TransportError
from aiockpt.http import follow
from aiockpt.testing import StallAfter
from tests.support.joined import joined, shards
from tests.support.servers import settle
from tests.support.transports import (
    pair,
    proxied,
    publish,
    soon,
    through,
    transport,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_blocking")]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for news for a moment only."""
    monkeypatch.setattr(follow, "_NEWS_WAIT_S", 0.2)


async def test_a_silent_peer_is_asked_again_or_given_up() -> None:
    """It falls silent before or in its answer."""
    async with (
        pair(stall_timeout=0.2) as (sender, receiver),
        proxied(sender, faults=[StallAfter(40)] * 3) as proxy,
        proxied(sender, otherwise=StallAfter(0)) as silent,
    ):
        await publish(sender, 1)
        assert await soon(receiver.steps(through(proxy, sender))) == 1
        with pytest.raises(TransferStalledError):
            await soon(receiver.steps(through(silent, sender), reconnect_timeout=0))


async def test_a_sender_that_is_gone_delays_nobody() -> None:
    """The others are asked again and again, though it never answers.

    It is given up by the time of its last answer, not by that of the others.
    """
    async with shards() as senders, transport() as receiver:
        for sender in senders:
            await publish(sender, 1)
        steps = receiver.steps(joined(senders))
        impatient = receiver.steps(joined(senders), reconnect_timeout=1.5)
        assert await soon(steps) == await soon(impatient) == 1
        await senders[2].shutdown(wait=False)
        waiting = asyncio.ensure_future(soon(steps))
        with pytest.raises(TransportError):
            await soon(impatient)  # after several rounds without news
        await publish(senders[0], 2)
        assert await waiting == 2


async def test_senders_that_publish_together_are_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their answers to the first request say all, so no connection is cut."""
    monkeypatch.setattr(follow, "_OTHERS_PUBLISH_S", 10.0)
    monkeypatch.setattr(follow, "_NEWS_WAIT_S", 30.0)
    async with shards(world=3) as senders, transport() as receiver:
        steps = receiver.steps(joined(senders))
        for step in (1, 2, 3):
            waiting = asyncio.ensure_future(soon(steps))
            await settle(lambda: all(s.statistics().waiting == 1 for s in senders))
            await asyncio.gather(*(publish(sender, step) for sender in senders))
            assert await waiting == step
        assert [sender.statistics().requests for sender in senders] == [3, 3, 3]
