"""The reader-writer lock: phases, eviction and statistics.

`faults/test_locks.py` compares exclusion, order and cancellation with a model.
"""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest
import uvloop

from aiockpt.runtime.rwlock import Hold, RWLock
from tests.support.lockmodel import (
    IDLE,
    acquire,
    at_once,
    facts,
    queue,
    settle,
)

pytestmark = pytest.mark.every_loop

LOOPS = pytest.mark.parametrize(
    "new_loop",
    [asyncio.new_event_loop, uvloop.new_event_loop],
    ids=["asyncio", "uvloop"],
)


@LOOPS
def test_another_event_loop_is_refused(new_loop):
    """A lock that somebody waited for on one loop lets nobody wait on another."""
    lock = RWLock()
    with asyncio.Runner(loop_factory=new_loop) as one:
        lease = one.run(lock.acquire_write())
        waiter = one.run(queue(lock.acquire_read()))
        with (
            asyncio.Runner(loop_factory=new_loop) as other,
            pytest.raises(RuntimeError, match="another event loop"),
        ):
            other.run(lock.acquire_read())
        lease.release()
        one.get_loop().run_until_complete(waiter).release()
    assert lock.statistics() == IDLE


async def phases(holder: str, names: list[str]) -> list[set[str]]:
    """Return who holds at once, of those who queue behind a holder ("R0", "W1")."""
    lock = RWLock()
    lease = await acquire(lock, holder)
    tasks = {name: await queue(acquire(lock, name[0])) for name in names}
    lease.release()
    seen = []
    while tasks:
        await settle()
        inside = {name for name, task in tasks.items() if task.done()}
        assert inside, f"{list(tasks)} wait for nobody"
        seen.append(inside)
        for name in inside:
            tasks.pop(name).result().release()
    await settle()
    assert lock.statistics() == IDLE
    return seen


@pytest.mark.asyncio
class TestFairness:
    """Writers and readers take turns."""

    @pytest.mark.parametrize(
        ("holder", "names", "expected"),
        [
            ("R", "W0", [{"W0"}]),
            ("W", "R0 W1", [{"R0"}, {"W1"}]),
            ("R", "W0 R1 R2", [{"W0"}, {"R1", "R2"}]),
            ("R", "W0 R1 W2 R3", [{"W0"}, {"R1", "R3"}, {"W2"}]),
            ("R", "W0 W1 R2", [{"W0"}, {"R2"}, {"W1"}]),
            ("W", "W0 W1 W2", [{"W0"}, {"W1"}, {"W2"}]),
            ("W", "W0 R1 W2 R3", [{"R1", "R3"}, {"W0"}, {"W2"}]),
        ],
    )
    async def test_phases_follow_the_queue(self, holder, names, expected):
        """A writer is followed by all readers queued so far, those by one writer."""
        assert await phases(holder, names.split()) == expected


@pytest.mark.asyncio
class TestCancellation:
    """A waiter that is cancelled leaves the lock as if it had never come."""

    async def test_a_newcomer_does_not_wait_for_a_cancelled_writer(self):
        """A waiter counts no more from its cancel on, before its task has noticed."""
        lock = RWLock()
        with await lock.acquire_read():
            writer = await queue(lock.acquire_write())
            writer.cancel()
            at_once(lock.acquire_read()).release()
        assert lock.statistics() == IDLE


@pytest.mark.asyncio
class TestEviction:
    """A writer with a grace does not wait for readers forever."""

    async def test_a_grace_is_waited_out(self):
        """Nobody is evicted before the grace has passed."""
        lock = RWLock()
        loop = asyncio.get_running_loop()
        begin = loop.time()
        evicted = loop.create_future()
        with await lock.acquire_read(evict=lambda: evicted.set_result(loop.time())):
            writer = await queue(lock.acquire_write(grace=0.05))
            assert await evicted - begin >= 0.045  # uvloop's clock ticks in ms
        (await writer).release()

    async def test_an_eviction_may_release_everybody(self):
        """Evictions that release on the spot, even for others, let the writer in."""
        lock = RWLock()
        leases: list[Hold] = []
        evictions = []

        def release_all() -> None:
            evictions.append(len(leases))
            for lease in leases:
                lease.release()

        leases += [await lock.acquire_read(evict=release_all) for _ in range(3)]
        (await lock.acquire_write(grace=0.0)).release()
        assert evictions == [3]
        assert facts(lock) == IDLE

    async def test_readers_admitted_later_get_a_grace_of_their_own(self):
        """It is counted from when a writer let them in, and they are evicted then."""
        lock = RWLock()
        loop = asyncio.get_running_loop()
        evicted = loop.create_future()
        writer = await lock.acquire_write()
        reader = await queue(
            lock.acquire_read(evict=lambda: evicted.set_result(loop.time()))
        )
        graceful = await queue(lock.acquire_write(grace=0.05))
        await asyncio.sleep(0.04)
        entered = loop.time()
        writer.release()
        assert await evicted - entered >= 0.045
        reader.result().release()
        (await graceful).release()

    async def test_a_writer_cancelled_as_its_grace_ends_evicts_nobody(self):
        """The cancel comes first, and the task has yet to notice it."""
        lock = RWLock()
        with await lock.acquire_read(evict=pytest.fail):
            writer = asyncio.create_task(lock.acquire_write(grace=0.004))
            asyncio.get_running_loop().call_later(0.002, writer.cancel)
            await asyncio.sleep(0)
            time.sleep(0.01)  # noqa: ASYNC251 - both are due in one turn of the loop
            with pytest.raises(asyncio.CancelledError):
                await writer
        assert lock.statistics() == IDLE

    @pytest.mark.parametrize("end", ["granted", "cancelled"])
    async def test_a_wait_that_is_over_leaves_no_timer_behind(self, end):
        """The loop does not keep a lock alive until the grace has passed."""
        lock = RWLock()
        lease = await lock.acquire_read()
        writer = await queue(lock.acquire_write(grace=3600.0))
        if end == "granted":
            lease.release()
            (await writer).release()
        else:
            writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        assert not lock._graceful  # they would pile up unseen
        kept = weakref.ref(lock)
        del lock, lease, writer
        await settle()
        gc.collect()
        assert kept() is None

    async def test_an_eviction_that_fails_does_not_spare_the_others(
        self, allow_error_logs
    ):
        """The failure is logged, and the next reader is evicted all the same."""
        lock = RWLock()
        evicted = asyncio.Event()
        with (
            await lock.acquire_read(evict=lambda: 1 / 0),
            await lock.acquire_read(evict=evicted.set),
        ):
            writer = await queue(lock.acquire_write(grace=0.0))
            await evicted.wait()
        (await writer).release()
        assert [record.exc_info[0] for record in allow_error_logs] == [
            ZeroDivisionError
        ]
