"""HTTPTransport: its beginning, its end, and calls that overlap."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from aiockpt import StepNotFoundError
from aiockpt.errors import ClosedError, LocalProtocolError, TransferTimeoutError
from aiockpt.runtime.lifetime import Deadline, Lifetime
from aiockpt.testing import assert_same
from tests.support.proofs import proves
from tests.support.serving import Peer
from tests.support.transports import (
    MIB,
    Transport,
    port_of,
    receive,
    transport,
    weights,
)

asynchronous = pytest.mark.asyncio


class Gate:
    """Work for the bridge that lasts until the test says so."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go = threading.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> None:
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.go.wait(30)


def held_up(sender: Transport, step: str, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Let staging wait in its thread, before a function of the stager."""
    gate = Gate()
    stager = sender._stager
    original: Callable[..., Any] = getattr(stager, step)

    def wait_first(*args: Any) -> Any:
        gate()
        return original(*args)

    monkeypatch.setattr(stager, step, wait_first)
    return gate


@asynchronous
class TestStart:
    """The server's beginning."""

    @proves("cell HTTPTransport.start: timeout", "cell HTTPTransport.start: cancel")
    @pytest.mark.parametrize("turns", range(5))
    async def test_a_cancelled_start_keeps_the_address(self, turns: int) -> None:
        """Peers were told it already, and wait there for a start that succeeds."""
        sender = transport()
        metadata = sender.metadata()
        start = asyncio.create_task(sender.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.wait({start})
        async with transport() as receiver:
            early = asyncio.create_task(receiver.recv_checkpoint(0, metadata, 1))
            await sender.send_checkpoint([], 1, weights())
            assert_same(await early, weights())
            assert sender.metadata() == metadata
        await sender.shutdown()

    @proves("cell HTTPTransport.start: success")
    async def test_calls_that_begin_together_start_it_once(self) -> None:
        """The second one does not go on before somebody serves."""
        async with transport(reconnect_timeout=0) as receiver:
            sender = transport()
            await asyncio.gather(
                *(sender.send_checkpoint([], 1, weights()) for _ in range(3)),
                sender.start(),
            )
            assert_same(await receive(sender, receiver), weights())
            await sender.shutdown()

    async def test_a_mount_gives_the_socket_back(self) -> None:
        """Nobody would ever accept on it."""
        sender = transport(advertise="here.example")
        port = port_of(sender)
        sender.mount("/checkpoint")
        async with transport(port=port):
            pass
        with pytest.raises(LocalProtocolError, match="advertise"):
            sender.metadata()
        await sender.shutdown()

    async def test_one_that_serves_is_not_mounted(self) -> None:
        """Its peers were told another address."""
        async with transport() as sender:
            with pytest.raises(LocalProtocolError, match="mount"):
                sender.mount("/checkpoint")


@asynchronous
class TestWithdrawal:
    """``disallow_checkpoint`` while something is about to be offered."""

    @pytest.mark.parametrize("step", ["_describe", "_plan"])
    async def test_it_wins_over_a_send_that_it_does_not_wait_for(
        self, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is offered, and the sender is told."""
        async with transport() as sender, transport() as receiver:
            gate = held_up(sender, step, monkeypatch)
            send = asyncio.create_task(sender.send_checkpoint([], 1, weights()))
            await gate.entered.wait()
            async with asyncio.timeout(1):
                await sender.disallow_checkpoint()
            gate.go.set()
            with pytest.raises(StepNotFoundError) as caught:
                await send
            assert "withdrawn" in caught.value.__notes__[0]
            assert "step=None" in repr(sender)
            await sender.send_checkpoint([], 2, weights())
            assert_same(await receive(sender, receiver, step=2), weights())

    async def test_it_wins_over_a_send_that_waits_for_its_turn(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was called before it is withdrawn by it."""
        async with transport() as sender:
            gate = held_up(sender, "_describe", monkeypatch)
            sends = [
                asyncio.create_task(sender.send_checkpoint([], step, weights()))
                for step in (1, 2)
            ]
            await gate.entered.wait()
            await sender.disallow_checkpoint()
            gate.go.set()
            results = await asyncio.gather(*sends, return_exceptions=True)
            assert [type(result) for result in results] == [StepNotFoundError] * 2
            assert "step=None" in repr(sender)

    async def test_it_wins_over_a_send_that_has_hardly_begun(self) -> None:
        """Which only looks whether it serves already."""
        async with transport() as sender:
            send = asyncio.create_task(sender.send_checkpoint([], 1, weights()))
            await asyncio.sleep(0)
            await sender.disallow_checkpoint()
            with pytest.raises(StepNotFoundError):
                await send
            assert "step=None" in repr(sender)

    async def test_it_wins_over_a_renaming(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whose memory is not taken away while it works."""
        async with transport() as sender:
            await sender.send_checkpoint([], 1, weights())
            gate = Gate()
            sender._bridge.post(gate)
            other = Gate()
            sender._bridge.post(other)  # both threads are busy
            await other.entered.wait()
            rename = asyncio.create_task(sender.allow_checkpoint(2))
            await asyncio.sleep(0.01)
            await sender.disallow_checkpoint()
            gate.go.set()
            other.go.set()
            with pytest.raises(StepNotFoundError):
                await rename
            assert "step=None" in repr(sender)


@asynchronous
class TestZeroCopy:
    """Live memory is drained before anything takes its place."""

    @proves("cell HTTPTransport.send_checkpoint, zero_copy=True: timeout")
    async def test_a_send_that_times_out_leaves_the_old_offer(self) -> None:
        """And its reader, who may finish."""
        async with transport(zero_copy=True, grace=30, insecure=True) as sender:
            await sender.send_checkpoint([], 1, weights(mib=16))
            async with Peer(port_of(sender), token=None, receive_buffer=4096) as peer:
                await peer.request("/checkpoint/1/full", Connection="close")
                await peer.head()
                with pytest.raises(TransferTimeoutError):
                    await sender.send_checkpoint([], 2, weights(mib=1), timeout=0.3)
                assert "step=1 readers=1" in repr(sender)
                assert len(await peer.read_all()) > 16 * MIB
                await sender.send_checkpoint([], 2, weights(mib=1))
                assert "step=2" in repr(sender)


@asynchronous
class TestShutdown:
    """The one end."""

    async def test_the_loop_goes_on(self) -> None:
        """Posted work, as unmapping gigabytes is, ends in its thread."""
        sender = transport()
        await sender.send_checkpoint([], 1, weights())
        for _ in range(4):
            sender._bridge.post(time.sleep, 0.5)
        longest, last = 0.0, time.monotonic()
        shutdown = asyncio.create_task(sender.shutdown())
        while not shutdown.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert longest < 0.45

    async def test_a_second_one_waits_for_the_first(self) -> None:
        """Whoever called it may exit the process."""
        sender = transport()
        await sender.send_checkpoint([], 1, weights())
        sender._bridge.post(time.sleep, 0.05)
        first = asyncio.create_task(sender.shutdown())
        await asyncio.sleep(0)
        await sender.shutdown()
        await asyncio.sleep(0)
        assert first.done()

    async def test_a_second_one_may_cut_the_grace_of_the_first(self) -> None:
        """``wait=False`` says that nobody wants to wait any longer."""
        sender = transport(grace=60, insecure=True)
        await sender.send_checkpoint([], 1, weights(mib=16))
        async with Peer(port_of(sender), token=None, receive_buffer=4096) as peer:
            await peer.request("/checkpoint/1/full")
            await peer.head()
            first = asyncio.create_task(sender.shutdown())
            await asyncio.sleep(0.05)
            assert not first.done()
            async with asyncio.timeout(5):
                await sender.shutdown(wait=False)
                await first

    @proves(
        "cell HTTPTransport.shutdown: timeout", "cell HTTPTransport.shutdown: cancel"
    )
    async def test_a_cancelled_one_goes_on(self) -> None:
        """Nothing is left half closed."""
        sender = transport()
        await sender.send_checkpoint([], 1, weights())
        sender._bridge.post(time.sleep, 0.05)
        first = asyncio.create_task(sender.shutdown())
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await sender.shutdown()

    @pytest.mark.parametrize("step", ["_describe", "_plan"])
    async def test_calls_under_way_fail(
        self, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And keep no memory: the arena is unmapped when shutdown returns."""
        sender = transport()
        gate = held_up(sender, step, monkeypatch)
        send = asyncio.create_task(sender.send_checkpoint([], 1, weights()))
        await gate.entered.wait()
        shutdown = asyncio.create_task(sender.shutdown())
        await asyncio.sleep(0.01)
        assert not shutdown.done()
        gate.go.set()
        await shutdown
        with pytest.raises(ClosedError):
            await send
        assert sender._stager._pool.free == []

    @pytest.mark.parametrize("advertise", [None, "http://proxy.example/checkpoint"])
    async def test_nothing_works_after_it(self, advertise: str | None) -> None:
        """Every call says why; only stopping again is no mistake."""
        sender = transport(advertise=advertise)
        await sender.send_checkpoint([], 1, weights())
        await sender.shutdown()
        for call in (
            sender.start(),
            sender.send_checkpoint([], 1, weights()),
            sender.allow_checkpoint(1),
            sender.recv_checkpoint(0, "http://127.0.0.1:1/checkpoint/", 1),
        ):
            with pytest.raises(ClosedError):
                await call
        plain = (sender.metadata, sender.address, lambda: sender.mount("/x"))
        for function in plain:
            with pytest.raises(ClosedError):
                function()
        await sender.disallow_checkpoint()
        await sender.shutdown()


@pytest.mark.parametrize(
    "call",
    [
        lambda used: used.start(),
        lambda used: used.send_checkpoint([], 1, weights()),
        lambda used: used.allow_checkpoint(1),
        lambda used: used.disallow_checkpoint(),
        lambda used: used.recv_checkpoint(0, used.metadata(), 1),
        lambda used: used.shutdown(),
    ],
    ids=["start", "send", "allow", "disallow", "recv", "shutdown"],
)
def test_another_event_loop_is_refused(call: Callable[[Transport], Any]) -> None:
    """Nobody would serve there, and what belongs to the first loop would break."""
    with asyncio.Runner() as first, asyncio.Runner() as second:
        used = transport()

        async def there() -> None:
            with pytest.raises(LocalProtocolError, match="event loop"):
                await call(used)

        first.run(used.send_checkpoint([], 1, weights()))
        second.run(there())
        first.run(used.shutdown())


def test_a_forked_child_is_told_that_it_is_one() -> None:
    """Before it waits for threads that are not there."""
    made, reading = Lifetime("the transport"), os.pipe()
    with asyncio.Runner() as runner:
        runner.run(bound(made))
    if (child := os.fork()) == 0:
        try:
            with asyncio.Runner() as runner:
                runner.run(bound(made))
        except LocalProtocolError as error:
            os.write(reading[1], str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(reading[1])
    with open(reading[0]) as said:
        assert "this is a forked one: make one after the fork" in said.read()


async def bound(made: Lifetime) -> None:
    """Use it."""
    made.bind()


def test_a_deadline_that_has_ended_keeps_nothing_of_its_call() -> None:
    """Threads that go on may keep the deadline, and must not keep a template by it."""

    class Template:
        """Something large."""

    known: list[weakref.ref[Template]] = []

    async def fail(deadline: Deadline) -> None:
        template = Template()
        known.append(weakref.ref(template))
        async with deadline:
            raise ZeroDivisionError

    async def main() -> None:
        deadline = Deadline(60, stop="here")
        with suppress(ZeroDivisionError):
            await asyncio.create_task(fail(deadline))
        await asyncio.sleep(0)  # the loop forgets the task
        gc.collect()
        assert known[0]() is None
        assert not deadline.expired

    async def overrun() -> None:
        deadline = Deadline(0.01, stop="here")
        with pytest.raises(TransferTimeoutError):
            async with deadline:
                await asyncio.Event().wait()
        assert deadline.expired

    asyncio.run(main())
    asyncio.run(overrun())
