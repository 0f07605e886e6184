"""What a shelf promises to publishers, to readers, and to the trainer's memory."""

from __future__ import annotations

import asyncio

import pytest

from aiockpt.errors import (
    CheckpointChangedError,
    ClosedError,
    PeerFailedError,
    StepNotFoundError,
)
from aiockpt.http.failing import Failure
from aiockpt.http.published import Published
from aiockpt.http.shelf import Shelf
from serving import Memory, settle

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]


def never() -> None:
    """Stand for an eviction that must not happen."""
    raise AssertionError("evicted")


class Reader:
    """A task that reads until it is told to stop, or evicted."""

    def __init__(self, shelf: Shelf, published: Published) -> None:
        self._stop = asyncio.Event()
        self._inside = asyncio.Event()
        self.evicted = False
        self._task = asyncio.create_task(self._read(shelf, published))

    async def _read(self, shelf: Shelf, published: Published) -> None:
        async with shelf.reading(published, evict=self._evict):
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


async def test_what_is_published_is_found_at_once():
    """A step that is there needs no waiting."""
    shelf = Shelf()
    memory = Memory(step=7)
    await shelf.publish(memory, grace=0)
    assert (await shelf.wait_for(7, wait=0)).servable is memory
    assert (await shelf.wait_for(None, wait=0)).servable is memory
    assert repr(shelf) == "<Shelf step=7 readers=0>"
    await shelf.close()
    assert memory.references == 0


@pytest.mark.parametrize(("step", "serving"), [(6, 7), (8, 7)])
async def test_another_step_is_refused_with_the_one_being_served(step, serving):
    """The error says what there is instead."""
    shelf = Shelf()
    await shelf.publish(Memory(step=7), grace=0)
    with pytest.raises(StepNotFoundError) as caught:
        await shelf.wait_for(step, wait=0)
    assert (caught.value.step, caught.value.serving) == (step, serving)


async def test_an_older_step_is_refused_without_waiting():
    """It will not come back, so nobody waits for it."""
    shelf = Shelf()
    await shelf.publish(Memory(step=7), grace=0)
    async with asyncio.timeout(5):
        with pytest.raises(StepNotFoundError):
            await shelf.wait_for(6, wait=3600)


async def test_waiting_ends_when_the_step_comes():
    """A receiver may be early; steps in between do not disturb it."""
    shelf = Shelf()
    waiting = asyncio.create_task(shelf.wait_for(9, wait=3600))
    await asyncio.sleep(0)
    await shelf.publish(Memory(step=8), grace=0)
    memory = Memory(step=9)
    await shelf.publish(memory, grace=0)
    assert (await waiting).servable is memory


async def test_waiting_ends_when_the_step_was_skipped():
    """A newer step ends the wait for an older one."""
    shelf = Shelf()
    waiting = asyncio.create_task(shelf.wait_for(9, wait=3600))
    await asyncio.sleep(0)
    await shelf.publish(Memory(step=10), grace=0)
    with pytest.raises(StepNotFoundError) as caught:
        await waiting
    assert caught.value.serving == 10


async def test_waiting_is_bounded():
    """A step that does not come is refused after the wait."""
    shelf = Shelf()
    with pytest.raises(StepNotFoundError) as caught:
        await shelf.wait_for(9, wait=0.01)
    assert caught.value.serving is None


async def test_a_newer_step_is_waited_for():
    """One that is as old as what the waiter has is none."""
    shelf = Shelf()
    await shelf.publish(Memory(step=7), grace=0)
    assert (await shelf.wait_past(6, wait=60)).step == 7
    waiting = asyncio.create_task(shelf.wait_past(7, wait=60))
    await asyncio.sleep(0)
    await shelf.publish(Memory(step=7, fill=1), grace=0)
    await shelf.publish(Memory(step=8), grace=0)
    assert (await waiting).step == 8
    await shelf.close()


@pytest.mark.parametrize("serving", [None, 7])
async def test_waiting_for_a_newer_step_is_bounded(serving):
    """The error says what there is."""
    shelf = Shelf()
    if serving is not None:
        await shelf.publish(Memory(step=serving), grace=0)
    for wait in (0, 0.01):
        with pytest.raises(StepNotFoundError) as caught:
            await shelf.wait_past(7, wait=wait)
        assert (caught.value.step, caught.value.serving) == (None, serving)
    await shelf.close()


async def test_a_retraction_ends_the_wait_for_a_newer_step():
    """Unless there was nothing to retract."""
    shelf = Shelf()
    await shelf.retract(grace=0)
    assert shelf.withdrawals == 0
    await shelf.publish(Memory(step=7), grace=0)
    waiting = asyncio.create_task(shelf.wait_past(7, wait=60))
    await asyncio.sleep(0)
    await shelf.retract(grace=0)
    with pytest.raises(StepNotFoundError):
        await waiting
    assert shelf.withdrawals == 1


async def test_a_closed_shelf_fails_who_waits_for_a_newer_step():
    """They hear of it at once."""
    shelf = Shelf()
    await shelf.publish(Memory(step=7), grace=0)
    waiting = asyncio.create_task(shelf.wait_past(7, wait=60))
    await asyncio.sleep(0)
    await shelf.close()
    with pytest.raises(ClosedError):
        await waiting


async def test_a_cancelled_waiter_leaves_the_others_waiting():
    """Cancelling one receiver's wait is nobody else's business."""
    shelf = Shelf()
    first, second = (asyncio.create_task(shelf.wait_for(1, wait=60)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    await shelf.publish(Memory(step=1), grace=0)
    assert (await second).step == 1
    assert first.cancelled()


async def test_a_reader_of_a_superseded_snapshot_keeps_its_bytes():
    """Publishing does not wait for readers of a snapshot, nor take it from them."""
    shelf = Shelf()
    old, new = Memory(step=1), Memory(step=2)
    await shelf.publish(old, grace=0)
    reader = await Reader(shelf, await shelf.wait_for(1, wait=0)).inside()
    await shelf.publish(new, grace=0)
    assert (await shelf.wait_for(2, wait=0)).servable is new
    assert old.references
    assert shelf.statistics().superseded == 1
    await reader.stop()
    assert not reader.evicted
    assert old.references == 0
    assert shelf.statistics().superseded == 0


async def test_live_memory_is_drained_before_publish_returns():
    """The trainer may change live memory as soon as something else is published."""
    shelf = Shelf()
    old = Memory(step=1, live=True)
    await shelf.publish(old, grace=0)
    reader = await Reader(shelf, await shelf.wait_for(1, wait=0)).inside()
    publishing = asyncio.create_task(shelf.publish(Memory(step=2), grace=3600))
    await asyncio.sleep(0)
    assert not publishing.done()
    assert (await shelf.wait_for(1, wait=0)).step == 1
    await reader.stop()
    await publishing
    assert (await shelf.wait_for(2, wait=0)).step == 2
    assert old.references == 0
    assert not reader.evicted


async def test_a_reader_of_live_memory_is_evicted_after_the_grace():
    """A hung receiver delays the trainer by the grace and no more."""
    shelf = Shelf()
    old = Memory(step=1, live=True)
    await shelf.publish(old, grace=0)
    reader = await Reader(shelf, await shelf.wait_for(1, wait=0)).inside()
    async with asyncio.timeout(5):
        await shelf.publish(Memory(step=2), grace=0.01)
    assert reader.evicted
    assert old.references == 0
    assert shelf.statistics().evicted == 1
    await reader.stop()


async def test_a_cancelled_publish_leaves_live_memory_on_offer():
    """What was offered stays offered, and its reader undisturbed."""
    shelf = Shelf()
    old, new = Memory(step=1, live=True), Memory(step=2, live=True)
    await shelf.publish(old, grace=0)
    reader = await Reader(shelf, await shelf.wait_for(1, wait=0)).inside()
    publishing = asyncio.create_task(shelf.publish(new, grace=3600))
    await asyncio.sleep(0)
    publishing.cancel()
    await asyncio.wait({publishing})
    assert (await shelf.wait_for(1, wait=0)).step == 1
    assert not reader.evicted
    assert (old.references, new.references) == (2, 0)
    await reader.stop()
    await shelf.close()
    assert old.references == 0


async def test_a_retract_is_not_undone_by_a_publish_that_waits():
    """Who retracts while live memory is being drained finds nothing offered."""
    shelf = Shelf()
    old, new = Memory(step=1, live=True), Memory(step=2, live=True)
    await shelf.publish(old, grace=0)
    reader = await Reader(shelf, await shelf.wait_for(1, wait=0)).inside()
    publishing = asyncio.create_task(shelf.publish(new, grace=3600))
    await asyncio.sleep(0)
    retracting = asyncio.create_task(shelf.retract(grace=3600))
    await asyncio.sleep(0)
    await reader.stop()
    await retracting
    with pytest.raises(StepNotFoundError):
        await publishing
    assert shelf.latest is None
    assert (old.references, new.references) == (0, 0)


async def test_retract_waits_for_every_reader():
    """Readers of the current and of superseded snapshots are done when it returns."""
    shelf = Shelf()
    memories = [Memory(step=1), Memory(step=2)]
    readers = []
    for memory in memories:
        await shelf.publish(memory, grace=0)
        published = await shelf.wait_for(memory.manifest.step, wait=0)
        readers.append(await Reader(shelf, published).inside())
    retracting = asyncio.create_task(shelf.retract(grace=3600))
    await asyncio.sleep(0)
    assert shelf.latest is None
    for reader in readers:
        assert not retracting.done()
        await reader.stop()
    await retracting
    assert [memory.references for memory in memories] == [0, 0]


async def test_retract_evicts_after_the_grace():
    """No reader holds the trainer hostage."""
    shelf = Shelf()
    memory = Memory(step=1)
    await shelf.publish(memory, grace=0)
    reader = await Reader(shelf, await shelf.wait_for(1, wait=0)).inside()
    async with asyncio.timeout(5):
        await shelf.retract(grace=0.01)
    assert reader.evicted
    assert memory.references == 0
    await reader.stop()


async def test_retract_is_idempotent_and_forgets_nothing():
    """A cancelled retract is finished by the next one."""
    shelf = Shelf()
    await shelf.retract(grace=3600)
    memory = Memory(step=1)
    await shelf.publish(memory, grace=0)
    reader = await Reader(shelf, await shelf.wait_for(1, wait=0)).inside()
    first = asyncio.create_task(shelf.retract(grace=3600))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    second = asyncio.create_task(shelf.retract(grace=3600))
    await asyncio.sleep(0)
    assert not second.done()
    await reader.stop()
    await second
    assert memory.references == 0


async def test_a_reader_that_comes_too_late_is_told_so():
    """What left the shelf between the finding and the reading is not read."""
    shelf = Shelf()
    await shelf.publish(Memory(step=1), grace=0)
    published = await shelf.wait_for(1, wait=0)
    await shelf.publish(Memory(step=2), grace=0)
    with pytest.raises(CheckpointChangedError) as caught:
        async with shelf.reading(published, evict=never):
            pytest.fail("read what is gone")
    assert caught.value.expected == published.snapshot_id
    assert shelf.latest is not None
    assert caught.value.actual == shelf.latest.snapshot_id


async def test_a_reader_behind_a_draining_writer_is_told_so():
    """Live memory that is being taken away admits no further reader."""
    shelf = Shelf()
    memory = Memory(step=1, live=True)
    await shelf.publish(memory, grace=0)
    published = await shelf.wait_for(1, wait=0)
    first = await Reader(shelf, published).inside()
    retracting = asyncio.create_task(shelf.retract(grace=3600))
    await asyncio.sleep(0)
    second = Reader(shelf, published)
    await settle(lambda: published.lock.statistics().waiting_readers == 1)
    await first.stop()
    await retracting
    with pytest.raises(CheckpointChangedError):
        await second.stop()
    assert memory.references == 0


async def test_close_fails_those_who_wait_and_those_who_come():
    """After close nothing is served, and nobody waits for it."""
    shelf = Shelf()
    waiting = asyncio.create_task(shelf.wait_for(1, wait=3600))
    await asyncio.sleep(0)
    await shelf.close()
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await shelf.publish(Memory(), grace=0)
    with pytest.raises(ClosedError):
        await shelf.wait_for(1, wait=3600)
    await shelf.close()


class TestFailure:
    """A step that does not come, as those hear who wait for it."""

    async def test_who_waits_is_told_at_once(self) -> None:
        """And only those who wait for this step."""
        shelf = Shelf()
        waiting = [asyncio.ensure_future(shelf.wait_for(7, wait=60)) for _ in range(2)]
        other = asyncio.ensure_future(shelf.wait_for(8, wait=60))
        await asyncio.sleep(0)
        shelf.fail(Failure.of(OSError("no space"), step=7, receivers=2))
        for each in waiting:
            with pytest.raises(PeerFailedError, match="OSError: no space"):
                await each
        assert not other.done()
        await shelf.close()
        with pytest.raises(ClosedError):
            await other

    async def test_each_receiver_is_told_once(self) -> None:
        """Also after a retraction; who comes then waits for the next attempt."""
        shelf = Shelf()
        shelf.fail(Failure.of(asyncio.CancelledError(), step=7, receivers=1))
        await shelf.retract(grace=0)
        with pytest.raises(PeerFailedError, match="cut short"):
            await shelf.wait_for(7, wait=60)
        with pytest.raises(StepNotFoundError):
            await shelf.wait_for(7, wait=0)
        await shelf.close()

    async def test_without_receivers_everybody_is_told_until_it_is_retracted(
        self,
    ) -> None:
        """Nobody said how many will come."""
        shelf = Shelf()
        shelf.fail(Failure.of(OSError(), step=7, receivers=0))
        for _ in range(3):
            with pytest.raises(PeerFailedError):
                await shelf.wait_for(7, wait=60)
        await shelf.retract(grace=0)
        with pytest.raises(StepNotFoundError):
            await shelf.wait_for(7, wait=0)
        await shelf.close()

    async def test_what_is_served_is_not_touched(self) -> None:
        """And a publication ends the failure."""
        shelf = Shelf()
        await shelf.publish(Memory(step=7), grace=0)
        shelf.fail(Failure.of(OSError(), step=7, receivers=1))
        assert (await shelf.wait_for(7, wait=0)).step == 7
        shelf.fail(Failure.of(OSError(), step=8, receivers=1))
        await shelf.publish(Memory(step=8), grace=0)
        assert (await shelf.wait_for(8, wait=0)).step == 8
        await shelf.close()


async def test_a_failed_send_is_forgotten_by_itself(monkeypatch):
    """Its receiver may have died; whoever asks much later is one of the next send."""
    monkeypatch.setattr("aiockpt.http.failing._LATE", 0.1)
    shelf = Shelf()
    shelf.fail(Failure.of(OSError(), step=8, receivers=2))
    with pytest.raises(PeerFailedError):
        await shelf.wait_for(8, wait=0)
    await shelf.retract(grace=0)
    await asyncio.sleep(0.2)
    with pytest.raises(StepNotFoundError):
        await shelf.wait_for(8, wait=0)
    await shelf.close()


async def test_a_failed_send_is_no_news():
    """Who waits for a newer step waits for the send after it."""
    shelf = Shelf()
    await shelf.publish(Memory(step=7), grace=0)
    waiting = asyncio.create_task(shelf.wait_past(7, wait=60))
    await asyncio.sleep(0)
    shelf.fail(Failure(8, "no", None))
    with pytest.raises(StepNotFoundError):
        await shelf.wait_past(7, wait=0.01)
    await asyncio.sleep(0)
    assert not waiting.done()
    await shelf.publish(Memory(step=8), grace=0)
    assert (await waiting).step == 8
    await shelf.close()
