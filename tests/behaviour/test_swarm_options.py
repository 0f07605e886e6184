"""Swarms of transports with other options: TLS, zones, deltas, templates kept aside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf, nan
from typing import Any

import aiohttp
import pytest
import torch

from aiockpt import Swarm, TransferEvent
from aiockpt.runtime.same_host import format_mark, identity
from aiockpt.testing import Drip, assert_same
from tests.support.servers import certified, settle
from tests.support.transports import (
    CHUNK,
    MIB,
    Transport,
    chunked,
    proxied,
    through,
    told,
    transport,
    weights_of,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

CHUNKS = 48
STATE = chunked(CHUNKS)
NBYTES = CHUNKS * CHUNK
RATE = 400_000  # bytes per second of each connection to the sender


@asynccontextmanager
async def swarming(
    *receivers: dict[str, Any], **options: Any
) -> AsyncIterator[tuple[Transport, list[Transport], str]]:
    """Give a sender with slow connections, receivers that join, and the metadata."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        sender = await enter(transport(**options))
        joining: dict[str, Any] = {"swarm": True, "same_host": False}
        members = [await enter(transport(**{**joining, **each})) for each in receivers]
        proxy = await enter(proxied(sender, otherwise=Drip(RATE, burst=8192)))
        yield sender, members, through(proxy, sender)


def details(events: list[TransferEvent], stop: str) -> list[str]:
    """Return what the events of one kind say."""
    return [each.detail or "" for each in events if each.stop == stop]


def sent(*transports: Transport) -> int:
    """Return how many bytes these have sent."""
    return sum(each.statistics().bytes_sent for each in transports)


async def all_of(
    members: list[Transport], metadata: str, step: int = 1, **options: Any
) -> list[Any]:
    """Receive with all of them at once."""
    return await asyncio.gather(
        *(each.recv_checkpoint(0, metadata, step, **options) for each in members)
    )


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


async def test_a_receiver_may_linger_until_it_receives_again() -> None:
    """The receiver lingers until its next receive or its shutdown."""
    forever = {"swarm": Swarm(linger=inf)}
    async with swarming(forever, forever) as (sender, members, url):
        await sender.send_checkpoint([], 1, STATE)
        for _ in range(2):
            await all_of(members, url)
            for each in members:
                (member,) = each._host.members
                assert member.is_lingering


# -------------------------------------------------------------------------- TLS


async def test_members_serve_each_other_over_tls() -> None:
    """If each of them has a certificate, and trusts the others'."""
    server, client = certified()
    both = {"ssl_context": server, "client_ssl_context": client}
    async with (
        told() as events,
        swarming(both, both, ssl_context=server) as (sender, members, url),
    ):
        await sender.send_checkpoint([], 1, STATE)
        for state in await all_of(members, url):
            assert_same(state, STATE)
        assert sent(*members) > 0
        assert sent(sender) < 2 * NBYTES
        said = details(events, "swarm")
        for each in members:
            assert f"serves the swarm at {each.address()}" in said
            assert each.address().startswith("https:")
    assert not details(events, "drop")


async def test_a_member_without_tls_joins_no_swarm_of_a_sender_with_tls() -> None:
    """It receives all the same, and says why nobody can receive from it."""
    server, client = certified()
    both = {"ssl_context": server, "client_ssl_context": client}
    plain = {"client_ssl_context": client}
    async with (
        told() as events,
        swarming(both, plain, ssl_context=server) as (sender, members, url),
    ):
        await sender.send_checkpoint([], 1, STATE)
        for state in await all_of(members, url):
            assert_same(state, STATE)
        assert [each.statistics().requests for each in members] == [0, 0]
        said = details(events, "swarm")
        assert f"serves the swarm at {members[0].address()}" in said
    assert "in no swarm: the source speaks TLS, and this receiver does not" in said
    assert len(said) == 2


# ------------------------------------------------------------------------ zones


async def test_members_hear_of_those_in_their_zone_first() -> None:
    """A zone reaches the sender, which counts it when it names members."""
    rack: dict[str, Any] = {"swarm": Swarm(zone="rack"), "same_host": False}
    async with (
        transport() as sender,
        transport(**rack) as one,
        transport(**rack) as other,
        proxied(sender, otherwise=Drip(RATE, burst=8192)) as proxy,
        aiohttp.ClientSession() as session,
    ):
        await sender.send_checkpoint([], 1, STATE)
        base, _, token = sender.metadata().partition("#")
        session.headers["Authorization"] = f"Bearer {token}"
        async with session.head(f"{base}1/metadata") as answer:
            snapshot_id = answer.headers["ETag"].strip('"')
        mark = format_mark(identity() or b"", snapshot_id)

        async def announce(number: int, zone: str) -> list[str]:
            async with session.post(
                f"{base}1/members",
                headers={"Aiockpt-Lease": f"{number:032x}; ttl=60"},
                json={
                    "url": f"http://127.0.0.1:{number}/",
                    "zone": zone,
                    "host": mark,
                },
            ) as answer:
                named = (await answer.json()).get("members", [])
            return [each["zone"] for each in named]

        tasks = [
            asyncio.create_task(each.recv_checkpoint(0, through(proxy, sender), 1))
            for each in (one, other)
        ]
        zones: list[str] = []
        async with asyncio.timeout(20):
            while zones != ["rack", "rack"]:
                async with session.get(base) as answer:
                    swarm = (await answer.json())["status"]["swarm"]
                zones = [each["zone"] for each in swarm["members"]]
        # Those that come later were named less often, so they would be preferred.
        for number in range(1, 61):
            await announce(number, "elsewhere")
        named = await announce(61, "rack")
        assert sorted(named) == [*["elsewhere"] * 10, "rack", "rack"]
        for task in tasks:
            assert_same(await task, STATE)


# ------------------------------------------------------------ kinds of receives


async def test_deltas_come_from_the_sender() -> None:
    """Members share the first step. A member that has the next one whole is not asked.

    The deltas come slowly, so there is time to ask it.
    """
    async with (
        told() as events,
        swarming({}, {}, {}, keep_base=True) as (sender, (*members, whole), url),
        proxied(sender, otherwise=Drip(RATE // 20, burst=1024)) as slower,
    ):
        await sender.send_checkpoint([], 1, weights_of(0))
        held = await all_of(members, url)
        for state in held:
            assert_same(state, weights_of(0))
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
    assert sum("serves the swarm" in each for each in details(events, "swarm")) >= 4
    assert not details(events, "drop")


async def test_members_prepare_a_checkpoint() -> None:
    """They serve what they hold beside their templates, until they have it all."""
    async with swarming({}, {}, {}) as (sender, members, url):
        await sender.send_checkpoint([], 1, STATE)
        prepared = await asyncio.gather(
            *(each.prepare(url, 1, into={**_zeros(STATE), "n": 0}) for each in members)
        )
        assert sent(*members) > 0
        assert sent(sender) < 2.5 * NBYTES
        await settle(lambda: not any(each.statistics().readers for each in members))
        for each in prepared:
            assert_same(each.apply(), STATE)


def _zeros(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.zeros_like(torch.as_tensor(each)) for name, each in state.items()
    }
