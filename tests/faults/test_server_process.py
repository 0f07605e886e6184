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
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from aiockpt.errors import AiockptError
from aiockpt.memory.arena import CAN_LEND
from aiockpt.testing import assert_same
from aiockpt.transfer import deltas
from tests.support.forkserver import ADOPTED, children_of
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.transports import (
    MIB,
    Events,
    Transport,
    receive,
    transport,
    weights,
)
from tests.support.waiting import eventually, state_of

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

READERS = 100
SIZE = 32 * MIB  # more than the buffers of a connection hold
GRACE = 0.5
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
    record: Record, trouble: str, events: Events
) -> None:
    """Nobody gets the rest, and the next step is served, by another process if need be.

    The end of a process that did not answer is told.
    """
    async with (
        transport(process=True, grace=GRACE, same_host="lent" in trouble) as sender,
        transport() as receiver,
    ):
        await sender.send_checkpoint([1], 1, weights(mib=32))
        if "lent" in trouble:
            lent = await receive(sender, receiver, share=True)
        [pid] = servers()
        async with stuck_readers(sender) as readers:
            if "stopped" in trouble:
                os.kill(pid, signal.SIGSTOP)
            with busy_cores() if trouble == "starved" else nullcontext():
                began = time.monotonic()
                await sender.disallow_checkpoint()
                late = time.monotonic() - began - GRACE
            record.within(f"{trouble}: beyond the grace", late, LATE)
            async with asyncio.timeout(60):
                got = await asyncio.gather(*map(came, readers))
            assert max(got) < SIZE
        if "lent" in trouble:
            assert_same(lent, weights(mib=32))
        state = weights(2.0)
        await sender.send_checkpoint([1], 2, state, timeout=60)
        assert_same(await receive(sender, receiver, 2, timeout=60), state)
        ends = [each.detail for each in events if each.stop == "restart"]
        if "stopped" in trouble:
            assert ends == ["the server process has ended: exit code -9"]
        else:  # it may have answered
            assert set(ends) <= {"the server process has ended: exit code -9"}
    record.ran(READERS)


@proves("fault 47")
async def test_a_retraction_between_two_processes_gives_the_memory_back(
    record: Record,
) -> None:
    """One has been killed, and the next one is not there yet."""
    async with transport(process=True) as sender, transport() as receiver:
        for step in range(1, record.pick(3, 20) + 1):
            await sender.send_checkpoint([1], step, weights(mib=32))
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
@pytest.mark.skipif(not deltas.is_available(), reason="needs aiockpt[delta]")
async def test_a_retraction_while_a_delta_is_encoded(
    record: Record, events: Events
) -> None:
    """The process reads the memory in a thread, which takes longer than the grace.

    It is killed, or answers. It never dies of what was done to the memory.
    """
    async with (
        transport(process=True, grace=0.0, keep_base=True, chunk_bytes=SIZE) as sender,
        transport() as receiver,
    ):
        state = {"w": torch.zeros(SIZE // 2, dtype=torch.int16)}
        have = {"w": state["w"].clone()}
        await sender.send_checkpoint([1], 1, state)
        state["w"][::50] += 1
        for step in range(2, record.pick(4, 20)):
            await sender.send_checkpoint([1], step, have)
            await sender.send_checkpoint([1], step, state, timeout=60)
            receiving = asyncio.create_task(
                receive(sender, receiver, step, have=have, timeout=60)
            )
            most = sender.statistics().requests + 1
            await eventually(
                partial(has_more_requests, sender, most), "the request for the delta"
            )
            await sender.disallow_checkpoint()
            receiving.cancel()
            with suppress(AiockptError, asyncio.CancelledError):
                await receiving
            record.ran()
        await sender.send_checkpoint([1], 99, state, timeout=60)
        assert_same(await receive(sender, receiver, 99, timeout=60), state)
    ends = {each.detail for each in events if each.stop == "restart"}
    assert ends <= {"the server process has ended: exit code -9"}


def has_more_requests(sender: Transport, most: int) -> bool:
    """Tell whether a sender has got more requests than so many."""
    return sender.statistics().requests > most


@proves("fault 69")
@pytest.mark.skipif(not CAN_LEND, reason="memory is lent on Linux only")
@pytest.mark.parametrize("apart", [False, True])
async def test_processes_that_were_lent_memory_stand_still(
    record: Record, apart: bool
) -> None:
    """They hold no more than other readers would, and get no byte of another step."""
    async with (
        transport(
            process=apart, same_host=True, stall_timeout=2.0, grace=0.5
        ) as sender,
        AsyncExitStack() as stack,
    ):
        state, guests = weights(1.0, mib=32), []
        for step in range(1, record.pick(3, 8) + 1):
            await sender.send_checkpoint([1], step, state)
            guest = await stack.enter_async_context(halfway(sender, step))
            guests.append(guest)
            state["w0"].fill_(step + 1.0)
            assert shared() <= 5 * SIZE
        await sender.send_checkpoint([1], 98, state)
        await eventually(lambda: not sender.statistics().superseded, "their deadline")
        await sender.send_checkpoint([1], 99, state)
        await sender.send_checkpoint([1], 100, state)
        for step, guest in enumerate(guests, 1):
            os.kill(guest.pid, signal.SIGCONT)
            out, _ = await guest.communicate()
            assert out.decode().split()[-1:] in ([f"{step}.0"], ["gone"]), out
            record.ran()


GUEST = """
import asyncio, os, signal, sys
from aiockpt.errors import UnavailableError
from tests.support.transports import transport
stopped = False
def stop(progress):
    global stopped
    if progress.chunks_done > 10 and not stopped:
        stopped = True
        os.kill(os.getpid(), signal.SIGSTOP)
async def main():
    async with transport() as receiver:
        try:
            state = await receiver.recv_checkpoint(
                0, sys.argv[1], int(sys.argv[2]), progress=stop, timeout=120
            )
        except UnavailableError:
            print("gone")
        else:
            assert stopped
            low, high = state["w0"].min().item(), state["w0"].max().item()
            print(low if low == high else f"{low}-{high}")
asyncio.run(main())
"""


@asynccontextmanager
async def halfway(
    sender: Transport, step: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Have a process that has received a part of a step, and has stopped."""
    guest = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", GUEST, sender.metadata(), str(step)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await eventually(lambda: state_of(guest.pid) == "T", "its stop")
        yield guest
    finally:
        if guest.returncode is None:
            guest.kill()
            await guest.communicate()
