"""What calls over a process group leave behind, where no other test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from aiockpt.errors import ClosedError, ProcessGroupError, TransferTimeoutError
from aiockpt.pg.messages import RankChannel
from aiockpt.testing import assert_same
from tests.support.groups import Transport, moved, transports, watch_leaving
from tests.support.proofs import Cell, each_cell
from tests.support.servers import settle
from tests.support.transports import COUNT, MIB_SENT, held_up, left, options_of
from tests.support.transports import weights as filled

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.allow_leaks("threads", "fds"),  # the waits that nothing ends
]


def weights() -> dict[str, Any]:
    """Return what is sent."""
    return filled(mib=MIB_SENT, count=COUNT)


class Dam:
    """Lets some messages of a data segment pass, and then none until it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = asyncio.Event()
        self.open = threading.Event()
        self._passed = 0
        self._loop = asyncio.get_running_loop()
        watch_leaving(monkeypatch, self._watch)

    def _watch(self, _: RankChannel, tensor: torch.Tensor) -> None:
        self._passed += 1
        if self._passed > COUNT // 2:
            self._loop.call_soon_threadsafe(self.reached.set)
            self.open.wait(30)


@asynccontextmanager
async def dammed(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], timeout: float = 30
) -> AsyncIterator[tuple[list[Transport], asyncio.Task[Any], asyncio.Task[Any]]]:
    """Be in the middle of a transfer; give both ends, the send and the receive."""
    with monkeypatch.context() as patch:
        dam = Dam(patch)
        async with transports(timeout=30) as both:
            send = asyncio.create_task(both[0].send_checkpoint([1], 1, weights()))
            call = both[1].recv_checkpoint(0, "", 1, timeout, **options)
            receive = asyncio.create_task(call)
            try:
                await dam.reached.wait()
                if options.get("direct"):
                    await settle(lambda: left(options, 0) == "torn")
                yield both, send, receive
            finally:
                dam.open.set()
                await asyncio.wait({send, receive})
                for task in (send, receive):
                    if not task.cancelled():
                        task.exception()


async def outcome(task: asyncio.Task[Any], cell: Cell) -> None:
    """Have the receive end as the cell says."""
    if cell.ending == "cancel":
        task.cancel()
    await asyncio.wait({task})
    if cell.ending == "cancel":
        assert task.cancelled()
    else:
        assert isinstance(task.exception(), TransferTimeoutError)


@each_cell(
    "PGTransport.recv_checkpoint*: timeout", "PGTransport.recv_checkpoint*: cancel"
)
async def test_a_receive_that_is_cut_short(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It breaks the group while bytes arrive, and nothing while it fills a template."""
    options, seen = options_of(cell.call), set()
    limit = 2 if cell.ending == "timeout" else 30
    async with dammed(monkeypatch, options, limit) as (both, send, receive):
        await outcome(receive, cell)
        seen.add(left(options, 1000))
        with pytest.raises(ProcessGroupError):
            await send
        assert all("broken" in repr(each) for each in both)
    if "into=" in cell.call and "direct" not in cell.call:
        seen.add(await _at_the_end(cell, monkeypatch, limit))
    here = "either" if seen == {"untouched", "filled"} else "/".join(sorted(seen))
    # What is under way may still arrive in a template that is received into directly.
    here = "loose" if here == "torn" else here
    assert f"{here}, broken / broken" == cell.left


async def _at_the_end(cell: Cell, monkeypatch: pytest.MonkeyPatch, limit: float) -> str:
    """Cut it short when everything has arrived, and the sender has been told."""
    options = options_of(cell.call)
    with monkeypatch.context() as patch:
        gate = held_up(patch)
        async with transports(timeout=30) as (sender, receiver):
            call = receiver.recv_checkpoint(0, "", 1, limit, **options)
            receive = asyncio.create_task(call)
            await sender.send_checkpoint([1], 1, weights())
            await gate.entered.wait()
            if cell.ending == "cancel":
                receive.cancel()
            await settle(lambda: receive.cancelling() or receive.done(), patience=30)
            gate.go.set()
            await outcome(receive, cell)
            assert_same(await moved(sender, receiver, weights()), weights())
    return left(options, 0)


@each_cell(
    "PGTransport.disallow_checkpoint: timeout",
    "PGTransport.disallow_checkpoint: cancel",
)
async def test_a_cancelled_withdrawal(cell: Cell) -> None:
    """The send goes on, and a later call waits for it again."""
    async with transports() as (sender, receiver):
        send = asyncio.create_task(sender.send_checkpoint([1], 1, weights()))
        withdrawal = asyncio.create_task(sender.disallow_checkpoint())
        await asyncio.sleep(0.05)
        withdrawal.cancel()
        await asyncio.wait({withdrawal})
        assert withdrawal.cancelled()
        again = asyncio.create_task(sender.disallow_checkpoint())
        assert_same(await receiver.recv_checkpoint(0, "", 1), weights())
        await again
        await send
    assert cell.left in ("as before", "as cancel")


@each_cell("PGTransport.shutdown: success")
async def test_the_other_end_of_a_shutdown(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for its deadline."""
    async with dammed(monkeypatch, {}) as ((sender, receiver), send, receive):
        await sender.shutdown()
        with pytest.raises(ClosedError):
            await send
        with pytest.raises(ProcessGroupError):
            await receive
        assert "broken" in repr(receiver)
    assert cell.left == "closed / broken"
