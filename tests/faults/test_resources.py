"""Descriptors and ports run out, receivers and attackers come in numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import quantiles

import pytest

from aiockpt.errors import StagingError
from aiockpt.testing import FaultProxy, StallAfter, assert_same
from tests.support.faultpeers import TOKEN, Peer, noise, sender
from tests.support.matrix import Record
from tests.support.network import few_ports
from tests.support.proofs import proves
from tests.support.ranks import SUPPORT, process
from tests.support.servers import settle
from tests.support.shortages import FaultUnavailableError, exhausted_fds
from tests.support.transports import MIB, Transport, receive, transport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]


@proves("fault 13")
async def test_a_sender_without_descriptors_serves_again(record: Record) -> None:
    """Running receives go on, and new ones wait and are served afterwards."""
    state = noise(16)
    async with (
        sender(mib=16) as peer,
        FaultProxy("127.0.0.1", peer.port, faults=[StallAfter(4 * MIB)]) as proxy,
        transport(token=TOKEN, connections=1, stall_timeout=1, timeout=60) as early,
        transport(token=TOKEN, timeout=60) as late,
    ):
        for left in record.part_of([0, 1, 2, 5], few=1):
            url = peer.url.replace(str(peer.port), str(proxy.port))
            running = asyncio.create_task(early.recv_checkpoint(0, url, 1))
            await settle(lambda: proxy.statistics().bytes_down > MIB)
            await peer.ask(f"exhaust {left}")
            waiting = asyncio.create_task(late.recv_checkpoint(0, peer.url, 1))
            await asyncio.sleep(0.2)
            await peer.ask("relieve")
            since = time.monotonic()
            assert_same(await waiting, state)
            record.within("served again after", time.monotonic() - since, 2.5)
            assert_same(await running, state)
            record.ran()


@proves("fault 14")
async def test_a_receiver_without_descriptors_fails_plainly(record: Record) -> None:
    """It uses fewer connections or fails, and works with free descriptors again."""
    state = noise(4)
    async with sender(mib=4) as peer:
        up = range(12)
        for left in record.part_of([*up, *reversed(up)], few=2):
            async with transport(
                token=TOKEN, connections=4, timeout=20, reconnect_timeout=0.1
            ) as receiver:
                got, limit = state, "open files"  # where it does not fail
                with exhausted_fds(left=left):
                    try:
                        got = await receiver.recv_checkpoint(0, peer.url, 1)
                    except StagingError as error:
                        limit = str(error)
                assert "open files" in limit
                assert_same(got, state)
                assert_same(await receiver.recv_checkpoint(0, peer.url, 1), state)
            record.ran()


@proves("fault 15")
async def test_twenty_local_ports_are_enough_for_any_number_of_transfers(
    record: Record,
) -> None:
    """Connections are kept and used again."""
    state, count = noise(1), record.pick(40, 200)
    async with AsyncExitStack() as stack:
        try:
            stack.enter_context(few_ports(20))
        except FaultUnavailableError as error:
            pytest.skip(str(error))
        sends = await stack.enter_async_context(transport())
        receiver = await stack.enter_async_context(transport(connections=4))
        await sends.send_checkpoint([], 1, state)
        for _ in range(count // 4):
            gets = [receive(sends, receiver) for _ in range(4)]
            for got in await asyncio.gather(*gets):
                assert_same(got, state)
            record.ran(4)
        record.within("connections opened", opened(sends), 16, unit="", slack=1.25)


def opened(sends: Transport) -> int:
    """Count the connections that were made to a sender in the last minute."""
    table = Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]
    port = f":{int(sends.address().split(':')[2].split('/')[0]):04X}"
    return sum(line.split()[2].endswith(port) for line in table)


@proves("fault 28")
@pytest.mark.parametrize(
    "count", [32, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 8, 128))]
)
async def test_many_receivers_share_fairly(record: Record, count: int) -> None:
    """Each gets the right bytes and its share; the sender's memory does not grow."""
    mib = record.pick(1, 8)
    state = noise(mib)
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(sender(mib=mib))
        receivers = [
            await stack.enter_async_context(transport(token=TOKEN, timeout=100))
            for _ in range(count)
        ]
        await receivers[0].recv_checkpoint(0, peer.url, 1)  # what comes once is there
        before = forget_peak(peer)
        start = time.monotonic()
        times = await asyncio.gather(
            *(finished(receiver, peer, state, start) for receiver in receivers)
        )
        grown = resident(peer, "VmHWM") - before
        await asyncio.gather(*(each.shutdown() for each in receivers))
    record.within("memory per receiver", grown / count / MIB, 2, unit=" MiB", slack=5)
    record.at_least("Jain fairness", jain([1 / each for each in times]), 0.9)
    record.ran(count)


async def finished(
    receiver: Transport, peer: Peer, state: object, start: float
) -> float:
    """Receive; return how long after the start that was done."""
    got = await receiver.recv_checkpoint(0, peer.url, 1)
    took = time.monotonic() - start
    assert_same(got, state)
    return took


def forget_peak(peer: Peer) -> int:
    """Let a process's peak of memory be what it has now, and return that."""
    Path(f"/proc/{peer.process.pid}/clear_refs").write_text("5")
    return resident(peer, "VmRSS")


def resident(peer: Peer, what: str) -> int:
    """Return the memory of a process in bytes."""
    status = Path(f"/proc/{peer.process.pid}/status").read_text()
    return int(status.partition(f"{what}:")[2].split()[0]) << 10


def jain(rates: list[float]) -> float:
    """Return 1 where all are equal, 1/n where one has everything."""
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


@proves("fault 29")
async def test_more_receivers_than_are_admitted_all_finish(record: Record) -> None:
    """The sender refuses some of them, and they come back."""
    state = noise(4)
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(sender(mib=4, readers=4))
        receivers = [
            await stack.enter_async_context(transport(token=TOKEN, timeout=100))
            for _ in range(record.pick(8, 32))
        ]
        gets = [each.recv_checkpoint(0, peer.url, 1) for each in receivers]
        for got in await asyncio.gather(*gets):
            assert_same(got, state)
            record.ran()


@asynccontextmanager
async def attacked(peer: Peer, count: int) -> AsyncIterator[None]:
    """Let attackers sit there: silent, slow to ask, or slow to read."""
    command = (str(SUPPORT / "hostile.py"), str(peer.port), TOKEN, str(count))
    async with process(*command) as attackers:
        assert attackers.stdout is not None
        assert await attackers.stdout.readline() == b"ready\n"
        yield


@proves("fault 29")
async def test_attackers_do_not_slow_a_good_client_down(record: Record) -> None:
    """Two hundred that are silent, ask a byte a second, or read one."""
    mib, turns, times = record.pick(8, 200), record.pick(1, 8), record.pick(2, 8)
    state = noise(mib)
    taken: dict[int, list[float]] = {0: [], record.pick(30, 200): []}
    # Those who read slowly have the token, and each of them takes a reader's place.
    serving = sender(mib=mib, readers=128)
    async with serving as peer, transport(token=TOKEN) as receiver:
        into = noise(mib)
        for _ in range(turns):
            for count, seconds in taken.items():
                async with attacked(peer, count):
                    seconds.extend(await timed_into(receiver, peer, into, times))
                record.ran()
        assert_same(into, state)
    # The quarter that nothing else disturbed: what attackers cost, they cost always.
    clean, under = (quantiles(seconds)[0] for seconds in taken.values())
    record.within("good client's time", under / clean, 1.1, unit=" clean times")


async def timed_into(
    receiver: Transport, peer: Peer, into: object, times: int
) -> list[float]:
    """Receive into the same memory again and again; return the seconds of each.

    The first one does not count: some machines take back memory that rests.
    """
    await receiver.recv_checkpoint(0, peer.url, 1, into=into)
    taken = []
    for _ in range(times):
        since = time.monotonic()
        await receiver.recv_checkpoint(0, peer.url, 1, into=into)
        taken.append(time.monotonic() - since)
    return taken
