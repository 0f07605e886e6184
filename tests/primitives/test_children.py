"""Child processes and the packets between them: what is said, heard and left over."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.children import Child
from aiockpt.runtime.ipc import arrival, is_ours, owner_of, receive
from tests.support.servers import settle

pytestmark = [pytest.mark.every_loop, pytest.mark.torch_free]

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Return two ends that are connected."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.settimeout(0)
    yield pair
    for end in pair:
        end.close()


def test_a_packet_brings_its_descriptors(ends: Ends) -> None:
    """No program that is started inherits them."""
    ours, theirs = ends
    with Path(__file__).open("rb") as file:
        socket.send_fds(theirs, [b"two"], [file.fileno(), file.fileno()])
    data, fds = receive(ours, 100, 2)
    assert data == b"two"
    assert len(fds) == 2
    for fd in fds:
        assert not os.get_inheritable(fd)
        assert os.pread(fd, 3, 0) == b'"""'
        os.close(fd)


@pytest.mark.parametrize(("length", "count"), [(101, 0), (3, 3), (3, 40), (101, 3)])
def test_what_is_cut_short_is_refused(ends: Ends, length: int, count: int) -> None:
    """And its descriptors are closed."""
    ours, theirs = ends
    with Path(__file__).open("rb") as file:
        socket.send_fds(theirs, [b"x" * length], [file.fileno()] * count)
    with pytest.raises(OSError, match="cut short"):
        receive(ours, 100, 2)


def test_nothing_yet_and_the_end(ends: Ends) -> None:
    """The one raises, the other is empty."""
    ours, theirs = ends
    with pytest.raises(BlockingIOError):
        receive(ours, 100, 1)
    theirs.close()
    assert receive(ours, 100, 1) == (b"", [])


def test_the_kernel_tells_who_is_there(ends: Ends) -> None:
    """This process, at both ends."""
    assert owner_of(ends[0]) == (os.getpid(), os.geteuid())
    assert is_ours(ends[1])


@pytest.mark.asyncio
async def test_an_arrival_wakes_the_loop(ends: Ends) -> None:
    """Once; a cancel leaves nothing on the loop."""
    ours, theirs = ends
    waiting = asyncio.ensure_future(arrival(ours))
    await asyncio.sleep(0)
    theirs.send(b"here")
    await waiting
    assert receive(ours, 100, 1) == (b"here", [])
    waiting = asyncio.ensure_future(arrival(ours))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert not asyncio.get_running_loop().remove_reader(ours)


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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_it_ends_when_nobody_talks_to_it_any_more() -> None:
    """A child that is released is left to itself, and leaves no zombie."""
    async with started(greeting="here") as (child, said):
        await settle(lambda: said == ["here"])
        child.pause()  # it still runs while it is closed
        child.close()
        child.close()
        child.resume()
        await settle(lambda: not Path(f"/proc/{child.pid}").exists())


@pytest.mark.asyncio
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
