"""A server process that is starved, stopped or dead when it is to retract."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aiockpt.memory.arena import Arena
from aiockpt.testing import assert_same
from tests.support.forkserver import ADOPTED, children_of
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.transports import MIB, Transport, receive, transport, weights
from tests.support.waiting import eventually

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

READERS = 100
SIZE = 64 * MIB
GRACE = 1.0
LATE = 0.3


def servers() -> list[int]:
    """Return the processes of this one that serve: those that lower their priority."""
    found = children_of(os.getpid()) - ADOPTED
    return sorted(pid for pid in found if niceness(pid) > niceness(os.getpid()))


def niceness(pid: int) -> int:
    """Return how much a process gives way to others; a dead one gives way to none."""
    with suppress(OSError):  # it has ended
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return -99 if stat[0] in "ZX" else int(stat[16])
    return -99


def shared() -> int:
    """Return how many bytes of shared memory this process has."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:aiockpt" in line:
            start, stop = (int(each, 16) for each in line.split()[0].split("-"))
            total += stop - start
    return total


@contextmanager
def busy_cores() -> Iterator[None]:
    """Have two processes for each core that never wait."""
    count = 2 * len(os.sched_getaffinity(0))
    code = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(code) for _ in range(count)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


@asynccontextmanager
async def stuck_readers(sender: Transport) -> AsyncIterator[list[socket.socket]]:
    """Have many readers of step 1 that have asked for all of it, and never read."""
    url, token = urlsplit(sender.address()), urlsplit(sender.metadata()).fragment
    assert url.port is not None
    ask = f"GET /checkpoint/1/full HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}"
    readers = []
    try:
        for _ in range(READERS):
            readers.append(socket.create_connection(("127.0.0.1", url.port)))
            readers[-1].sendall(f"{ask}\r\n\r\n".encode())
        await eventually(lambda: sender.statistics().readers == READERS, "the readers")
        yield readers
    finally:
        for each in readers:
            each.close()


async def came(reader: socket.socket) -> int:
    """Read to the end of a connection; return how many bytes came."""
    loop, total = asyncio.get_running_loop(), 0
    reader.settimeout(0)
    with suppress(ConnectionError):
        while data := await loop.sock_recv(reader, MIB):
            total += len(data)
    return total


@proves("fault 46")
@pytest.mark.parametrize("trouble", ["starved", "stopped", "stopped, and lent"])
async def test_a_retraction_is_in_time_whatever_the_process_does(
    record: Record, trouble: str
) -> None:
    """Nobody gets the rest, a slow process goes on, and the next step is served."""
    async with (
        transport(process=True, grace=GRACE, same_host="lent" in trouble) as sender,
        transport() as receiver,
    ):
        await sender.send_checkpoint([1], 1, weights(mib=64))
        if "lent" in trouble:
            lent = await receive(sender, receiver, share=True)
        [pid] = servers()
        with busy_cores() if trouble == "starved" else nullcontext():
            async with stuck_readers(sender) as readers:
                if "stopped" in trouble:
                    os.kill(pid, signal.SIGSTOP)
                began = time.monotonic()
                await sender.disallow_checkpoint()
                late = time.monotonic() - began - GRACE
                record.within(f"{trouble}: beyond the grace", late, LATE)
                async with asyncio.timeout(60):
                    got = await asyncio.gather(*map(came, readers))
                assert max(got) < SIZE
        if trouble == "starved":
            assert servers() == [pid]
        if "lent" in trouble:
            assert_same(lent, weights(mib=64))
        state = weights(2.0)
        await sender.send_checkpoint([1], 2, state, timeout=60)
        assert_same(await receive(sender, receiver, 2, timeout=60), state)
    record.ran(READERS)


@proves("fault 47")
async def test_a_retraction_between_two_processes_gives_the_memory_back(
    record: Record,
) -> None:
    """One has been killed, and the next one is not there yet."""
    async with transport(process=True) as sender, transport() as receiver:
        for step in range(1, record.pick(3, 20) + 1):
            await sender.send_checkpoint([1], step, weights(mib=64))
            [pid] = servers()
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                while Path(f"/proc/{pid}").exists():  # noqa: ASYNC240, ASYNC110
                    await asyncio.sleep(0)
            await sender.disallow_checkpoint()
            await eventually(lambda: shared() < SIZE, "the memory's return")
            record.ran()
        await sender.send_checkpoint([1], step + 1, weights())
        assert_same(await receive(sender, receiver, step + 1), weights())


@proves("fault 46")
@pytest.mark.parametrize("trouble", ["slow", "stopped"])
async def test_a_retraction_does_not_wait_until_gigabytes_are_free(
    record: Record, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow process is paused meanwhile, and goes on; a stopped one is replaced."""
    takes, revoke = 2.0, Arena.revoke

    def slowly(arena: Arena) -> None:
        time.sleep(takes)  # as 8 GiB take
        revoke(arena)

    monkeypatch.setattr(Arena, "revoke", slowly)
    # No answer comes within no time at all, so the process counts as slow.
    monkeypatch.setattr("aiockpt.http.server_process._MARGIN", 0.0)
    async with (
        transport(process=True, grace=0.0) as sender,
        transport() as receiver,
    ):
        await sender.send_checkpoint([1], 1, weights(mib=64))
        [pid] = servers()
        async with stuck_readers(sender) as readers:
            if trouble == "stopped":
                os.kill(pid, signal.SIGSTOP)
                stopped = os.WSTOPPED | os.WNOHANG | os.WNOWAIT  # all of its threads
                await eventually(
                    lambda: os.waitid(os.P_PID, pid, stopped) is not None, "its stop"
                )
            began = time.monotonic()
            await sender.disallow_checkpoint()
            late = time.monotonic() - began
            record.within(f"{trouble}: until it has shrunk", late, LATE)
            async with asyncio.timeout(60):
                got = await asyncio.gather(*map(came, readers))
            assert max(got) < SIZE
        state = weights(2.0)
        await sender.send_checkpoint([1], 2, state, timeout=60)
        assert_same(await receive(sender, receiver, 2, timeout=60), state)
        assert (servers() == [pid]) == (trouble == "slow")
    record.ran(READERS)
