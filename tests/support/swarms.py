"""Swarms of transports on loopback: a slow sender, and receivers that join."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp

from aiockpt import Swarm, TransferEvent
from aiockpt.testing import Drip, assert_same
from tests.support.transports import (
    CHUNK,
    Transport,
    chunked,
    proxied,
    through,
    transport,
)

CHUNKS = 48
STATE = chunked(CHUNKS)  # 3 MiB
NBYTES = CHUNKS * CHUNK
SLOW = 400_000
"""Bytes per second of each connection to the sender."""


@asynccontextmanager
async def sending(**options: Any) -> AsyncIterator[Transport]:
    """Offer the state as step 1."""
    async with transport(**options) as sender:
        await sender.send_checkpoint([], 1, STATE)
        yield sender


@asynccontextmanager
async def receivers(
    count: int, swarm: Swarm | bool = True, **options: Any
) -> AsyncIterator[list[Transport]]:
    """Make receivers that join."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        made = [
            transport(swarm=swarm, same_host=False, **options) for _ in range(count)
        ]
        yield [await enter(each) for each in made]


@asynccontextmanager
async def slow(sender: Transport, rate: int = SLOW) -> AsyncIterator[str]:
    """Give the metadata of a sender with slow connections."""
    async with proxied(sender, otherwise=Drip(rate, burst=8192)) as proxy:
        yield through(proxy, sender)


def sent(*transports: Transport) -> int:
    """Return how many bytes these have sent."""
    return sum(each.statistics().bytes_sent for each in transports)


async def all_of(
    members: list[Transport],
    metadata: str | list[str],
    step: int = 1,
    state: Any = STATE,
    **options: Any,
) -> list[Any]:
    """Receive with all of them at once, and compare."""
    got = await asyncio.gather(
        *(each.recv_checkpoint(0, metadata, step, **options) for each in members)
    )
    for each in got:
        assert_same(each, state)
    return got


def authorized(metadata: str, number: int | None = None) -> dict[str, str]:
    """Return the headers of a request to a sender, of the receive with a number."""
    found = {"Authorization": f"Bearer {metadata.partition('#')[2]}"}
    if number is not None:
        found["Aiockpt-Lease"] = f"{number:032x}; ttl=60"
    return found


async def offer_to_join(metadata: str) -> None:
    """Ask for the manifest as a receiver would, so that the next one is invited."""
    headers = {**authorized(metadata, 7), "Aiockpt-Swarm": "join"}
    url = f"{metadata.partition('#')[0]}1/metadata"
    async with (
        aiohttp.ClientSession(headers=headers, raise_for_status=True) as session,
        session.get(url),
    ):
        pass


async def members_of(sender: Transport) -> list[dict[str, Any]]:
    """Return the members of a sender's swarm, as its status shows them."""
    async with (
        aiohttp.ClientSession(headers=authorized(sender.metadata())) as session,
        session.get(sender.address()) as answer,
    ):
        found: list[dict[str, Any]] = (await answer.json())["status"]["swarm"][
            "members"
        ]
        return found


async def until_members(
    sender: Transport, count: int | None = None, complaints: int = 0
) -> None:
    """Wait until a swarm has so many members, or so many complaints about one."""

    def is_so(members: list[dict[str, Any]]) -> bool:
        most = max((each["complaints"] for each in members), default=0)
        return count in (None, len(members)) and most >= complaints

    async with asyncio.timeout(60):
        while not is_so(await members_of(sender)):  # noqa: ASYNC110 - another's state
            await asyncio.sleep(0.01)


def places(events: list[TransferEvent]) -> list[str]:
    """Return where members have said that they serve."""
    said, start = [each.detail for each in events], "serves the swarm at "
    return [each.removeprefix(start) for each in said if each.startswith(start)]
