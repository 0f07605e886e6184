"""DefaultStager: the copy that training waits for."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.checkpointers.async_checkpointer import AsyncCheckpointer
from aiockpt.checkpointers.config import CheckpointStagerConfig, RankInfo
from aiockpt.checkpointers.process import CheckpointProcess
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.checkpointers.stager import CheckpointStager, DefaultStager
from aiockpt.errors import ClosedError, UnsupportedLeafError
from aiockpt.format.chunks import UNSEALED
from aiockpt.testing import assert_same
from tests.support.accelerators import FakeAccelerator
from tests.support.checkpointing import loaded
from tests.support.proofs import proves
from tests.support.serving import settle

pytestmark = pytest.mark.asyncio

DEFAULTS = CheckpointStagerConfig()


def state(fill: float = 1.0) -> dict[str, Any]:
    """Return a state dict with ties and several containers."""
    weight = torch.full((50_000,), fill)
    return {"weight": weight, "tied": weight[10:20], "more": [1, ("a", {2: None})]}


OPTIONS = [
    DEFAULTS,
    *(
        replace(DEFAULTS, **{name: False})
        for name in (
            "use_pinned_memory",
            "use_shared_memory",
            "use_async_staging",
            "use_non_blocking_copy",
        )
    ),
    CheckpointStagerConfig(*[False] * 4),
]


class TestOptions:
    """The seed's options keep their meaning, on every machine (C5)."""

    @proves("cell DefaultStager.stage: success")
    @pytest.mark.parametrize("config", OPTIONS)
    async def test_each_stages_everything(self, config: CheckpointStagerConfig) -> None:
        """Ties, views and containers included; nothing follows the state dict."""
        stager, live = DefaultStager(config), state()
        with await stager.stage(live, step=3, loss=0.5) as staged:
            live["weight"].zero_()
            found = staged.state_dict()
            assert_same(found, state())
            found["weight"][10] = 5
            assert found["tied"][0] == 5
        await stager.close()

    @pytest.mark.parametrize("config", OPTIONS)
    async def test_each_stages_from_a_device(
        self, config: CheckpointStagerConfig
    ) -> None:
        """Pinned where asked for, polled or blocked for."""
        device = FakeAccelerator(held=False)
        stager = DefaultStager(config, ports=device.port_for)
        with await stager.stage(state()) as staged:
            assert_same(staged.state_dict(), state())
            assert bool(device.pinned) is config.use_pinned_memory
        await stager.close()
        await settle(lambda: not device.pinned)

    async def test_shared_memory_has_a_descriptor(self) -> None:
        """Anonymous: no name that could leak or collide."""
        for shared in (True, False):
            stager = DefaultStager(replace(DEFAULTS, use_shared_memory=shared))
            with await stager.stage(state()) as staged:
                arena = staged.snapshot.arena
                assert arena is not None
                assert (arena.fd >= 0) is shared
            await stager.close()

    async def test_without_async_staging_no_thread_copies(self) -> None:
        """The calling thread does, in one go."""
        before = threading.active_count()
        stager = DefaultStager(replace(DEFAULTS, use_async_staging=False))
        with await stager.stage(state()):
            assert threading.active_count() == before
        await stager.close()


class TestDevice:
    """C6: the copies are ordered behind training, and are done when it says so."""

    async def test_it_waits_for_training_and_for_the_copies(self) -> None:
        """What the producer's stream has not computed yet is not read."""
        device, live = FakeAccelerator(), state(0.0)
        stager = DefaultStager(ports=device.port_for)
        device.produce(lambda: live["weight"].fill_(3.0))
        task = asyncio.create_task(stager.stage(live))
        await settle(lambda: not device.idle)
        assert not task.done()
        device.run(producer=False)
        assert device.copied == 0
        device.run()
        staged = await task
        assert_same(staged.state_dict(), state(3.0))
        staged.release()
        await stager.close()

    async def test_it_does_not_return_before_the_last_copy(self) -> None:
        """Though the stream that it polls is idle in between."""
        device = FakeAccelerator()
        stager = DefaultStager(ports=device.port_for)
        task = asyncio.create_task(stager.stage(state()))
        await settle(lambda: not device.idle)
        device.run(copies=1)
        await asyncio.sleep(0.02)
        assert not task.done()
        device.held = False
        device.run()
        (await task).release()
        await stager.close()


class TestMemory:
    """Arenas are made twice at most, and are let go of."""

    @proves("cell DefaultStager.close: success")
    async def test_it_is_reused(self) -> None:
        """As soon as whoever wrote it is done."""
        stager = DefaultStager()
        places = []
        for fill in range(4):
            with await stager.stage(state(fill)) as staged:
                assert staged.snapshot.arena is not None
                places.append(staged.snapshot.arena.address)
        assert len(set(places)) == 1
        both = [await stager.stage(state()) for _ in range(2)]
        for staged in both:
            staged.release()
        again = [await stager.stage(state()) for _ in range(2)]
        assert {s.snapshot.arena for s in both} == {s.snapshot.arena for s in again}
        for staged in again:
            staged.release()
            staged.release()  # twice does no harm
        await stager.close()

    async def test_no_digest_is_computed(self) -> None:
        """That is left to the process that writes."""
        stager = DefaultStager(replace(DEFAULTS, chunk_bytes=64 << 10))
        with await stager.stage(state()) as staged:
            digests = staged.snapshot.manifest.digests
            assert set(digests) == {UNSEALED}
            assert len(digests) == 4
        await stager.close()

    @proves("cell DefaultStager.stage: error")
    async def test_a_refused_state_leaves_nothing(self) -> None:
        """And the next one is staged."""
        stager = DefaultStager()
        with pytest.raises(UnsupportedLeafError):
            await stager.stage({"a": object()})
        (await stager.stage(state())).release()
        await stager.close()
        with pytest.raises(ClosedError):
            await stager.stage(state())


class _Clone(CheckpointStager):
    """A stager as the seed's users may have written one: it returns a state dict."""

    def __init__(self) -> None:
        self.closed = False
        self.seen: dict[str, Any] = {}

    async def stage(self, state_dict: Any, **kwargs: Any) -> Any:
        self.seen = kwargs
        return {key: value.clone() for key, value in state_dict.items()}

    async def close(self) -> None:
        self.closed = True


async def test_a_stager_of_ones_own_is_enough(tmp_path: Path) -> None:
    """What it returns is shared with the process by us; it gets the keywords (C7)."""
    stager, live = _Clone(), {"a": torch.ones(1000)}
    process = CheckpointProcess(RankInfo(0, 1))
    reader = CheckpointReader(RankInfo(0, 1))
    async with AsyncCheckpointer(stager, process, reader) as made:
        handle = await made.save(live, tmp_path / "a-2", epoch=4)
        live["a"].zero_()
        assert await handle.written()
    assert stager.seen == {"step": 2, "epoch": 4}
    assert stager.closed
    assert_same(loaded(tmp_path / "a-2"), {"a": torch.ones(1000)})
