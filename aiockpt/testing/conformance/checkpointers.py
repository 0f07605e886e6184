"""The test suite for checkpointers: subclass it, create yours, and run pytest.

::

    @pytest.mark.asyncio
    class TestMyCheckpointer(CheckpointerConformance[MyCheckpointer]):
        @asynccontextmanager
        async def checkpointer(self):
            async with MyCheckpointer() as made:
                yield made

The suite calls ``save``, ``load``, ``statistics`` and ``close``; each of them may block
or be a coroutine function. ``save`` may return a handle. The suite then waits for it:
with ``await handle.written()`` if ``save`` is a coroutine function, else with
``handle.result()``.

For another storage than a file system, override the fixture ``tmp_path`` with one that
returns an empty directory there, and the methods `names` and `occupy`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar

import pytest
import torch

from aiockpt.checkpointers.base import Checkpointer
from aiockpt.errors import (
    CheckpointNotFoundError,
    ClosedError,
    MissingKeysError,
    StorageError,
    UnsupportedLeafError,
)
from aiockpt.events import Progress, TransferEvent, add_hook
from aiockpt.state.equality import assert_same
from aiockpt.storage.interface import latest, list_checkpoints, storage_at
from aiockpt.testing.conformance.transports import sample

C = TypeVar("C", bound=Checkpointer)

_STEP: Final = 7


class CheckpointerConformance(ABC, Generic[C]):
    """Tests of a checkpointer. Each saved checkpoint must be complete."""

    timeout: ClassVar[float] = 60.0
    """Seconds that a save which should succeed may take."""

    @abstractmethod
    def checkpointer(self) -> AbstractAsyncContextManager[C]:
        """Yield a checkpointer of one rank with default options, then close it."""

    # ------------------------------------------------------------------- helpers

    def names(self, directory: Path) -> list[str]:
        """Return what is in a directory, also what is hidden."""
        return [each.name for each in directory.iterdir()]

    def occupy(self, path: Path) -> None:
        """Make a file that is no checkpoint."""
        path.write_text("precious")

    async def save(self, checkpointer: C, state: object, path: Path, **kw: Any) -> bool:
        """Save, and wait until it is committed; return False if it was not begun."""
        handle = await self.begin(checkpointer, state, path, **kw)
        return await self.settle(checkpointer, handle)

    async def begin(self, checkpointer: C, state: object, path: Path, **kw: Any) -> Any:
        """Save; return as soon as the state may be mutated, with a handle or None."""
        return await _outcome(checkpointer.save(state, path, **kw))

    async def settle(self, checkpointer: C, handle: Any) -> bool:
        """Wait for the end of a save; return the result of its handle."""
        if handle is None:  # it has blocked until the end
            return True
        if inspect.iscoroutinefunction(checkpointer.save):
            return bool(await handle.written())
        return bool(handle.result(timeout=self.timeout))

    async def load(self, checkpointer: C, path: Path, *args: Any, **kw: Any) -> Any:
        """Load."""
        return await _outcome(checkpointer.load(path, *args, **kw))

    # ------------------------------------------------------------------ round trip

    async def test_what_is_saved_is_loaded(self, tmp_path: Path) -> None:
        """Every bit, every tie and every container comes back."""
        async with self.checkpointer() as made:
            assert await self.save(made, sample(), tmp_path / f"step-{_STEP}")
            assert_same(await self.load(made, tmp_path / f"step-{_STEP}"), sample())

    async def test_an_empty_state_dict(self, tmp_path: Path) -> None:
        """A checkpoint need not hold a tensor."""
        async with self.checkpointer() as made:
            await self.save(made, {"epoch": 3, "names": ["a"]}, tmp_path / "c")
            found = await self.load(made, tmp_path / "c")
        assert_same(found, {"epoch": 3, "names": ["a"]})

    async def test_it_is_committed_when_the_save_says_so(self, tmp_path: Path) -> None:
        """Others see the checkpoint, with the step at the end of its name."""
        async with self.checkpointer() as made:
            await self.save(made, sample(), tmp_path / f"step-{_STEP}")
            found = latest(tmp_path)
            assert found is not None
            assert (found.name, found.step) == (f"step-{_STEP}", _STEP)

    async def test_the_step_may_be_given(self, tmp_path: Path) -> None:
        """The name of the directory need not contain it."""
        async with self.checkpointer() as made:
            await self.save(made, sample(), tmp_path / "best", step=_STEP)
        assert storage_at(tmp_path / "best").checkpoint().step == _STEP

    async def test_the_state_may_be_mutated_after_the_save(
        self, tmp_path: Path
    ) -> None:
        """The checkpoint holds what the tensors held when ``save`` was called."""
        live = sample()
        async with self.checkpointer() as made:
            handle = await self.begin(made, live, tmp_path / "c")
            live["weight"].zero_()
            live["nested"].append("later")
            await self.settle(made, handle)
            assert_same(await self.load(made, tmp_path / "c"), sample())

    async def test_saves_are_written_in_order(self, tmp_path: Path) -> None:
        """Each checkpoint is complete, and the last one is the latest."""
        async with self.checkpointer() as made:
            handles = [
                await self.begin(made, sample(step), tmp_path / f"step-{step}")
                for step in range(3)
            ]
            for handle in handles:
                await self.settle(made, handle)
            assert [each.step for each in list_checkpoints(tmp_path)] == [0, 1, 2]
            for step in range(3):
                found = await self.load(made, tmp_path / f"step-{step}")
                assert_same(found, sample(step))

    async def test_a_save_replaces_what_was_there(self, tmp_path: Path) -> None:
        """A path has one checkpoint, and nothing is left beside it."""
        async with self.checkpointer() as made:
            await self.save(made, sample(1), tmp_path / "c")
            await self.save(made, sample(2), tmp_path / "c")
            assert_same(await self.load(made, tmp_path / "c"), sample(2))
        assert self.names(tmp_path) == ["c"]

    async def test_closing_waits_for_what_was_saved(self, tmp_path: Path) -> None:
        """A program may exit right after a save."""
        async with self.checkpointer() as made:
            await self.begin(made, sample(), tmp_path / "c")
            await _outcome(made.close())
            assert storage_at(tmp_path / "c").checkpoint().step == 0

    # -------------------------------------------------------------------- loading

    async def test_a_template_is_filled_in_place(self, tmp_path: Path) -> None:
        """Its tensors keep their memory, and the load returns the template."""
        template = sample(1)
        weight = template["weight"]
        async with self.checkpointer() as made:
            await self.save(made, sample(), tmp_path / "c")
            found = await self.load(made, tmp_path / "c", template)
        assert found is template
        assert found["weight"] is weight
        assert torch.equal(weight, sample()["weight"])

    async def test_missing_keys(self, tmp_path: Path) -> None:
        """They keep their values if the load is not strict."""
        template = {**sample(1), "head": torch.ones(2)}
        async with self.checkpointer() as made:
            await self.save(made, sample(), tmp_path / "c")
            with pytest.raises(MissingKeysError, match="head"):
                await self.load(made, tmp_path / "c", template, strict=True)
            found = await self.load(made, tmp_path / "c", template, strict=False)
        assert torch.equal(found["head"], torch.ones(2))
        assert torch.equal(found["weight"], sample()["weight"])

    async def test_a_checkpoint_that_is_not_there(self, tmp_path: Path) -> None:
        """The error names the path."""
        async with self.checkpointer() as made:
            with pytest.raises(CheckpointNotFoundError, match="nowhere"):
                await self.load(made, tmp_path / "nowhere")

    # -------------------------------------------------------------------- failures

    async def test_a_save_that_cannot_be_written(self, tmp_path: Path) -> None:
        """The save or its handle raises, old files stay, and the next save works."""
        self.occupy(tmp_path / "taken")
        async with self.checkpointer() as made:
            with pytest.raises(StorageError, match="taken"):
                await self.save(made, sample(), tmp_path / "taken")
            with storage_at(tmp_path / "taken").open() as file:
                assert file.bytes_at(0, file.size()) == b"precious"
            await self.save(made, sample(), tmp_path / "c")
            assert_same(await self.load(made, tmp_path / "c"), sample())

    async def test_a_leaf_that_cannot_be_saved(self, tmp_path: Path) -> None:
        """The error names it, and nothing is written."""
        async with self.checkpointer() as made:
            with pytest.raises(UnsupportedLeafError, match="hook"):
                await self.save(made, {"hook": print}, tmp_path / "c")
            assert not self.names(tmp_path)
            await self.save(made, sample(), tmp_path / "c")

    @pytest.mark.parametrize("step", [-1, 1.5, "7"], ids=repr)
    async def test_a_step_that_is_none(self, tmp_path: Path, step: Any) -> None:
        """The call itself raises."""
        async with self.checkpointer() as made:
            with pytest.raises((TypeError, ValueError)):
                await _outcome(made.save(sample(), tmp_path / "c", step=step))
        assert not self.names(tmp_path)

    # ------------------------------------------------------------------ observation

    async def test_progress_comes_to_its_end(self, tmp_path: Path) -> None:
        """The number of bytes never falls, and ends at the total."""
        seen: list[Progress] = []
        async with self.checkpointer() as made:
            await self.save(made, sample(), tmp_path / "c", progress=seen.append)
            await _outcome(made.close())
        done = [each.bytes_done for each in seen]
        assert done == sorted(done)
        assert done[-1] == seen[-1].bytes_total > 300_000

    async def test_an_event_tells_of_a_save(self, tmp_path: Path) -> None:
        """It has the step and the bytes. Another event reports unchanged tensors."""
        seen: list[TransferEvent] = []
        remove = add_hook(seen.append)
        try:
            async with self.checkpointer() as made:
                await self.save(made, sample(), tmp_path / "step-1")
                await self.save(made, sample(), tmp_path / "step-2")
        finally:
            remove()
        written = [each for each in seen if each.stop == "write"]
        assert [(each.step, each.unchanged) for each in written] == [
            (1, False),
            (2, True),
        ]
        assert all(each.nbytes > 300_000 for each in written)

    async def test_statistics_count_saves(self, tmp_path: Path) -> None:
        """The counts include written and failed saves."""
        self.occupy(tmp_path / "taken")
        async with self.checkpointer() as made:
            await self.save(made, sample(), tmp_path / "c")
            with pytest.raises(StorageError):
                await self.save(made, sample(), tmp_path / "taken")
            now = made.statistics()  # type: ignore[attr-defined]
        assert (now.saves, now.written, now.failed) == (2, 1, 1)
        assert (now.under_way, now.skipped, now.replaced) == (0, 0, 0)
        assert now.bytes_written > 300_000
        assert now.stall_seconds > 0

    async def test_statistics_count_loads(self, tmp_path: Path) -> None:
        """They are the sums of what the events of loads say."""
        seen: list[TransferEvent] = []
        remove = add_hook(seen.append)
        try:
            async with self.checkpointer() as made:
                await self.save(made, sample(), tmp_path / "c")
                await self.load(made, tmp_path / "c")
                await self.load(made, tmp_path / "c", select=["bias"])
                with pytest.raises(CheckpointNotFoundError):
                    await self.load(made, tmp_path / "d")
                now = made.statistics().loads  # type: ignore[attr-defined]
        finally:
            remove()
        told = [each for each in seen if each.stop == "load"]
        assert now.ended == len(told) == 2
        assert now.nbytes == sum(each.nbytes for each in told) > 300_000
        assert now.needed == sum(each.needed for each in told)
        assert now.files == sum(each.files for each in told)
        assert now.ranges == sum(each.ranges for each in told)

    # ----------------------------------------------------------------------- the end

    async def test_a_closed_one_refuses(self, tmp_path: Path) -> None:
        """Closing twice is allowed; saving and loading afterwards is an error."""
        async with self.checkpointer() as made:
            await self.save(made, sample(), tmp_path / "c")
            await _outcome(made.close())
            await _outcome(made.close())
            with pytest.raises(ClosedError):
                await self.save(made, sample(), tmp_path / "d")
            with pytest.raises(ClosedError):
                await self.load(made, tmp_path / "c")
        assert self.names(tmp_path) == ["c"]


async def _outcome(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned
