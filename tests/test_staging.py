"""Stager: a live state dict becomes an immutable snapshot."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch

from aiockpt.errors import StagingError
from aiockpt.format.chunks import digest
from aiockpt.testing import assert_same
from aiockpt.transfer.stager import Snapshot
from tests.support.accelerators import FakeAccelerator
from tests.support.pipeline import file_of, rebuilt, stager
from tests.support.proofs import proves
from tests.support.serving import settle

pytestmark = pytest.mark.asyncio


def state(fill: float = 1.0, size: int = 50_000) -> dict[str, Any]:
    """Return a state dict of several chunks, with padding and a sparse view."""
    wide = torch.full((1000,), fill)
    return {
        "weight": torch.full((size,), fill),
        "odd": [torch.full((3,), int(fill), dtype=torch.int8), wide[1:4:2]],
        "view": wide[::10],
        "step": 7,
    }


def address(snapshot: Snapshot) -> int:
    """Return where a snapshot's bytes are."""
    (first, *_) = snapshot.views(0, 64)
    return np.frombuffer(first, np.uint8).ctypes.data


class TestSnapshot:
    """The bytes that come out."""

    async def test_every_chunk_has_the_digest_of_its_bytes(self) -> None:
        """That is what a receiver compares with."""
        async with stager() as staging:
            snapshot = await staging.stage(state(), step=1)
            grid = snapshot.manifest.grid
            assert len(grid) > 2
            for chunk, expected in enumerate(snapshot.manifest.digests):
                assert digest(snapshot.views(*grid.range(chunk))) == expected

    async def test_equal_states_have_equal_ids(self) -> None:
        """A restarted server serves the same id, whatever its memory held before."""
        async with stager() as staging:
            ids = []
            for fill in (1.0, 3.0, 1.0):
                snapshot = await staging.stage(state(fill), step=1)
                ids.append(snapshot.manifest.snapshot_id)
                snapshot.release()
        async with stager(zero_copy=True) as staging:
            snapshot = await staging.stage(state(), step=1)
            ids.append(snapshot.manifest.snapshot_id)
            snapshot.release()
        assert ids[0] == ids[2] == ids[3] != ids[1]

    async def test_it_cannot_be_written(self) -> None:
        """A server gets views to read from."""
        async with stager() as staging:
            snapshot = await staging.stage(state(), step=1)
            assert all(view.readonly for view in snapshot.views(0, 1000))


class TestArena:
    """Memory is reused, and never under a reader."""

    async def test_it_is_reused_when_nobody_reads(self) -> None:
        """Pages that are there cost no fault."""
        async with stager() as staging:
            first = await staging.stage(state(), step=1)
            place = address(first)
            first.release()
            second = await staging.stage(state(), step=2)
            assert address(second) == place

    async def test_it_is_kept_while_somebody_reads(self) -> None:
        """Every reader counts."""
        async with stager() as staging:
            first = await staging.stage(state(1.0), step=1)
            first.acquire()
            first.release()
            second = await staging.stage(state(2.0), step=2)
            assert address(second) != address(first)
            assert_same(rebuilt(file_of(first)), state(1.0))


class _Broken(FakeAccelerator):
    """A device that copies nothing."""

    def copy(self, pairs: Any, *, after: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")


class TestDevice:
    """Staging from a device: ordered, held, and never in the way of the loop."""

    async def test_it_waits_for_what_training_has_enqueued(self) -> None:
        """A copy that overtook the producer would tear the state."""
        device, weight = FakeAccelerator(), torch.zeros(100)
        device.produce(lambda: weight.fill_(7))
        async with stager(ports=device.port_for) as staging:
            task = asyncio.create_task(staging.stage({"w": weight}, step=1))
            await settle(lambda: not device.idle)
            assert device.run(producer=False) == 0
            device.run()
            assert rebuilt(file_of(await task))["w"].unique().tolist() == [7]

    async def test_the_loop_goes_on_meanwhile(self) -> None:
        """Nor does the wait burn a core."""
        device = FakeAccelerator()
        async with stager(ports=device.port_for) as staging:
            task = asyncio.create_task(staging.stage(state(), step=1))
            await settle(lambda: not device.idle)
            loop = asyncio.get_running_loop()
            began, asked = loop.time(), sum(each.queries for each in device.events)
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not task.done()
            asked = sum(each.queries for each in device.events) - asked
            assert asked < 100 + (loop.time() - began) / 0.0005
            device.held = False
            device.run()
            await task

    async def test_the_state_is_held_until_its_copies_ran(self) -> None:
        """The device owns nothing: it would read memory that was freed."""
        device, live = FakeAccelerator(), state()
        async with stager(ports=device.port_for) as staging:
            task = asyncio.create_task(staging.stage(live, step=1))
            await settle(lambda: not device.idle)
            del live
            device.held = False
            device.run()
            assert_same(rebuilt(file_of(await task)), state())

    async def test_it_returns_when_the_last_copy_has_run(self) -> None:
        """From then on the state may be changed."""
        device, live = FakeAccelerator(), state()
        async with stager(ports=device.port_for) as staging:
            task = asyncio.create_task(staging.stage(live, step=1))
            while not task.done():
                await settle(lambda: task.done() or not device.idle)
                device.run(copies=1)
                await asyncio.sleep(0)
            assert device.idle
            beside = 4  # between the two elements of a view
            assert device.copied == task.result().manifest.segment_bytes - beside
            live["weight"].zero_()
            device.produce(live["view"].zero_)
            device.run()
            assert_same(rebuilt(file_of(task.result())), state())

    @proves("cell DefaultStager.stage: cancel")
    async def test_a_cancel_leaves_the_arena_to_the_copies(self) -> None:
        """Until they have run, no other staging writes to the same memory."""
        device = FakeAccelerator()
        async with stager(ports=device.port_for) as staging:
            task = asyncio.create_task(staging.stage(state(1.0), step=1))
            await settle(lambda: not device.idle)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            again = asyncio.create_task(staging.stage(state(2.0), step=2))
            await settle(lambda: len(device.pinned) == 2)
            device.held = False
            device.run()
            assert_same(rebuilt(file_of(await again)), state(2.0))

    async def test_a_device_that_fails_is_named(self) -> None:
        """The next staging may work."""
        device = _Broken()
        async with stager(ports=device.port_for) as staging:
            with pytest.raises(StagingError, match=r"step 1 .*illegal memory access"):
                await staging.stage(state(), step=1)

    async def test_the_arena_is_pinned_as_long_as_it_lives(self) -> None:
        """Once, not for every checkpoint: page-locking stops the whole driver."""
        device = FakeAccelerator(held=False)
        async with stager(ports=device.port_for) as staging:
            for step in range(3):
                snapshot = await staging.stage(state(), step=step)
                assert device.pinned == {address(snapshot)}
                snapshot.release()
            staging.trim()
            await settle(lambda: not device.pinned)

    async def test_it_can_serve_live_memory_of_the_host_only(self) -> None:
        """What lies on a device is copied, also with zero_copy."""
        device = FakeAccelerator(held=False)
        async with stager(ports=device.port_for, zero_copy=True) as staging:
            live = state()
            before = copy.deepcopy(live)
            snapshot = await staging.stage(live, step=1)
            live["weight"].zero_()
            assert_same(rebuilt(file_of(snapshot)), before)
            snapshot.release()
