"""A thread maps and unmaps memory, which may take long."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aiockpt.memory.arena import Arena
from tests.support.servers import settle
from tests.support.transports import receive, transport, weights

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("options", [{}, {"same_host": True}, {"zero_copy": True}])
async def test_staging_memory_is_mapped_in_a_thread(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapping waits for those who touch or unmap gigabytes."""
    threads: list[int] = []
    make = Arena.__init__

    def noted(arena: Arena, *args: Any, **given: Any) -> None:
        threads.append(threading.get_ident())
        make(arena, *args, **given)

    monkeypatch.setattr(Arena, "__init__", noted)
    async with transport(**options) as sender:
        for step in range(3):
            await sender.send_checkpoint([1], step, weights(mib=1 + 4 * step))
        await sender.disallow_checkpoint()
    assert len(threads) == 3
    assert threading.get_ident() not in threads


async def test_a_cancelled_send_gives_back_what_was_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that maps is waited for, and its memory returns to the system."""
    made: list[Arena] = []
    mapping, go = threading.Event(), threading.Event()
    make = Arena.__init__

    def slow(arena: Arena, *args: Any, **given: Any) -> None:
        mapping.set()
        assert go.wait(30)
        make(arena, *args, **given)
        made.append(arena)

    monkeypatch.setattr(Arena, "__init__", slow)
    async with transport() as sender:
        sending = asyncio.create_task(sender.send_checkpoint([1], 1, weights()))
        await settle(mapping.is_set)
        sending.cancel()
        await asyncio.sleep(0.02)
        go.set()
        await asyncio.wait({sending})
        assert sending.cancelled()
    assert [arena.closed for arena in made] == [True]


async def test_kept_memory_is_unmapped_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread unmaps it before the transport that kept it has ended."""
    threads: list[int] = []
    close = Arena.close

    def noted(arena: Arena) -> None:
        threads.append(threading.get_ident())
        close(arena)

    async with transport() as sender, transport(keep_arena=True) as receiver:
        await sender.send_checkpoint([1], 1, weights())
        got = await receive(sender, receiver)
        del got
        monkeypatch.setattr(Arena, "close", noted)
        await receiver.shutdown()
        assert len(threads) == 1
        assert threading.get_ident() not in threads
