"""Loops that stand still, clocks that jump, deadlines of every kind, slow readers."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt import AuthenticationError
from aiockpt.errors import TransferTimeoutError
from aiockpt.testing import (
    Drip,
    LaggingLoop,
    PeerProcess,
    assert_same,
    wall_clock_jumped,
)
from tests.support.clocks import monotonic_ahead
from tests.support.commandline import ENVIRONMENT
from tests.support.groups import moved, transports
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.senders import MIB_SERVED
from tests.support.servers import Peer
from tests.support.transports import (
    pair,
    port_of,
    proxied,
    receive,
    through,
    transport,
    weights,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(900)]

SUPPORT = Path(__file__).parents[1] / "support"
RANGES = 4
HOUR = 3600.0


@proves("fault 27")
async def test_a_loop_that_stands_still_is_not_taken_for_a_stalled_peer(
    record: Record,
) -> None:
    """Each block of either loop is a little shorter than the stall timeout."""
    for block in record.pick([0.3], [0.1, 0.5, 1.0, 5.0]):
        # Some blocks long: the bytes come in between.
        slow = Drip(rate=1e6 / block, burst=1 << 16)
        stall_timeout = block * 1.5 + record.pick(2.0, 0.2)
        async with lagged(stall_timeout, slow) as ends:
            with LaggingLoop(block, pause=block) as lag:
                await ends()
            assert lag.count > 1
        record.ran()
    record.within("connections made again", 0, 0, unit="")


@contextmanager
def busy_interpreter(threads: int) -> Iterator[None]:
    """Run threads that compute in Python until the end of the block."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    spinning = [threading.Thread(target=spin) for _ in range(threads)]
    for thread in spinning:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in spinning:
            thread.join()


@proves("fault 27")
async def test_nor_is_a_busy_interpreter(record: Record) -> None:
    """Threads compute in Python beside the loop."""
    for count in record.pick([1], [1, 2, 4]):
        slow = Drip(rate=10e6, burst=1 << 18)
        async with lagged(record.pick(5.0, 2.0), slow) as ends:
            with busy_interpreter(count):
                await ends()
        record.ran()


@asynccontextmanager
async def lagged(stall_timeout: float, slow: Drip) -> AsyncIterator[Any]:
    """Give a transfer on a slow link; who is thought stalled is connected to again."""
    options: Any = {"stall_timeout": stall_timeout, "connections": RANGES}
    async with pair(**options) as (sender, receiver):
        await sender.send_checkpoint([], 1, weights(mib=8))
        async with proxied(sender, otherwise=slow) as proxy:

            async def transfer() -> None:
                url = through(proxy, sender)
                got = await receiver.recv_checkpoint(0, url, 1, 300)
                assert_same(got, weights(mib=8))
                # One more may renew the lease while all ranges are on their way.
                assert proxy.statistics().connections <= RANGES + 1

            yield transfer


@proves("fault 30")
@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_jump_of_the_wall_clock_moves_no_deadline(
    record: Record, jump: float
) -> None:
    """The clock jumps during a receive, and a short deadline is kept, too."""
    for _ in range(record.pick(1, 20)):
        async with pair(state=weights(mib=8)) as (sender, receiver):
            with wall_clock_jumped(jump):
                await sender.send_checkpoint([], 2, weights(mib=8))
                assert_same(await receive(sender, receiver, 2), weights(mib=8))
                began = time.monotonic()
                with pytest.raises(TransferTimeoutError):
                    await receive(sender, receiver, 3, timeout=0.3)
                record.within("late", time.monotonic() - began - 0.3, 0.5)
        record.ran()


@proves("fault 30")
async def test_a_token_expires_by_the_wall_clock(record: Record) -> None:
    """An hour early where that is an hour ahead; never where it is behind."""
    async with pair(state=weights()) as (sender, receiver):
        metadata = sender.grant("worker", lifetime=60)
        with wall_clock_jumped(-HOUR):
            await receiver.recv_checkpoint(0, metadata, 1)
        with wall_clock_jumped(HOUR), pytest.raises(AuthenticationError):
            await receiver.recv_checkpoint(0, metadata, 1)
        assert_same(await receiver.recv_checkpoint(0, metadata, 1), weights())
    record.ran(3)


@proves("fault 30")
@pytest.mark.asyncio(loop_factories=["asyncio"])  # the other process takes seconds
async def test_the_clocks_of_two_ends_may_differ(record: Record) -> None:
    """The monotonic one, too, as those of two hosts do."""
    program = [sys.executable, str(SUPPORT / "senders.py"), "serve", "0", "secret"]
    ahead = monotonic_ahead(1_000_000, program)
    async with PeerProcess(ahead, env=ENVIRONMENT) as peer:
        url = await peer.line()
        async with transport(token="secret") as receiver:
            with wall_clock_jumped(-HOUR):
                got = await receiver.recv_checkpoint(0, url, 1)
            assert_same(got, weights(mib=MIB_SERVED))
    record.ran()
    record.note("`time.time` jumps in a process; no faked clock under torch's threads")


@proves("fault 36")
@pytest.mark.parametrize("limit", [1e9, 1e30, timedelta.max])
async def test_a_huge_deadline_is_as_good_as_none(record: Record, limit: Any) -> None:
    """No clock, socket or lock overflows; in a process group, too."""
    state = weights()
    async with pair(timeout=limit) as (sender, receiver):
        await sender.send_checkpoint([], 1, state, limit)
        assert_same(await receive(sender, receiver, timeout=limit), state)
        await sender.disallow_checkpoint()
    async with transports(timeout=limit) as (first, second):
        assert_same(await moved(first, second, state, timeout=limit), state)
    record.ran(2)


@proves("fault 36")
@pytest.mark.allow_error_logs  # a save that fails is logged
async def test_a_save_that_is_late_before_it_begins_saves_nothing(
    tmp_path: Path, record: Record
) -> None:
    """The save fails, and training goes on."""
    config = aiockpt.CheckpointerConfig(use_process=False, raise_on_failure=True)
    async with aiockpt.make_async_checkpointer(config) as made:
        for limit in (0, timedelta(0), 1e-9):
            with pytest.raises(TransferTimeoutError):
                await made.save(weights(), tmp_path / "a", timeout=limit)
            record.ran()
        assert aiockpt.list_checkpoints(tmp_path) == []
        for limit in (1e9, timedelta.max):
            await (await made.save(weights(), tmp_path / "a", timeout=limit)).written()
            record.ran()


@proves("fault 23")
async def test_a_send_that_times_out_under_a_slow_reader_changes_nothing(
    record: Record,
) -> None:
    """Again and again: the reader gets the old bits to the last one."""
    old = weights(1.0, mib=16)
    async with transport(zero_copy=True, grace=600, insecure=True) as sender:
        await sender.send_checkpoint([], 1, old)
        async with Peer(port_of(sender), token=None, receive_buffer=4096) as reader:
            await reader.request("/checkpoint/1/full")
            head = await reader.head()
            before = facts(sender)
            for _ in range(record.pick(10, 100)):
                with pytest.raises(TransferTimeoutError):
                    await sender.send_checkpoint([], 2, weights(2.0, mib=1), 0.02)
                assert facts(sender) == before
                record.ran()
            body = await reader.read_some(int(head.headers["Content-Length"]))
        assert body.endswith(bytes(old["w0"].numpy()))
        await sender.send_checkpoint([], 2, weights(2.0))
        async with transport() as receiver:
            assert_same(await receive(sender, receiver, 2), weights(2.0))


def facts(sender: Any) -> tuple[Any, ...]:
    """Return what a transport says of its offer and its readers."""
    now = sender.statistics()
    return now.step, now.readers, now.waiting
