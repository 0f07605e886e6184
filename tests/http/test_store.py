"""What a store promises to publishers, to readers, and to the trainer's memory."""

from __future__ import annotations

import asyncio

import pytest

from aiockpt.errors import (
    CheckpointChangedError,
    ClosedError,
    PeerFailedError,
    StepNotFoundError,
)
from aiockpt.http.store import Failure, Publication, Store
from tests.support.proofs import proves
from tests.support.serving import Memory, settle

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]


def never() -> None:
    """Stand for an eviction that must not happen."""
    raise AssertionError("evicted")


class Reader:
    """A task that reads until it is told to stop, or evicted."""

    def __init__(self, store: Store, published: Publication) -> None:
        self._stop = asyncio.Event()
        self._inside = asyncio.Event()
        self.evicted = False
        self._task = asyncio.create_task(self._read(store, published))

    async def _read(self, store: Store, published: Publication) -> None:
        async with store.reading(published, evict=self._evict):
            self._inside.set()
            await self._stop.wait()

    def _evict(self) -> None:
        self.evicted = True
        self._stop.set()

    async def inside(self) -> Reader:
        await self._inside.wait()
        return self

    async def stop(self) -> None:
        self._stop.set()
        await self._task


async def test_waiting_ends_when_the_step_was_skipped():
    """A newer step ends the wait for an older one."""
    store = Store()
    waiting = asyncio.create_task(store.wait_for(9, wait=3600))
    await asyncio.sleep(0)
    await store.publish(Memory(step=10), grace=0)
    with pytest.raises(StepNotFoundError) as caught:
        await waiting
    assert caught.value.serving == 10


async def test_a_cancelled_waiter_leaves_the_others_waiting():
    """Cancelling one receiver's wait is nobody else's business."""
    store = Store()
    first, second = (asyncio.create_task(store.wait_for(1, wait=60)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    await store.publish(Memory(step=1), grace=0)
    assert (await second).step == 1
    assert first.cancelled()


@proves("cell HTTPTransport.send_checkpoint: success")
@proves("invariant 9")
async def test_a_reader_of_a_superseded_snapshot_keeps_its_bytes():
    """Publishing does not wait for readers of a snapshot, nor take it from them."""
    store = Store()
    old, new = Memory(step=1), Memory(step=2)
    await store.publish(old, grace=0)
    reader = await Reader(store, await store.wait_for(1, wait=0)).inside()
    await store.publish(new, grace=0)
    assert (await store.wait_for(2, wait=0)).servable is new
    assert old.references
    assert store.statistics().superseded == 1
    await reader.stop()
    assert not reader.evicted
    assert old.references == 0
    assert store.statistics().superseded == 0


@proves("cell HTTPTransport.send_checkpoint, zero_copy=True: success")
async def test_live_memory_is_drained_before_publish_returns():
    """The trainer may change live memory as soon as something else is published."""
    store = Store()
    old = Memory(step=1, live=True)
    await store.publish(old, grace=0)
    reader = await Reader(store, await store.wait_for(1, wait=0)).inside()
    publishing = asyncio.create_task(store.publish(Memory(step=2), grace=3600))
    await asyncio.sleep(0)
    assert not publishing.done()
    assert (await store.wait_for(1, wait=0)).step == 1
    await reader.stop()
    await publishing
    assert (await store.wait_for(2, wait=0)).step == 2
    assert old.references == 0
    assert not reader.evicted


@proves("cell HTTPTransport.send_checkpoint, zero_copy=True: success")
async def test_a_reader_of_live_memory_is_evicted_after_the_grace():
    """A hung receiver delays the trainer by the grace and no more."""
    store = Store()
    old = Memory(step=1, live=True)
    await store.publish(old, grace=0)
    reader = await Reader(store, await store.wait_for(1, wait=0)).inside()
    async with asyncio.timeout(5):
        await store.publish(Memory(step=2), grace=0.01)
    assert reader.evicted
    assert old.references == 0
    assert store.statistics().evicted == 1
    await reader.stop()


@proves("cell HTTPTransport.send_checkpoint, zero_copy=True: cancel")
async def test_a_cancelled_publish_leaves_live_memory_on_offer():
    """What was offered stays offered, and its reader undisturbed."""
    store = Store()
    old, new = Memory(step=1, live=True), Memory(step=2, live=True)
    await store.publish(old, grace=0)
    reader = await Reader(store, await store.wait_for(1, wait=0)).inside()
    publishing = asyncio.create_task(store.publish(new, grace=3600))
    await asyncio.sleep(0)
    publishing.cancel()
    await asyncio.wait({publishing})
    assert (await store.wait_for(1, wait=0)).step == 1
    assert not reader.evicted
    assert (old.references, new.references) == (2, 0)
    await reader.stop()
    await store.close()
    assert old.references == 0


async def test_a_retract_is_not_undone_by_a_publish_that_waits():
    """Who retracts while live memory is being drained finds nothing offered."""
    store = Store()
    old, new = Memory(step=1, live=True), Memory(step=2, live=True)
    await store.publish(old, grace=0)
    reader = await Reader(store, await store.wait_for(1, wait=0)).inside()
    publishing = asyncio.create_task(store.publish(new, grace=3600))
    await asyncio.sleep(0)
    retracting = asyncio.create_task(store.retract(grace=3600))
    await asyncio.sleep(0)
    await reader.stop()
    await retracting
    with pytest.raises(StepNotFoundError):
        await publishing
    assert store.latest is None
    assert (old.references, new.references) == (0, 0)


async def test_retract_waits_for_every_reader():
    """Readers of the current and of superseded snapshots are done when it returns."""
    store = Store()
    memories = [Memory(step=1), Memory(step=2)]
    readers = []
    for memory in memories:
        await store.publish(memory, grace=0)
        published = await store.wait_for(memory.manifest.step, wait=0)
        readers.append(await Reader(store, published).inside())
    retracting = asyncio.create_task(store.retract(grace=3600))
    await asyncio.sleep(0)
    assert store.latest is None
    for reader in readers:
        assert not retracting.done()
        await reader.stop()
    await retracting
    assert [memory.references for memory in memories] == [0, 0]


async def test_retract_is_idempotent_and_forgets_nothing():
    """A cancelled retract is finished by the next one."""
    store = Store()
    await store.retract(grace=3600)
    memory = Memory(step=1)
    await store.publish(memory, grace=0)
    reader = await Reader(store, await store.wait_for(1, wait=0)).inside()
    first = asyncio.create_task(store.retract(grace=3600))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    second = asyncio.create_task(store.retract(grace=3600))
    await asyncio.sleep(0)
    assert not second.done()
    await reader.stop()
    await second
    assert memory.references == 0


async def test_a_reader_that_comes_too_late_is_told_so():
    """What left the store between the finding and the reading is not read."""
    store = Store()
    await store.publish(Memory(step=1), grace=0)
    published = await store.wait_for(1, wait=0)
    await store.publish(Memory(step=2), grace=0)
    with pytest.raises(CheckpointChangedError) as caught:
        async with store.reading(published, evict=never):
            pytest.fail("read what is gone")
    assert caught.value.expected == published.snapshot_id
    assert store.latest is not None
    assert caught.value.actual == store.latest.snapshot_id


async def test_a_reader_behind_a_draining_writer_is_told_so():
    """Live memory that is being taken away admits no further reader."""
    store = Store()
    memory = Memory(step=1, live=True)
    await store.publish(memory, grace=0)
    published = await store.wait_for(1, wait=0)
    first = await Reader(store, published).inside()
    retracting = asyncio.create_task(store.retract(grace=3600))
    await asyncio.sleep(0)
    second = Reader(store, published)
    await settle(lambda: published.lock.statistics().waiting_readers == 1)
    await first.stop()
    await retracting
    with pytest.raises(CheckpointChangedError):
        await second.stop()
    assert memory.references == 0


async def test_close_fails_those_who_wait_and_those_who_come():
    """After close nothing is served, and nobody waits for it."""
    store = Store()
    waiting = asyncio.create_task(store.wait_for(1, wait=3600))
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await store.publish(Memory(), grace=0)
    with pytest.raises(ClosedError):
        await store.wait_for(1, wait=3600)
    await store.close()


class TestFailure:
    """A step that does not come, as those hear who wait for it."""

    async def test_who_waits_is_told_at_once(self) -> None:
        """And only those who wait for this step."""
        store = Store()
        waiting = [asyncio.ensure_future(store.wait_for(7, wait=60)) for _ in range(2)]
        other = asyncio.ensure_future(store.wait_for(8, wait=60))
        await asyncio.sleep(0)
        store.fail(Failure.of(OSError("no space"), step=7, receivers=2))
        for each in waiting:
            with pytest.raises(PeerFailedError, match="OSError: no space"):
                await each
        assert not other.done()
        await store.close()
        with pytest.raises(ClosedError):
            await other

    async def test_each_receiver_is_told_once(self) -> None:
        """Also after a retraction; who comes then waits for the next attempt."""
        store = Store()
        store.fail(Failure.of(asyncio.CancelledError(), step=7, receivers=1))
        await store.retract(grace=0)
        with pytest.raises(PeerFailedError, match="cut short"):
            await store.wait_for(7, wait=60)
        with pytest.raises(StepNotFoundError):
            await store.wait_for(7, wait=0)
        await store.close()

    async def test_without_receivers_everybody_is_told_until_it_is_retracted(
        self,
    ) -> None:
        """Nobody said how many will come."""
        store = Store()
        store.fail(Failure.of(OSError(), step=7, receivers=0))
        for _ in range(3):
            with pytest.raises(PeerFailedError):
                await store.wait_for(7, wait=60)
        await store.retract(grace=0)
        with pytest.raises(StepNotFoundError):
            await store.wait_for(7, wait=0)
        await store.close()

    async def test_what_is_served_is_not_touched(self) -> None:
        """And a publication ends the failure."""
        store = Store()
        await store.publish(Memory(step=7), grace=0)
        store.fail(Failure.of(OSError(), step=7, receivers=1))
        assert (await store.wait_for(7, wait=0)).step == 7
        store.fail(Failure.of(OSError(), step=8, receivers=1))
        await store.publish(Memory(step=8), grace=0)
        assert (await store.wait_for(8, wait=0)).step == 8
        await store.close()


async def test_a_failed_send_is_forgotten_by_itself(monkeypatch):
    """Its receiver may have died; whoever asks much later is one of the next send."""
    monkeypatch.setattr("aiockpt.http.store._FAILURE_LASTS", 0.1)
    store = Store()
    store.fail(Failure.of(OSError(), step=8, receivers=2))
    with pytest.raises(PeerFailedError):
        await store.wait_for(8, wait=0)
    await store.retract(grace=0)
    await asyncio.sleep(0.2)
    with pytest.raises(StepNotFoundError):
        await store.wait_for(8, wait=0)
    await store.close()


async def test_a_failed_send_is_no_news():
    """Who waits for a newer step waits for the send after it."""
    store = Store()
    await store.publish(Memory(step=7), grace=0)
    waiting = asyncio.create_task(store.wait_past(7, wait=60))
    await asyncio.sleep(0)
    store.fail(Failure(8, "no", None))
    with pytest.raises(StepNotFoundError):
        await store.wait_past(7, wait=0.01)
    await asyncio.sleep(0)
    assert not waiting.done()
    await store.publish(Memory(step=8), grace=0)
    assert (await waiting).step == 8
    await store.close()
