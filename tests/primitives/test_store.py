"""What a store promises to publishers, to readers, and to the trainer's memory."""

from __future__ import annotations

import asyncio
from unittest.mock import ANY

import pytest

from aiockpt.errors import (
    CheckpointChangedError,
    ClosedError,
    PeerFailedError,
    StepNotFoundError,
)
from aiockpt.http.store import Failure, Statistics, Store
from aiockpt.runtime.secrets import Token
from aiockpt.swarm.relay import Relay, Slots
from tests.support.proofs import proves
from tests.support.servers import Memory, settle

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.torch_free,
    pytest.mark.usefixtures("no_blocking"),
]

FAR = 3600.0  # seconds that no test waits


class Reader:
    """A task that reads until it is told to stop, or evicted."""

    def __init__(self, store, published):
        self._stop = asyncio.Event()
        self._inside = asyncio.Event()
        self.evicted = False
        self._task = asyncio.create_task(self._read(store, published))

    async def _read(self, store, published):
        async with store.reading(published, evict=self._evict):
            self._inside.set()
            await self._stop.wait()

    def _evict(self):
        self.evicted = True
        self._stop.set()

    async def stop(self):
        self._stop.set()
        await self._task

    @classmethod
    async def of(cls, store, step):
        """Return a reader of a published step that has begun."""
        reader = cls(store, await store.wait_for(step, wait=0))
        await reader._inside.wait()
        return reader


async def begun(call):
    """Start a call, and let it go as far as it can."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    return task


async def read_live(step=1):
    """Return a store with live memory, the memory, and its reader."""
    store, memory = Store(), Memory(step=step, live=True)
    await store.publish(memory, grace=0)
    return store, memory, await Reader.of(store, step)


async def test_two_records_are_added_field_by_field():
    """Counters and readers are sums, also of fields that are new."""
    names = Statistics.__struct_fields__
    first = Statistics(**{name: 1 + at for at, name in enumerate(names)})
    second = Statistics(**dict.fromkeys(names, 100))
    total = first + second
    for at, name in enumerate(names):
        expected = {"step": 1, "oldest_reader": 100}.get(name, 101 + at)
        assert getattr(total, name) == expected, name
    assert (Statistics() + second).step == 100
    assert first + Statistics() == first == Statistics() + first


async def test_of_a_server_that_has_ended_only_the_counters_stay():
    """It serves no step, and nobody reads from it or waits for it."""
    before = Statistics(**dict.fromkeys(Statistics.__struct_fields__, 5))
    counts = dict.fromkeys(
        ("requests", "refused", "bytes_sent", "gone", "stalled", "evicted", "lent"), 5
    )
    assert before.counters() == Statistics(**counts)


async def test_a_body_of_a_relay_is_a_reader():
    """A member of a swarm counts whom it serves, as a sender does."""
    store, relay = Store(), Relay(Memory().manifest, {}, Slots(2))
    relay.tokens = [Token("of-members")]
    store.serve_relay(relay)
    publication = store.relay_of("of-members")
    assert publication is not None
    async with store.reading(publication, evict=lambda: None):
        assert store.statistics() == Statistics(readers=1, oldest_reader=ANY)
    assert store.statistics() == Statistics()


async def test_a_relay_is_found_by_its_tokens_until_it_ends():
    """Then nobody reads it, and a closed store accepts no other relay."""
    store, relay = Store(), Relay(Memory().manifest, {}, Slots(2))
    store.serve_relay(relay)
    assert store.relay_of("") is None  # it has no token yet
    relay.tokens = Token("one"), Token("other")
    share = store.relay_of("one")
    assert share is not None
    assert share is store.relay_of("other")
    assert store.relay_of("third") is None
    async with store.unread(relay) as publication:
        assert publication is share
    for _ in range(2):
        await store.end_relay(relay)
        assert store.relay_of("one") is None
        async with store.unread(relay) as publication:
            assert publication is None
    with pytest.raises(CheckpointChangedError):
        async with store.reading(share, evict=lambda: None):
            raise AssertionError("it has ended")
    await store.close()
    with pytest.raises(ClosedError):
        store.serve_relay(relay)


async def test_waiting_ends_when_the_step_was_skipped():
    """A newer step ends the wait for an older one; a cancel is nobody else's."""
    store = Store()
    first = await begun(store.wait_for(9, wait=FAR))
    second = await begun(store.wait_for(10, wait=FAR))
    cancelled = await begun(store.wait_for(10, wait=FAR))
    cancelled.cancel()
    await asyncio.sleep(0)
    await store.publish(Memory(step=10), grace=0)
    assert (await second).step == 10
    assert cancelled.cancelled()
    with pytest.raises(StepNotFoundError) as caught:
        await first
    assert caught.value.serving == 10


@proves("cell HTTPTransport.send_checkpoint, zero_copy=True: success")
async def test_a_reader_of_live_memory_is_evicted_after_the_grace():
    """A hung receiver delays the trainer by the grace and no more."""
    store, old, reader = await read_live()
    async with asyncio.timeout(5):
        await store.publish(Memory(step=2), grace=0.01)
    assert reader.evicted
    assert old.references == 0
    assert store.statistics().evicted == 1
    await reader.stop()


@proves("cell HTTPTransport.send_checkpoint, zero_copy=True: cancel")
async def test_a_cancelled_publish_leaves_live_memory_on_offer():
    """What was offered stays offered, and its reader undisturbed."""
    store, old, reader = await read_live()
    new = Memory(step=2, live=True)
    publishing = await begun(store.publish(new, grace=FAR))
    publishing.cancel()
    await asyncio.wait({publishing})
    assert (await store.wait_for(1, wait=0)).step == 1
    assert not reader.evicted
    assert (old.references, new.references) == (2, 0)
    await reader.stop()
    await store.close()
    assert old.references == 0


async def test_a_retract_is_not_undone_by_a_publish_that_waits():
    """A retraction while live memory is drained leaves nothing offered."""
    store, old, reader = await read_live()
    new = Memory(step=2, live=True)
    publishing = await begun(store.publish(new, grace=FAR))
    retracting = await begun(store.retract(grace=FAR))
    await reader.stop()
    await retracting
    with pytest.raises(StepNotFoundError):
        await publishing
    assert store.latest is None
    assert (old.references, new.references) == (0, 0)


async def test_retract_waits_for_every_reader():
    """It waits for readers of superseded snapshots; a cancelled one ends later."""
    store = Store()
    await store.retract(grace=FAR)
    memories, readers = [Memory(step=1), Memory(step=2)], []
    for memory in memories:
        await store.publish(memory, grace=0)
        readers.append(await Reader.of(store, memory.manifest.step))
    cancelled = await begun(store.retract(grace=FAR))
    cancelled.cancel()
    await asyncio.sleep(0)
    retracting = await begun(store.retract(grace=FAR))
    assert store.latest is None
    for reader in readers:
        assert not retracting.done()
        await reader.stop()
    await retracting
    assert [memory.references for memory in memories] == [0, 0]


async def test_a_reader_that_comes_too_late_is_told_so():
    """What left the store between the finding and the reading is not read."""
    store = Store()
    await store.publish(Memory(step=1), grace=0)
    published = await store.wait_for(1, wait=0)
    await store.publish(Memory(step=2), grace=0)
    with pytest.raises(CheckpointChangedError) as caught:
        await Reader(store, published).stop()
    assert caught.value.expected == published.snapshot_id
    assert store.latest is not None
    assert caught.value.actual == store.latest.snapshot_id


async def test_a_reader_behind_a_draining_writer_is_told_so():
    """Live memory that is being taken away admits no further reader."""
    store, memory, first = await read_live()
    published = await store.wait_for(1, wait=0)
    retracting = await begun(store.retract(grace=FAR))
    second = Reader(store, published)
    await settle(lambda: published.lock.statistics().waiting_readers == 1)
    await first.stop()
    await retracting
    with pytest.raises(CheckpointChangedError):
        await second.stop()
    assert memory.references == 0


class TestFailure:
    """A send that failed, as those hear who wait for its step."""

    async def test_who_waits_is_told_at_once(self):
        """Those who wait for another step, or for a newer one, wait on."""
        store = Store()
        waiting = [await begun(store.wait_for(7, wait=FAR)) for _ in range(2)]
        others = [
            await begun(store.wait_for(8, wait=FAR)),
            await begun(store.wait_past(6, wait=FAR)),
        ]
        store.fail(Failure.of(OSError("no space"), step=7, receivers=2))
        for each in waiting:
            with pytest.raises(PeerFailedError, match="OSError: no space"):
                await each
        await asyncio.sleep(0)
        assert not any(other.done() for other in others)
        await store.publish(Memory(step=8), grace=0)
        assert [(await other).step for other in others] == [8, 8]
        await store.close()

    async def test_without_receivers_everybody_is_told_until_it_is_retracted(self):
        """The store cannot know how many receivers will come."""
        store = Store()
        store.fail(Failure.of(OSError(), step=7, receivers=0))
        for _ in range(3):
            with pytest.raises(PeerFailedError):
                await store.wait_for(7, wait=60)
        await store.retract(grace=0)
        with pytest.raises(StepNotFoundError):
            await store.wait_for(7, wait=0)
        await store.close()

    async def test_what_is_served_is_not_touched(self):
        """The served checkpoint stays, and the next publication ends the failure."""
        store = Store()
        for step in (7, 8):
            await store.publish(Memory(step=step), grace=0)
            store.fail(Failure.of(OSError(), step=step, receivers=1))
            assert (await store.wait_for(step, wait=0)).step == step
            store.fail(Failure.of(OSError(), step=8, receivers=1))
        await store.close()

    async def test_it_is_forgotten_by_itself(self, monkeypatch):
        """A receiver that asks much later is one of the next send."""
        monkeypatch.setattr("aiockpt.http.store._FAILURE_LASTS_S", 0.05)
        store = Store()
        store.fail(Failure.of(OSError(), step=8, receivers=2))
        with pytest.raises(PeerFailedError):
            await store.wait_for(8, wait=0)
        await store.retract(grace=0)
        await asyncio.sleep(0.1)
        with pytest.raises(StepNotFoundError):
            await store.wait_for(8, wait=0)
        await store.close()


async def test_a_closed_store_says_so_first():
    """A failure of the sender that was told before does not hide it."""
    store = Store()
    store.fail(Failure.of(ValueError("x"), step=3, receivers=2))
    await store.close()
    with pytest.raises(ClosedError):
        await store.wait_for(3, wait=FAR)
    with pytest.raises(ClosedError):
        await store.wait_past(2, wait=FAR)
