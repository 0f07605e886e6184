"""Staging: a live state dict becomes an immutable snapshot, while training waits."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import aiockpt
from aiockpt import list_checkpoints
from aiockpt.checkpointers import (
    CheckpointStagerConfig,
    CheckpointWriter,
    DefaultStager,
    WritableSnapshot,
)
from aiockpt.checkpointers.recovery import _rebuilt
from aiockpt.errors import ClosedError, StagingError, UnsupportedLeafError
from aiockpt.format.chunks import digest
from aiockpt.format.limits import IS_CANCELLED
from aiockpt.memory.arena import ArenaPool
from aiockpt.memory.snapshot import Snapshot
from aiockpt.state import nodes
from aiockpt.storage.write import write_file
from aiockpt.testing import assert_same
from aiockpt.transfer.live import LiveState
from tests.support.accelerators import FakeAccelerator
from tests.support.proofs import proves
from tests.support.saving import ALONE, CHUNK, config, loaded, tied_state
from tests.support.servers import settle
from tests.support.states import file_of, rebuilt, stager

pytestmark = pytest.mark.asyncio


def state(fill: float = 1.0):
    """Return a state dict of several chunks, with padding and a sparse view."""
    wide = torch.full((1000,), fill)
    return {
        "weight": torch.full((50_000,), fill),
        "odd": [torch.full((3,), int(fill), dtype=torch.int8), wide[1:4:2]],
        "view": wide[::10],
        "step": 7,
    }


def address(snapshot) -> int:
    """Return where a snapshot's bytes are."""
    (first, *_) = snapshot.views(0, 64)
    return np.frombuffer(first, np.uint8).ctypes.data


class TestSnapshot:
    """The bytes that come out, and the memory that they are in."""

    async def test_every_chunk_has_the_digest_of_its_bytes(self) -> None:
        """That is what a receiver compares with; nobody can write them."""
        async with stager() as staging:
            snapshot = await staging.stage(state(), step=1)
            grid = snapshot.manifest.grid
            assert len(grid) > 2
            for chunk, expected in enumerate(snapshot.manifest.digests):
                views = snapshot.views(*grid.range(chunk))
                assert digest(views) == expected
                assert all(view.readonly for view in views)

    async def test_equal_states_have_equal_ids(self) -> None:
        """The ids are equal in any memory, with and without a copy."""
        ids = []
        async with stager() as staging, stager(zero_copy=True) as in_place:
            for made, fill in ((staging, 1), (staging, 3), (staging, 1), (in_place, 1)):
                snapshot = await made.stage(state(fill), step=1)
                ids.append(snapshot.manifest.snapshot_id)
                snapshot.release()
        assert ids[0] == ids[2] == ids[3] != ids[1]


class Broken(FakeAccelerator):
    """A device that copies nothing."""

    def copy(self, pairs, *, after):
        raise RuntimeError("an illegal memory access was encountered")


class TestDevice:
    """Staging from a device: ordered, held, and never in the way of the loop."""

    async def test_it_waits_for_what_training_has_enqueued(self) -> None:
        """Meanwhile the loop goes on, and the wait burns no core."""
        device, live = FakeAccelerator(), state(0.0)
        device.produce(lambda: live["weight"].fill_(7))
        async with stager(ports=device.port_for) as staging:
            task = asyncio.create_task(staging.stage(live, step=1))
            await settle(lambda: not device.idle)
            loop = asyncio.get_running_loop()
            began, asked = loop.time(), sum(each.queries for each in device.events)
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not task.done()
            asked = sum(each.queries for each in device.events) - asked
            assert asked < 100 + (loop.time() - began) / 0.0005
            assert device.run(producer=False) == 0
            device.held = False
            device.run()
            assert rebuilt(file_of(await task))["weight"].unique().tolist() == [7]

    async def test_it_returns_when_the_last_copy_has_run(self) -> None:
        """The state is held until then; from then on it may be changed."""
        device, live = FakeAccelerator(), state()
        async with stager(ports=device.port_for) as staging:
            task = asyncio.create_task(staging.stage(dict(live), step=1))
            weight = live.pop("weight")
            del weight  # the device owns nothing: it would read memory that was freed
            while not task.done():
                await settle(lambda: task.done() or not device.idle)
                device.run(copies=1)
                await asyncio.sleep(0)
            assert device.idle
            beside = 4  # between the two elements of a view
            assert device.copied == task.result().manifest.segment_bytes - beside
            device.produce(live["view"].zero_)
            device.run()
            assert_same(rebuilt(file_of(task.result())), state())

    @proves("cell DefaultStager.stage: cancel")
    async def test_a_cancel_leaves_the_arena_to_the_copies(self) -> None:
        """No other staging gets the arena before the copies have run."""
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
        """The error has the words of the device's driver."""
        async with stager(ports=Broken().port_for) as staging:
            with pytest.raises(StagingError, match=r"step 1 .*illegal memory access"):
                await staging.stage(state(), step=1)

    @pytest.mark.parametrize("zero_copy", [False, True])
    async def test_the_arena_is_pinned_as_long_as_it_lives(self, zero_copy) -> None:
        """Once, not for every checkpoint; what lies on a device is always copied."""
        device, live = FakeAccelerator(held=False), state()
        before = copy.deepcopy(live)
        async with stager(ports=device.port_for, zero_copy=zero_copy) as staging:
            for step in range(3):
                snapshot = await staging.stage(live, step=step)
                assert device.pinned == {address(snapshot)}
                live["weight"].zero_()
                assert_same(rebuilt(file_of(snapshot)), before)
                live["weight"].fill_(1)
                snapshot.release()
            staging.trim()
            await settle(lambda: not device.pinned)


def small(fill: int = 1) -> dict[str, Any]:
    """Return small tensors of odd sizes, of which some move by their elements."""
    made = {f"w{n}": torch.full((n % 200,), fill * n) for n in range(600)}
    made["w300"] = torch.full((40,), fill)[::4]
    made["w301"] = torch.full((70_000,), fill)  # which is not small
    return made


class Counting(FakeAccelerator):
    """A device that counts the copies to host memory and from there."""

    count = 0

    def copy(self, moves, *, after):
        made = [*moves]
        self.count += len(made)
        return super().copy(made, after=after)


class TestSmallTensors:
    """Small tensors of a device travel together."""

    @pytest.mark.parametrize("zero_copy", [False, True])
    async def test_they_arrive_in_few_copies(self, zero_copy) -> None:
        """Bit by bit, with zeros between them and whatever lies among them."""
        device, ids = Counting(held=False), []
        async with (
            stager(ports=device.port_for, zero_copy=zero_copy) as staging,
            stager() as plain,
        ):
            for fill in (3, 1):  # the second one into memory that has been used
                snapshot = await staging.stage(small(fill), step=1)
                assert_same(rebuilt(file_of(snapshot)), small(fill))
                ids.append(snapshot.manifest.snapshot_id)
                snapshot.release()
            assert (await plain.stage(small(), step=1)).manifest.snapshot_id == ids[1]
        assert device.count < 2 * 40

    async def test_a_device_without_memory_copies_each(self, monkeypatch) -> None:
        """The staging is slower, but the checkpoint is complete."""

        def full(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError

        device = FakeAccelerator(held=False)
        async with stager(ports=device.port_for) as staging:
            monkeypatch.setattr(torch, "empty_like", full)
            snapshot = await staging.stage(small(), step=1)
            monkeypatch.undo()
            assert_same(rebuilt(file_of(snapshot)), small())

    async def test_they_are_as_training_leaves_them(self) -> None:
        """The copies come after training's work, also between two pieces."""
        device, live = FakeAccelerator(), small(0)
        for each in live.values():
            device.produce(partial(each.fill_, 7))
        async with stager(ports=device.port_for) as staging:
            task = asyncio.create_task(staging.stage(live, step=1))
            await settle(lambda: not device.idle)
            assert device.run(producer=False) == 0
            device.held = False
            device.run()
            found = rebuilt(file_of(await task))
        assert all((each == 7).all() for each in found.values())

    async def test_a_cancel_keeps_the_memory_until_they_are_copied(self) -> None:
        """The fake device fails if it is freed before."""
        device = FakeAccelerator()
        async with stager(ports=device.port_for) as staging:
            task = asyncio.create_task(staging.stage(small(), step=1))
            await settle(lambda: not device.idle)
            device.run(copies=3)
            task.cancel()
            await asyncio.wait({task})
            device.held = False
            device.run()
            snapshot = await staging.stage(small(2), step=2)
            assert_same(rebuilt(file_of(snapshot)), small(2))


async def test_a_device_copies_ahead_of_the_digests(monkeypatch) -> None:
    """The device is one chunk ahead of each thread, so neither waits."""
    device, live, copied = Counting(held=False), {"w": torch.ones(80_000)}, []

    def noted(*args: Any) -> str:
        copied.append(device.count)
        return digest(*args)

    monkeypatch.setattr("aiockpt.transfer.stager.digest", noted)
    async with stager(ports=device.port_for, threads=1) as staging:
        snapshot = await staging.stage(live, step=1)
        assert copied == [2, 3, 4, 5, 5]
        assert_same(rebuilt(file_of(snapshot)), live)


async def test_a_cancel_ends_a_turn_at_the_next_chunk(monkeypatch) -> None:
    """All chunks may have been copied, and the stager stays usable."""
    device, live, digested = FakeAccelerator(held=False), {"w": torch.ones(80_000)}, []
    loop = asyncio.get_running_loop()

    def cancelling(*args: Any) -> str:
        digested.append(args)
        loop.call_soon_threadsafe(task.cancel)
        is_cancelled = IS_CANCELLED.get()
        assert is_cancelled is not None
        while not is_cancelled():
            time.sleep(0.001)
        return digest(*args)

    async with stager(ports=device.port_for, threads=1) as staging:
        with monkeypatch.context() as patched:
            patched.setattr("aiockpt.transfer.stager.digest", cancelling)
            task = asyncio.create_task(staging.stage(live, step=1))
            await asyncio.wait({task})
        assert task.cancelled()
        assert len(digested) == 1
        snapshot = await staging.stage(live, step=2)
        assert_same(rebuilt(file_of(snapshot)), live)


SWITCHES = [
    *("use_pinned_memory", "use_shared_memory"),
    *("use_async_staging", "use_non_blocking_copy"),
]
"""The switches of torch's configuration."""


@pytest.mark.parametrize("name", SWITCHES)
async def test_a_switch_of_torch_stays_on(name) -> None:
    """What happens anyway may be asked for; anything else is refused with a reason."""
    asked: dict[str, Any] = {name: True}
    assert CheckpointStagerConfig(**asked) == CheckpointStagerConfig()
    for value in (False, None, 0):
        asked[name] = value
        with pytest.raises(ValueError, match=f"{name}={value} cannot be chosen: .*; "):
            CheckpointStagerConfig(**asked)


class TestDefaultStager:
    """The stager of the checkpointers, with the options of torch's."""

    @proves("cell DefaultStager.stage: success")
    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("device", [None, FakeAccelerator])
    async def test_everything_is_staged(self, shared, device) -> None:
        """Ties, views and containers included; nothing follows the state dict."""
        config = CheckpointStagerConfig(chunk_bytes=1 << 16)
        port = device and device(held=False)
        options = {"ports": port.port_for} if port else {}
        made, live = DefaultStager(config, shared=shared, **options), tied_state()
        with await made.stage(live, step=3, loss=0.5) as staged:
            live["weight"].zero_()
            found = staged.state_dict()
            assert_same(found, tied_state())
            found["weight"][10] = 5
            assert found["tied"][0] == 5
            if port:
                assert port.pinned
            arena = staged.snapshot.arena
            assert arena is not None
            assert (arena.fd >= 0) is shared
            # Digests are left to the process that writes.
            manifest = staged.snapshot.manifest
            assert {*manifest.digests} == {manifest.grid.unsealed} == {"0" * 32}
        await made.close()
        if port:
            await settle(lambda: not port.pinned)

    @proves("cell DefaultStager.close: success", "cell DefaultStager.stage: error")
    async def test_memory_is_reused(self) -> None:
        """The arena is free once its writer is done; a refused state leaves none."""
        made = DefaultStager()
        with pytest.raises(UnsupportedLeafError):
            await made.stage({"a": object()})
        seen = []
        for _ in range(2):
            both = [await made.stage(tied_state()) for _ in range(2)]
            seen.append({each.snapshot.arena for each in both})
            for staged in (*both, *both):  # twice does no harm
                staged.release()
        assert seen[0] == seen[1]
        assert len(seen[0]) == 2
        await made.close()
        with pytest.raises(ClosedError):
            await made.stage(tied_state())


@pytest.mark.parametrize("read", [0, CHUNK, 2 * CHUNK + 5, None])
async def test_a_snapshot_is_written_as_it_is(tmp_path, read: int | None) -> None:
    """Its digests may be asked for before, while, or after it is written."""
    live = {"a": torch.arange(3 * CHUNK + 7, dtype=torch.uint8)}
    async with stager() as staging, stager(seal=False) as hasty:
        expected = await staging.stage(live, step=12)
        snapshot = await hasty.stage(live, step=12)
        sealed: list[object] = []
        source = WritableSnapshot(snapshot, on_seal=sealed.append)
        stop = source.segment_bytes if read is None else read
        for start in range(0, stop, CHUNK // 2):
            source.views(start, min(start + CHUNK // 2, stop))
        found = source.seal()
        assert source.seal() is found
        assert sealed == [found]
        assert found.header == expected.manifest.header
        assert found.digests == expected.manifest.digests
        writer = CheckpointWriter(config(), ALONE)
        await asyncio.to_thread(
            writer.write_staged, tmp_path / "s", WritableSnapshot(expected), 12
        )
        expected.release()
        snapshot.release()
    (written,) = list_checkpoints(tmp_path)
    assert written.step == 12
    assert_same(loaded(tmp_path / "s"), live)


@pytest.mark.parametrize("held", [False, True])
async def test_a_device_is_copied_ahead_of_the_writing(tmp_path, held) -> None:
    """Through a pinned arena, which is kept for the next save."""
    device, pool = FakeAccelerator(held=held), ArenaPool(keep=1)
    live = {"a": torch.randn(CHUNK), "t": torch.randn(9, 5).t(), "n": 1}
    options: Any = {"chunk_bytes": CHUNK, "allow_pickle": False, "pool": pool}

    def written(step: int) -> None:
        with (
            LiveState(live, step=step, ports=device.port_for, **options) as source,
            (tmp_path / "f").open("w+b") as file,
        ):
            write_file(tmp_path / "f", file.fileno(), source, durable=False)

    for step in (1, 2):
        writing = asyncio.create_task(asyncio.to_thread(written, step))
        while not writing.done():
            device.run()
            await asyncio.sleep(0.001)
        await writing
        assert_same(await asyncio.to_thread(aiockpt.load, tmp_path / "f"), live)
    assert len(device.pinned) == 1
    pool.close()
    assert not device.pinned


Pair = namedtuple("Pair", "x w")


async def test_what_is_recovered_has_its_named_tuples() -> None:
    """A named tuple has this program's type, or one with the same fields."""
    Local = namedtuple("Local", "a b")
    staging = DefaultStager()
    live = {"pair": Pair(1, torch.ones(2)), "local": Local([2], torch.zeros(1))}
    with await staging.stage(live, step=1) as staged:
        snapshot = staged.snapshot
        assert isinstance(snapshot, Snapshot)
        assert snapshot.arena is not None
        sealed = WritableSnapshot(snapshot).seal()
        found: Any = _rebuilt(sealed, snapshot.arena.fd, "d", allow_pickle=False)
    await staging.close()
    assert type(found["pair"]) is Pair
    assert found["local"].a == [2]
    assert found["local"]._fields == ("a", "b")
    assert type(found["local"]).__name__ == "Local"


async def test_no_state_dict_is_walked_on_the_loop(monkeypatch) -> None:
    """A walk of a large one takes long, so a thread does it; or nobody, if it can."""
    walkers: list[str] = []
    walk = nodes._walk

    def watched(template: object) -> Iterator[Any]:
        walkers.append(threading.current_thread().name)
        return walk(template)

    monkeypatch.setattr(nodes, "_walk", watched)
    staging = DefaultStager()
    for live in ({"a": [1]}, {"pair": Pair(1, torch.ones(2))}):
        with await staging.stage(live) as staged:
            assert_same(staged.state_dict(), live)
    await staging.close()
    assert len(walkers) == 1
    assert walkers[0].startswith("aiockpt-stage")
