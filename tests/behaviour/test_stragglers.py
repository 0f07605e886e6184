"""One slow connection does not hold up a receive, whatever is received into what."""

from __future__ import annotations

from typing import Any

import pytest

from aiockpt.testing import Drip, Fault, assert_same
from tests.support.transports import chunked, pair, proxied, through

SLOWEST = Drip(1000, burst=100)
"""A chunk takes more than a minute."""

WANTED = [f"w{n}" for n in range(16, 48)]


@pytest.mark.asyncio
@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["fresh", "into", "direct", "select", "have"])
async def test_a_straggler_is_overtaken(how: str) -> None:
    """Each byte is written by one connection, and what is not wanted by none."""
    into: dict[str, Any] = {key: value * 0 for key, value in chunked(64).items()}
    if how == "have":
        into = chunked(64) | {key: into[key] for key in WANTED}
    every: dict[str, dict[str, Any]] = {
        "fresh": {},
        "into": {"into": into},
        "direct": {"into": into, "direct": True},
        "select": {"select": WANTED},
        "have": {"into": into, "have": True},
    }
    faults = [Fault(), SLOWEST, SLOWEST]
    async with (
        pair(state=chunked(64), connections=4) as (sender, receiver),
        proxied(sender, faults=faults) as proxy,
    ):
        url = through(proxy, sender)
        got = await receiver.recv_checkpoint(0, url, 1, 170.0, **every[how])
        assert proxy.statistics().connections > 2
    expected = chunked(64)
    if how == "select":
        expected = {key: expected[key] for key in WANTED}
    assert_same(got, expected)
