"""Fingerprints that take long or fail: each is computed once, one at a time."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import StepNotFoundError, http_transport
from aiockpt.errors import (
    PeerFailedError,
    StorageError,
    TransportError,
    UnsupportedLeafError,
)
from tests.support.proofs import proves
from tests.support.servers import Peer, settle
from tests.support.transports import pair, port_of, transport, weights
from tests.support.waiting import servers_of

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_blocking")]

STATE = {**weights(mib=2.0, count=4), "step": 3}


class Slow:
    """Makes each computation wait until it may go on, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.count = self.running = self.most = 0
        self._lock = threading.Lock()
        module: Any = http_transport
        compute = module.fingerprint_of_snapshot

        def slowly(*args: Any, **options: Any) -> bytes:
            with self._lock:
                self.count += 1
                self.running += 1
                self.most = max(self.most, self.running)
            self.began.set()
            try:
                assert self.go_on.wait(20)
                return compute(*args, **options)
            finally:
                with self._lock:
                    self.running -= 1

        monkeypatch.setattr(module, "fingerprint_of_snapshot", slowly)

    async def has_begun(self) -> None:
        """Wait until a thread computes."""
        await settle(self.began.is_set)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes computations wait."""
    found = Slow(monkeypatch)
    yield found
    found.go_on.set()


async def ask(sender: Any, receiver: Any, step: int | None = 1, **options: Any) -> Any:
    """Ask for a fingerprint."""
    return await receiver.fingerprint(sender.metadata(), step, **options)


@proves("cell HTTPTransport.fingerprint: cancel")
@pytest.mark.parametrize("process", [False, True])
async def test_many_who_ask_get_one_computation(slow: Slow, process: bool) -> None:
    """Also where the first of them leaves, and where the next step replaces it.

    A server process asks the trainer.
    """
    async with transport(process=process) as sender, transport() as receiver:
        await sender.send_checkpoint(step=1, state_dict=STATE)
        first, *others = (asyncio.create_task(ask(sender, receiver)) for _ in range(5))
        await slow.has_begun()
        first.cancel()
        await asyncio.wait({first})
        await sender.send_checkpoint(step=2, state_dict=STATE)
        slow.go_on.set()
        assert await asyncio.gather(*others) == [aiockpt.fingerprint(STATE)] * 4
        assert slow.count == 1


async def test_a_head_computes_nothing(slow: Slow) -> None:
    """Its answer has no body."""
    slow.go_on.set()
    async with transport(insecure=True) as sender:
        await sender.send_checkpoint(step=1, state_dict=STATE)
        async with Peer(port_of(sender), token=None) as peer:
            path = "/checkpoint/1/fingerprint"
            assert (await peer.ask(path, method="HEAD")).status == 200
    assert slow.count == 0


async def test_one_is_computed_at_a_time(slow: Slow) -> None:
    """A second snapshot waits for its turn; a superseded one is kept meanwhile."""
    async with pair(state=STATE) as (sender, receiver):
        first = asyncio.create_task(ask(sender, receiver, 1))
        await slow.has_begun()
        newer = {**STATE, "w0": STATE["w0"] + 1}
        await sender.send_checkpoint(step=2, state_dict=newer)
        second = asyncio.create_task(ask(sender, receiver, 2))
        await asyncio.sleep(0.2)
        slow.go_on.set()
        assert await first == aiockpt.fingerprint(STATE)
        assert await second == aiockpt.fingerprint(newer)
        assert (slow.count, slow.most) == (2, 1)


async def test_a_slow_one_is_asked_for_in_pieces(slow: Slow) -> None:
    """A computation may take longer than the stall timeout."""
    async with pair(state=STATE, stall_timeout=0.5) as (sender, receiver):
        asking = asyncio.create_task(ask(sender, receiver, timeout=120))
        await slow.has_begun()
        await sender.send_checkpoint(step=2, state_dict=STATE)
        await settle(lambda: sender.statistics().requests > 4, patience=60)
        assert not asking.done()
        slow.go_on.set()
        assert await asking == aiockpt.fingerprint(STATE)


async def test_a_retraction_ends_it(slow: Slow) -> None:
    """Its memory is read no more afterwards; whoever asks waits for the step again."""
    async with pair(state=STATE, grace=0.1) as (sender, receiver):
        asking = asyncio.create_task(ask(sender, receiver, timeout=60))
        await slow.has_begun()
        retracting = asyncio.create_task(sender.disallow_checkpoint())
        await asyncio.sleep(0.3)
        assert not retracting.done()
        slow.go_on.set()
        await retracting
        assert not slow.running
        await settle(lambda: sender.statistics().waiting == 1)
        other = {"w": torch.ones(3)}
        await sender.send_checkpoint(step=1, state_dict=other)
        assert await asking == aiockpt.fingerprint(other)


@pytest.mark.parametrize("process", [False, True])
async def test_a_step_may_be_replaced_first(slow: Slow, process: bool) -> None:
    """The next step is computed after the first, and the sender keeps one of them."""
    async with transport(process=process) as sender, transport() as receiver:
        asking = list[asyncio.Task[Any]]()
        for step in (1, 2):
            await sender.send_checkpoint(step=step, state_dict=STATE)
            asking.append(asyncio.create_task(ask(sender, receiver, step, timeout=60)))
            await slow.has_begun()
            await settle(lambda step=step: sender.statistics().requests >= step)
        await sender.send_checkpoint(step=3, state_dict=STATE)
        slow.go_on.set()
        assert await asking[0] == aiockpt.fingerprint(STATE)
        with pytest.raises(StepNotFoundError, match="being served is step 3") as caught:
            await asking[1]
        assert (caught.value.step, caught.value.serving) == (2, 3)


@proves("cell HTTPTransport.fingerprint: this process dies")
async def test_a_client_that_dies_cancels_nothing(slow: Slow) -> None:
    """The sender is idle when the computation has ended, and keeps the result."""
    async with pair(state=STATE, insecure=True) as (sender, receiver):
        async with Peer(port_of(sender), token=None) as peer:
            await peer.request("/checkpoint/1/fingerprint")
            await slow.has_begun()
            assert sender.statistics().readers == 1
        slow.go_on.set()
        await settle(lambda: sender.statistics().readers == 0)
        assert await ask(sender, receiver) == aiockpt.fingerprint(STATE)
        assert slow.count == 1


@proves("cell HTTPTransport.fingerprint: the other one dies")
async def test_a_shutdown_ends_it(slow: Slow) -> None:
    """Nothing is left of a computation that nobody needs any more."""
    async with transport() as receiver:
        async with transport(grace=0.1) as sender:
            await sender.send_checkpoint(step=1, state_dict=STATE)
            asking = asyncio.create_task(ask(sender, receiver, timeout=2))
            await slow.has_begun()
            asyncio.get_running_loop().call_later(0.3, slow.go_on.set)
        with pytest.raises(TransportError):
            await asking


async def test_a_process_that_dies_is_asked_again(slow: Slow) -> None:
    """The next process asks the trainer again."""
    async with transport(process=True) as sender, transport() as receiver:
        await sender.send_checkpoint(step=1, state_dict=STATE)
        asking = asyncio.create_task(ask(sender, receiver, timeout=60))
        await slow.has_begun()
        (pid,) = servers_of(port_of(sender))
        os.kill(pid, signal.SIGKILL)
        await settle(lambda: pid not in servers_of(port_of(sender)))
        slow.go_on.set()
        assert await asking == aiockpt.fingerprint(STATE)


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize(
    ("error", "said", "is_kept"),
    [
        (UnsupportedLeafError("w", "object", "w is odd"), "w is ", True),
        (StorageError("model.safetensors", "no space left"), "no space left", False),
        (MemoryError("a detail"), "MemoryError; the sender's log has more", False),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_failure_of_the_checkpoint_is_remembered(
    process: bool,
    error: Exception,
    said: str,
    is_kept: bool,
    monkeypatch: pytest.MonkeyPatch,
    allow_error_logs: list[Any],
) -> None:
    """Such a failure is not computed again; one of the host may pass.

    Neither blocks the next step.
    """
    module: Any = http_transport
    compute, steps = module.fingerprint_of_snapshot, list[int]()

    def fails_at_first(snapshot: Any, **options: Any) -> bytes:
        steps.append(snapshot.manifest.step)
        if steps == [1]:
            raise error
        found: bytes = compute(snapshot, **options)
        return found

    monkeypatch.setattr(module, "fingerprint_of_snapshot", fails_at_first)
    async with transport(process=process) as sender, transport() as receiver:
        await sender.send_checkpoint(step=1, state_dict=STATE)
        for attempt in range(3):
            if attempt and not is_kept:
                assert await ask(sender, receiver) == aiockpt.fingerprint(STATE)
                continue
            with pytest.raises(PeerFailedError, match=said) as caught:
                await ask(sender, receiver, timeout=20)
            assert "step 1 has no fingerprint" in str(caught.value)
            assert "a detail" not in str(caught.value)
        assert steps == ([1] if is_kept else [1, 1])
        await sender.send_checkpoint(step=2, state_dict=STATE)
        assert await ask(sender, receiver, 2) == aiockpt.fingerprint(STATE)
    logged = [each.getMessage() for each in allow_error_logs]
    assert logged == ["a fingerprint failed"] * isinstance(error, MemoryError)
