"""The suite's own tools: what a test leaves behind."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

import pytest

from tests.support.leakcheck import shm

KEEPER = """
import multiprocessing
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
input()
"""


@pytest.mark.allow_leaks("fds")  # Python's tracker of what is shared stays
def test_what_others_share_is_no_leak() -> None:
    """A semaphore of another program is not of this run; those made here are."""
    before = shm()
    environment = {k: v for k, v in os.environ.items() if k != "TEST_SHARED_NAMES"}
    command = [sys.executable, "-S", "-c", KEEPER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as other:
        assert other.stdout is not None
        name = other.stdout.readline().decode().strip().removeprefix("/")
        assert f"sem.{name}" in os.listdir("/dev/shm")
        assert shm() == before
        other.communicate(b"\n")
    lock = multiprocessing.get_context("spawn").Lock()
    memory = SharedMemory(create=True, size=1)
    assert len(shm() - before) == 2
    memory.close()
    memory.unlink()
    del lock
    assert shm() == before
