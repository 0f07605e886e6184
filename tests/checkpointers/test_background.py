"""AsyncCheckpointer: what a training loop sees of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import events as observe
from aiockpt.checkpointers.async_checkpointer import AsyncCheckpointer
from aiockpt.checkpointers.config import (
    CheckpointerConfig,
    CheckpointProcessConfig,
    RankInfo,
)
from aiockpt.checkpointers.factories import make_async_checkpointer
from aiockpt.checkpointers.writer import configured_writer
from aiockpt.errors import (
    MissingKeysError,
    SaveInProgressError,
    StorageError,
    TransferTimeoutError,
    UnsupportedLeafError,
    WorkerError,
)
from aiockpt.events import Progress, TransferEvent
from aiockpt.testing import StallAfter, assert_same
from tests.support.checkpointing import (
    Diary,
    Gate,
    GatedWriter,
    OwnFormat,
    Troubled,
    loaded,
)
from tests.support.proofs import proves
from tests.support.transports import proxied, through, transport

pytestmark = pytest.mark.asyncio

PROCESS = CheckpointerConfig()
THREAD = CheckpointerConfig(use_process=False)


def state(fill: float = 1.0) -> dict[str, Any]:
    """Return a state dict with ties and several containers."""
    weight = torch.full((50_000,), fill)
    return {"weight": weight, "tied": weight[10:20], "more": [1, ("a", {2: None})]}


@pytest.fixture(params=[PROCESS, THREAD], ids=["process", "thread"])
def config(request: pytest.FixtureRequest) -> CheckpointerConfig:
    """Return a config for each place where writing happens."""
    found: CheckpointerConfig = request.param
    return found


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Return a gate for a writer."""
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


@asynccontextmanager
async def gated(
    gate: Gate, config: CheckpointerConfig, **options: Any
) -> AsyncIterator[AsyncCheckpointer]:
    """Make a checkpointer that writes when the gate says so."""
    made = make_async_checkpointer(
        replace(config, **options),
        checkpoint_writer_init_fn=GatedWriter,
        checkpoint_writer_init_args={"gate": gate.path},
    )
    try:
        yield made
    finally:
        gate.open(20)
        await made.close()


class TestSave:
    """What ``save`` promises."""

    @proves("cell AsyncCheckpointer.save: success")
    async def test_the_state_may_be_mutated_when_it_returns(
        self, tmp_path: Path, gate: Gate, config: CheckpointerConfig
    ) -> None:
        """C14: also tensors of the host are copied; nothing of a later step leaks."""
        live = state()
        async with gated(gate, config) as made:
            handle = await made.save(live, tmp_path / "step-7")
            assert (handle.staged, handle.done(), handle.step) == (True, False, 7)
            live["weight"].zero_()
            live["more"].append("later")
            gate.open()
            assert await handle.written()
            assert handle.done()
        assert_same(loaded(tmp_path / "step-7"), state())

    async def test_it_works_with_defaults_and_no_accelerator(
        self, tmp_path: Path
    ) -> None:
        """C5: the seed's factory raises here."""
        async with aiockpt.make_async_checkpointer() as made:
            handle = await made.save(state(), tmp_path / "a")
            assert await handle.written()
            assert_same(await made.load(tmp_path / "a"), state())

    @proves("cell SaveHandle.written: success", "cell AsyncCheckpointer.load: success")
    async def test_what_it_saved_can_be_loaded_at_once(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """Whole, in place, and strictly."""
        async with make_async_checkpointer(config) as made:
            await (await made.save(state(), tmp_path / "a")).written()
            template = state(0.0)
            filled = await made.load(tmp_path / "a", template, strict=True)
            assert filled is template
            assert_same(template, state())
            template["missing"] = torch.zeros(3)
            with pytest.raises(MissingKeysError, match="missing"):
                await made.load(tmp_path / "a", template, strict=True)

    async def test_keywords_reach_the_hooks(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """C7: sync or coroutine, before and after the commit, where it is written."""
        diary = tmp_path / "diary"
        hook = Diary(str(diary))
        async with make_async_checkpointer(config, commit_hook=hook) as made:
            await (await made.save(state(), tmp_path / "a", loss=0.5)).written()
        assert diary.read_text() == "pre a [('loss', 0.5)]\npost a [('loss', 0.5)]\n"

    async def test_a_writer_of_ones_own_gets_a_state_dict(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """As the seed's writers do, with the factory's words."""
        async with make_async_checkpointer(
            config,
            checkpoint_writer_init_fn=OwnFormat,
            checkpoint_writer_init_args={"suffix": ".x"},
        ) as made:
            await (await made.save(state(), tmp_path / "a", tag=1)).written()
        assert_same(torch.load(tmp_path / "a" / "0.x"), [state(), {"tag": 1}])

    async def test_two_arenas_are_enough_for_ever(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """Memory is reused: the second save of a kind faults in no page."""
        async with make_async_checkpointer(config) as made:
            places = set()
            for step in range(6):
                handle = await made.save(state(step), tmp_path / f"step-{step}")
                for submission in list(made._under_way)[-1:]:
                    arena = submission.snapshot.arena
                    assert arena is not None
                    places.add(arena.address)
                if step % 2:
                    await handle.written()
        assert 1 <= len(places) <= 2
        assert_same(loaded(tmp_path / "step-5"), state(5))


class TestPolicy:
    """What a third save does (C4)."""

    async def test_the_next_one_is_staged_while_one_is_written(
        self, tmp_path: Path, gate: Gate, config: CheckpointerConfig
    ) -> None:
        """That is what two arenas are for; a third one waits."""
        async with gated(gate, config) as made:
            first = await made.save(state(1), tmp_path / "1")
            second = await made.save(state(2), tmp_path / "2")
            assert (first.done(), second.done()) == (False, False)
            third = asyncio.create_task(made.save(state(3), tmp_path / "3"))
            await asyncio.sleep(0.1)
            assert not third.done()
            gate.open()
            handle = await third
            assert first.done()
            assert made.statistics().under_way == 2
            gate.open(2)
            assert await handle.written()
        for step in (1, 2, 3):
            assert_same(loaded(tmp_path / str(step)), state(step))

    @proves("cell AsyncCheckpointer.save: timeout")
    @pytest.mark.allow_error_logs
    async def test_waiting_has_a_deadline(
        self, tmp_path: Path, gate: Gate, config: CheckpointerConfig
    ) -> None:
        """The save fails, and training goes on."""
        async with gated(gate, config) as made:
            for step in (1, 2):
                await made.save(state(step), tmp_path / str(step))
            handle = await made.save(state(3), tmp_path / "3", timeout=0.05)
            with pytest.raises(TransferTimeoutError, match="timed out"):
                await handle.written()
        assert not (tmp_path / "3").exists()

    async def test_skip_saves_nothing(
        self, tmp_path: Path, gate: Gate, config: CheckpointerConfig
    ) -> None:
        """The handle says so; it is no failure."""
        async with gated(gate, config, busy_policy="skip") as made:
            for step in (1, 2):
                await made.save(state(step), tmp_path / str(step))
            third = await made.save(state(3), tmp_path / "3")
            assert (third.skipped, third.staged) == (True, False)
            assert await third.written() is False
            assert made.statistics().skipped == 1
        assert not (tmp_path / "3").exists()

    async def test_replace_takes_the_place_of_the_one_that_waits(
        self, tmp_path: Path, gate: Gate, config: CheckpointerConfig
    ) -> None:
        """What is being written goes on."""
        async with gated(gate, config, busy_policy="replace") as made:
            first, second, third, fourth = [
                await made.save(state(step), tmp_path / str(step))
                for step in (1, 2, 3, 4)
            ]
            assert await second.written() is False
            assert await third.written() is False
            assert (second.replaced, third.replaced) == (True, True)
            gate.open(2)
            assert await first.written()
            assert await fourth.written()
            assert made.statistics().replaced == 2
        there = {each.name for each in aiockpt.list_checkpoints(tmp_path)}
        assert there == {"1", "4"}

    @pytest.mark.allow_error_logs
    @pytest.mark.parametrize("trouble", [{"bad": object()}, {}], ids=["state", "word"])
    async def test_replace_waits_until_it_has_something_better(
        self, tmp_path: Path, gate: Gate, config: CheckpointerConfig, trouble: Any
    ) -> None:
        """What waits is written if the newer one cannot be staged or handed over."""
        async with gated(gate, config, busy_policy="replace") as made:
            first, second = [
                await made.save(state(s), tmp_path / str(s)) for s in (1, 2)
            ]
            third = await made.save(
                state(3) | trouble, tmp_path / "3", word=1 if trouble else object()
            )
            assert isinstance(third.error, UnsupportedLeafError)
            gate.open(2)
            assert await first.written()
            assert await second.written()
        assert_same(loaded(tmp_path / "2"), state(2))
        assert not (tmp_path / "3").exists()

    async def test_replace_holds_three_copies_at_most(
        self, tmp_path: Path, gate: Gate, config: CheckpointerConfig
    ) -> None:
        """The third one only until the one that waited has gone."""
        async with gated(gate, config, busy_policy="replace") as made:
            places = set()
            for step in range(8):
                await made.save(state(step), tmp_path / str(step))
                for submission in made._under_way:
                    if not submission.ended.done():
                        arena = submission.snapshot.arena
                        assert arena is not None
                        places.add(arena.address)
            assert len(places) == 3
            assert len(made._under_way) <= 3
            gate.open(2)
        assert_same(loaded(tmp_path / "7"), state(7))

    async def test_fail_raises(
        self, tmp_path: Path, gate: Gate, config: CheckpointerConfig
    ) -> None:
        """At once, and what is under way goes on."""
        async with gated(gate, config, busy_policy="fail") as made:
            handles = [await made.save(state(s), tmp_path / str(s)) for s in (1, 2)]
            with pytest.raises(SaveInProgressError, match="2 saves before it"):
                await made.save(state(3), tmp_path / "3")
            gate.open(2)
            assert [await handle.written() for handle in handles] == [True, True]

    @pytest.mark.parametrize("policy", ["skip", "replace", "fail"])
    async def test_ranks_may_not_choose_each_for_itself(self, policy: Any) -> None:
        """Some would save a step that others do not, and wait for them."""
        with pytest.raises(ValueError, match="several ranks need 'wait'"):
            make_async_checkpointer(
                CheckpointerConfig(busy_policy=policy), RankInfo(0, 2)
            )


@pytest.mark.allow_error_logs
class TestFailure:
    """C13: a failed save is never silent, and never fails training unless told so."""

    @proves("cell SaveHandle.written: error")
    async def test_the_handle_raises(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """Each time that it is asked; other saves are as before."""
        (tmp_path / "file").write_text("")
        async with make_async_checkpointer(config) as made:
            handle = await made.save(state(), tmp_path / "file" / "a")
            for _ in range(2):
                with pytest.raises(StorageError):
                    await handle.written()
            assert isinstance(handle.error, StorageError)
            assert await (await made.save(state(), tmp_path / "a")).written()
            assert await made.close() == ()

    @proves("cell AsyncCheckpointer.close, aclose: error")
    async def test_what_nobody_saw_is_logged_and_returned_by_close(
        self,
        tmp_path: Path,
        config: CheckpointerConfig,
        allow_error_logs: list[logging.LogRecord],
    ) -> None:
        """With the path, at the moment of the failure."""
        (tmp_path / "file").write_text("")
        made = make_async_checkpointer(config)
        await made.save(state(), tmp_path / "file" / "a")
        (failure,) = await made.close()
        assert isinstance(failure, StorageError)
        (record,) = allow_error_logs
        assert "file/a is not saved: StorageError" in record.getMessage()
        assert await made.aclose() == ()

    @proves("cell AsyncCheckpointer.save: error")
    async def test_what_cannot_be_staged_fails_its_handle(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """Training goes on; the error says which leaf it was."""
        async with make_async_checkpointer(config) as made:
            handle = await made.save({"a": [object()]}, tmp_path / "a")
            assert not handle.staged
            with pytest.raises(UnsupportedLeafError, match=r"a\.0|a\[0\]|object"):
                await handle.written()
            assert await (await made.save(state(), tmp_path / "a")).written()

    async def test_a_keyword_that_is_no_data_fails_its_handle(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """Wherever it is written; others arrive as they were when it was saved."""
        diary, words = tmp_path / "diary", ["said"]
        hook = Diary(str(diary))
        async with make_async_checkpointer(config, commit_hook=hook) as made:
            handle = await made.save(state(), tmp_path / "a", word=object())
            with pytest.raises(UnsupportedLeafError, match="word"):
                await handle.written()
            handle = await made.save(state(), tmp_path / "a", word=words)
            words.append("later")
            await handle.written()
        assert diary.read_text().splitlines()[-1] == "post a [('word', ['said'])]"

    @proves(
        "cell AsyncCheckpointer.save: error",
        "cell AsyncCheckpointer.close, aclose: error",
    )
    async def test_told_so_it_raises(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """At once, at the next save, or at the end."""
        (tmp_path / "file").write_text("")
        config = replace(config, raise_on_failure=True)
        made = make_async_checkpointer(config)
        with pytest.raises(UnsupportedLeafError):
            await made.save({"a": object()}, tmp_path / "a")
        handle = await made.save(state(), tmp_path / "file" / "a")
        await handle._ended.wait()
        with pytest.raises(StorageError):
            await made.save(state(), tmp_path / "b")
        await made.save(state(), tmp_path / "file" / "c")
        with pytest.raises(StorageError, match="file"):
            await made.close()

    @proves("cell SaveHandle.written: the other one dies")
    async def test_a_dead_child_fails_one_save(self, tmp_path: Path) -> None:
        """The next one is written by another child."""
        async with make_async_checkpointer(checkpoint_writer_init_fn=Troubled) as made:
            handle = await made.save(state(), tmp_path / "a", trouble="die")
            with pytest.raises(WorkerError, match="signal 9"):
                await handle.written()
            assert await (await made.save(state(), tmp_path / "a")).written()
            assert made.statistics().restarts == 1

    async def test_an_error_of_the_block_is_not_hidden(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """Though a save failed too."""
        (tmp_path / "file").write_text("")
        config = replace(config, raise_on_failure=True)
        with pytest.raises(ZeroDivisionError):
            await _broken_block(config, tmp_path / "file" / "a")


class TestAccount:
    """Events, progress and numbers (C16)."""

    async def test_statistics_count_everything(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """And say how long training was kept."""
        async with make_async_checkpointer(config) as made:
            for step in range(3):
                await (await made.save(state(), tmp_path / f"{step}")).written()
            now = made.statistics()
            assert (now.saves, now.written, now.failed, now.under_way) == (3, 3, 0, 0)
            assert now.bytes_written == 3 * 200_000
            assert now.stall_seconds > 0
            assert now.write_seconds > 0
            assert "written=3" in repr(made)

    async def test_events_and_progress_are_told(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """Of the copy and of the write."""
        events: list[TransferEvent] = []
        told: list[Progress] = []
        remove = observe.add_hook(events.append)
        try:
            async with make_async_checkpointer(config) as made:
                handle = await made.save(
                    state(), tmp_path / "step-4", progress=told.append
                )
                await handle.written()
        finally:
            remove()
        assert [(e.stop, e.step, e.nbytes) for e in events] == [
            ("stage", 4, 200_000),
            ("write", 4, 200_000),
        ]
        assert {(each.stop, each.bytes_total) for each in told} == {("write", 200_000)}
        assert told[-1].bytes_done == 200_000

    async def test_a_handle_says_what_became_of_it(
        self, tmp_path: Path, gate: Gate
    ) -> None:
        """To a person, too."""
        async with gated(gate, THREAD) as made:
            handle = await made.save(state(), tmp_path / "step-4")
            assert repr(handle).endswith("step-4 step=4 staged>")
            gate.open()
            await handle.written()
            assert repr(handle).endswith("written>")


class TestEnd:
    """After the end nothing is left, and nothing is lost."""

    @proves("cell AsyncCheckpointer.close, aclose: success")
    async def test_leaving_the_block_writes_what_was_staged(
        self, tmp_path: Path, config: CheckpointerConfig
    ) -> None:
        """Also if an exception ends it."""
        with pytest.raises(ZeroDivisionError):
            await _broken_block(config, tmp_path / "1", tmp_path / "2")
        assert_same(loaded(tmp_path / "1"), state())
        assert_same(loaded(tmp_path / "2"), state())

    @proves("cell AsyncCheckpointer.close, aclose: timeout")
    @pytest.mark.allow_error_logs
    async def test_a_writer_that_hangs_does_not_hold_the_end(
        self, tmp_path: Path, gate: Gate
    ) -> None:
        """It is killed, and the save has failed."""
        process = CheckpointProcessConfig(subprocess_shutdown_timeout_secs=0.3)
        async with gated(gate, CheckpointerConfig(process_config=process)) as made:
            handle = await made.save(state(), tmp_path / "a")
            (failure,) = await made.close()
            assert isinstance(failure, WorkerError)
            assert handle.error is failure
            assert not (tmp_path / "a").exists()


class TestCancel:
    """C3: at every await, and it stays usable."""

    @pytest.mark.parametrize("where", [PROCESS, THREAD], ids=["process", "thread"])
    async def test_save(self, tmp_path: Path, where: CheckpointerConfig) -> None:
        """What was cancelled is not there at all, or wholly."""
        async with make_async_checkpointer(where) as made:
            await (await made.save(state(), tmp_path / "first")).written()
            for turns in range(60):
                path = tmp_path / f"step-{turns}"
                task = asyncio.create_task(made.save(state(turns), path))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    await task.result().written()
            await (await made.save(state(), tmp_path / "last")).written()
            assert made.statistics().failed == 0
        for checkpoint in aiockpt.list_checkpoints(tmp_path):
            if checkpoint.name.startswith("step-"):
                assert_same(loaded(checkpoint.path), state(checkpoint.step))
        assert_same(loaded(tmp_path / "last"), state())

    @proves("cell SaveHandle.written: timeout", "cell SaveHandle.written: cancel")
    async def test_waiting_for_the_end(
        self, tmp_path: Path, gate: Gate, config: CheckpointerConfig
    ) -> None:
        """The write goes on, and the next who asks is told."""
        async with gated(gate, config) as made:
            handle = await made.save(state(), tmp_path / "a")
            for turns in range(5):
                task = asyncio.create_task(handle.written())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                assert task.cancelled()
            gate.open()
            assert await handle.written()

    @proves("cell AsyncCheckpointer.save: cancel")
    async def test_a_save_that_waits(
        self, tmp_path: Path, gate: Gate, config: CheckpointerConfig
    ) -> None:
        """Its turn goes to the next one."""
        async with gated(gate, config) as made:
            for step in (1, 2):
                await made.save(state(step), tmp_path / str(step))
            waiting = asyncio.create_task(made.save(state(3), tmp_path / "3"))
            behind = asyncio.create_task(made.save(state(4), tmp_path / "4"))
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.wait({waiting})
            gate.open(3)
            assert await (await behind).written()
        assert not (tmp_path / "3").exists()

    @proves("cell AsyncCheckpointer.load, state_dict=: cancel")
    async def test_load(self, tmp_path: Path, config: CheckpointerConfig) -> None:
        """The template is left alone from then on."""
        async with make_async_checkpointer(config) as made:
            await (await made.save(state(), tmp_path / "a")).written()
            for turns in range(30):
                template = state(0.0)
                task = asyncio.create_task(made.load(tmp_path / "a", template))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                template["weight"].fill_(7.0)
                await asyncio.sleep(0.001)
                assert template["weight"].eq(7.0).all()
            assert_same(await made.load(tmp_path / "a"), state())

    @pytest.mark.parametrize("heard", [0, 200_000])
    async def test_load_from_a_peer_that_says_nothing(
        self, heard: int, config: CheckpointerConfig
    ) -> None:
        """Nobody waits for it any longer; its patience is 10 seconds."""
        template = {"weight": torch.zeros(500_000)}
        async with transport() as sender, make_async_checkpointer(config) as made:
            await sender.send_checkpoint([1], 1, {"weight": torch.ones(500_000)})
            async with proxied(sender, otherwise=StallAfter(heard)) as proxy:
                url = through(proxy, sender)
                task = asyncio.create_task(made.load(url, template))
                await asyncio.sleep(0.5)
                async with asyncio.timeout(5):
                    task.cancel()
                    await asyncio.wait({task})
        assert task.cancelled()
        assert template["weight"].eq(0).all() or heard


async def test_the_loop_never_stands_still(tmp_path: Path, no_blocking: object) -> None:
    """Nothing that blocks is called on it, from the first save to the end."""
    async with make_async_checkpointer(
        checkpoint_writer_init_fn=configured_writer
    ) as made:
        for step in range(3):
            handle = await made.save(state(), tmp_path / f"step-{step}")
            await handle.written()
        await made.load(tmp_path / "step-1")


async def _broken_block(config: CheckpointerConfig, *paths: Path) -> None:
    async with make_async_checkpointer(config) as made:
        for path in paths:
            await made.save(state(), path)
        raise ZeroDivisionError
