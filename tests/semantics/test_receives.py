"""What a receive over HTTP leaves behind: in memory here, and at its sender."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiockpt import IntegrityError, TransferTimeoutError
from aiockpt.testing import StallAfter, assert_same
from cells import proves
from outcomes import Cell
from receivers import COUNT, MIB_SENT, arenas, held_up, left, options_of
from serving import settle
from transports import MIB, Transport, pair, proxied, receive, through, transport
from transports import weights as filled

pytestmark = pytest.mark.asyncio

HERE = "semantics/test_receives.py::"


def weights() -> dict[str, Any]:
    """Return what is sent."""
    return filled(mib=MIB_SENT, count=COUNT)


async def at_the_sender(sender: Transport, receiver: Transport) -> str:
    """Say what is left there; the next receive finds what it should."""
    await settle(lambda: sender.statistics().readers == 0)
    assert sender.statistics().step == 1
    assert_same(await receive(sender, receiver), weights())
    return "idle"


def check(cell: Cell, seen: set[str], there: str) -> None:
    """Compare what was found with the words of the cell."""
    here = "either" if seen == {"untouched", "filled"} else "/".join(sorted(seen))
    assert f"{here} / {there}" == cell.left


@proves(HERE + "test_an_error")
async def test_an_error(cell: Cell) -> None:
    """The last bytes are not those of the manifest; the first ones have been here."""
    options = options_of(cell.call)
    state = weights()
    async with transport(zero_copy=True) as sender, transport() as receiver:
        await sender.send_checkpoint([], 1, state)
        before = arenas()
        state[f"w{COUNT - 1}"].numpy()[:] = 9.0  # which nobody can see
        with pytest.raises(IntegrityError) as caught:
            await receive(sender, receiver, **options)
        notes = list(getattr(caught.value, "__notes__", []))
        del caught
        here = left(options, before)
        state[f"w{COUNT - 1}"].numpy()[:] = 1.0
        check(cell, {here}, await at_the_sender(sender, receiver))
    if "into" in options:
        done = "was modified" if here == "torn" else "was not modified"
        assert f"the template {done}" in notes


@asynccontextmanager
async def stalling(sender: Transport) -> AsyncIterator[str]:
    """Give the metadata of a sender whose connections fall silent half way."""
    silent = StallAfter(int(MIB_SENT * MIB / 16))
    async with proxied(sender, otherwise=silent) as proxy:
        yield through(proxy, sender)


async def end(task: asyncio.Task[Any], cell: Cell) -> None:
    """Have a receive end as the cell says; its deadline comes by itself."""
    if cell.ending == "cancel":
        task.cancel()
    await settle(lambda: task.cancelling() or task.done(), patience=30)


async def outcome(task: asyncio.Task[Any], cell: Cell) -> None:
    """Check how it has ended; keep nothing of its error."""
    await asyncio.wait({task})
    if cell.ending == "cancel":
        assert task.cancelled()
    else:
        assert isinstance(task.exception(), TransferTimeoutError)


async def cut_half_way(
    cell: Cell, options: dict[str, Any], sender: Transport, receiver: Transport
) -> str:
    """Cut a receive short while bytes arrive; return what is left of it."""
    arrived = asyncio.Event()
    before = arenas()
    limit = 0.5 if cell.ending == "timeout" else 30
    async with stalling(sender) as metadata:
        task = asyncio.create_task(
            receiver.recv_checkpoint(
                *(0, metadata, 1, limit),
                **options,
                progress=lambda now: arrived.set() if now.chunks_done else None,
            )
        )
        await arrived.wait()
        await end(task, cell)
        await outcome(task, cell)
        del task
    return left(options, before)


async def cut_at_the_end(
    cell: Cell,
    options: dict[str, Any],
    sender: Transport,
    receiver: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Cut it short while the template is filled."""
    with monkeypatch.context() as patch:
        gate = held_up(patch)
        limit = 2 if cell.ending == "timeout" else 30
        task = asyncio.create_task(receive(sender, receiver, timeout=limit, **options))
        await gate.entered.wait()
        await end(task, cell)
        gate.go.set()
        await outcome(task, cell)
    return left(options, 0)


async def cut(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a receive short at each of the moments that make a difference."""
    async with pair(num_chunks=1, stall_timeout=30) as (sender, receiver):
        await sender.send_checkpoint([], 1, weights())
        seen = {await cut_half_way(cell, options_of(cell.call), sender, receiver)}
        if "into=" in cell.call and "direct" not in cell.call:
            options = options_of(cell.call)
            ends = (sender, receiver, monkeypatch)
            seen.add(await cut_at_the_end(cell, options, *ends))
        check(cell, seen, await at_the_sender(sender, receiver))


@proves(HERE + "test_a_deadline")
async def test_a_deadline(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """While bytes arrive, and while the template is filled."""
    await cut(cell, monkeypatch)


@proves(HERE + "test_a_cancel")
async def test_a_cancel(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same two moments."""
    await cut(cell, monkeypatch)
