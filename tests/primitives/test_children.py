"""A child process: what it hears and says, and what is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.children import Child
from tests.support.serving import settle

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.every_loop,
    pytest.mark.torch_free,
]


@asynccontextmanager
async def started(
    *also: Any, **options: Any
) -> AsyncIterator[tuple[Child, list[object]]]:
    """Start a child that repeats what it hears; give it, and what it has said."""
    bridge, said = Bridge(threads=1, name="test"), list[object]()
    child = await bridge.run(partial(Child, "tests.support.echoing_child", **options))
    child.listen(lambda data: said.append(msgspec.msgpack.decode(data)), *also)
    try:
        yield child, said
    finally:
        if not child.gone.is_set():
            child.kill()
        await child.exitcode(10)
        child.close()
        await bridge.aclose(timeout=5)


async def test_it_hears_and_answers_and_ends() -> None:
    """Its last words are heard before it counts as gone."""
    async with started(greeting="good morning") as (child, said):
        child.send("how are you")
        child.send(float("inf"))
        child.send("end")
        async with asyncio.timeout(20):
            await child.gone.wait()
        assert said == ["good morning", "how are you", float("inf"), "end"]
        assert await child.exitcode(10) == 0


@pytest.mark.parametrize("kernel", ["new", "old"])
async def test_its_death_is_noticed(kernel, monkeypatch) -> None:
    """At once, on old kernels by its socket; what is sent then is said to nobody."""
    if kernel == "old":
        monkeypatch.delattr(os, "pidfd_open")
    ended = asyncio.Event()
    async with started(ended.set) as (child, _):
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            await (child.gone if kernel == "new" else ended).wait()
        assert await child.exitcode(10) == -signal.SIGKILL
        child.send("nothing")


async def test_it_may_be_paused() -> None:
    """It says nothing then, and goes on later."""
    async with started(greeting="here") as (child, said):
        await settle(lambda: said == ["here"])
        assert not child.is_stopped
        child.pause()
        await settle(lambda: child.is_stopped)
        child.send("still here")
        await asyncio.sleep(0.05)
        assert said == ["here"]
        assert await child.exitcode(0) is None
        child.resume()
        await settle(lambda: said == ["here", "still here"])
        assert not child.is_stopped


async def test_it_ends_when_nobody_talks_to_it_any_more() -> None:
    """A child that is released is left to itself."""
    async with started(greeting="here") as (child, said):
        await settle(lambda: said == ["here"])
        pid = child.pid
        child.close()
    await settle(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0))


async def test_a_process_that_cannot_be_started() -> None:
    """The system says why, and nothing is left."""
    before = len(os.listdir("/dev/fd"))
    bridge = Bridge(threads=1, name="test")
    with pytest.raises(FileNotFoundError):
        await bridge.run(
            partial(Child, "tests.support.echoing_child", program="/nowhere/python")
        )
    await bridge.aclose(timeout=5)
    assert len(os.listdir("/dev/fd")) == before
