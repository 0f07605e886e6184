"""The writer: what it writes, when it calls the hooks, what a failure leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file

from aiockpt.checkpointers.config import RankInfo
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.checkpointers.sync import SyncCheckpointer
from aiockpt.checkpointers.writer import CheckpointWriter, WriterHook
from aiockpt.errors import (
    StagingError,
    StorageError,
    UnsupportedLeafError,
)
from aiockpt.events import Progress, TransferEvent, add_hook
from aiockpt.format.chunks import ChunkHasher, HashedChunk
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import ArenaPool
from aiockpt.storage import commit
from aiockpt.storage.checkpoint_file import read_header, verify_chunks
from aiockpt.storage.directory import latest
from aiockpt.storage.write import BLOCK, WritableSnapshot, write_file
from aiockpt.testing import assert_same
from aiockpt.transfer.live import LiveState
from tests.support.accelerators import FakeAccelerator
from tests.support.disks import small_disk
from tests.support.pipeline import stager
from tests.support.proofs import proves
from tests.support.saved import (
    ALONE,
    CHUNK,
    config,
    load,
    names,
    run_beside,
    save,
    sync_checkpointer,
    training_state,
)
from tests.support.states import State, states

FILE = "checkpoint_0.safetensors"


class Hook(WriterHook):
    """Notes what it is called with, and what it sees then."""

    def __init__(self, directory: Path, *, fails: str = "") -> None:
        self.calls: list[Any] = []
        self._directory = directory
        self._fails = fails

    def _note(self, what: str, path: str, kwargs: Any) -> None:
        found = latest(self._directory)
        self.calls.append((what, path, kwargs, found and found.step))
        if self._fails == what:
            raise KeyError(what)

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        self._note("pre", path, kwargs)

    def post_commit(self, path: str, **kwargs: Any) -> None:
        self._note("post", path, kwargs)


class CoroutineHook(Hook):
    """The same, as coroutine functions."""

    async def pre_commit(self, path: str, **kwargs: Any) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self._note("pre", path, kwargs)

    async def post_commit(self, path: str, **kwargs: Any) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self._note("post", path, kwargs)


class TestFile:
    """What a rank's file is."""

    def test_other_tools_read_it(self, tmp_path: Path) -> None:
        """It is a safetensors file, named after its tensors."""
        state = training_state()
        found = load_file(save(tmp_path / "s", state) / FILE)
        assert torch.equal(found["model.norm.bias"], state["model"]["norm.bias"])
        assert torch.equal(
            found["optimizer.state[0].exp_avg"],
            state["optimizer"]["state"][0]["exp_avg"],
        )

    def test_every_chunk_has_its_digest(self, tmp_path: Path) -> None:
        """Computed while it was written (C2)."""
        path = save(tmp_path / "s-3", training_state()) / FILE
        header = read_header(path, limits=Limits())
        assert isinstance(header, Manifest)
        assert (header.step, header.chunk_bytes) == (3, CHUNK)
        assert len(header.digests) > 3
        assert list(verify_chunks(path, header)) == []

    def test_blocks_and_chunks_need_not_meet(self, tmp_path: Path) -> None:
        """A chunk longer than a block, and one that does not divide it."""
        state = {"a": torch.randn(3 * BLOCK // 4 + 1000), "b": torch.randn(7)}
        for chunk_bytes in (BLOCK + 64, 3 * CHUNK, 2 * BLOCK):
            path = save(tmp_path / "s", state, chunk_bytes=chunk_bytes)
            assert_same(load(path), state)

    def test_more_views_than_one_call_takes(self, tmp_path: Path) -> None:
        """Thousands of tensors are one block."""
        state = {f"{i}": torch.full((3,), float(i)) for i in range(5000)}
        assert_same(load(save(tmp_path / "s", state)), state)

    def test_it_is_written_in_large_pieces(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Aligned, in order, however small the tensors are; the header comes last."""
        written: list[tuple[int, int]] = []
        real = os.pwritev

        def seen(fd: int, views: Any, at: int) -> int:
            done = real(fd, views, at)
            written.append((at, done))
            return done

        monkeypatch.setattr(os, "pwritev", seen)
        state = {f"{i}": torch.ones(BLOCK // 256) for i in range(320)}
        path = save(tmp_path / "s", state) / FILE
        *pieces, header = written
        assert header == (0, pieces[0][0])
        assert [at for at, _ in pieces[1:]] == [n * BLOCK for n in range(1, 6)]
        assert sum(size for _, size in pieces) == 5 * BLOCK
        assert sum(pieces[-1]) == path.stat().st_size

    @proves("cell SyncCheckpointer.save: success")
    @pytest.mark.parametrize("fsync", [True, False])
    def test_the_disk_confirms_each_step_before_the_next(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
    ) -> None:
        """File, its name, marker, its name, and the name of the checkpoint."""
        said: list[str] = []
        place = tmp_path / "new"
        real, rename = os.fsync, os.rename

        def seen(fd: int) -> None:
            real(fd)
            said.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")

        def renamed(one: Any, other: Any) -> None:
            rename(one, other)
            said.append(f"name {Path(other).name}")

        monkeypatch.setattr(os, "fsync", seen)
        monkeypatch.setattr(os, "rename", renamed)
        save(place / "s", {"a": 1}, fsync=fsync)
        expected = [
            *(f"sync {tmp_path.name}", f"sync {FILE}.tmp", f"name {FILE}"),
            *("sync .s.part", "sync commit.json.tmp", "name commit.json"),
            *("sync .s.part", "name s", "sync new"),
        ]
        assert said == [each for each in expected if fsync or each[:4] == "name"]

    @given(state=states())
    @settings(
        suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
    )
    def test_any_state_dict(self, tmp_path: Path, state: State) -> None:
        """Views, ties, flags, all dtypes, all containers."""
        plain = dict(state)
        path = save(tmp_path / "s", plain)
        assert_same(load(path), plain)

    def test_the_state_dict_is_not_copied(self, tmp_path: Path) -> None:
        """Its bytes go from where they are to the file."""
        tensor = torch.randn(CHUNK)
        pool = ArenaPool(keep=1)
        options: Any = {"step": 1, "chunk_bytes": CHUNK, "allow_pickle": False}
        with LiveState({"a": tensor}, pool=pool, **options) as live:
            view = live.views(0, live.segment_bytes)[0]
            before = bytes(view[:4])
            tensor.add_(1)
            assert bytes(view[:4]) != before
            del view

    def test_a_snapshot_is_written_as_it_is(self, tmp_path: Path) -> None:
        """What a transport serves can be saved."""
        state = training_state()

        async def staged() -> None:
            async with stager() as staging:
                snapshot = await staging.stage(state, step=12)
                writer = CheckpointWriter(config(), ALONE)
                writer.write_staged(tmp_path / "s", WritableSnapshot(snapshot), 12)
                snapshot.release()

        asyncio.run(staged())
        found = latest(tmp_path)
        assert found is not None
        assert found.step == 12
        assert_same(load(tmp_path / "s"), state)


class TestDevice:
    """What lies on a device is staged ahead of the writing."""

    @pytest.mark.parametrize("held", [False, True])
    def test_through_a_pinned_arena(self, tmp_path: Path, held: bool) -> None:
        """Which is kept for the next save."""
        device = FakeAccelerator(held=held)
        state = {"a": torch.randn(CHUNK), "t": torch.randn(9, 5).t(), "n": 1}
        pool = ArenaPool(keep=1)
        for step in (1, 2):
            live = run_beside(
                device,
                lambda step=step: LiveState(
                    state,
                    step=step,
                    chunk_bytes=CHUNK,
                    allow_pickle=False,
                    pool=pool,
                    ports=device.port_for,
                ),
            )
            with live, (tmp_path / "f").open("w+b") as file:
                run_beside(
                    device,
                    lambda live=live, file=file: write_file(
                        tmp_path / "f", file.fileno(), live, durable=False
                    ),
                )
            assert_same(load(tmp_path / "f"), state)
        assert len(device.pinned) == 1
        pool.close()
        assert not device.pinned

    def test_a_copy_that_fails(self, tmp_path: Path) -> None:
        """Is a staging error, and no checkpoint."""
        writer = CheckpointWriter(config(), ALONE)
        state = {"a": torch.empty(3, device="meta")}
        with pytest.raises((StagingError, UnsupportedLeafError, StorageError)):
            writer.write(tmp_path / "s", state)
        assert names(tmp_path) == []


class TestHooks:
    """Called around the commit, with the keywords of ``save`` (C7)."""

    @pytest.mark.parametrize("kind", [Hook, CoroutineHook])
    @pytest.mark.parametrize("beside_a_loop", [False, True])
    def test_before_and_after(
        self, tmp_path: Path, kind: type[Hook], beside_a_loop: bool
    ) -> None:
        """The path is that of ``save``; the checkpoint is there after, not before."""
        hook = kind(tmp_path)
        path = tmp_path / "s-5"

        async def saving() -> None:
            with sync_checkpointer(hook) as checkpointer:
                checkpointer.save({"a": 1}, path, epoch=3, note="x")

        if beside_a_loop:
            asyncio.run(saving())
        else:
            with sync_checkpointer(hook) as checkpointer:
                checkpointer.save({"a": 1}, path, epoch=3, note="x")
        given = {"epoch": 3, "note": "x"}
        expected = [("pre", str(path), given, None), ("post", str(path), given, 5)]
        assert hook.calls == expected

    @proves("cell SyncCheckpointer.save: error")
    @pytest.mark.parametrize("kind", [Hook, CoroutineHook])
    def test_one_that_fails_before(self, tmp_path: Path, kind: type[Hook]) -> None:
        """Keeps the checkpoint from being committed."""
        save(tmp_path / "s-5", {"a": 1})
        checkpointer = sync_checkpointer(kind(tmp_path, fails="pre"))
        with checkpointer, pytest.raises(KeyError, match="pre"):
            checkpointer.save({"a": 2}, tmp_path / "s-5")
        assert load(tmp_path / "s-5") == {"a": 1}
        assert names(tmp_path) == ["s-5"]

    @proves("cell SaveHandle.written: error", "cell SyncCheckpointer.save: error")
    def test_one_that_fails_after(self, tmp_path: Path) -> None:
        """Is heard of; the checkpoint is there, and the old one is gone."""
        save(tmp_path / "s-5", {"a": 1})
        checkpointer = sync_checkpointer(Hook(tmp_path, fails="post"))
        with checkpointer, pytest.raises(KeyError, match="post"):
            checkpointer.save({"a": 2}, tmp_path / "s-5")
        assert load(tmp_path / "s-5") == {"a": 2}
        assert names(tmp_path) == ["s-5"]


class TestFailures:
    """A save that fails leaves what was there, and nothing else."""

    def test_a_leaf_that_cannot_be_saved(self, tmp_path: Path) -> None:
        """It is named before a byte is written."""
        save(tmp_path / "s", {"a": 1})
        with pytest.raises(UnsupportedLeafError) as caught:
            save(tmp_path / "s", {"model": {"x": object()}})
        assert caught.value.path == "model.x"
        assert load(tmp_path / "s") == {"a": 1}
        assert names(tmp_path) == ["s"]

    def test_pickles_are_opted_into(self, tmp_path: Path) -> None:
        """By both, who saves and who loads."""
        path = save(tmp_path / "s", {"x": 1 + 2j, "y": slice(3)}, allow_pickle=True)
        from aiockpt.checkpointers.reader import CheckpointReader

        reader = CheckpointReader(ALONE, allow_pickle=True)
        assert reader.read(path)[0]["y"] == slice(3)

    def test_a_full_disk(self, tmp_path: Path) -> None:
        """The error says what is needed and what is free."""
        with small_disk(tmp_path / "disk", 1 << 20) as disk:
            save(disk / "s", {"a": 1})
            with pytest.raises(StorageError) as caught:
                save(disk / "s", {"a": torch.zeros(1 << 20)})
            assert "No space left on device: 4.2 MB are needed and" in str(caught.value)
            assert load(disk / "s") == {"a": 1}
            assert names(disk) == ["s"]

    @proves("cell SaveHandle.written: error", "cell SyncCheckpointer.save: error")
    @pytest.mark.parametrize("call", ["pwritev", "fsync", "rename"])
    def test_a_call_that_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        """Any of them, each time that it is made."""
        save(tmp_path / "s", {"a": 1})
        real, calls = getattr(os, call), 0

        def counted(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == doomed:
                raise OSError(5, "Input/output error")
            return real(*args)

        monkeypatch.setattr(os, call, counted)
        for doomed in range(1, 20):
            calls = 0
            with contextlib.suppress(StorageError):
                save(tmp_path / "s", {"a": 2, "t": torch.zeros(9)}, fsync=True)
            assert load(tmp_path / "s")["a"] in (1, 2)
            if calls < doomed:
                break
        assert 1 < doomed <= calls + 1
        assert load(tmp_path / "s")["a"] == 2

    def test_a_digest_that_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is computed in a thread behind the writing, which hears of it."""
        save(tmp_path / "s", {"a": 1})
        update, seen = ChunkHasher.update, []

        def failing(
            self: ChunkHasher, start: int, *views: memoryview
        ) -> list[HashedChunk]:
            seen.append(start)
            if len(seen) == 2:
                raise MemoryError("injected")
            return update(self, start, *views)

        monkeypatch.setattr(ChunkHasher, "update", failing)
        with pytest.raises(MemoryError, match="injected"):
            save(tmp_path / "s", {"a": torch.zeros(3 * BLOCK // 4)})
        assert load(tmp_path / "s") == {"a": 1}
        assert names(tmp_path) == ["s"]

    @pytest.mark.parametrize("fsync", [True, False])
    def test_a_close_that_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
    ) -> None:
        """It matters before the commit, and only if the disk was not asked before."""
        close, denied = os.close, []

        def closed(fd: int) -> None:
            mine = ".part" in os.readlink(f"/proc/self/fd/{fd}")
            close(fd)
            if mine:
                denied.append(fd)
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "close", closed)
        if fsync:
            # The directory that was synced is closed, too.
            monkeypatch.setattr(commit, "sync_directory", lambda _: None)
            save(tmp_path / "s", {"a": 1}, fsync=True)
        else:
            with pytest.raises(StorageError, match="Input/output error"):
                save(tmp_path / "s", {"a": 1}, fsync=False)
        monkeypatch.undo()
        assert names(tmp_path) == (["s"] if fsync else [])
        assert bool(denied) != fsync

    def test_several_ranks_need_a_barrier(self) -> None:
        """Or there would be no telling who commits (C8)."""
        with pytest.raises(ValueError, match="2 ranks need a barrier"):
            CheckpointWriter(config(), RankInfo(1, 2))


def test_events(tmp_path: Path) -> None:
    """A hook hears of every save and load."""
    heard: list[TransferEvent] = []
    remove = add_hook(heard.append)
    with sync_checkpointer() as checkpointer:
        checkpointer.save({"a": 1}, tmp_path / "s-3")
        checkpointer.load(tmp_path / "s-3")
    remove()
    assert [(event.stop, event.step) for event in heard] == [
        ("write", 3),
        ("load", None),
    ]
    assert all(event.detail == str(tmp_path / "s-3") for event in heard)


class TestAccount:
    """Numbers and progress, in the words of the asynchronous one (C16)."""

    def test_statistics_count_everything(self, tmp_path: Path) -> None:
        """Also what failed; the caller was kept as long as it took."""
        with sync_checkpointer() as checkpointer:
            assert checkpointer.statistics().saves == 0
            for step in (1, 2):
                checkpointer.save({"a": torch.ones(1000)}, tmp_path / f"s-{step}")
            with pytest.raises(UnsupportedLeafError):
                checkpointer.save({"a": object()}, tmp_path / "s-3")
            now = checkpointer.statistics()
        assert (now.saves, now.written, now.failed, now.under_way) == (3, 2, 1, 0)
        assert now.bytes_written == 2 * 4000
        assert now.stall_seconds == now.write_seconds > 0
        assert (now.skipped, now.replaced, now.restarts) == (0, 0, 0)

    def test_progress_is_told(self, tmp_path: Path) -> None:
        """Block by block, to the end; hooks do not get it."""
        told: list[Progress] = []
        hook = Hook(tmp_path)
        with sync_checkpointer(hook) as checkpointer:
            state = {"a": torch.ones(3 * BLOCK // 4)}
            checkpointer.save(state, tmp_path / "s-3", progress=told.append)
        done = [each.bytes_done for each in told]
        assert (done[0], done[-1], len(done)) == (0, 3 * BLOCK, 5)
        assert all(0 < b - a <= BLOCK for a, b in pairwise(done))
        assert {(each.stop, each.bytes_total) for each in told} == {("write", done[-1])}
        assert [kwargs for _, _, kwargs, _ in hook.calls] == [{}, {}]

    @pytest.mark.allow_error_logs
    def test_a_progress_that_raises_does_not_matter(self, tmp_path: Path) -> None:
        """It is somebody else's code."""

        def refuse(_: Progress) -> None:
            raise KeyError

        with sync_checkpointer() as checkpointer:
            checkpointer.save({"a": 1}, tmp_path / "s-3", progress=refuse)
        assert load(tmp_path / "s-3") == {"a": 1}

    def test_a_writer_of_ones_own_is_counted_too(self, tmp_path: Path) -> None:
        """It is asked with the words that it knows."""

        class Own(CheckpointWriter):
            def write(self, path: Any, state_dict: Any, **kwargs: Any) -> None:
                assert kwargs == {"epoch": 3}
                super().write(path, state_dict, **kwargs)

        reader = CheckpointReader(ALONE)
        with SyncCheckpointer(Own(config(), ALONE), reader) as made:
            made.save({"a": 1}, tmp_path / "s", progress=print, epoch=3)
            assert made.statistics().written == 1


def test_reprs(tmp_path: Path) -> None:
    """Say what a person wants."""
    with sync_checkpointer() as checkpointer:
        assert repr(checkpointer) == "<SyncCheckpointer <CheckpointWriter rank=0/1>>"
    assert repr(checkpointer).endswith(" closed>")


class TestWritableSnapshot:
    """Digests come with the bytes, or before them."""

    @pytest.mark.parametrize("read", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 5, None])
    def test_digests_are_the_same_whenever_they_are_asked_for(
        self, read: int | None
    ) -> None:
        """Before the first byte, after some, or after the last one."""
        state = {"a": torch.arange(3 * CHUNK + 7, dtype=torch.uint8)}

        async def staged() -> tuple[Manifest, Manifest, list[Manifest]]:
            async with stager() as staging, stager(seal=False) as hasty:
                expected = await staging.stage(state, step=3)
                snapshot = await hasty.stage(state, step=3)
                sealed: list[Manifest] = []
                source = WritableSnapshot(snapshot, on_seal=sealed.append)
                stop = source.segment_bytes if read is None else read
                for start in range(0, stop, CHUNK // 2):
                    source.views(start, min(start + CHUNK // 2, stop))
                found = source.seal()
                assert source.seal() is found
                expected.release()
                snapshot.release()
                return expected.manifest, found, sealed

        expected, found, sealed = asyncio.run(staged())
        assert found.header == expected.header
        assert found.digests == expected.digests
        assert sealed == [found]
