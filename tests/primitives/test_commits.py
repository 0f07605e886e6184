"""What a save builds, replaces and sweeps, step by step, and how a step fails."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import list_checkpoints
from aiockpt.errors import StorageError
from aiockpt.format.chunks import ChunkHasher
from aiockpt.storage import commit, retention
from aiockpt.storage import files as _files
from aiockpt.storage.commit import Draft
from aiockpt.storage.retention import retire, sweep
from tests.support.saving import (
    load,
    names,
    save,
    save_by_two,
    sync_checkpointer,
)
from tests.support.shortages import small_disk

FILE, MARKER = "checkpoint_0.safetensors", "commit.json"


def steps(directory: Path) -> list[int]:
    """Return the steps that are listed."""
    return [checkpoint.step for checkpoint in list_checkpoints(directory)]


@pytest.fixture
def no_exchange(monkeypatch) -> None:
    """Have a file system that cannot exchange names."""
    monkeypatch.setattr(commit, "exchange", lambda *_: False)


@pytest.mark.usefixtures("no_exchange")
def test_a_replacement_by_two_renames(tmp_path, monkeypatch) -> None:
    """The old one is found between them, and what others put there moves along."""
    path = save_by_two(tmp_path / "last")
    (path / "tokenizer.json").write_text("{}")
    renames = []

    def rename(old: Path, new: Path) -> None:
        renames.append((load(path, rank=0), new.name))
        os.replace(old, new)

    monkeypatch.setattr(os, "rename", rename)
    save(path, {"a": 2})
    assert load(path) == {"a": 2}
    assert {"rank": 0} in [state for state, _ in renames]
    assert ".last.old" in [name for _, name in renames]
    assert names(tmp_path) == ["last"]
    assert names(path) == [FILE, MARKER, "tokenizer.json"]


@pytest.mark.usefixtures("no_exchange")
def test_the_name_of_the_old_one_is_taken(tmp_path) -> None:
    """The error names it, and what to do."""
    path = save(tmp_path / "s", {"a": 1})
    (tmp_path / ".s.old" / FILE).mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(StorageError, match="move it away") as caught:
            save(path, {"a": 2})
        assert caught.value.path == str(tmp_path / ".s.old")
    assert load(path) == {"a": 1}


@pytest.mark.usefixtures("no_exchange")
def test_a_long_name_without_exchange(tmp_path) -> None:
    """Replacing and retiring leave nothing, though the trash has a longer name."""
    name = "x" * 248
    for step in (1, 2, 2, 3):
        save(tmp_path / f"{name}{step}", {"a": step}, keep_last=1)
    assert names(tmp_path) == [f"{name}3"]


def test_one_that_was_just_replaced_stays(tmp_path, monkeypatch) -> None:
    """A checkpoint that was just replaced stays, also if no lock says so."""
    for step in (1, 2):
        save(tmp_path / f"s-{step}", {"a": step})
    found = list_checkpoints(tmp_path)
    save(tmp_path / "s-1", {"a": 3})
    monkeypatch.setattr(retention, "checkpoints_in", lambda _: found)
    assert retire(tmp_path, keep_last=1) == []
    assert load(tmp_path / "s-1") == {"a": 3}


def test_one_that_cannot_go_keeps_no_other(tmp_path, monkeypatch, caplog) -> None:
    """The save is well, and a warning says what stays."""
    for step in (1, 2, 3):
        save(tmp_path / f"s-{step}", {"a": step})
    set_aside = _files.set_aside

    def stuck(path: Path, suffix: str) -> Path:
        if path.name == "s-1":
            raise PermissionError(1, "not yours")
        return set_aside(path, suffix)

    monkeypatch.setattr(retention, "set_aside", stuck)
    save(tmp_path / "s-4", {"a": 4}, keep_last=1)
    assert names(tmp_path) == ["s-1", "s-4"]
    assert "old checkpoints are not removed" in caplog.text
    assert "s-1: not yours" in caplog.text


def test_a_dead_save_is_removed(tmp_path) -> None:
    """Its files are not locked any more; one live rank protects all files."""
    draft = Draft(tmp_path / "s-1", 0, durable=False)
    (tmp_path / ".s-1.part" / MARKER).touch()  # as it is being written
    sweep(tmp_path, shared=False)
    assert names(tmp_path / ".s-1.part") == [f"{FILE}.tmp", MARKER]
    save(tmp_path / "s-2", {"a": 1})
    assert ".s-1.part" in names(tmp_path)
    draft.discard()
    draft.close()


def test_among_hosts_it_must_be_old(tmp_path) -> None:
    """Locks of other hosts may be invisible."""
    Draft(tmp_path / "s-1", 0, durable=False).close()
    part = tmp_path / ".s-1.part"
    sweep(tmp_path, shared=True)
    assert names(tmp_path) == [".s-1.part"]
    for each in (*part.iterdir(), part):
        os.utime(each, (time.time() - 7200,) * 2)
    assert sweep(tmp_path, shared=True) == [part]


def test_a_new_save_goes_on_in_the_directory_of_a_dead_one(tmp_path) -> None:
    """What the dead one, of more ranks, has left there is not committed."""
    for rank in (0, 1):
        with Draft(tmp_path / "s-1", rank, durable=False) as draft:
            draft.keep_file()
    lock = os.open(tmp_path / ".s-1.part" / "checkpoint_1.safetensors", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # or it would be swept
    path = save(tmp_path / "s-1", {"a": 1})
    os.close(lock)
    assert names(path) == [FILE, MARKER]


def test_a_digest_that_fails(tmp_path, monkeypatch) -> None:
    """It is computed in a thread behind the writing, which hears of it."""
    save(tmp_path / "s", {"a": 1})
    seen: list[int] = []
    update = ChunkHasher.update

    def failing(self: ChunkHasher, start: int, *views: Any) -> Any:
        seen.append(start)
        if len(seen) == 2:
            raise MemoryError("injected")
        return update(self, start, *views)

    monkeypatch.setattr(ChunkHasher, "update", failing)
    with pytest.raises(MemoryError, match="injected"):
        save(tmp_path / "s", {"a": torch.zeros(3 << 20)})
    assert load(tmp_path / "s") == {"a": 1}
    assert names(tmp_path) == ["s"]


@pytest.mark.parametrize(
    "at", ["checkpointers.writer._Save.confirm", "storage.commit.Draft.__exit__"]
)
def test_a_signal_between_the_commit_and_the_report(
    tmp_path, monkeypatch, at: str
) -> None:
    """Its handler raises; the save counts as written."""

    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"aiockpt.{at}", interrupted)
    with sync_checkpointer() as made:
        with pytest.raises(KeyboardInterrupt):
            made.save({"a": 1}, tmp_path / "step-1")
        now = made.statistics()
        assert (now.written, now.failed) == (1, 0)
    assert load(tmp_path / "step-1") == {"a": 1}


@pytest.mark.usefixtures("no_exchange")
def test_a_name_where_another_file_system_is_mounted(tmp_path) -> None:
    """It cannot be taken; the error says so, and what is there stays."""
    with small_disk(tmp_path / "step-1", 1 << 20) as disk:
        with pytest.raises(StorageError, match=r"step-1: .*busy.* directory below"):
            save(disk, {"a": 1})
        assert names(tmp_path) == ["step-1"]
        assert names(disk) == []
