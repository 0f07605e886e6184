"""Swarms of transports with other options: TLS, zones, deltas, templates kept aside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf, nan
from typing import Any

import pytest

from aiockpt import Swarm, TransferEvent
from aiockpt.testing import Drip, assert_same
from tests.support.servers import certified, settle
from tests.support.swarms import (
    NBYTES,
    SLOW,
    STATE,
    all_of,
    members_of,
    places,
    sending,
    sent,
    slow,
)
from tests.support.transports import (
    MIB,
    Events,
    Transport,
    proxied,
    through,
    transport,
    weights_of,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]


@asynccontextmanager
async def swarming(
    *receivers: dict[str, Any], **options: Any
) -> AsyncIterator[tuple[Transport, list[Transport], str]]:
    """Give a sender with slow connections, receivers that join, and the metadata."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        sender = await enter(sending(**options))
        joining: dict[str, Any] = {"swarm": True, "same_host": False}
        members = [await enter(transport(**{**joining, **each})) for each in receivers]
        yield sender, members, await enter(slow(sender))


def details(events: list[TransferEvent], stop: str) -> list[str]:
    """Return what the events of one kind say."""
    return [each.detail or "" for each in events if each.stop == stop]


@pytest.mark.parametrize(
    ("option", "error", "reason"),
    [
        ({"linger": -1.0}, ValueError, "linger must be at least 0, got -1.0"),
        ({"linger": "30"}, TypeError, "linger must be a number, got str"),
        ({"linger": None}, TypeError, "linger must be a number, got NoneType"),
        ({"linger": nan}, ValueError, "linger must be at least 0, got nan"),
        ({"slots": 0}, ValueError, "slots must be at least 1, got 0"),
        ({"slots": 1.5}, TypeError, "slots must be of type int, got float"),
        ({"slots": True}, TypeError, "slots must be of type int, got bool"),
        ({"rate": 0}, ValueError, "rate must be at least 1, got 0"),
        ({"rate": "x"}, TypeError, "rate must be a number, got str"),
        ({"rate": inf}, ValueError, "rate must be finite; None is for no limit"),
        ({"zone": 3}, TypeError, "zone must be of type str, got int"),
        ({"zone": "z" * 65}, ValueError, "zone must have at most 64 characters"),
        ({"zone": "\ud800"}, ValueError, "zone cannot be encoded"),
    ],
    ids=repr,
)
async def test_bad_values(
    option: dict[str, Any], error: type[Exception], reason: str
) -> None:
    """They are refused where they are given."""
    with pytest.raises(error, match=reason):
        Swarm(**option)


@pytest.mark.parametrize("other", ["TLS", "plain"])
async def test_members_of_a_sender_with_tls_need_tls(
    other: str, events: Events
) -> None:
    """Members with certificates that all trust serve each other.

    One without receives all the same, and says why nobody can receive from it.
    """
    server, client = certified()
    both = {"ssl_context": server, "client_ssl_context": client}
    second = both if other == "TLS" else {"client_ssl_context": client}
    async with swarming(both, second, ssl_context=server) as (_, members, url):
        await all_of(members, url)
        serving = [each.address() for each in members]
        assert serving[0].startswith("https:")
        if other == "TLS":
            assert sent(*members) > 0
        else:
            assert [each.statistics().requests for each in members] == [0, 0]
            del serving[1]
        assert sorted(places(events)) == sorted(serving)
    why = "in no swarm: the source speaks TLS, and this receiver does not"
    assert details(events, "swarm").count(why) == (other == "plain")
    assert not details(events, "drop")


async def test_a_zone_reaches_the_sender() -> None:
    """The sender counts it when it names members, and its status shows it."""
    zoned = [{"swarm": Swarm(zone=zone, linger=60)} for zone in ("rack", "other")]
    async with swarming(*zoned) as (sender, members, url):
        await all_of(members, url)
        zones = [each["zone"] for each in await members_of(sender)]
    assert sorted(zones) == ["other", "rack"]


async def test_deltas_come_from_the_sender(events: Events) -> None:
    """Members share the first step. A member that has the next one whole is not asked.

    The deltas come slowly, so there is time to ask it.
    """
    async with (
        swarming({}, {}, {}, keep_base=True) as (sender, (*members, whole), url),
        proxied(sender, otherwise=Drip(SLOW // 20, burst=1024)) as slower,
    ):
        await sender.send_checkpoint([], 1, weights_of(0))
        held = await all_of(members, url, state=weights_of(0))
        assert sent(*members) > 0
        await sender.send_checkpoint([], 2, weights_of(1))
        before = sent(sender)
        got = await asyncio.gather(
            whole.recv_checkpoint(0, url, 2),
            *(
                each.recv_checkpoint(0, through(slower, sender), 2, have=state)
                for each, state in zip(members, held, strict=True)
            ),
        )
        for state in got:
            assert_same(state, weights_of(1))
        assert sent(sender) - before < 1.2 * 4 * MIB
        assert sent(whole) == 0
    assert len(places(events)) >= 4
    assert not details(events, "drop")


async def test_members_prepare_a_checkpoint() -> None:
    """They serve what they hold beside their templates, until they have it all."""
    async with swarming({}, {}, {}) as (sender, members, url):
        into = [{key: STATE[key] * 0 for key in STATE} for _ in members]
        prepared = await asyncio.gather(
            *(
                each.prepare(url, 1, into=template)
                for each, template in zip(members, into, strict=True)
            )
        )
        assert sent(*members) > 0
        assert sent(sender) < 3 * NBYTES
        await settle(lambda: not any(each.statistics().readers for each in members))
        for each in prepared:
            assert_same(each.apply(), STATE)
