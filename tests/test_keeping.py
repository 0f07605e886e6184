"""Memory that nobody has any more, but for a device."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import weakref

from aiockpt.memory.device import keep_until


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
