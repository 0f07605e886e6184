"""Calls in threads of their own: they can be left behind, and keep nothing for long."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from aiockpt.runtime.bridge import Bridge

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

LONG = 30.0


class Wait:
    """A wait that nothing ends but its own event."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.end = threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.end.wait(LONG)
        return "ended"


def alive() -> list[threading.Thread]:
    """Return the threads that were started for such calls."""
    return [t for t in threading.enumerate() if t.name == "bridge-apart-apart"]


async def begun(wait: Wait) -> None:
    """Wait until a thread is in it."""
    while not wait.begun.is_set():  # noqa: ASYNC110 - a thread sets it
        await asyncio.sleep(0.001)


async def test_a_cancel_leaves_the_thread_behind() -> None:
    """The call ends before its thread, which no end of the bridge waits for."""
    bridge, wait = Bridge(threads=1, name="bridge-apart"), Wait()
    call = asyncio.create_task(bridge.run_apart(wait))
    await begun(wait)
    (left,) = alive()
    call.cancel()
    await asyncio.wait({call})
    bridge.close()
    assert call.cancelled()
    assert left.is_alive()
    assert left.daemon
    wait.end.set()
    while left.is_alive():  # noqa: ASYNC110 - joining it would block
        await asyncio.sleep(0.001)


class Thing:
    """Something that must not be kept alive."""


@pytest.mark.parametrize("left_behind", [False, True])
async def test_nothing_is_kept_once_the_thread_has_ended(*, left_behind: bool) -> None:
    """Neither its arguments nor what it raised."""
    bridge = Bridge(threads=1, name="bridge-apart")
    thing, wait = Thing(), Wait()
    gone = weakref.ref(thing)

    def fail(kept: Thing) -> None:
        wait()
        raise ValueError(kept)

    call = asyncio.create_task(bridge.run_apart(fail, thing))
    del thing
    await begun(wait)
    if left_behind:
        call.cancel()
        await asyncio.wait({call})
    wait.end.set()
    if not left_behind:
        await asyncio.wait({call})
        assert isinstance(call.exception(), ValueError)
    del call
    bridge.close()
    while alive():  # noqa: ASYNC110 - joining it would block
        await asyncio.sleep(0.001)
    if not left_behind:
        gc.collect()  # the error was in our own frames
    assert gone() is None
