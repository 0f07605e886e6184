"""Two savers of one path: one is told that it has saved, the other one why not."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import aiockpt
from aiockpt.checkpointers import WriterHook
from aiockpt.errors import StorageError
from aiockpt.storage import commit, interface, retention
from aiockpt.storage.directory import part_of
from aiockpt.storage.lock import SaveLock, holder_of
from aiockpt.storage.retention import retire, sweep
from tests.support.saving import (
    Gate,
    load,
    names,
    pass_gate,
    save,
    sync_checkpointer,
)
from tests.support.waiting import wait_until

BUSY = "another process is writing it"


class Held(WriterHook):
    """Waits before the commit until it may go on."""

    def __init__(self, gate: str) -> None:
        self._gate = gate

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        Path(f"{self._gate}.reached").touch()
        pass_gate(self._gate)

    def post_commit(self, path: str, **kwargs: Any) -> None:
        pass


@pytest.fixture
def path(tmp_path) -> Path:
    """Return a checkpoint that will be replaced."""
    return save(tmp_path / "c" / "step-1", state(0))


def state(value: float) -> dict[str, Any]:
    """Return what a saver saves."""
    return {"w": torch.full((1000,), float(value))}


def value_at(path: Path, rank: int = 0) -> float:
    """Return what is there, all of it the same saver's."""
    (found,) = load(path, rank=rank)["w"].unique().tolist()
    return float(found)


def reached(gate: Gate) -> None:
    """Wait until the saver waits before its commit."""
    wait_until(Path(f"{gate.path}.reached").exists, "the end of the writing")


PROGRAM = """
import sys
import torch, aiockpt
from tests.primitives.test_two_savers import Held, state
if __name__ == "__main__":
    with aiockpt.make_sync_checkpointer(commit_hook=Held(sys.argv[2])) as saver:
        saver.save(state(1), sys.argv[1])
"""


def begun(kind: str, path: Path, gate: Gate, pool: ThreadPoolExecutor) -> Future[Any]:
    """Begin a save of 1 that waits before its commit."""

    def save_it() -> None:
        if kind == "thread":
            with sync_checkpointer(Held(gate.path)) as saver:
                saver.save(state(1), path)
        elif kind == "background":
            hook = Held(gate.path)
            with aiockpt.make_background_checkpointer(commit_hook=hook) as made:
                made.save(state(1), path).result()
        else:
            command = [sys.executable, "-c", PROGRAM, str(path), gate.path]
            root = Path(__file__).parents[2]
            subprocess.run(command, check=True, cwd=root, timeout=120)

    future = pool.submit(save_it)
    reached(gate)
    return future


@pytest.mark.parametrize("kind", ["thread", "process", "background"])
def test_the_second_one_is_told(tmp_path, path, gate, kind: str) -> None:
    """The second saver fails while the first one waits with a complete file."""
    with ThreadPoolExecutor(1) as pool:
        first = begun(kind, path, gate, pool)
        with pytest.raises(StorageError) as caught:
            save(path, state(2))
        assert caught.value.path == str(path)
        assert f"{BUSY} (process " in str(caught.value)
        assert "save to another path" in str(caught.value)
        other = save(path.parent / "step-2", state(2), keep_last=1)  # and sweeps
        assert value_at(path) == 0
        gate.open()
        first.result(60)
    assert value_at(path) == 1
    assert value_at(other) == 2
    assert names(path.parent) == ["step-1", "step-2"]


def test_the_second_one_of_several_ranks_is_told(tmp_path, path, gate) -> None:
    """Each of its ranks: the first one's files are its own until they are committed."""
    with ThreadPoolExecutor(1) as pool:
        first = begun("thread", path, gate, pool)
        with pytest.raises(StorageError, match=BUSY):
            commit.Draft(path, 0, durable=False)
        with commit.Draft(path, 1, durable=False) as other:
            with pytest.raises(StorageError, match=BUSY):
                commit.Draft(path, 1, durable=False)
            other.keep_file()
            with pytest.raises(StorageError, match=BUSY):
                commit.Draft(path, 1, durable=False)
        gate.open()
        first.result(60)
    assert value_at(path) == 1
    assert names(path.parent) == ["step-1"]


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_file_that_another_rank_has_renamed_is_not_foreign(
    path, monkeypatch, comes_back: bool
) -> None:
    """Rank 0 looks at the directory while the other one works in it."""
    real = os.lstat
    with commit.Draft(path, 1, durable=False) as other:

        def renamed(place: Any) -> Any:
            if Path(place) == other.temporary and other.temporary.exists():
                os.rename(other.temporary, other.path)
                try:
                    return real(place)
                finally:
                    if comes_back:
                        os.rename(other.path, other.temporary)
                        monkeypatch.undo()
            return real(place)

        monkeypatch.setattr(os, "lstat", renamed)
        with commit.Draft(path, 0, durable=False) as draft:
            draft.discard()
        other.discard()
    assert names(path.parent) == ["step-1"]


def paused(monkeypatch, at: str) -> tuple[threading.Event, threading.Event]:
    """Let the first call of a function of the commit wait; give its two events."""
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(60)

    before(monkeypatch, commit, at, wait)
    return inside, go_on


@pytest.mark.parametrize("at", ["_remove_others", "next_serial", "encode_commit"])
def test_nor_in_the_middle_of_the_commit(path, monkeypatch, at: str) -> None:
    """The lock is one, from opening to rename."""
    inside, go_on = paused(monkeypatch, at)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(save, path, state(1))
        assert inside.wait(60)
        with pytest.raises(StorageError, match=BUSY):
            save(path, state(2))
        go_on.set()
        first.result(60)
    assert value_at(path) == 1


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
def test_what_another_program_puts_there_meanwhile_stays(
    tmp_path, path, gate, monkeypatch, kind: str, exchanges: bool, is_new: bool
) -> None:
    """The save fails, and says what is there."""
    if not exchanges:
        monkeypatch.setattr(commit, "exchange", lambda *_: False)
    if is_new:
        shutil.rmtree(path)
    with ThreadPoolExecutor(1) as pool:
        first = begun("thread", path, gate, pool)
        shutil.rmtree(path, ignore_errors=True)
        precious = path if kind == "file" else path / "precious"
        if kind == "link":
            (tmp_path / "elsewhere").mkdir()
            path.symlink_to(tmp_path / "elsewhere")
        elif kind == "directory":
            path.mkdir()
        precious.write_text("precious")
        gate.open()
        with pytest.raises(StorageError, match=r"it holds files|it is a file"):
            first.result(60)
    assert names(path.parent) == ["step-1"]
    assert precious.read_text() == "precious"


def test_a_process_of_another_container_is_not_taken_for_dead(path) -> None:
    """Its number says nothing here, though the kernel is the same one."""
    with SaveLock(path, wait=0) as lock:
        said = msgspec.json.decode(lock.path.read_bytes())
        nobody = subprocess.Popen([sys.executable, "-c", ""])
        nobody.wait(60)
        said["process"] = nobody.pid
        lock.path.write_bytes(msgspec.json.encode(said))
        holder = holder_of(lock.path)
        assert holder is not None
        assert holder.is_dead()
        said["kernel"] = said["kernel"].replace("pid:[", "pid:[1")
        lock.path.write_bytes(msgspec.json.encode(said))
        holder = holder_of(lock.path)
        assert holder is not None
        assert not holder.is_dead()


def test_a_lock_whose_taking_was_interrupted_is_free(path, monkeypatch) -> None:
    """A signal handler's error is raised unchanged, and the lock is free."""

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "ftruncate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(path, state(1))
    save(path, state(2))
    assert value_at(path) == 2


def no_locks(*_: Any) -> None:
    """Refuse, as a file system without locks does."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def silent(*_: Any) -> None:
    """Say that it is locked, as a host does whose locks do not reach another one."""


@pytest.mark.parametrize("place", [(commit, "SaveLock"), (interface, "Draft")])
def test_what_nobody_has_got_is_given_back(path, monkeypatch, place: Any) -> None:
    """A signal's handler raises when it is made, and before it has a name."""
    module, name = place
    real = getattr(module, name)

    def interrupted(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        real(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(path, state(1))
    save(path, state(2))
    assert value_at(path) == 2
    assert names(path.parent) == ["step-1"]


@pytest.mark.parametrize("flock", [no_locks, silent])
class TestWithoutLocks:
    """Nothing is torn, and the one whose save is not there is told."""

    def test_the_one_that_was_overtaken_is_told(
        self, path, gate, monkeypatch, flock
    ) -> None:
        """It has waited before its commit while another one has saved."""
        monkeypatch.setattr(fcntl, "flock", flock)
        with ThreadPoolExecutor(1) as pool:
            first = begun("thread", path, gate, pool)
            save(path, state(2))
            assert value_at(path) == 2
            gate.open()
            with pytest.raises(StorageError, match="another process is saving to it"):
                first.result(60)
        assert value_at(path) == 2
        assert names(path.parent) == ["step-1"]

    @pytest.mark.parametrize("at", ["_described", "next_serial", "encode_commit"])
    def test_two_commits_at_once(self, path, monkeypatch, flock, at: str) -> None:
        """Each is whole, one after the other, and none has a file of the other one."""
        monkeypatch.setattr(fcntl, "flock", flock)
        inside, go_on = paused(monkeypatch, at)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(save, path, state(1))
            assert inside.wait(60)
            save(path, state(2))
            assert value_at(path) == 2
            go_on.set()
            first.result(60)
        assert value_at(path) == 1
        assert names(path.parent) == ["step-1"]

    def test_a_sweep_leaves_what_lives(self, path, monkeypatch, flock) -> None:
        """The lock names a living process, and nothing is an hour old."""
        monkeypatch.setattr(fcntl, "flock", flock)
        with commit.Draft(path.parent / "step-2", 0, durable=False) as draft:
            sweep(path.parent, shared=False)
            save(path.parent / "step-3", state(3), keep_last=1)
            assert draft.temporary.exists()
            draft.keep_file()
            sweep(path.parent, shared=False)
            assert draft.path.exists()
            draft.discard()


def before(monkeypatch, module: Any, name: str, act: Callable[[], object]) -> None:
    """Let something happen right before the first call of a function."""
    real, calls = getattr(module, name), itertools.count()

    def slow(*args: Any, **kwargs: Any) -> Any:
        if not next(calls):
            act()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, slow)


class TestRetentionBesideASave:
    """Another process removes the old checkpoint of the path at the worst moment."""

    @pytest.fixture(autouse=True)
    def newer(self, path: Path) -> Path:
        """Return a newer checkpoint, because of which retention removes the old one."""
        return save(path.with_name("step-2"), state(2))

    def test_while_the_save_looks_at_it(self, path, monkeypatch) -> None:
        """A directory that is going is not taken for one with other files."""
        before(monkeypatch, commit, "is_ours", lambda: retire(path.parent, keep_last=1))
        save(path, state(1))
        assert value_at(path) == 1

    @pytest.mark.parametrize("flock", [no_locks, silent])
    @pytest.mark.parametrize("swaps", [True, False])
    @pytest.mark.parametrize(
        "at", ["next_serial", "_check_free", "exchange", "move_directory"]
    )
    def test_while_the_save_replaces_it(
        self, path, monkeypatch, flock, swaps: bool, at: str
    ) -> None:
        """The reader works without locks, whether or not the system exchanges names."""
        if swaps and at == "move_directory":
            pytest.skip("it is not called")
        monkeypatch.setattr(fcntl, "flock", flock)
        if not swaps:
            monkeypatch.setattr(commit, "exchange", no_swap)
        before(monkeypatch, commit, at, lambda: retire(path.parent, keep_last=1))
        save(path, state(1))
        assert value_at(path) == 1

    def test_what_was_replaced_meanwhile_does_not_move(self, path, monkeypatch) -> None:
        """The directory never moves, since a reader or a crash could come then."""

        def moved(path: Path, suffix: str) -> Path:
            raise AssertionError(path)

        before(monkeypatch, retention, "SaveLock", lambda: save(path, state(1)))
        monkeypatch.setattr(retention, "set_aside", moved)
        assert not retire(path.parent, keep_last=1)
        assert value_at(path) == 1

    @pytest.mark.parametrize("at", ["_remove_from_trash", "others_in", "remove_ours"])
    def test_a_sweep_is_faster(self, path, newer, monkeypatch, at: str) -> None:
        """A save to another path sweeps the trash of the directory."""

        def swept() -> None:
            sweep(path.parent, shared=False)

        before(monkeypatch, retention, at, swept)
        (removed,) = retire(path.parent, keep_last=1)
        assert removed.path == path
        assert names(path.parent) == [newer.name]

    def test_a_sweep_removes_the_directory_to_build_in(self, path, monkeypatch) -> None:
        """It is not taken for a file."""
        part = part_of(path)
        part.mkdir()
        exists = Path.exists

        def gone(self: Path, **kwargs: Any) -> bool:
            found = exists(self, **kwargs)
            if self == part:
                with suppress(FileNotFoundError):
                    part.rmdir()
            return found

        monkeypatch.setattr(Path, "exists", gone)
        save(path, state(1))
        assert value_at(path) == 1


def no_swap(one: Path, other: Path) -> bool:
    """Say that the system cannot swap names, as on an older network disk."""
    os.stat(other)
    return False
