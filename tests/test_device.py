"""The port to the accelerator, and the fake one that stands in for it."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from aiockpt import HTTPTransport, Server
from aiockpt.errors import TransferTimeoutError
from aiockpt.memory.device import completed, keep_until, port_for
from aiockpt.testing import assert_same
from tests.support.accelerators import FakeAccelerator
from tests.support.serving import settle


def test_host_memory_needs_no_port() -> None:
    """Its copies are memmoves in threads."""
    assert port_for(torch.device("cpu")) is None


@pytest.mark.asyncio
class TestCompleted:
    """The loop awaits an event of a device."""

    async def test_it_returns_when_the_event_is_there(self) -> None:
        """And not before."""
        device = FakeAccelerator()
        waiting = asyncio.create_task(completed(device.fence()))
        await asyncio.sleep(0.005)
        assert not waiting.done()
        device.run()
        await waiting

    async def test_it_does_not_yield_for_an_event_that_is_past(self) -> None:
        """A chunk that was copied meanwhile costs nothing."""
        device = FakeAccelerator(held=False)
        event = device.fence()
        waiting = completed(event)
        with pytest.raises(StopIteration):
            waiting.send(None)

    async def test_it_can_be_cancelled(self) -> None:
        """A deadline ends the wait for a device that hangs."""
        device = FakeAccelerator()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await completed(device.fence())


class TestFakeAccelerator:
    """What a test can rely on."""

    def test_streams_run_in_order(self) -> None:
        """A copy sees what was enqueued before its fence, and nothing later."""
        device = FakeAccelerator()
        source, copy = torch.zeros(2), torch.zeros(2)
        device.produce(lambda: source.fill_(1))
        done = device.copy([(copy, source)], after=device.fence())
        device.run()
        device.produce(lambda: source.fill_(2))
        device.run()
        assert done.query()
        assert copy.tolist() == [1, 1]

    def test_the_side_stream_waits_for_the_producer(self) -> None:
        """Until its fence was reached, no copy runs."""
        device = FakeAccelerator()
        source, copy = torch.ones(2), torch.zeros(2)
        done = device.copy([(copy, source)], after=device.fence())
        assert device.run(producer=False) == 0
        assert not done.query()
        assert device.run() == 4  # the fence, the wait for it, the copy, its event
        assert device.idle

    def test_it_keeps_nothing_alive(self) -> None:
        """A copy whose source was freed is the caller's mistake, and is noticed."""
        device = FakeAccelerator()
        source, copy = torch.ones(2), torch.zeros(2)
        device.copy([(copy, source)], after=device.fence())
        del source
        with pytest.raises(RuntimeError, match="freed"):
            device.run()

    def test_it_says_what_waits(self) -> None:
        """The repr is for the person who debugs a test."""
        device = FakeAccelerator()
        device.produce(lambda: None)
        assert repr(device) == "<FakeAccelerator producer=1 side=0>"


@pytest.mark.asyncio
class TestLoad:
    """A receive into a template that is on a device."""

    @pytest_asyncio.fixture
    async def pair(
        self,
    ) -> AsyncIterator[tuple[HTTPTransport[Any], HTTPTransport[Any]]]:
        """Give a sender of ones, and a receiver."""
        async with (
            HTTPTransport[Any](
                chunk_bytes=64 << 10, server=Server(host="127.0.0.1")
            ) as sender,
            HTTPTransport[Any](server=Server(host="127.0.0.1")) as receiver,
        ):
            await sender.send_checkpoint([], 1, self.state(1.0), 10)
            yield sender, receiver

    def state(self, fill: float) -> dict[str, torch.Tensor]:
        wide = torch.full((40, 10), fill)
        return {
            "weight": torch.full((50_000,), fill),
            "half": wide[:, ::2],
            "sparse": wide[:, 1:2],
        }

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
        """Take all memory of templates for a device's."""
        device = FakeAccelerator()
        monkeypatch.setattr("aiockpt.http.transport.port_for", device.port_for)
        return device

    @pytest.mark.parametrize("direct", [False, True])
    async def test_it_goes_through_the_side_stream(
        self, pair: Any, device: FakeAccelerator, direct: bool
    ) -> None:
        """Behind what the producer still does with the template."""
        sender, receiver = pair
        template = self.state(0.0)
        device.produce(lambda: template["weight"].fill_(5))
        receive = receiver.recv_checkpoint(
            0, sender.metadata(), 1, 10, into=template, direct=direct
        )
        task = asyncio.create_task(receive)
        await settle(lambda: bool(device.events) and device.events[0].queries > 0)
        assert device.idle
        device.held = False
        device.run()
        got = await task
        assert got["weight"] is template["weight"]
        assert_same(template, self.state(1.0))

    async def test_it_is_finished_when_it_is_cancelled(
        self, pair: Any, device: FakeAccelerator
    ) -> None:
        """The arena lives until the device has read it; the template is whole."""
        sender, receiver = pair
        template = self.state(0.0)
        receive = receiver.recv_checkpoint(0, sender.metadata(), 1, 0.5, into=template)
        task = asyncio.create_task(receive)
        await settle(lambda: device.run(copies=0) >= 0 and not device.idle)
        with pytest.raises(TransferTimeoutError, match="while copying step 1"):
            await task
        device.held = False
        device.run()
        assert_same(template, self.state(1.0))


# Memory that nobody has any more, but for a device.


class Memory:
    """Something that a device copies from."""

    def __init__(self) -> None:
        self.idle = threading.Event()

    def drain(self) -> None:
        """Block until it does so no more."""
        self.idle.wait(30)


def ended() -> None:
    """Wait until no thread waits for a device any more."""
    for thread in threading.enumerate():
        if "drain" in thread.name:
            thread.join(30)


def test_it_lives_until_the_device_is_idle() -> None:
    """And no longer, though nobody asks."""
    memory = Memory()
    idle, gone = memory.idle, weakref.ref(memory)
    keep_until(memory.drain)
    del memory
    gc.collect()
    assert gone() is not None
    idle.set()
    ended()
    assert gone() is None


def test_no_exit_waits_for_a_device() -> None:
    """A process whose device hangs ends all the same."""
    program = (
        "import threading\n"
        "from aiockpt.memory.device import keep_until\n"
        "keep_until(threading.Event().wait)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0


def test_a_device_that_fails_is_logged(
    allow_error_logs: list[logging.LogRecord],
) -> None:
    """There is nobody to raise it to."""

    def fail() -> None:
        raise RuntimeError("device lost")

    keep_until(fail)
    ended()
    assert "waiting for a device failed" in allow_error_logs[0].getMessage()
