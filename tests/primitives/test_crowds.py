"""What one request costs does not grow with the number of receivers.

These tests count steps. A cost that grows with the number of receivers, for each of
them, would be the square of it for all.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from math import inf

import pytest

from aiockpt.http.protocol import Lease
from aiockpt.http.security import network_of
from aiockpt.http.store import Store
from aiockpt.runtime.deadlines import Deadlines
from aiockpt.swarm.messages import Announcement
from aiockpt.swarm.tracker import Tracker
from tests.support.proofs import proves
from tests.support.servers import Memory
from tests.support.steps import counted_steps

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

FEW, MANY = 50, 1500
FAR = 3600.0


def lease_of(number: int, *, joins: bool = True) -> Lease:
    """Return a lease of another receive for each number."""
    until = asyncio.get_running_loop().time() + FAR + number
    return Lease(f"{number + (1 << 124):032x}", until, joins=joins)


async def steps_of(
    crowd: Callable[[int], Awaitable[Callable[[], Awaitable[object]]]],
) -> tuple[int, int]:
    """Return the steps of one request beside few receivers, and beside many."""
    found = []
    for count in (FEW, MANY):
        request = await crowd(count)
        await request()  # what is done once
        with counted_steps() as steps:
            await request()
        found.append(steps.count)
    return found[0], found[1]


async def superseded(count: int) -> tuple[Store, Lease]:
    """Return a store with so many leases on a superseded snapshot, and one of them."""
    store = Store()
    store.replace(Memory(step=1))
    old = store.latest
    assert old is not None
    leases = [lease_of(number) for number in range(count)]
    for each in leases:
        store.lease(old, each, silence_timeout=FAR)
    store.replace(Memory(step=2))
    return store, leases[count // 2]


@proves("threat D19")
async def test_a_request_beside_many_leases() -> None:
    """It renews its lease and reads, and the store tidies after it."""

    async def crowd(count: int) -> Callable[[], Awaitable[None]]:
        store, lease = await superseded(count)

        async def request() -> None:
            publication = store.leased(lease, 1)
            assert publication is not None
            store.lease(publication, lease, silence_timeout=FAR)
            assert publication.has_joining(besides=lease)
            async with store.reading(publication, evict=print, lease=lease):
                pass
            assert store.statistics().superseded == 1

        return request

    few, many = await steps_of(crowd)
    assert 0 < many < 2 * few


@proves("threat D19")
async def test_a_receive_that_ends_beside_many_leases() -> None:
    """Each end of a lease costs the same, whoever is left."""

    async def crowd(count: int) -> Callable[[], Awaitable[None]]:
        store, _ = await superseded(count)
        left = iter(range(count))

        async def request() -> None:
            store.end_lease(lease_of(next(left)))

        return request

    few, many = await steps_of(crowd)
    assert 0 < many < 2 * few


def announce(tracker: Tracker, number: int, *bad: str, have: int = 64) -> str:
    """Announce a member of a host of its own; return its id."""
    said = Announcement(f"http://h:{1000 + number}/c/", have=have, bad=bad)
    address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    lease = f"{number:032x}"
    return tracker.announce(lease, said, address=address, trusts_url=False).id


@proves("threat D19")
async def test_a_member_of_a_large_swarm() -> None:
    """It announces itself, is promised a chunk, and leaves; the page shows some."""

    async def crowd(count: int) -> Callable[[], Awaitable[None]]:
        tracker = Tracker(64)
        for number in range(count):
            announce(tracker, number, have=1)

        async def request() -> None:
            announce(tracker, count, have=1)
            tracker.promise(f"{count:032x}", range(3, 4))
            assert len(tracker) == count + 1
            assert [each.id for each in tracker.statistics(3)] == ["m1", "m2", "m3"]
            tracker.leave(f"{count:032x}")

        return request

    few, many = await steps_of(crowd)
    assert 0 < many < 2 * few  # it names some of 64 members, which it looks at


@proves("threat D19")
async def test_a_complaint_beside_many() -> None:
    """It is counted with those of its host; nobody looks at all the others."""

    async def crowd(count: int) -> Callable[[], Awaitable[None]]:
        tracker = Tracker(64)
        names = [announce(tracker, number) for number in range(count)]
        for number in range(count):
            bad = (names[(number + each) % count] for each in range(1, 9))
            announce(tracker, number, *bad)

        async def request() -> None:
            announce(tracker, count, names[3])

        return request

    few, many = await steps_of(crowd)
    assert 0 < many < 2 * few


@proves("threat D19")
async def test_polls_that_wait_do_nothing() -> None:
    """Only news wakes a waiting poll; one timer looks for clients that left."""
    store, checks = Store(), 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks > FEW:
            raise ConnectionResetError("the client has left")

    async with asyncio.TaskGroup() as group:
        polls = [
            group.create_task(store.wait_for(1, wait=FAR, check=check))
            for _ in range(FEW)
        ]
        gone = group.create_task(
            _error_of(store.wait_past(0, wait=FAR, check=_fail_soon()))
        )
        await asyncio.sleep(0)
        with counted_steps() as steps:
            await asyncio.sleep(0.6)
        assert steps.count < 20 * FEW
        assert isinstance(await gone, ConnectionResetError)
        checks = -10 * FEW
        store.replace(Memory(step=1))
        assert {await poll for poll in polls} == {store.latest}


def _fail_soon() -> Callable[[], None]:
    def check() -> None:
        raise ConnectionResetError("the client has left")

    return check


async def _error_of(waiting: Awaitable[object]) -> Exception | None:
    try:
        await waiting
    except ConnectionError as error:
        return error
    return None


async def test_deadlines_change_and_end_in_order() -> None:
    """The deadlines behave as in a plain dict, in bounded memory."""
    chance, deadlines, plain = random.Random(3), Deadlines[int](), dict[int, float]()
    for now in range(2000):
        for _ in range(4):
            key = chance.randrange(100)
            if chance.random() < 0.1:
                deadlines.forget(key)
                plain.pop(key, None)
            else:
                plain[key] = now + chance.uniform(0, 200)
                deadlines.set(key, plain[key])
        assert deadlines.first() == min(plain.values(), default=inf)
        ended = sorted((at, key) for key, at in plain.items() if at <= now)
        assert deadlines.expired(now) == [key for _, key in ended]
        for _, key in ended:
            del plain[key]
    assert len(deadlines._heap) < 500


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.7", "10.0.0.7"), ("::ffff:10.0.0.7", "10.0.0.7"),
        ("64:ff9b::10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:aaaa::1", "2001:db8:1:2::/64"), ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"), ("", ""), ("host", "host"),
    ],
)  # fmt: skip
async def test_an_ipv6_network_of_64_counts_as_one_host(
    address: str, network: str
) -> None:
    """A host has as many addresses there as it likes."""
    assert network_of(address) == network
