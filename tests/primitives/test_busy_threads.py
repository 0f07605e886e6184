"""Sends, retractions and ends that come while a thread of the sender works."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from aiockpt import StepNotFoundError
from aiockpt.errors import ClosedError
from aiockpt.testing import assert_same
from tests.support.proofs import proves
from tests.support.servers import Peer, settle
from tests.support.states import Copies
from tests.support.transports import (
    MIB,
    Gate,
    pair,
    port_of,
    receive,
    transport,
    weights,
)

pytestmark = pytest.mark.asyncio


@pytest.fixture
def copies(monkeypatch):
    """Return what stops each staging of 1 MiB after 10 of its 16 chunks."""
    made = Copies(monkeypatch, after=MIB * 10 // 16)
    yield made
    made.go()


def sending(sender, step=1, state=None, **options):
    """Start to send."""
    state = weights() if state is None else state
    return asyncio.create_task(sender.send_checkpoint([1], step, state, **options))


def held_up(sender, step, monkeypatch):
    """Let staging wait in its thread, before a function of the stager."""
    gate, original = Gate(), getattr(sender._stager, step)

    def wait_first(*args):
        gate()
        return original(*args)

    monkeypatch.setattr(sender._stager, step, wait_first)
    return gate


async def test_nothing_is_found_until_it_is_published(copies):
    """A receiver waits and gets no byte; a plain request is answered 404."""
    async with pair() as (sender, receiver):
        _, _, token = sender.metadata().partition("#")
        async with Peer(port_of(sender), token=token) as peer:
            send = sending(sender)
            early = asyncio.create_task(receive(sender, receiver))
            await settle(lambda: copies.waiting and sender.statistics().waiting)
            sent = sender.statistics().bytes_sent
            for what in ("metadata", "full", "0"):
                path = f"/checkpoint/1/{what}"
                assert (await peer.ask(path, Prefer="wait=0")).status == 404
            assert sent == 0
            copies.go()
            await send
            assert_same(await early, weights())
            assert (await peer.ask("/checkpoint/1/metadata")).status == 200


class TestWithdrawal:
    """``disallow_checkpoint`` while something is about to be offered."""

    @pytest.mark.parametrize("moment", ["begun", "_describe", "_plan", "staged"])
    async def test_it_wins_over_a_send_that_it_does_not_wait_for(
        self, moment, monkeypatch, copies
    ):
        """Nothing is offered, and the sender is told; a receiver waits for the next."""
        async with pair() as (sender, receiver):
            early = asyncio.create_task(receive(sender, receiver))
            await settle(lambda: sender.statistics().waiting)
            gate = held_up(sender, moment, monkeypatch) if moment[0] == "_" else None
            sends = [sending(sender), sending(sender)]  # one waits for the other
            if gate is not None:
                await gate.entered.wait()
            elif moment == "staged":
                await settle(lambda: copies.waiting)
            else:
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                await sender.disallow_checkpoint()
            assert not any(send.done() for send in sends)
            if gate is not None:
                gate.go.set()
            copies.go()
            for send in sends:
                with pytest.raises(StepNotFoundError) as caught:
                    await send
                assert "retracted" in caught.value.__notes__[0]
            assert "step=None" in repr(sender)
            assert not early.done()
            await sending(sender)
            assert_same(await early, weights())

    async def test_it_wins_over_a_renaming(self):
        """The renaming keeps its memory while it works."""
        async with transport() as sender:
            await sender.send_checkpoint([], 1, weights())
            gates = [Gate() for _ in range(sender.statistics().threads.threads)]
            for gate in gates:  # all threads are busy
                sender._bridge.post(gate)
                await gate.entered.wait()
            rename = asyncio.create_task(sender.allow_checkpoint(2))
            await asyncio.sleep(0.01)
            await sender.disallow_checkpoint()
            for gate in gates:
                gate.go.set()
            with pytest.raises(StepNotFoundError):
                await rename
            assert "step=None" in repr(sender)


class TestShutdown:
    """`shutdown` ends the transport once."""

    async def test_the_loop_goes_on(self):
        """Posted work, as unmapping gigabytes is, ends in its thread."""
        sender, go = transport(), threading.Event()
        await sender.send_checkpoint([], 1, weights())
        for _ in range(4):
            sender._bridge.post(go.wait, 30)
        shutdown = asyncio.create_task(sender.shutdown())
        for _ in range(50):  # a loop that stands still would never get through
            await asyncio.sleep(0.001)
        assert not shutdown.done()
        go.set()
        await shutdown

    async def test_a_second_one_waits_for_the_first(self):
        """It returns when the first does."""
        sender = transport()
        await sender.send_checkpoint([], 1, weights())
        sender._bridge.post(time.sleep, 0.05)
        first = asyncio.create_task(sender.shutdown())
        await asyncio.sleep(0)
        await sender.shutdown()
        await asyncio.sleep(0)
        assert first.done()

    @proves(
        "cell HTTPTransport.shutdown: timeout", "cell HTTPTransport.shutdown: cancel"
    )
    async def test_a_cancelled_one_goes_on(self):
        """A cancelled shutdown leaves nothing half closed."""
        sender, go = transport(), threading.Event()
        await sender.send_checkpoint([], 1, weights())
        sender._bridge.post(go.wait, 30)
        first = asyncio.create_task(sender.shutdown())
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go.set()
        await sender.shutdown()

    @pytest.mark.parametrize("step", ["_describe", "_plan"])
    async def test_calls_under_way_fail(self, step, monkeypatch):
        """The calls fail, and the arena is unmapped when `shutdown` returns."""
        sender = transport()
        gate = held_up(sender, step, monkeypatch)
        send = sending(sender)
        await gate.entered.wait()
        shutdown = asyncio.create_task(sender.shutdown())
        await asyncio.sleep(0.01)
        assert not shutdown.done()
        gate.go.set()
        await shutdown
        with pytest.raises(ClosedError):
            await send
        assert sender._stager._pool.free == []
