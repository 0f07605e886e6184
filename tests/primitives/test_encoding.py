"""The sender encodes each delta once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiockpt.http import deltas
from aiockpt.testing import assert_same
from tests.support.transports import receive, transport, weights_of

pytestmark = pytest.mark.asyncio


async def test_a_chunk_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent and later receivers share the deltas."""
    calls: list[int] = []
    encode = deltas._encoded

    def counting(*given: Any) -> bytes | None:
        calls.append(given[2])
        return encode(*given)

    monkeypatch.setattr(deltas, "_encoded", counting)
    async with (
        transport(keep_base=True) as sender,
        transport(same_host=False) as receiver,
    ):
        for step in (0, 1):
            await sender.send_checkpoint(step=step, state_dict=weights_of(step))
        options: list[dict[str, Any]] = [
            {"into": weights_of(0), "have": True} for _ in range(3)
        ]
        calling = [receive(sender, receiver, **each) for each in options]
        for got in [*await asyncio.gather(*calling[:2]), await calling[2]]:
            assert_same(got, weights_of(1))
    assert len(calls) == len({*calls}) > 0
