"""A save: what it writes, when it calls the hooks, and what a failure leaves."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from aiockpt import (
    CheckpointerConfig,
    Progress,
    SyncCheckpointer,
    latest,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from aiockpt.checkpointers import (
    CheckpointReader,
    CheckpointWriter,
    WriterHook,
)
from aiockpt.errors import StorageError
from aiockpt.testing import assert_same
from tests.support.proofs import proves
from tests.support.saving import (
    ALONE,
    config,
    load,
    names,
    save,
    sync_checkpointer,
    training_state,
)

FILE = "checkpoint_0.safetensors"
BLOCK = 4 << 20
"""Bytes that are digested and written at once."""


KEYWORDS: Any = {"epoch": 3}
"""What a hook or a writer of one's own takes."""


class TestFile:
    """A rank's file is a safetensors file with a manifest."""

    def test_other_tools_read_it(self, tmp_path) -> None:
        """It is a safetensors file with the names of the tensors."""
        state = training_state()
        path = save(tmp_path / "s-3", state) / FILE
        found = load_file(path)
        moments = state["optimizer"]["state"][0]["exp_avg"]
        assert torch.equal(found["model.norm.bias"], state["model"]["norm.bias"])
        assert torch.equal(found["optimizer.state[0].exp_avg"], moments)

    def test_blocks_and_chunks_need_not_meet(self, tmp_path) -> None:
        """A block may end inside a chunk, and may take several system calls."""
        state = {"a": torch.randn(3 * BLOCK // 4 + 1000), "b": torch.randn(7)}
        state |= {f"{i}": torch.full((3,), float(i)) for i in range(2000)}
        path = save(tmp_path / "s", state, chunk_bytes=BLOCK + 64)
        assert_same(load(path), state)

    def test_it_is_written_in_large_pieces(self, tmp_path, monkeypatch) -> None:
        """Aligned, in order, from the tensors' own memory; the header comes last."""
        written: list[tuple[int, int]] = []
        places: set[int] = set()
        real = os.pwritev

        def seen(fd: int, views, at: int) -> int:
            done = real(fd, views, at)
            written.append((at, done))
            places.update(np.frombuffer(view, np.uint8).ctypes.data for view in views)
            return done

        monkeypatch.setattr(os, "pwritev", seen)
        state = {f"{i}": torch.ones(BLOCK // 256) for i in range(320)}
        path = save(tmp_path / "s", state) / FILE
        *pieces, header = written
        assert header == (0, pieces[0][0])
        assert [at for at, _ in pieces[1:]] == [n * BLOCK for n in range(1, 6)]
        assert sum(size for _, size in pieces) == 5 * BLOCK
        assert sum(pieces[-1]) == path.stat().st_size
        assert {each.data_ptr() for each in state.values()} <= places

    @proves("cell SyncCheckpointer.save: success")
    @pytest.mark.parametrize("fsync", [True, False])
    def test_the_disk_confirms_each_step_before_the_next(
        self, tmp_path, monkeypatch, fsync: bool
    ) -> None:
        """File, its name, marker, its name, and the name of the checkpoint."""
        said: list[str] = []
        real, rename = os.fsync, os.rename

        def seen(fd: int) -> None:
            real(fd)
            said.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")

        def renamed(one, other) -> None:
            rename(one, other)
            said.append(f"name {Path(other).name}")

        monkeypatch.setattr(os, "fsync", seen)
        monkeypatch.setattr(os, "rename", renamed)
        save(tmp_path / "new" / "s", {"a": 1}, fsync=fsync)
        expected = [
            *(f"sync {tmp_path.name}", f"sync {FILE}.tmp", f"name {FILE}"),
            *("sync .s.part", "name .s.*.part"),  # which nobody else knows
            *("sync commit.json.tmp", "name commit.json"),
            *("sync .s.*.part", "name s", "sync new"),
        ]
        said = [re.sub(r"\.[0-9a-f]{8}\.", ".*.", each) for each in said]
        assert said == [each for each in expected if fsync or each[:4] == "name"]


class Hook(WriterHook):
    """Notes what it is called with, and what it sees then."""

    def __init__(self, directory: Path, *, fails: str = "") -> None:
        self.calls: list[object] = []
        self._directory, self._fails = directory, fails

    def _note(self, what: str, path: str, kwargs) -> None:
        found = latest(self._directory)
        self.calls.append((what, path, kwargs, found and found.step))
        if self._fails == what:
            raise KeyError(what)

    def pre_commit(self, path: str, **kwargs) -> None:
        self._note("pre", path, kwargs)

    def post_commit(self, path: str, **kwargs) -> None:
        self._note("post", path, kwargs)


class CoroutineHook(Hook):
    """The same, as coroutine functions."""

    async def pre_commit(self, path: str, **kwargs) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self._note("pre", path, kwargs)

    async def post_commit(self, path: str, **kwargs) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self._note("post", path, kwargs)


@pytest.mark.parametrize("kind", [Hook, CoroutineHook])
class TestHooks:
    """Called around the commit, with the keywords of ``save``."""

    @pytest.mark.parametrize("beside_a_loop", [False, True])
    def test_before_and_after(self, tmp_path, kind, beside_a_loop: bool) -> None:
        """The path is that of ``save``; the checkpoint is there after, not before."""
        hook, path = kind(tmp_path), tmp_path / "s-5"
        told: list[Progress] = []

        async def saving() -> None:
            state = {"a": torch.ones(3 * BLOCK // 4)}
            with sync_checkpointer(hook) as checkpointer:
                checkpointer.save(state, path, **KEYWORDS, progress=told.append)

        if beside_a_loop:
            asyncio.run(saving())
        else:
            with pytest.raises(StopIteration):
                saving().send(None)
        given = {"epoch": 3}
        expected = [("pre", str(path), given, None), ("post", str(path), given, 5)]
        assert hook.calls == expected
        done = [each.bytes_done for each in told]
        assert (done[0], done[-1], len(done)) == (0, 3 * BLOCK, 5)
        assert all(0 < b - a <= BLOCK for a, b in pairwise(done))

    @proves("cell SaveHandle.written: error", "cell SyncCheckpointer.save: error")
    @pytest.mark.parametrize(("fails", "there"), [("pre", 1), ("post", 2)])
    def test_one_that_fails(self, tmp_path, kind, fails: str, there: int) -> None:
        """A hook that fails before the commit prevents it; later it does not."""
        save(tmp_path / "s-5", {"a": 1})
        checkpointer = sync_checkpointer(kind(tmp_path, fails=fails))
        with checkpointer, pytest.raises(KeyError, match=fails):
            checkpointer.save({"a": 2}, tmp_path / "s-5")
        assert load(tmp_path / "s-5") == {"a": there}
        assert names(tmp_path) == ["s-5"]


class TestFailures:
    """A save that fails leaves what was there, and nothing else."""

    @pytest.mark.parametrize("fsync", [True, False])
    def test_a_close_that_fails(self, tmp_path, monkeypatch, fsync: bool) -> None:
        """It matters before the commit, and only if the disk was not asked before."""
        close, denied = os.close, []

        def closed(fd: int) -> None:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            mine = is_file and ".part" in os.readlink(f"/proc/self/fd/{fd}")
            close(fd)
            if mine:
                denied.append(fd)
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "close", closed)
        if fsync:
            save(tmp_path / "s", {"a": 1}, fsync=True)
        else:
            with pytest.raises(StorageError, match="Input/output error"):
                save(tmp_path / "s", {"a": 1}, fsync=False)
        monkeypatch.undo()
        assert names(tmp_path) == (["s"] if fsync else [])
        assert bool(denied) != fsync


class Own(CheckpointWriter):
    """A writer of one's own, which knows one word."""

    def write(self, path, state_dict, **kwargs) -> None:
        assert kwargs == {"epoch": 3}
        super().write(path, state_dict, **kwargs)


@pytest.mark.allow_error_logs
def test_what_is_told(tmp_path, events) -> None:
    """A hook hears of each save and load; a callback that raises does not matter."""

    def refuse(_: Progress) -> None:
        raise KeyError

    with sync_checkpointer() as checkpointer:
        checkpointer.save({"a": 1}, tmp_path / "s-3", progress=refuse)
        checkpointer.load(tmp_path / "s-3")
    assert [(each.stop, each.step) for each in events] == [("write", 3), ("load", None)]
    assert all(each.detail == str(tmp_path / "s-3") for each in events)
    with SyncCheckpointer(Own(config(), ALONE), CheckpointReader(ALONE)) as made:
        made.save({"a": 1}, tmp_path / "own", progress=print, **KEYWORDS)
        assert made.statistics().written == 1


def test_pickles_are_opted_into(tmp_path) -> None:
    """The save and the load must both allow pickles."""
    path = save(tmp_path / "s", {"x": 1 + 2j, "y": slice(3)}, allow_pickle=True)
    assert CheckpointReader(ALONE, allow_pickle=True).read(path)[0]["y"] == slice(3)


class TestUnchanged:
    """A save whose tensors are those of the save before it says so.

    A trainer that saves a copy of its first step for ever loses everything, and nobody
    notices as long as files appear.
    """

    def state(self, step: int, fill: float = 1.0):
        """Return a state dict whose plain value says the step."""
        return {"step": step, "weight": torch.full((1000,), fill), "b": torch.ones(3)}

    def check(self, events, log, paths) -> None:
        """Check that the last event, and one line of the log, name both saves."""
        assert events[-1].unchanged
        assert events[-1].level == logging.WARNING
        (line,) = [x.getMessage() for x in log.records if x.levelname == "WARNING"]
        for text in (events[-1].detail, line):
            assert all(word in text for word in [*map(str, paths), "step 1", "step 2"])

    @pytest.mark.parametrize("process", [None, False])
    def test_it_warns(self, tmp_path, events, caplog, process: bool | None) -> None:
        """The handle, the event and one line of the log have the warning."""
        paths = [tmp_path / f"step-{step}" for step in (1, 2, 3)]
        states = self.state(1), self.state(2), self.state(3, fill=2.0)

        async def main() -> None:
            background = CheckpointerConfig(use_process=bool(process))
            async with make_async_checkpointer(background) as made:
                for state, path in zip(states, paths, strict=True):
                    handle = await made.save(state, path)
                    await handle.written()
                    assert handle.unchanged is (path == paths[1])

        if process is None:
            with make_sync_checkpointer() as made:
                for state, path in zip(states, paths, strict=True):
                    made.save(state, path)
        else:
            asyncio.run(main())
        written = [each for each in events if each.stop == "write"]
        assert [each.unchanged for each in written] == [False, True, False]
        self.check(written[:2], caplog, paths[:2])

    def test_what_is_meant_to_be_equal_is_no_warning(self, tmp_path, events) -> None:
        """The same step as "best" beside "last", and states without tensors."""
        with make_sync_checkpointer() as made:
            for name in ("last", "best", "best"):
                made.save(self.state(5), tmp_path / name, step=5)
            for step in (6, 7):
                made.save({"step": step}, tmp_path / f"step-{step}")
        assert [each.unchanged for each in events] == [False, True, True, False, False]
        assert events[1].level == logging.INFO
        assert events[2].level == logging.WARNING
