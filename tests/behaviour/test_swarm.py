"""Receivers of one checkpoint that serve each other: ``HTTPTransport(swarm=...)``."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import weakref
from math import inf
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

from aiockpt import Swarm
from aiockpt.testing import assert_same
from tests.support.servers import settle
from tests.support.swarms import (
    CHUNKS,
    NBYTES,
    SLOW,
    STATE,
    all_of,
    offer_to_join,
    places,
    receivers,
    sending,
    sent,
    slow,
    until_members,
)
from tests.support.transports import (
    CHUNK,
    Events,
    Halfway,
    chunked,
    in_the_middle,
    port_of,
    told,
    transport,
)
from tests.support.waiting import servers_of

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]


def zeros() -> dict[str, Any]:
    """Return a template of the state."""
    return {key: each * 0 for key, each in STATE.items()}


async def test_a_single_receiver_asks_for_nothing_more() -> None:
    """It asks as it does without a swarm."""
    requests = []
    for swarm in (True, False):
        async with sending() as sender, receivers(1, swarm) as (receiver,):
            await all_of([receiver], sender.metadata())
            assert receiver.statistics().requests == 0
            requests.append(sender.statistics().requests)
    assert requests[0] == requests[1]


async def test_members_send_each_other_the_checkpoint() -> None:
    """A member sends from the memory that its receive fills, whoever owns it."""
    own, direct = zeros(), zeros()
    async with sending() as sender, receivers(3) as members, slow(sender) as url:
        one, other, another = members
        got = await asyncio.gather(
            one.recv_checkpoint(0, url, 1),
            other.recv_checkpoint(0, url, 1, into=own),
            another.recv_checkpoint(0, url, 1, into=direct, direct=True),
        )
        for state in got:
            assert_same(state, STATE)
        assert got[1]["w0"] is own["w0"]
        assert got[2]["w0"] is direct["w0"]
        assert all(sent(each) > 0 for each in members)
        assert sent(sender, *members) >= 3 * NBYTES


async def test_a_receive_that_hears_of_nobody_asks_as_without_a_swarm() -> None:
    """The receiver waits for a moment, since another one might have joined."""
    async with sending() as sender, receivers(1) as (receiver,), slow(sender) as url:
        await offer_to_join(url)
        await all_of([receiver], url)
        assert sender.statistics().requests < CHUNKS


async def test_the_first_receiver_joins_when_a_second_one_comes() -> None:
    """The source cuts its long ranges, so that it asks again."""
    large = chunked(256)  # more than the buffers of sockets hold
    async with transport() as sender, receivers(2) as (first, second):
        await sender.send_checkpoint([], 1, large)
        async with slow(sender, 8 * SLOW) as url, told() as events:
            task, _ = await in_the_middle(
                lambda halfway: first.recv_checkpoint(0, url, 1, progress=halfway),
                lambda: asyncio.sleep(0),
            )
            assert_same(await second.recv_checkpoint(0, url, 1), large)
            assert_same(await task, large)
        assert sent(first) > 0
        assert sent(sender) < 2 * 256 * CHUNK
        assert sender.statistics().evicted == 0
    assert len(places(events)) == 2


async def test_a_member_with_a_server_process_serves_from_its_own_loop() -> None:
    """The member serves at a port of its own, and the process may die meanwhile."""
    async with (
        sending(process=True) as sender,
        receivers(2, process=True) as plain,
        receivers(1, process=True, keep_arena=True) as keeping,
        slow(sender, 2 * SLOW) as url,
    ):
        members = [*plain, *keeping]
        tasks = [
            asyncio.create_task(each.recv_checkpoint(0, url, 1)) for each in members
        ]
        await settle(lambda: sent(*members) > 0, patience=60)
        for each in members:
            (pid,) = servers_of(port_of(each))
            os.kill(pid, signal.SIGKILL)
        for state in await asyncio.gather(*tasks):
            assert_same(state, STATE)
        into = zeros()
        await all_of(members[:1], url, into=into)
        # Each sends checkpoints of its own, too, from its process.
        await members[0].send_checkpoint([1], 2, STATE)
        await all_of(members[1:2], members[0].metadata(), 2)


async def test_the_address_of_a_member_with_a_server_process(events: Events) -> None:
    """Its host is the advertised one, but a proxy's URL leads to the process only."""
    apart: dict[str, Any] = {"process": True}
    async with (
        sending() as sender,
        receivers(1, advertise="localhost", **apart) as named,
        receivers(1, advertise="http://proxy.example/ckpt/", **apart) as behind,
        slow(sender) as url,
    ):
        await all_of([*named, *behind], url)
        addresses = {each.address() for each in (*named, *behind)}
    found = {*places(events)}
    assert not found & addresses
    assert sorted(str(urlsplit(each).hostname) for each in found) == [
        *("127.0.0.1", "localhost"),
    ]


async def test_senders_that_hold_the_same_are_sources_beside_members() -> None:
    """The members join at the first that invites them."""
    async with (
        sending() as one,
        sending() as other,
        receivers(3) as members,
        slow(one) as first,
        slow(other) as second,
    ):
        await all_of(members, [first, second])


async def test_neither_end_needs_to_take_part() -> None:
    """A sender without a swarm, receivers that join none: all of them receive."""
    async with sending(swarm=False) as sender, receivers(2) as members:
        await all_of(members, sender.metadata())
        assert [each.statistics().requests for each in members] == [0, 0]
    async with (
        sending() as sender,
        receivers(1) as ones,
        receivers(1, swarm=False) as no,
    ):
        await all_of([*ones, *no], sender.metadata())
        assert no[0].statistics().requests == 0


# ----------------------------------------------------------------------- its end


async def test_a_member_lingers_and_serves_a_late_one() -> None:
    """The member serves until its time has passed or it receives again.

    It forgets the progress callback, which may refer to as much as a model.
    """
    async with (
        sending() as sender,
        receivers(2, Swarm(linger=inf)) as members,
        slow(sender) as url,
    ):
        callback = Halfway()
        forgotten = weakref.ref(callback)
        await all_of(members, url, progress=callback)
        del callback
        gc.collect()
        assert forgotten() is None
        before = sent(*members)
        async with receivers(1) as late:
            await all_of(late, url)
        assert sent(*members) > before
        async with sending() as other:  # the next receive ends it
            await all_of(members, other.metadata())
        await until_members(sender, 0)


async def test_what_the_caller_has_changed_is_not_sent(events: Events) -> None:
    """A member that lingers compares the digests before it sends, and then leaves."""
    async with (
        sending() as sender,
        receivers(2, Swarm(linger=60)) as members,
        slow(sender) as url,
    ):
        for state in await all_of(members, url):
            for name in state.keys() - {"n"}:
                state[name].zero_()
        before = len(events)
        async with receivers(1) as late:
            await all_of(late, url)
        given = [each for each in events[before:] if each.stop == "fetch_chunk"]
        assert given
        addresses = [each.address() for each in members]
        assert not [each for each in given if each.nbytes and each.peer in addresses]
        dropped = [each for each in events if each.stop == "drop"]
        assert dropped
        for each in dropped:  # which is nothing to worry about
            assert each.detail == f"{each.peer} has left the swarm"
            assert each.level == logging.INFO
        asked = {each.peer for each in dropped}
        await until_members(sender, len(members) - len(asked))
    assert not any("digest" in each.detail for each in events)


async def test_two_receives_of_a_transport_are_in_the_swarm() -> None:
    """A request cannot say which of them it is for: it is the first, until its end."""
    async with (
        sending() as sender,
        receivers(2) as (double, single),
        slow(sender) as url,
    ):
        await all_of([double, double, single], url)
        assert sent(double, single) > 0


async def test_a_cancel_ends_the_serving() -> None:
    """The serving ends with a cancel of anyio, which is repeated until it has ended."""
    async with sending() as sender, receivers(2) as (first, second):
        async with slow(sender, SLOW // 2) as url:
            scope = anyio.CancelScope()

            async def fetch(halfway: Halfway) -> None:
                with scope:
                    await first.recv_checkpoint(0, url, 1, progress=halfway)

            other = asyncio.create_task(second.recv_checkpoint(0, url, 1))
            task, _ = await in_the_middle(fetch, lambda: asyncio.sleep(0.2))
            scope.cancel()
            await asyncio.wait({task})
            assert_same(await other, STATE)
        assert first.statistics().readers == 0


async def test_a_new_step_replaces_the_swarm() -> None:
    """Its members keep the old one until they have it, as without a swarm."""
    async with sending() as sender, receivers(2) as members, slow(sender) as url:
        task = asyncio.create_task(all_of(members, url))
        await settle(lambda: any(each.statistics().requests for each in members))
        await sender.send_checkpoint([], 2, {**STATE, "n": 2})
        await task
        await all_of(members, url, 2, {**STATE, "n": 2})
