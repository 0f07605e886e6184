"""The port to the accelerator, and memory that only a device still reads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
import torch

from aiockpt.memory.device import completed, keep_until, port_for
from aiockpt.runtime import system
from tests.support.accelerators import FakeAccelerator


def test_host_memory_needs_no_port() -> None:
    """Threads copy host memory by memmove."""
    assert port_for(torch.device("cpu")) is None


@pytest.mark.asyncio
class TestCompleted:
    """The loop awaits an event of a device."""

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


def ended() -> None:
    """Wait until no thread waits for a device any more."""
    for thread in threading.enumerate():
        if "drain" in thread.name:
            thread.join(30)


def test_no_exit_waits_for_a_device() -> None:
    """A process whose device hangs ends all the same."""
    program = (
        "import threading\n"
        "from aiockpt.memory.device import keep_until\n"
        "keep_until(threading.Event().wait)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0


def test_a_device_that_fails_is_logged(allow_error_logs) -> None:
    """There is nobody to raise it to."""

    def fail() -> None:
        raise RuntimeError("device lost")

    keep_until(fail)
    ended()
    assert "waiting for a device failed" in allow_error_logs[0].getMessage()


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, 2), (2, 2), (4, 2), (6, 3), (8, 4), (64, 4)]
)
def test_half_of_the_cores_copy(cores: int, threads: int, monkeypatch) -> None:
    """The others are the program's; more than four threads would delay training."""
    monkeypatch.setattr(system, "usable_cores", lambda: cores)
    assert system.copying_threads() == threads
