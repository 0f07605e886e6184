"""What an HTTP sender's calls leave behind: on offer here, and with its receivers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest

from aiockpt import AiockptError, StepNotFoundError
from aiockpt.errors import TransferTimeoutError
from aiockpt.local.server_process import ServerProcess
from aiockpt.testing import assert_same
from tests.support.proofs import Cell, each_cell
from tests.support.servers import Peer, settle
from tests.support.transports import Transport, port_of, receive, transport, weights

pytestmark = pytest.mark.asyncio

GRACE = 60.0
"""Longer than a test: who waits for a reader, waits for ever."""


@asynccontextmanager
async def stuck(sender: Transport) -> AsyncIterator[Peer]:
    """Ask for what is offered, and read only its beginning."""
    before = sender.statistics().readers
    async with Peer(port_of(sender), token=None, receive_buffer=4096) as peer:
        await peer.request("/checkpoint/1/full", Connection="close")
        await peer.head()
        await settle(lambda: sender.statistics().readers > before)
        yield peer


@asynccontextmanager
async def offering(cell: Cell, **options: Any) -> AsyncIterator[Transport]:
    """Offer 16 MiB as step 1, from the memory that is sent where the cell says so."""
    zero_copy = "zero_copy" in cell.call or "send_checkpoint" not in cell.call
    if "process" in cell.call:
        options |= {"zero_copy": False, "process": True}
    options = {"grace": GRACE, "insecure": True, "zero_copy": zero_copy, **options}
    sender = transport(**options)
    await sender.send_checkpoint([], 1, weights(mib=16))
    try:
        yield sender
    finally:
        await sender.shutdown(wait=False)


async def cancelled(call: Coroutine[Any, Any, object]) -> None:
    """Cancel a call once it waits for something."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0.05)
    assert not task.done(), task
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def is_offered(sender: Transport, receiver: Transport) -> str:
    """Say whether what is offered is new, old or nothing; it arrives whole."""
    step = sender.statistics().step
    if step is None:
        return "none"
    assert_same(await receive(sender, receiver, step), weights(float(step), mib=16))
    return "old" if step == 1 else "new"


@asynccontextmanager
async def waiting(
    sender: Transport, receiver: Transport, patience: float = 0.3
) -> AsyncIterator[list[str]]:
    """Have somebody wait for step 2; say afterwards what they know of it."""
    known: list[str] = []
    task = asyncio.create_task(receive(sender, receiver, 2, timeout=30))
    await settle(lambda: sender.statistics().waiting == 1)
    yield known
    await asyncio.wait({task}, timeout=patience if sender.statistics().waiting else 10)
    if task.done():
        known.append("told" if task.exception() else "served")
    else:
        known.append("waits")
        task.cancel()
        await asyncio.wait({task})


@each_cell("HTTPTransport.start: error")
async def test_a_start_that_fails(cell: Cell) -> None:
    """The port is another's; once it is free, the same object takes it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = transport(port=other.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            await taken.start()
    async with transport() as receiver:
        await taken.start()
        await taken.send_checkpoint([], 1, weights())
        assert_same(await receive(taken, receiver), weights())
        await taken.shutdown()
    assert cell.left == "as before"


@contextmanager
def stopped(sender: Transport) -> Iterator[None]:
    """Have the process that serves, if there is one, hear of something too late."""
    store = sender._store
    if not isinstance(store, ServerProcess):
        yield
        return
    assert store.pid is not None
    os.kill(store.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(store.pid, signal.SIGCONT)


@each_cell(
    "HTTPTransport.send_checkpoint: error",
    "HTTPTransport.send_checkpoint, zero_copy=True: error",
    "HTTPTransport.send_checkpoint: timeout",
    "HTTPTransport.send_checkpoint, zero_copy=True: timeout",
    "HTTPTransport.send_checkpoint: cancel",
    "HTTPTransport.send_checkpoint, zero_copy=True: cancel",
)
async def test_a_send_that_does_not_succeed(cell: Cell) -> None:
    """A reader of what was offered before reads on; who waits for the step is told."""
    await failed_send(cell)


@each_cell(
    "HTTPTransport.send_checkpoint, Server(process=True): error",
    "HTTPTransport.send_checkpoint, Server(process=True): timeout",
    "HTTPTransport.send_checkpoint, Server(process=True): cancel",
)
async def test_a_send_to_a_process_that_does_not_succeed(cell: Cell) -> None:
    """It leaves as little, though the serving process has all of it already."""
    await failed_send(cell)


async def failed_send(cell: Cell) -> None:
    """Have a send fail; see what is on offer then, and what who waits for it knows."""
    state = weights(2.0, mib=16)
    async with offering(cell) as sender, transport() as receiver, stuck(sender) as peer:
        call: Callable[..., Any] = sender.send_checkpoint
        patience = 10.0 if "process" in cell.call else 0.3  # to hear of its failure
        async with waiting(sender, receiver, patience) as known:
            if cell.ending == "error":
                with pytest.raises(AiockptError):
                    await call([], 2, {**state, "bad": object()})
            elif cell.ending == "timeout":
                with pytest.raises(TransferTimeoutError), stopped(sender):
                    await call([], 2, state, limit_of(cell))
            else:
                with stopped(sender):
                    await _cancelled_send(cell, sender, call([], 2, state))
        here = await is_offered(sender, receiver)
        assert f"{here} / {known[0]}" == cell.left
        assert len(await peer.read_all()) > 16 << 20


def limit_of(cell: Cell) -> float:
    """Return a deadline for staging, or one for whoever is waited for after that."""
    if "process" in cell.call:
        return 1.0
    return 0.3 if "zero_copy" in cell.call else 0.0


async def _cancelled_send(
    cell: Cell, sender: Transport, call: Coroutine[Any, Any, object]
) -> None:
    if "zero_copy" in cell.call:  # it waits for the reader
        await cancelled(call)
        return
    task = asyncio.create_task(call)
    store = sender._store
    if isinstance(store, ServerProcess):
        await settle(
            lambda: store._running and store._running.unanswered
        )  # the process has it
    else:
        await asyncio.sleep(0)  # it stages
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@each_cell(
    "HTTPTransport.allow_checkpoint: error",
    "HTTPTransport.allow_checkpoint: timeout",
    "HTTPTransport.allow_checkpoint: cancel",
)
async def test_a_renaming_that_does_not_succeed(cell: Cell) -> None:
    """It waits for a reader of live memory, as a send does."""
    async with offering(cell) as sender, transport() as receiver, stuck(sender) as peer:
        async with waiting(sender, receiver) as known:
            if cell.ending == "error":
                with pytest.raises(ValueError, match="step"):
                    await sender.allow_checkpoint(-1)
                async with transport() as empty:
                    with pytest.raises(StepNotFoundError):
                        await empty.allow_checkpoint(2)
            else:
                await cancelled(sender.allow_checkpoint(2))
        here = await is_offered(sender, receiver)
        assert cell.left in (f"{here} / {known[0]}", "as cancel")
        assert len(await peer.read_all()) > 16 << 20


@each_cell(
    "HTTPTransport.disallow_checkpoint: timeout",
    "HTTPTransport.disallow_checkpoint: cancel",
)
async def test_a_cancelled_withdrawal(cell: Cell) -> None:
    """The reader is not evicted before its grace; a later call waits for it again."""
    async with offering(cell) as sender, transport() as receiver, stuck(sender) as peer:
        await cancelled(sender.disallow_checkpoint())
        here = await is_offered(sender, receiver)
        there = "reads on" if sender.statistics().readers == 1 else "evicted"
        assert cell.left in (f"{here} / {there}", "as cancel")
        again = asyncio.create_task(sender.disallow_checkpoint())
        await asyncio.sleep(0.05)
        assert not again.done()
        assert len(await peer.read_all()) > 16 << 20
        await again
        assert sender.statistics().readers == 0


@each_cell(
    "HTTPTransport.send_checkpoint: the other one dies",
    "HTTPTransport.send_checkpoint, zero_copy=True: the other one dies",
    "HTTPTransport.allow_checkpoint: the other one dies",
    "HTTPTransport.disallow_checkpoint: the other one dies",
    "HTTPTransport.shutdown: the other one dies",
)
async def test_a_reader_dies(cell: Cell) -> None:
    """The kernel closes its connection: nobody waits for its grace."""
    calls: dict[str, Callable[[Transport], Coroutine[Any, Any, object]]] = {
        "send_checkpoint": lambda it: it.send_checkpoint([], 2, weights(2.0, mib=16)),
        "allow_checkpoint": lambda it: it.allow_checkpoint(2),
        "disallow_checkpoint": lambda it: it.disallow_checkpoint(),
        "shutdown": lambda it: it.shutdown(),
    }
    name = cell.call.partition(",")[0].rpartition(".")[2]
    async with offering(cell) as sender, transport() as receiver, stuck(sender) as peer:
        call = asyncio.create_task(calls[name](sender))
        await asyncio.sleep(0.05)
        peer.close()
        async with asyncio.timeout(20):
            await call
        await settle(lambda: sender.statistics().readers == 0)
        if name == "shutdown":
            assert cell.left == "closed"
        elif name == "allow_checkpoint":
            assert_same(await receive(sender, receiver, 2), weights(mib=16))
            assert cell.left == "new"
        else:
            assert await is_offered(sender, receiver) == cell.left
    with suppress(AiockptError):
        await sender.disallow_checkpoint()
