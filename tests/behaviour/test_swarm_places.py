"""Members of a swarm whose source is behind a proxy."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from aiockpt import Swarm
from aiockpt.testing import Drip, FaultProxy
from tests.support.servers import own_address, reverse_proxy
from tests.support.swarms import SLOW, all_of, sending, sent
from tests.support.transports import Events, Transport, transport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

JOINING: dict[str, Any] = {"swarm": Swarm(linger=60), "same_host": False}


@asynccontextmanager
async def behind(sender: Transport) -> AsyncIterator[str]:
    """Give the metadata of a sender behind a slow reverse proxy of another host."""
    base, _, token = sender.metadata().partition("#")
    async with reverse_proxy(base, local="127.0.0.9") as proxy:
        _, _, place = proxy.url.partition("//127.0.0.1:")
        port, _, path = place.partition("/")
        fault = Drip(SLOW, burst=8192)
        async with FaultProxy("127.0.0.1", int(port), otherwise=fault) as slower:
            yield f"http://127.0.0.1:{slower.port}/{path}#{token}"


async def test_behind_a_proxy_both_ends_say_what_a_swarm_needs(events: Events) -> None:
    """Nobody asks the proxy's host for chunks, and all receive from the source.

    A receiver with a session of the caller's knows its own address, too.
    """
    async with (
        aiohttp.ClientSession() as session,
        sending() as sender,
        transport(session=session, **JOINING) as one,
        transport(**JOINING) as two,
        behind(sender) as url,
    ):
        await all_of([one, two], url)
        assert sent(one, two) == 0
    said = [each for each in events if each.stop == "swarm"]
    warnings = [each.detail for each in said if each.level == logging.WARNING]
    assert len([each for each in warnings if each.startswith("hides a member")]) == 1
    assert len([each for each in warnings if each.startswith("nobody is told")]) == 2
    for each in warnings:
        assert "connects from '127.0.0.1'" in each
        assert "its announcement came from '127.0.0.9'" in each
        assert "a proxy or a NAT is between them" in each
        assert "Auth(peers=['127.0.0.1'])" in each
    assert not [each for each in events if each.stop == "drop"]


async def test_behind_a_proxy_listed_members_serve_each_other(events: Events) -> None:
    """The source hands out the addresses that they announce."""
    here = own_address()
    async with (
        sending(peers=[here]) as sender,
        transport(host=here, **JOINING) as one,
        transport(host=here, **JOINING) as two,
        behind(sender) as url,
    ):
        await all_of([one, two], url)
        assert sent(one, two) > 0
    assert not [each for each in events if each.level >= logging.WARNING]


async def test_a_receiver_at_another_path_joins_no_swarm(events: Events) -> None:
    """It says why; a member must not choose the path that others ask for."""
    async with (
        sending() as sender,
        transport(**JOINING) as one,
        transport(advertise="http://127.0.0.1:9/a/b/", **JOINING) as two,
        behind(sender) as url,
    ):
        await all_of([one, two], url)
        assert sent(one, two) == 0
    (why,) = [each.detail for each in events if "in no swarm" in each.detail]
    assert "it serves at http://127.0.0.1:9/a/b/" in why
    assert "members serve at /checkpoint/" in why
