"""AsyncCheckpointer: what a training loop sees of a save, from the copy to the end."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.checkpointers import (
    AsyncCheckpointer,
    CheckpointerConfig,
    CheckpointProcess,
    CheckpointProcessConfig,
    CheckpointReader,
    CheckpointStager,
    DefaultStager,
    RankInfo,
    make_async_checkpointer,
)
from aiockpt.errors import (
    LimitExceededError,
    SaveInProgressError,
    StagingError,
    StateDictError,
    StorageError,
    TransferTimeoutError,
    UnsupportedLeafError,
    WorkerError,
)
from aiockpt.testing import StallAfter, assert_same
from tests.support.proofs import proves
from tests.support.saving import (
    Diary,
    GatedWriter,
    Troubled,
    has_begun,
    loaded,
)
from tests.support.saving import tied_state as state
from tests.support.servers import settle
from tests.support.transports import proxied, through, transport
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.asyncio

PROCESS = CheckpointerConfig()
THREAD = CheckpointerConfig(use_process=False)


@pytest.fixture(params=[PROCESS, THREAD], ids=["process", "thread"])
def config(request):
    """Return a config for each place where writing happens."""
    return request.param


@asynccontextmanager
async def gated(gate, config, **options):
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


async def saves(made, place, *steps):
    """Begin saves, which are held by the gate; return their handles."""
    return [await made.save(state(step), place / f"{step}") for step in steps]


def places(handles):
    """Return where the arenas of the saves are that have not ended."""
    return {each.snapshot.arena.address for each in handles if each.snapshot}


async def cut(call, turns):
    """Begin a call, and cancel it after some turns of the loop; return its task."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    return task


@proves("cell AsyncCheckpointer.save: success")
async def test_a_save_returns_when_the_state_is_staged(tmp_path, gate, config) -> None:
    """The write has not begun, and nothing of a later step gets into it."""
    live = state()
    async with gated(gate, config) as made:
        handle = await made.save(live, tmp_path / "step-7")
        assert (handle.staged, handle.done(), handle.step) == (True, False, 7)
        assert repr(handle).endswith("step-7 step=7 staged>")
        live["weight"].zero_()
        gate.open()
        assert await handle.written()
        assert handle.done()
        assert repr(handle).endswith("written>")
    assert_same(loaded(tmp_path / "step-7"), state())


@proves("cell CheckpointProcess.submit: error")
@pytest.mark.allow_error_logs
async def test_keywords_reach_the_hooks_as_they_were(tmp_path, config) -> None:
    """Hooks are plain or coroutine functions; what is no data is refused by name."""
    diary, words = tmp_path / "diary", ["said"]
    hook = Diary(str(diary))
    async with make_async_checkpointer(config, commit_hook=hook) as made:
        handle = await made.save(state(), tmp_path / "a", snapshot=0.5, word=words)  # type: ignore[arg-type]
        words.append("later")
        await handle.written()
        with pytest.raises(UnsupportedLeafError, match="word"):
            await made.save(state(), tmp_path / "b", word=object())  # type: ignore[arg-type]
    said = "a [('snapshot', 0.5), ('word', ['said'])]"
    assert diary.read_text() == f"pre {said}\npost {said}\n"


async def test_two_arenas_are_enough_for_any_number_of_saves(tmp_path, config) -> None:
    """The memory of a save that has ended is used again."""
    async with make_async_checkpointer(config) as made:
        seen = set()
        for step in range(6):
            handle = await made.save(state(step), tmp_path / f"step-{step}")
            seen |= places([handle])
            if step % 2:
                await handle.written()
    assert 1 <= len(seen) <= 2
    assert_same(loaded(tmp_path / "step-5"), state(5))


async def test_a_hook_of_events_hears_of_the_copy_and_of_the_write(tmp_path) -> None:
    """Each event has the step and the number of bytes."""
    events: list[aiockpt.TransferEvent] = []
    remove = aiockpt.add_hook(events.append)
    try:
        async with make_async_checkpointer(THREAD) as made:
            await (await made.save(state(), tmp_path / "step-4")).written()
    finally:
        remove()
    found = [(each.stop, each.step, each.nbytes) for each in events]
    assert found == [("stage", 4, 200_000), ("write", 4, 200_000)]


async def test_nothing_that_blocks_is_called_on_the_loop(tmp_path, no_blocking) -> None:
    """The loop is never blocked, from the first save to the end."""
    async with make_async_checkpointer() as made:
        for step in range(3):
            await (await made.save(state(), tmp_path / f"step-{step}")).written()
        await made.load(tmp_path / "step-1")


class Cloning(CheckpointStager):
    """A stager as a user of torch's may have written it: it returns a state dict."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    async def stage(self, state_dict, **kwargs):
        self.seen.append(kwargs)
        return {key: value.clone() for key, value in state_dict.items()}

    async def close(self) -> None:
        self.seen.append("closed")


class Doubling(DefaultStager):
    """A stager that stages something else than it is given."""

    async def stage(self, state_dict, **kwargs):
        doubled = {key: 2 * value for key, value in state_dict.items()}
        return await super().stage(doubled, **kwargs)


@pytest.mark.parametrize(("make", "factor"), [(Cloning, 1), (Doubling, 2)])
async def test_a_stager_of_ones_own(tmp_path, make, factor: int) -> None:
    """It gets the keywords, and what it returns is what is written."""
    stager, live = make(), {"a": torch.ones(1000)}
    writer, reader = CheckpointProcess(RankInfo(0, 1)), CheckpointReader(RankInfo(0, 1))
    async with AsyncCheckpointer(stager, writer, reader) as made:
        handle = await made.save(live, tmp_path / "a-2", epoch=4)  # type: ignore[arg-type]
        live["a"].zero_()
        assert await handle.written()
    assert_same(loaded(tmp_path / "a-2"), {"a": factor * torch.ones(1000)})
    if make is Cloning:
        assert stager.seen == [{"step": 2, "epoch": 4}, "closed"]


class Held(DefaultStager):
    """A stager that waits until it may go on, or fails then."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.failure: Exception | None = None

    async def stage(self, state_dict, **kwargs):
        self.begun.set()
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        return await super().stage(state_dict, **kwargs)


@pytest.mark.allow_error_logs
async def test_nothing_is_written_before_everything_is_staged(tmp_path) -> None:
    """A save that is cancelled then, or whose copy fails, leaves nothing."""
    stager = Held()
    writer, reader = CheckpointProcess(RankInfo(0, 1)), CheckpointReader(RankInfo(0, 1))
    async with AsyncCheckpointer(stager, writer, reader) as made:
        await writer.ready()
        for failure in (None, StagingError("the bus is gone")):
            stager.begun.clear()
            stager.go.clear()
            saving = asyncio.create_task(made.save(state(), tmp_path / "step-1"))
            await stager.begun.wait()
            assert os.listdir(tmp_path) == []
            if failure is None:
                saving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await saving
            stager.failure = failure
            stager.go.set()
        handle = await saving
        assert handle.staged is False
        with pytest.raises(StagingError, match="the bus is gone"):
            await handle.written()
        stager.failure = None
        assert await (await made.save(state(2.0), tmp_path / "step-2")).written()
        assert await made.close() == ()
    assert os.listdir(tmp_path) == ["step-2"]
    assert_same(loaded(tmp_path / "step-2"), state(2.0))


class TestPolicy:
    """The policy says what a third save does while one is written and one waits."""

    @proves(
        "cell AsyncCheckpointer.save: timeout", "cell AsyncCheckpointer.save: cancel"
    )
    @pytest.mark.allow_error_logs
    async def test_wait(self, tmp_path, gate, config) -> None:
        """It waits for its turn until its deadline, or until it is cancelled."""
        async with gated(gate, config) as made:
            first, second = await saves(made, tmp_path, 1, 2)
            late = await made.save(state(3), tmp_path / "3", timeout=0.05)
            with pytest.raises(TransferTimeoutError, match="timed out"):
                await late.written()
            waiting, behind = (
                asyncio.create_task(made.save(state(step), tmp_path / f"{step}"))
                for step in (4, 5)
            )
            await asyncio.sleep(0.05)
            done = [each.done() for each in (first, second, waiting, behind)]
            assert not any(done)
            waiting.cancel()
            await asyncio.wait({waiting})
            gate.open()
            handle = await behind
            assert first.done()
            assert made.statistics().under_way == 2
            gate.open(2)
            assert await handle.written()
        for step in (1, 2, 5):
            assert_same(loaded(tmp_path / f"{step}"), state(step))
        assert not {"3", "4"} & set(os.listdir(tmp_path))

    async def test_skip(self, tmp_path, gate, config) -> None:
        """It saves nothing, and its handle says so; it is no failure."""
        async with gated(gate, config, busy_policy="skip") as made:
            *_, third = await saves(made, tmp_path, 1, 2, 3)
            assert (third.skipped, third.staged) == (True, False)
            assert await third.written() is False
            assert made.statistics().skipped == 1
        assert not (tmp_path / "3").exists()

    async def test_replace(self, tmp_path, gate, config) -> None:
        """It takes the place of the save that waits; there are three copies at most."""
        async with gated(gate, config, busy_policy="replace") as made:
            seen, handles = set(), []
            for step in range(8):
                handles += await saves(made, tmp_path, step)
                seen |= places(handles)
            assert len(seen) == 3
            assert made.statistics().under_way <= 3
            assert [await each.written() for each in handles[1:7]] == [False] * 6
            assert all(each.replaced for each in handles[1:7])
            gate.open(2)
            assert await handles[0].written()
            assert await handles[7].written()
            assert made.statistics().replaced == 6
        there = {each.name for each in aiockpt.list_checkpoints(tmp_path)}
        assert there == {"0", "7"}

    @pytest.mark.allow_error_logs
    @pytest.mark.parametrize("wrong", ["state", "word"])
    async def test_replace_needs_something_better(
        self, tmp_path, gate, config, wrong: str
    ) -> None:
        """The save that waits is written if the newer one cannot be staged."""
        async with gated(gate, config, busy_policy="replace") as made:
            first, second = await saves(made, tmp_path, 1, 2)
            newer = state(3) | ({"bad": object()} if wrong == "state" else {})
            word = object() if wrong == "word" else 1
            with pytest.raises(UnsupportedLeafError):
                await made.save(newer, tmp_path / "3", word=word)
            gate.open(2)
            assert await first.written()
            assert await second.written()
        assert_same(loaded(tmp_path / "2"), state(2))
        assert not (tmp_path / "3").exists()

    async def test_fail(self, tmp_path, gate, config) -> None:
        """It raises at once, and what is under way goes on."""
        async with gated(gate, config, busy_policy="fail") as made:
            handles = await saves(made, tmp_path, 1, 2)
            with pytest.raises(SaveInProgressError, match="2 saves before it"):
                await made.save(state(3), tmp_path / "3")
            gate.open(2)
            assert [await handle.written() for handle in handles] == [True, True]

    @pytest.mark.parametrize("policy", ["skip", "replace", "fail"])
    async def test_ranks_have_no_choice(self, policy) -> None:
        """Some ranks would save a step that others do not, and wait for them."""
        config = CheckpointerConfig(busy_policy=policy)
        with pytest.raises(ValueError, match="use 'wait' with several ranks"):
            make_async_checkpointer(config, RankInfo(0, 2))


def a_cycle() -> Any:
    """Return a state dict that contains itself."""
    found: dict[str, Any] = {}
    found["again"] = found
    return found


class Unreadable:
    """A registered type whose encoder fails."""

    def __init__(self, _: object = None) -> None: ...

    def encoded(self) -> object:
        """Fail."""
        raise RuntimeError("no luck")


aiockpt.register_leaf(
    Unreadable, tag="tests.Unreadable", encode=Unreadable.encoded, decode=Unreadable
)

NEVER_SAVED: dict[str, Any] = {
    "leaf": lambda: ({"a": {"b": print}}, UnsupportedLeafError, "a.b is a builtin"),
    "meta": lambda: (
        {"a": torch.ones(2, device="meta")}, UnsupportedLeafError, "a is a meta"
    ),
    "cycle": lambda: (a_cycle(), LimitExceededError, "nesting of again.again"),
    "encoder": lambda: (
        {"x": [Unreadable()]}, StateDictError, "x[0]: the encoder of 'tests.Unread"
    ),
}  # fmt: skip


@pytest.mark.allow_error_logs
class TestFailure:
    """A failed save is never silent, and never fails training unless told to."""

    @proves(
        "cell SaveHandle.written: error",
        "cell AsyncCheckpointer.save: error",
        "cell AsyncCheckpointer.close, aclose: error",
    )
    async def test_it_is_told_once(self, tmp_path, config, allow_error_logs) -> None:
        """The handle raises it each time; otherwise `close` and the log tell it."""
        (tmp_path / "file").touch()
        made = make_async_checkpointer(config)
        seen = await made.save(state(), tmp_path / "file" / "a")
        for _ in range(2):
            with pytest.raises(StorageError):
                await seen.written()
        assert isinstance(seen.error, StorageError)
        with pytest.raises(UnsupportedLeafError, match=r"a\[0\]"):
            await made.save({"a": [object()]}, tmp_path / "b")
        allow_error_logs.clear()
        unseen = await made.save(state(), tmp_path / "file" / "c")
        assert [*map(str, await made.close())] == [str(unseen.error)]
        (record,) = allow_error_logs
        assert "file/c is not saved: StorageError" in record.getMessage()
        assert await made.aclose() == ()

    @pytest.mark.parametrize("make", NEVER_SAVED.values(), ids=NEVER_SAVED)
    async def test_what_can_never_be_saved_is_raised_at_once(
        self, tmp_path, config, make
    ) -> None:
        """The save itself raises it and counts as failed, and the next one works."""
        bad, error, words = make()
        async with make_async_checkpointer(config) as made:
            with pytest.raises(error) as caught:
                await made.save(bad, tmp_path / "a")
            assert words in str(caught.value)
            assert made.statistics()[:3] == (1, 0, 1)
            assert await (await made.save(state(), tmp_path / "b")).written()
            assert await made.close() == ()  # nobody has to be told again
        assert [each.name for each in tmp_path.iterdir()] == ["b"]

    @proves(
        "cell AsyncCheckpointer.save: error",
        "cell AsyncCheckpointer.close, aclose: error",
    )
    async def test_if_told_to_it_raises(self, tmp_path, config) -> None:
        """`raise_on_failure` raises in the save, in the next one, or at the end."""
        (tmp_path / "file").touch()
        config = replace(config, raise_on_failure=True)
        made = make_async_checkpointer(config)
        with pytest.raises(UnsupportedLeafError):
            await made.save({"a": object()}, tmp_path / "a")
        handle = await made.save(state(), tmp_path / "file" / "a")
        await settle(handle.done)
        with pytest.raises(StorageError):
            await made.save(state(), tmp_path / "b")
        await made.save(state(), tmp_path / "file" / "c")
        with pytest.raises(StorageError, match="file"):
            await made.close()

        async def broken() -> None:
            async with make_async_checkpointer(config) as made:
                await saves(made, tmp_path, 1)
                await made.save(state(), tmp_path / "file" / "d")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await broken()
        assert_same(loaded(tmp_path / "1"), state(1))

    @pytest.mark.parametrize("trouble", ["raise", "system-exit"])
    async def test_what_a_writer_raises_is_a_worker_error(
        self, tmp_path, config, trouble: str
    ) -> None:
        """Asking for it ends no training, and the next save is written."""
        async with make_async_checkpointer(
            config, checkpoint_writer_init_fn=Troubled
        ) as made:
            handle = await made.save(state(), tmp_path / "a", trouble=trouble)  # type: ignore[arg-type]
            with pytest.raises(WorkerError, match=r"a raised \w+: ") as caught:
                await handle.written()
            assert "Traceback" in caught.value.remote_traceback
            assert "write_staged" in caught.value.remote_traceback
            assert await (await made.save(state(), tmp_path / "a")).written()
            assert made.statistics().restarts == 0


class TestEnd:
    """After the end, nothing is left and nothing is lost."""

    @proves(
        "cell AsyncCheckpointer.close, aclose: timeout",
        "cell CheckpointProcess.close, aclose: timeout",
        "cell SaveHandle.written: error",
    )
    @proves("invariant 6")
    @pytest.mark.allow_error_logs
    async def test_a_writer_that_hangs_does_not_hold_the_end(
        self, tmp_path, gate, config
    ) -> None:
        """Every handle knows. A process is killed; a thread is left to its write."""
        limits = CheckpointProcessConfig(subprocess_shutdown_timeout_secs=0.3)
        config = replace(config, process_config=limits)
        async with gated(gate, config) as made:
            handles = await saves(made, tmp_path, 1, 2)
            await has_begun(handles[0])
            failures = await made.close()
            assert [str(each.error) for each in handles] == [*map(str, failures)]
            assert all(isinstance(each, WorkerError) for each in failures)
        if not config.use_process:
            assert "1 has not ended within 0.3 s" in str(failures[0])
            assert "2 was not begun within 0.3 s" in str(failures[1])
            wait_until((tmp_path / "1").exists, "the write")
            assert_same(loaded(tmp_path / "1"), state(1))
        assert (tmp_path / "1").exists() is not config.use_process
        assert not (tmp_path / "2").exists()


async def test_a_save_can_be_cancelled_at_every_await(tmp_path, config) -> None:
    """A cancelled save leaves nothing, or the whole checkpoint."""
    async with make_async_checkpointer(config) as made:
        await (await made.save(state(), tmp_path / "first")).written()
        for turns in range(0, 60, 2):
            task = await cut(made.save(state(turns), tmp_path / f"step-{turns}"), turns)
            if not task.cancelled():
                await task.result().written()
        await (await made.save(state(), tmp_path / "last")).written()
        assert made.statistics().failed == 0
    for each in aiockpt.list_checkpoints(tmp_path):
        fill = each.step if each.name.startswith("step") else 1.0
        assert_same(loaded(each.path), state(fill))


@proves("cell AsyncCheckpointer.load, state_dict=: cancel")
async def test_nothing_writes_after_a_cancelled_load(tmp_path) -> None:
    """The template is left alone from then on."""
    async with make_async_checkpointer(THREAD) as made:
        await (await made.save(state(), tmp_path / "a")).written()
        for turns in range(30):
            template = state(0.0)
            await cut(made.load(tmp_path / "a", template), turns)
            template["weight"].fill_(7.0)
            await asyncio.sleep(0.001)
            assert template["weight"].eq(7.0).all()
        assert_same(await made.load(tmp_path / "a"), state())


@pytest.mark.parametrize("heard", [0, 200_000])
async def test_a_cancelled_load_does_not_wait_for_a_silent_peer(
    monkeypatch, heard: int
) -> None:
    """The cancel does not wait for the peer's time limit either."""
    monkeypatch.setattr("aiockpt.checkpointers.peer._IDLE_TIMEOUT_S", 600)
    template = {"weight": torch.zeros(500_000)}
    async with transport() as sender, make_async_checkpointer(THREAD) as made:
        await sender.send_checkpoint([1], 1, {"weight": torch.ones(500_000)})
        async with proxied(sender, otherwise=StallAfter(heard)) as proxy:
            task = asyncio.create_task(made.load(through(proxy, sender), template))
            await settle(lambda: proxy.statistics().bytes_down >= heard)
            task.cancel()
            async with asyncio.timeout(PATIENCE):
                await asyncio.wait({task})
            assert task.cancelled()
    assert template["weight"].eq(0).all() or heard
