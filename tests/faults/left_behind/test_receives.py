"""What a receive over HTTP leaves behind: in memory here, and at its sender."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from aiockpt import IntegrityError
from aiockpt.errors import MissingKeysError, TransferTimeoutError
from aiockpt.testing import StallAfter, assert_same
from tests.support.proofs import Cell, each_cell
from tests.support.servers import settle
from tests.support.transports import (
    COUNT,
    FILLING,
    MIB,
    MIB_SENT,
    SHARING,
    Transport,
    arenas,
    begin,
    held_up,
    left,
    lends,
    options_of,
    pair,
    proxied,
    receive,
    there,
    through,
    transport,
)
from tests.support.transports import weights as filled

pytestmark = pytest.mark.asyncio


def weights() -> dict[str, Any]:
    """Return what is sent."""
    return filled(mib=MIB_SENT, count=COUNT)


async def at_the_sender(sender: Transport, receiver: Transport) -> str:
    """Say what is left there; the next receive finds what it should."""
    await settle(lambda: sender.statistics().readers == 0)
    assert sender.statistics().step == 1
    found = there(sender)
    assert_same(await receive(sender, receiver), weights())
    return found


def check(cell: Cell, seen: set[str], other: str) -> None:
    """Compare what was found with the words of the cell."""
    here = "either" if seen == {"untouched", "filled"} else "/".join(sorted(seen))
    assert f"{here} / {other}" == cell.left


@asynccontextmanager
async def found_at(
    cell: Cell, sender: Transport, **faults: Any
) -> AsyncIterator[str | list[str]]:
    """Give the metadata of one sender, or of two, all by way of proxies."""
    async with proxied(sender, **faults) as one, proxied(sender, **faults) as other:
        both = [through(each, sender) for each in (one, other)]
        yield both if "metadata=[" in cell.call else both[0]


@each_cell(
    "HTTPTransport.recv_checkpoint: error",
    "HTTPTransport.recv_checkpoint, into=*: error",
    "HTTPTransport.recv_checkpoint, select=*: error",
    "HTTPTransport.recv_checkpoint, have=*: error",
    "HTTPTransport.recv_checkpoint, metadata=[...]: error",
    "HTTPTransport.prepare: error",
)
async def test_an_error(cell: Cell) -> None:
    """The last bytes are not those of the manifest; the first ones have been here."""
    options = options_of(cell.call)
    state = weights()
    async with transport(zero_copy=True) as sender, transport() as receiver:
        await sender.send_checkpoint([], 1, state)
        before = arenas()
        state[f"w{COUNT - 1}"].numpy()[:] = 9.0  # which nobody can see
        async with found_at(cell, sender) as metadata:
            with pytest.raises(IntegrityError) as caught:
                await begin(receiver, cell.call, metadata, **options)
        notes = list(getattr(caught.value, "__notes__", []))
        del caught
        here = await finally_left(options, before)
        state[f"w{COUNT - 1}"].numpy()[:] = 1.0
        check(cell, {here}, await at_the_sender(sender, receiver))
    if "into" in options:
        done = "was modified" if here == "torn" else "was not modified"
        assert f"the template {done}" in notes


@each_cell("HTTPTransport.recv_checkpoint, share=True: error")
async def test_an_error_of_what_is_shared(cell: Cell) -> None:
    """The memory has come, and does not hold what is asked for."""
    options = {**options_of(cell.call), "select": ["nothing"]}
    async with transport(same_host=True) as sender, transport() as receiver:
        await sender.send_checkpoint([], 1, weights())
        before = arenas()
        with pytest.raises(MissingKeysError) as caught:
            await receive(sender, receiver, **options)
        del caught
        here = await finally_left(options, before)
        check(cell, {here}, await at_the_sender(sender, receiver))


async def finally_left(options: dict[str, Any], before: int) -> str:
    """Say what is left once a thread has unmapped it, or let go of it."""
    with suppress(TimeoutError):
        await settle(lambda: left(options, before) != "something")
    return left(options, before)


def stalling() -> dict[str, Any]:
    """Return faults: connections fall silent half way, and later ones at once."""
    half = StallAfter(int(MIB_SENT * MIB / 16))
    return {"faults": [half, half], "otherwise": StallAfter(0)}


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
    async with found_at(cell, sender, **stalling()) as metadata:
        task = asyncio.create_task(
            begin(
                *(receiver, cell.call, metadata),
                **options,
                timeout=limit,
                progress=lambda now: arrived.set() if now.chunks_done else None,
            )
        )
        await arrived.wait()
        await end(task, cell)
        await outcome(task, cell)
        del task
    return await finally_left(options, before)


async def cut_at_the_end(
    cell: Cell,
    options: dict[str, Any],
    sender: Transport,
    receiver: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Cut it short while the template is filled, or tensors are made."""
    before = arenas()
    with monkeypatch.context() as patch:
        gate = held_up(patch, SHARING if "share=" in cell.call else FILLING)
        limit = 2 if cell.ending == "timeout" else 30
        task = asyncio.create_task(receive(sender, receiver, timeout=limit, **options))
        await gate.entered.wait()
        await end(task, cell)
        gate.go.set()
        await outcome(task, cell)
        del task
    return await finally_left(options, before)


def is_held_up(call: str) -> bool:
    """Tell whether a receive has something to do when all bytes are there."""
    return "share=" in call or ("into=" in call and "direct" not in call)


async def cut(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a receive short at each of the moments that make a difference."""
    same_host = lends(cell.call)
    ends = pair(connections=1, stall_timeout=30, same_host=same_host)
    async with ends as (sender, receiver):
        await sender.send_checkpoint([], 1, weights())
        seen = set()
        if "share=" not in cell.call:  # which takes all at once
            options = options_of(cell.call)
            seen.add(await cut_half_way(cell, options, sender, receiver))
        if is_held_up(cell.call):
            options = options_of(cell.call)
            end = cut_at_the_end(cell, options, sender, receiver, monkeypatch)
            seen.add(await end)
        check(cell, seen, await at_the_sender(sender, receiver))


@each_cell("HTTPTransport.recv_checkpoint*: timeout", "HTTPTransport.prepare: timeout")
async def test_a_deadline(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline ends it while bytes arrive, and while it fills the template."""
    await cut(cell, monkeypatch)


@each_cell("HTTPTransport.recv_checkpoint*: cancel", "HTTPTransport.prepare: cancel")
async def test_a_cancel(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancel ends it while bytes arrive, and while it fills the template."""
    await cut(cell, monkeypatch)
