"""Child processes and the packets between them: what is said, heard and left over."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.children import Child, Pauses
from aiockpt.runtime.ipc import Channel
from tests.support.servers import settle

pytestmark = [pytest.mark.every_loop, pytest.mark.torch_free]

SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"

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
    """The parent notices it at once, on old kernels by the socket."""
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
async def test_it_may_be_stopped() -> None:
    """It says nothing then, and goes on later."""
    async with started(greeting="here") as (child, said):
        await settle(lambda: said == ["here"])
        assert not child.is_stopped
        os.kill(child.pid, signal.SIGSTOP)
        await settle(lambda: child.is_stopped)
        child.send("still here")
        await asyncio.sleep(0.05)
        assert said == ["here"]
        assert await child.exitcode(0) is None
        os.kill(child.pid, signal.SIGCONT)
        await settle(lambda: said == ["here", "still here"])
        assert not child.is_stopped


@pytest.mark.asyncio
async def test_it_ends_when_nobody_talks_to_it_any_more() -> None:
    """A child that is released is left to itself, and leaves no zombie."""
    async with started(greeting="here") as (child, said):
        await settle(lambda: said == ["here"])
        os.kill(child.pid, signal.SIGSTOP)  # it still runs while it is closed
        child.close()
        child.close()
        os.kill(child.pid, signal.SIGCONT)
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


def refusing(monkeypatch: pytest.MonkeyPatch, code: int, times: int = 1) -> list[int]:
    """Let the system refuse the next packets; return a list of the refusals."""
    send, refused = socket.send_fds, list[int]()

    def send_fds(*args: Any) -> int:
        if len(refused) < times:
            refused.append(code)
            raise OSError(code, os.strerror(code))
        return send(*args)

    monkeypatch.setattr(socket, "send_fds", send_fds)
    return refused


@pytest.mark.asyncio
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS])
async def test_what_the_kernel_lacks_for_a_moment_delays_a_message(
    monkeypatch, code: int
) -> None:
    """The other end is not gone: it gets each message once, in order."""
    async with started() as (child, said):
        refused = refusing(monkeypatch, code, times=3)
        for word in ("one", "two", "three"):
            child.send(word)
        await settle(lambda: said == ["one", "two", "three"])
        assert refused == [code] * 3
        assert not child.gone.is_set()


@pytest.mark.asyncio
@pytest.mark.parametrize("nbytes", [196_602, 196_603, 196_604, 5_000_000])
async def test_a_message_of_any_size_arrives_whole(nbytes: int) -> None:
    """It travels in packets, waits for space in the socket, and keeps its turn."""
    async with started() as (child, said):
        words = ["one", "y" * nbytes, "two", "z" * nbytes, "three"]
        for word in words:
            child.send(word)
        await settle(lambda: len(said) == 5)
        assert said == words
        assert not child.gone.is_set()


@pytest.mark.asyncio
@pytest.mark.allow_error_logs
async def test_a_long_message_brings_its_descriptors(ends: Ends) -> None:
    """Once, with the message; a message that breaks off leaves none open."""
    ours, theirs = ends
    heard, ended, before = list[Any](), asyncio.Event(), len(os.listdir("/dev/fd"))
    sender = Channel(theirs, lambda *_: None, lambda: None)
    receiver = Channel(ours, lambda *each: heard.append(each), ended.set)
    fd = os.open(__file__, os.O_RDONLY)
    sender.send("x" * 1_000_000, [fd])
    await settle(lambda: len(heard) == 1)
    [(data, [copy])] = heard
    assert msgspec.msgpack.decode(data) == "x" * 1_000_000
    assert os.pread(copy, 3, 0) == b'"""'
    os.close(copy)
    sender.send("y" * 1_000_000, [fd])
    os.close(fd)
    sender.close()  # the first packets are on their way
    async with asyncio.timeout(20):
        await ended.wait()
    assert len(heard) == 1
    receiver.close()
    assert len(os.listdir("/dev/fd")) == before - 2  # the two ends


@pytest.mark.asyncio
@pytest.mark.allow_error_logs
async def test_a_message_that_cannot_be_read_is_told(ends: Ends, caplog) -> None:
    """The end of a channel has its reason in the log: it may end a process."""
    ours, theirs = ends
    ended = asyncio.Event()
    receiver = Channel(ours, lambda *_: None, ended.set)
    theirs.send(b"x" * 199_000)
    async with asyncio.timeout(20):
        await ended.wait()
    assert "a message of another process is lost" in caplog.text
    receiver.close()


@pytest.mark.asyncio
async def test_what_will_never_be_sent_is_the_senders_error(monkeypatch) -> None:
    """The sender gets a typed error, and the channel works on."""
    async with started() as (child, said):
        for code in (errno.EMSGSIZE, errno.EPERM):
            with monkeypatch.context() as patch:
                refusing(patch, code)
                with pytest.raises(OSError, match=os.strerror(code)):
                    child.send("refused")
        for code in (errno.EPIPE, errno.ECONNRESET):
            with monkeypatch.context() as patch:
                refusing(patch, code)
                child.send("to nobody")
        child.send("well")
        await settle(lambda: said == ["well"])


@pytest.mark.asyncio
@pytest.mark.allow_error_logs
async def test_a_message_that_is_lost_in_the_queue_ends_the_channel(
    monkeypatch,
) -> None:
    """What follows would make no sense; the supervisor replaces the process."""
    async with started() as (child, _):
        refusing(monkeypatch, errno.ENOMEM)
        child.send("queued")
        monkeypatch.undo()
        refusing(monkeypatch, errno.EPERM)
        async with asyncio.timeout(20):
            await child.gone.wait()


def test_pauses_grow_with_short_lives() -> None:
    """The pauses are 0, 1, 2, 4 seconds, up to a minute. A long life resets them."""
    pauses = Pauses()
    assert [pauses.next(4.0) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert [pauses.next(61.0), pauses.next(3.0), pauses.next(3.0)] == [0, 0, 1]


@pytest.mark.asyncio
async def test_the_time_without_a_core_is_known() -> None:
    """The parent knows how long a child that competes for a core had none."""
    async with started(greeting="here") as (child, said):
        await settle(lambda: said == ["here"])
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(child.pid, {core})
        os.setpriority(os.PRIO_PROCESS, child.pid, 19)
        before = child.starved
        rival = subprocess.Popen(  # noqa: ASYNC220 - it is quick
            [sys.executable, "-c", SPIN, str(core)]
        )
        try:
            for number in range(400):
                child.send(number)
                await asyncio.sleep(0.005)
                if child.starved > before:
                    break
            assert child.starved > before
        finally:
            rival.kill()
            rival.wait()
