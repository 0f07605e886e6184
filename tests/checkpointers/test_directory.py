"""Checkpoint directories: what is whole, what is listed, what goes."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

import pytest

from aiockpt.errors import CheckpointNotFoundError, StorageError
from aiockpt.storage import commit, retention
from aiockpt.storage import files as _files
from aiockpt.storage.commit import Draft
from aiockpt.storage.directory import (
    MARKER,
    checkpoint_at,
    find_checkpoint,
    latest,
    list_checkpoints,
    step_of,
)
from aiockpt.storage.retention import retire, sweep
from tests.support.saved import load, names, save, sync_checkpointer

FILE = "checkpoint_0.safetensors"


def steps(directory: Path) -> list[int]:
    """Return the steps that are listed."""
    return [checkpoint.step for checkpoint in list_checkpoints(directory)]


class TestWhole:
    """A checkpoint is there when its marker and its files are."""

    def test_a_saved_one_is(self, tmp_path: Path) -> None:
        """The marker says its step, its ranks and its files."""
        path = save(tmp_path / "step-7", {"a": 1})
        found = checkpoint_at(path)
        assert (found.step, found.world_size, found.path) == (7, 1, path)
        assert found.nbytes == (path / FILE).stat().st_size
        assert latest(tmp_path) == found
        assert names(tmp_path) == ["step-7"]
        assert names(path) == [FILE, MARKER]

    @pytest.mark.parametrize("lost", [MARKER, FILE])
    def test_without_its_marker_or_a_file_it_is_not(
        self, tmp_path: Path, lost: str
    ) -> None:
        """Neither `load`, nor `latest`, nor a list knows it (C10)."""
        path = save(tmp_path / "step-7", {"a": 1})
        (path / lost).unlink()
        assert find_checkpoint(path) is None
        assert latest(tmp_path) is None
        with pytest.raises(CheckpointNotFoundError) as caught:
            load(path)
        assert isinstance(caught.value, FileNotFoundError)
        assert caught.value.path == str(path)

    def test_with_a_short_file_it_is_not(self, tmp_path: Path) -> None:
        """The marker knows how long each file is."""
        path = save(tmp_path / "step-7", {"a": 1})
        os.truncate(path / FILE, 100)
        with pytest.raises(CheckpointNotFoundError, match="not of their full size"):
            load(path)
        assert steps(tmp_path) == []

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (b"{", "not a valid marker"),
            (b"\xff", "not a valid marker"),
            (b'{"aiockpt": 2}', "format version 2; this library knows version 1"),
            (
                b'{"aiockpt": 1, "step": -1, "world_size": 1, "files": {}}',
                "not a valid marker",
            ),
            (
                b'{"aiockpt": 1, "step": 1, "world_size": 1, "files": {}}',
                "names 0 files",
            ),
        ],
    )
    def test_a_marker_of_another_kind(
        self, tmp_path: Path, text: bytes, reason: str
    ) -> None:
        """It is named, with what is wrong; a list goes on without it."""
        path = save(tmp_path / "step-7", {"a": 1})
        (path / MARKER).write_bytes(text)
        with pytest.raises(StorageError, match=reason):
            load(path)
        assert steps(tmp_path) == []

    def test_a_marker_that_points_outside(self, tmp_path: Path) -> None:
        """Names in it are no paths."""
        path = save(tmp_path / "step-7", {"a": 1})
        text = (path / MARKER).read_text().replace(FILE, f"../x/{FILE}")
        (path / MARKER).write_text(text)
        with pytest.raises(StorageError, match="is not the name of a rank's file"):
            load(path)

    @pytest.mark.parametrize("ranks", [2, 10**18])
    def test_a_marker_that_does_not_name_every_rank(
        self, tmp_path: Path, ranks: int
    ) -> None:
        """Rank 1 would find out too late that its file never was."""
        path = save(tmp_path / "step-7", {"a": 1})
        text = (path / MARKER).read_text().replace('size": 1', f'size": {ranks}')
        (path / MARKER).write_text(text)
        with pytest.raises(StorageError, match=f"names 1 files for {ranks} ranks"):
            load(path)
        assert latest(tmp_path) is None

    def test_a_marker_with_an_impossible_name(self, tmp_path: Path) -> None:
        """It does not hide the checkpoints beside it."""
        path = save(tmp_path / "step-7", {"a": 1})
        save(tmp_path / "step-6", {"a": 1})
        text = (path / MARKER).read_text().replace(FILE, "a\\u0000b")
        (path / MARKER).write_text(text)
        assert steps(tmp_path) == [6]

    @pytest.mark.parametrize("name", ["a\0b", "x" * 300, "x" * 5000])
    def test_an_impossible_path(self, tmp_path: Path, name: str) -> None:
        """It is no checkpoint, and nothing can be saved there."""
        with pytest.raises(StorageError):
            save(tmp_path / name, {"a": 1})
        with pytest.raises(StorageError):
            load(tmp_path / name)

    def test_nothing_is_there(self, tmp_path: Path) -> None:
        """Each case is said in its own words."""
        (tmp_path / "empty").mkdir()
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        with pytest.raises(CheckpointNotFoundError, match="no such checkpoint"):
            load(tmp_path / "missing")
        with pytest.raises(CheckpointNotFoundError, match="it holds no marker"):
            load(tmp_path / "empty")
        with pytest.raises(StorageError):
            load(tmp_path / "loop")
        assert latest(tmp_path / "missing") is None
        assert list_checkpoints(tmp_path) == []

    def test_a_link_to_one_is_one(self, tmp_path: Path) -> None:
        """People link their best ones."""
        (tmp_path / "best").symlink_to(save(tmp_path / "step-7", {"a": 1}))
        assert load(tmp_path / "best") == {"a": 1}

    @pytest.mark.parametrize(
        ("name", "step"), [("step-12", 12), ("7", 7), ("best", 0), ("v2-final", 0)]
    )
    def test_the_step_is_in_the_name(self, name: str, step: int) -> None:
        """The number at its end, if it ends in one."""
        assert step_of(f"/checkpoints/{name}") == step


class TestReplacing:
    """A name has the old checkpoint or the new one."""

    def test_a_second_save_replaces_the_first(self, tmp_path: Path) -> None:
        """All of it; nothing of the first is left."""
        path = save(tmp_path / "last", {"a": 1})
        (path / "notes.txt").touch()
        save(path, {"a": 2})
        assert load(path) == {"a": 2}
        assert names(path) == [FILE, MARKER]
        assert names(tmp_path) == ["last"]

    def test_where_names_cannot_be_exchanged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two renames do, and the old one is found between them."""
        path = save(tmp_path / "last", {"a": 1})
        monkeypatch.setattr(commit, "exchange", lambda one, other: False)
        renames = []

        def rename(old: Path, new: Path) -> None:
            renames.append((load(path), new.name))
            os.replace(old, new)

        monkeypatch.setattr(os, "rename", rename)
        save(path, {"a": 2})
        seen = [state for state, _ in renames]
        assert load(path) == {"a": 2}
        assert {"a": 1} in seen
        assert ".last.old" in [name for _, name in renames]
        assert names(tmp_path) == ["last"]

    def test_the_old_one_stands_in(self, tmp_path: Path) -> None:
        """After a crash between the two renames."""
        path = save(tmp_path / "step-3", {"a": 1})
        path.rename(tmp_path / ".step-3.old")
        assert load(path) == {"a": 1}
        found = latest(tmp_path)
        assert found is not None
        assert (found.name, found.step) == ("step-3", 3)
        sweep(tmp_path, shared=False)
        assert load(path) == {"a": 1}
        save(path, {"a": 2})
        assert load(path) == {"a": 2}
        assert names(tmp_path) == ["step-3"]

    def test_a_directory_of_something_else_is_left_alone(self, tmp_path: Path) -> None:
        """What holds files and no checkpoint is not ours to replace."""
        path = tmp_path / "step-1"
        path.mkdir()
        (path / "thesis.tex").touch()
        with pytest.raises(StorageError, match="choose a new directory"):
            save(path, {"a": 1})
        assert names(path) == ["thesis.tex"]
        assert names(tmp_path) == ["step-1"]
        (path / "thesis.tex").unlink()
        save(path, {"a": 1})  # an empty one is taken

    def test_a_file_is_left_alone(self, tmp_path: Path) -> None:
        """It is no directory."""
        (tmp_path / "f").write_text("x")
        with pytest.raises(StorageError, match="it is a file"):
            save(tmp_path / "f", {"a": 1})
        assert (tmp_path / "f").read_text() == "x"

    def test_directories_above_are_made(self, tmp_path: Path) -> None:
        """As many as it takes."""
        path = save(tmp_path / "a" / "b" / "step-1", {"a": 1}, fsync=True)
        assert load(path) == {"a": 1}

    def test_two_processes_with_one_name(self, tmp_path: Path) -> None:
        """The second one is told; the first one goes on."""
        with Draft(tmp_path / "s", 0, durable=False) as draft:
            with pytest.raises(StorageError, match="another process is writing it"):
                Draft(tmp_path / "s", 0, durable=False)
            assert draft.temporary.exists()


class TestLongNames:
    """A name of any length is saved, replaced and retired; or is refused at once."""

    @pytest.mark.parametrize("length", [230, 239, 240, 248, 249])
    @pytest.mark.parametrize("letter", ["x", "\N{BLACK STAR}"])
    @pytest.mark.parametrize("exchange", [True, False])
    def test_it_fits(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        length: int,
        letter: str,
        exchange: bool,
    ) -> None:
        """Nothing is left of what is replaced, or retired: its trash has a name too."""
        if not exchange:
            monkeypatch.setattr(commit, "exchange", lambda *_: False)
        room = length - len("9")
        fill = letter * (room // len(letter.encode()))
        name = fill + "x" * (room - len(fill.encode()))
        assert len(os.fsencode(f"{name}9")) == length
        for step in (1, 2, 2, 3):
            save(tmp_path / f"{name}{step}", {"a": step}, keep_last=1)
        assert names(tmp_path) == [f"{name}3"]
        assert load(tmp_path / f"{name}3") == {"a": 3}

    @pytest.mark.parametrize("length", [250, 255, 256, 5000])
    def test_it_does_not(self, tmp_path: Path, length: int) -> None:
        """What is built beside it would have too long a name."""
        with pytest.raises(StorageError, match="File name too long"):
            save(tmp_path / ("x" * length), {"a": 1})
        assert names(tmp_path) == []


class TestListing:
    """Lists and `latest` go by the step."""

    def test_by_step(self, tmp_path: Path) -> None:
        """Not by the name, nor by age."""
        for step in (10, 9, 100):
            save(tmp_path / f"step-{step}", {"a": step})
        (tmp_path / "other").mkdir()
        (tmp_path / "file").touch()
        assert steps(tmp_path) == [9, 10, 100]
        found = latest(tmp_path)
        assert found is not None
        assert found.step == 100

    def test_one_that_cannot_be_read_is_named(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is passed over, but not in silence: it may be the one that is wanted."""
        save(tmp_path / "s-1", {"a": 1})
        (save(tmp_path / "s-2", {"a": 2}) / MARKER).write_text("{")
        assert steps(tmp_path) == [1]
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert "a checkpoint is left out: " in record.getMessage()
        assert "s-2/commit.json: it is not a valid marker" in record.getMessage()

    def test_a_step_that_was_given(self, tmp_path: Path) -> None:
        """The name need not tell it."""
        with sync_checkpointer() as checkpointer:
            checkpointer.save({"a": 1}, tmp_path / "best", step=55)
        assert steps(tmp_path) == [55]


class TestRetention:
    """Old ones go, but never all (C16)."""

    def test_the_last_few_stay(self, tmp_path: Path) -> None:
        """And those whose step is a round number."""
        for step in range(1, 8):
            save(tmp_path / f"s-{step}", {"a": step}, keep_last=2, keep_every=3)
        assert steps(tmp_path) == [3, 6, 7]
        assert names(tmp_path) == ["s-3", "s-6", "s-7"]

    def test_unfinished_ones_do_not_count(self, tmp_path: Path) -> None:
        """The last whole one stays, however many broken ones there are."""
        save(tmp_path / "s-1", {"a": 1})
        for step in (2, 3):
            (save(tmp_path / f"s-{step}", {"a": 2}) / MARKER).unlink()
        assert retire(tmp_path, keep_last=1) == []
        assert steps(tmp_path) == [1]

    def test_what_was_just_saved_stays(self, tmp_path: Path) -> None:
        """Also if it goes back to an earlier step."""
        save(tmp_path / "s-9", {"a": 9})
        save(tmp_path / "s-4", {"a": 4}, keep_last=1)
        assert steps(tmp_path) == [4, 9]

    @pytest.mark.parametrize("option", ["keep_last", "keep_every"])
    def test_none_is_no_number(self, option: str) -> None:
        """To keep nothing is refused."""
        with pytest.raises(ValueError, match=option):
            sync_checkpointer(**{option: 0})

    def test_one_that_cannot_go_keeps_no_other(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The save is well, and a warning says what stays."""
        for step in (1, 2, 3):
            save(tmp_path / f"s-{step}", {"a": step})
        trash = _files.trash

        def stuck(path: Path) -> Path:
            if path.name == "s-1":
                raise PermissionError(1, "not yours")
            return trash(path)

        monkeypatch.setattr(retention, "trash", stuck)
        save(tmp_path / "s-4", {"a": 4}, keep_last=1)
        assert names(tmp_path) == ["s-1", "s-4"]
        assert "old checkpoints are not removed" in caplog.text
        assert "s-1: not yours" in caplog.text

    def test_what_is_being_read_can_be_read_on(self, tmp_path: Path) -> None:
        """A mapped one outlives its name."""
        state = load(save(tmp_path / "s-1", {"a": [1, 2]}), mmap=True)
        save(tmp_path / "s-2", {"a": 2}, keep_last=1)
        assert state == {"a": [1, 2]}

    def test_links_are_no_checkpoints(self, tmp_path: Path) -> None:
        """They do not count, and what they name stays, wherever it is."""
        elsewhere = save(tmp_path / "elsewhere" / "s-9", {"a": 9})
        place = tmp_path / "checkpoints"
        best = save(place / "s-1", {"a": 1})
        (place / "best").symlink_to(best)
        (place / "other").symlink_to(elsewhere)
        (place / "newest").symlink_to("s-4")
        (place / "nothing").symlink_to("nothing")
        for step in (2, 3, 4):
            save(place / f"s-{step}", {"a": step}, keep_last=2)
        found = ["best", "newest", "nothing", "other", "s-1", "s-3", "s-4"]
        assert names(place) == found
        assert load(place / "best") == {"a": 1}
        assert load(place / "other") == {"a": 9}


class TestSweep:
    """What died is cleaned up by the next save, and what lives is not."""

    def test_a_dead_save_is_removed(self, tmp_path: Path) -> None:
        """Its files are not locked any more."""
        draft = Draft(tmp_path / "s-1", 0, durable=False)
        assert names(tmp_path) == [".s-1.part"]
        sweep(tmp_path, shared=False)
        assert names(tmp_path / ".s-1.part") == [f"{FILE}.tmp"]
        draft.close()  # as the end of a process does
        save(tmp_path / "s-2", {"a": 1})
        assert names(tmp_path) == ["s-2"]

    def test_one_live_rank_protects_all_files(self, tmp_path: Path) -> None:
        """A marker that is being written is nobody's file."""
        with Draft(tmp_path / "s-1", 0, durable=False):
            (tmp_path / ".s-1.part" / MARKER).touch()
            sweep(tmp_path, shared=False)
            assert MARKER in names(tmp_path / ".s-1.part")

    def test_among_hosts_it_must_be_old(self, tmp_path: Path) -> None:
        """Locks of other hosts may be invisible."""
        Draft(tmp_path / "s-1", 0, durable=False).close()
        sweep(tmp_path, shared=True)
        assert names(tmp_path) == [".s-1.part"]
        long_ago = time.time() - 7200
        for each in (tmp_path / ".s-1.part", *(tmp_path / ".s-1.part").iterdir()):
            os.utime(each, (long_ago, long_ago))
        os.utime(tmp_path / ".s-1.part", (long_ago, long_ago))
        assert sweep(tmp_path, shared=True) == [tmp_path / ".s-1.part"]

    def test_what_was_being_removed_goes(self, tmp_path: Path) -> None:
        """Trash, and an old one whose name is taken again."""
        path = save(tmp_path / "s-1", {"a": 1})
        shutil.copytree(path, tmp_path / ".s-1.old")
        shutil.copytree(path, tmp_path / ".s-1.0123abcd.trash")
        (tmp_path / ".hidden").touch()
        sweep(tmp_path, shared=False)
        assert names(tmp_path) == [".hidden", "s-1"]

    @pytest.mark.parametrize(
        "name", [".photos.part", ".config.old", ".mail.trash", ".s-1.part"]
    )
    def test_what_others_call_so_stays(self, tmp_path: Path, name: str) -> None:
        """A checkpointer removes what it has made."""
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
        (tmp_path / "config").mkdir()
        save(tmp_path / "s-2", {"a": 1})
        assert names(tmp_path / name) == ["precious"]

    def test_links_are_not_followed(self, tmp_path: Path) -> None:
        """What they name is elsewhere."""
        path = save(tmp_path / "elsewhere" / "s-1", {"a": 1})
        (tmp_path / "checkpoints").mkdir()
        for suffix in ("part", "old", "0123abcd.trash"):
            (tmp_path / "checkpoints" / f".s-1.{suffix}").symlink_to(path)
        save(tmp_path / "checkpoints" / "s-1", {"a": 1})
        sweep(tmp_path / "checkpoints", shared=False)
        assert load(path) == {"a": 1}

    def test_a_new_save_goes_on_in_the_directory_of_a_dead_one(
        self, tmp_path: Path
    ) -> None:
        """What the dead one, of more ranks, has left there is not committed."""
        for rank in (0, 1):
            with Draft(tmp_path / "s-1", rank, durable=False) as draft:
                draft.keep_file()
        os.utime(tmp_path / ".s-1.part")
        lock = os.open(tmp_path / ".s-1.part" / "checkpoint_1.safetensors", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)  # or it would be swept
        path = save(tmp_path / "s-1", {"a": 1})
        os.close(lock)
        assert names(path) == [FILE, MARKER]
