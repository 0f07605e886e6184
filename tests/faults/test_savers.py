"""Savers that get in each other's way, or die around the commit of a checkpoint."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.checkpointers import WriterHook
from aiockpt.errors import AiockptError, StorageError
from aiockpt.storage.interface import find_checkpoint
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.saving import load, names, save

pytestmark = pytest.mark.timeout(300)


def refuse(*_: Any) -> None:
    """Have no locks, as some file systems."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@proves("fault 63")
@pytest.mark.parametrize("locks", ["work", "refuse", "say nothing"])
def test_two_savers_of_one_path(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch, locks: str
) -> None:
    """Who was told that it has saved has; what is there is one saver's, whole."""
    path, fsync = tmp_path / "c" / "step-1", os.fsync
    chance = record.chance()

    def slow(fd: int) -> None:
        threading.Event().wait(chance.random() / 100)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    if locks != "work":
        silent = refuse if locks == "refuse" else lambda *_: None
        monkeypatch.setattr(fcntl, "flock", silent)

    def saved(value: float) -> bool:
        with suppress(StorageError):
            save(path, {"w": torch.full((1000,), value)}, fsync=True)
            return True
        return False

    last = 0.0
    with ThreadPoolExecutor(2) as pool:
        for number in range(0, record.pick(20, 400), 2):
            values = number + 1.0, number + 2.0
            told = [
                v for v, ok in zip(values, pool.map(saved, values), strict=True) if ok
            ]
            assert told or locks != "work"
            (found,) = load(path)["w"].unique().tolist() if told or last else (0.0,)
            assert found in (told or [last])
            last = found
            record.ran()
    save(path, {"w": 1})
    assert names(path.parent) == ["step-1"]
    record.within("torn checkpoints", 0, 0, unit="")


class Dying(WriterHook):
    """Dies before or after the commit."""

    def pre_commit(self, path: str, die: str = "", **_: Any) -> None:
        if die == "before":
            os.kill(os.getpid(), signal.SIGKILL)

    def post_commit(self, path: str, die: str = "", **_: Any) -> None:
        if die == "after":
            os.kill(os.getpid(), signal.SIGKILL)


@proves("fault 64")
@pytest.mark.asyncio
@pytest.mark.allow_error_logs
@pytest.mark.parametrize("die", ["before", "after"])
async def test_a_process_that_dies_around_the_commit(
    tmp_path: Path, record: Record, caplog: pytest.LogCaptureFixture, die: str
) -> None:
    """Everything agrees with the disk."""
    async with aiockpt.make_async_checkpointer(commit_hook=Dying()) as made:
        for step in range(record.pick(2, 20)):
            path = tmp_path / f"step-{step}"
            hook: Any = {"die": die}
            handle = await made.save({"w": torch.ones(9)}, path, **hook)
            with suppress(AiockptError):
                await handle.written()
            there = find_checkpoint(path) is not None
            assert there is (die == "after")
            assert (handle.error is None) is there
            now = made.statistics()
            assert (now.written, now.failed)[not there] == step + 1
            denied = [
                each for each in caplog.messages if f"{path} is not saved" in each
            ]
            assert bool(denied) is not there
            record.ran()
