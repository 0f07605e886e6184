"""Checkpoint directories: what is whole, what is listed, what goes."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from aiockpt import latest, list_checkpoints
from aiockpt.errors import CheckpointNotFoundError, StorageError
from tests.support.proofs import proves
from tests.support.saving import load, names, save, save_by_two, sync_checkpointer

FILE, MARKER = "checkpoint_0.safetensors", "commit.json"


def steps(directory: Path) -> list[int]:
    """Return the steps that are listed."""
    return [checkpoint.step for checkpoint in list_checkpoints(directory)]


@pytest.fixture
def path(tmp_path) -> Path:
    """Return a checkpoint of step 7."""
    return save(tmp_path / "step-7", {"a": 1})


NAMES = {
    "epoch=0-step=10.ckpt": 10, "epoch=3-step=120-val_loss=0.25.ckpt": 120,
    "step_7": 7, "Step12.pt": 12, "global_step400": 400, "checkpoint-500": 500,
    "epoch=3.ckpt": 3, "timestep-9": 9, "loss=0.25": 0, "loss=0.25.ckpt": 0,
    "step-12-5": 12, "footstep3-4": 4, "v2-final": 0, "best.ckpt": 0, "7": 7, "best": 0,
}  # fmt: skip
"""Names, and the steps that they say."""


class TestWhole:
    """A checkpoint is there when its marker and its files are."""

    def test_a_saved_one_is(self, tmp_path, path) -> None:
        """The marker says its step, its ranks and its files; a link to it is one."""
        (found,) = list_checkpoints(tmp_path)
        assert (found.step, found.world_size, found.path) == (7, 1, path)
        assert found.nbytes == (path / FILE).stat().st_size
        assert latest(tmp_path) == found
        assert names(tmp_path) == ["step-7"]
        assert names(path) == [FILE, MARKER]
        (tmp_path / "best").symlink_to(path)
        assert load(tmp_path / "best") == {"a": 1}
        assert list_checkpoints(tmp_path) == [found]

    @pytest.mark.parametrize("lost", [MARKER, FILE, "some bytes"])
    def test_without_its_marker_or_a_file_it_is_not(self, tmp_path, path, lost) -> None:
        """Neither `load`, nor `latest`, nor a list knows it."""
        if lost == "some bytes":
            os.truncate(path / FILE, 100)
        else:
            (path / lost).unlink()
        assert latest(tmp_path) is None
        full = (
            "not of the size that its marker says" if lost == "some bytes" else "step-7"
        )
        with pytest.raises(CheckpointNotFoundError, match=full) as caught:
            load(path)
        assert isinstance(caught.value, FileNotFoundError)
        assert caught.value.path == str(path)

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            ("{", "", "not a valid marker"),
            ('"aiockpt"', "\xff", "not a valid marker"),
            ('t": 2', 't": 3', "format version 3; this library knows versions 1 and 2"),
            ('t": 2', 't": 1', "serial number 1 in a marker of version 1"),
            ('"serial": 1', '"serial": 0', "serial number 0 in a marker of version 2"),
            ('step": 7', 'step": -1', "not a valid marker"),
            ('size": 1', 'size": 2', "names 1 files for 2 ranks"),
            ('size": 1', f'size": {10**18}', f"names 1 files for {10**18} ranks"),
            (FILE, f"../x/{FILE}", "is not the name of a rank's file"),
            (FILE, "a\\u0000b", "is not the name of a rank's file"),
        ],
    )
    def test_a_marker_of_another_kind(
        self, tmp_path, path, caplog, old: str, new: str, reason: str
    ) -> None:
        """It is named, with what is wrong; a list goes on without it, and warns."""
        save(tmp_path / "step-6", {"a": 1})
        text = (path / MARKER).read_text()
        assert old in text
        (path / MARKER).write_bytes(text.replace(old, new, 1).encode("latin-1"))
        with pytest.raises(StorageError, match=reason):
            load(path)
        caplog.clear()
        assert steps(tmp_path) == [6]
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert "a checkpoint is left out: " in record.getMessage()
        assert "step-7" in record.getMessage()

    def test_an_impossible_path(self, tmp_path) -> None:
        """It is no checkpoint, and nothing can be saved there."""
        for name in ("a\0b", "x" * 300, "x" * 5000):
            with pytest.raises(StorageError):
                save(tmp_path / name, {"a": 1})
            with pytest.raises(StorageError):
                load(tmp_path / name)
        # What is built beside it has a longer name.
        with pytest.raises(StorageError, match="File name too long"):
            save(tmp_path / ("x" * 250), {"a": 1})
        assert names(tmp_path) == []

    def test_nothing_is_there(self, tmp_path) -> None:
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

    def test_lists_go_by_the_commit(self, tmp_path) -> None:
        """The step was given, or ends the name; it is not the age."""
        for name in NAMES:
            save(tmp_path / "c-5" / name, {"a": 1})
        found = list_checkpoints(tmp_path / "c-5")
        assert {each.name: each.step for each in found} == NAMES
        for step in (10, 9, 100):
            save(tmp_path / f"step-{step}", {"a": step})
        with sync_checkpointer() as checkpointer:
            checkpointer.save({"a": 1}, tmp_path / "best", step=55)
        (tmp_path / "other").mkdir()
        (tmp_path / "file").touch()
        assert steps(tmp_path) == [10, 9, 100, 55]
        newest = latest(tmp_path)
        assert newest is not None
        assert (newest.step, newest.serial) == (55, 4)
        save(tmp_path / "step-9", {"a": 9})
        assert steps(tmp_path) == [10, 100, 55, 9]

    def test_two_that_were_committed_at_once(self, tmp_path) -> None:
        """The higher step is the later one; the next commit is later than both."""
        for step in (3, 8, 4):
            marker = save(tmp_path / f"step-{step}", {"a": step}) / MARKER
            marker.write_text(
                re.sub(r'"serial": \d+', '"serial": 5', marker.read_text())
            )
        assert steps(tmp_path) == [3, 4, 8]
        save(tmp_path / "step-1", {"a": 1})
        assert steps(tmp_path) == [3, 4, 8, 1]

    def test_older_markers_have_no_serial_number(self, tmp_path) -> None:
        """They come first, in the order of their file times, and can be loaded."""
        for step in (30, 10, 20):
            marker = save(tmp_path / f"step-{step}", {"a": step}) / MARKER
            lines = marker.read_text().replace('aiockpt": 2', 'aiockpt": 1')
            marker.write_text(re.sub(r' *"serial": \d+,\n', "", lines))
            os.utime(marker, (1e9 - step, 1e9 - step))
        assert steps(tmp_path) == [30, 20, 10]
        assert load(tmp_path / "step-20") == {"a": 20}
        save(tmp_path / "step-5", {"a": 5})
        assert steps(tmp_path) == [30, 20, 10, 5]
        assert latest(tmp_path).serial == 1  # type: ignore[union-attr]

    def test_a_marker_that_another_program_has_rewritten(self, tmp_path) -> None:
        """Its serial number counts, wherever it stands."""
        for step in (1, 2, 3):
            marker = save(tmp_path / f"step-{step}", {"a": step}) / MARKER
            found = json.loads(marker.read_text())
            marker.write_text(json.dumps(found, sort_keys=True))
        assert [each.serial for each in list_checkpoints(tmp_path)] == [1, 2, 3]

    def test_the_highest_serial_number(self, tmp_path) -> None:
        """A marker that has it makes no later one invalid."""
        marker = save(tmp_path / "step-1", {"a": 1}) / MARKER
        text = marker.read_text()
        marker.write_text(text.replace('"serial": 1', f'"serial": {2**63 - 1}'))
        save(tmp_path / "step-2", {"a": 2})
        assert steps(tmp_path) == [1, 2]

    def test_a_fifo_in_the_place_of_a_file(self, tmp_path) -> None:
        """It is named, and nobody waits for what may never come."""
        for name in ("step-1", ".step-2.part"):
            (tmp_path / name).mkdir()
        os.mkfifo(tmp_path / "step-1" / MARKER)
        os.mkfifo(tmp_path / ".step-2.part" / FILE)
        os.mkfifo(tmp_path / ".step-3.lock")
        for step in (1, 2, 3):
            with pytest.raises(StorageError):
                save(tmp_path / f"step-{step}", {"a": 1})
        with pytest.raises(StorageError, match="not a regular file"):
            load(tmp_path / "step-1")
        assert list_checkpoints(tmp_path) == []
        assert latest(tmp_path) is None
        save(tmp_path / "step-4", {"a": 4})
        assert steps(tmp_path) == [4]


class TestReplacing:
    """A name has the old checkpoint or the new one."""

    def test_what_others_put_there_moves_along(self, tmp_path) -> None:
        """Files, directories, and what is only called like a rank's file."""
        path = save_by_two(tmp_path / "last")
        (path / "tokenizer.json").write_text("{}")
        (path / "logs").mkdir()
        (path / "logs" / "events").write_text("seen")
        (path / "checkpoint_7.safetensors").write_text("another tool's")
        (path / "link").symlink_to("tokenizer.json")
        for value in (2, 3):
            save(path, {"a": value})
            assert load(path) == {"a": value}
            assert (path / "link").read_text() == "{}"
            assert (path / "logs" / "events").read_text() == "seen"
            assert (path / "checkpoint_7.safetensors").read_text() == "another tool's"
            assert len(names(path)) == 6
            assert names(tmp_path) == ["last"]

    def test_what_cannot_move_along_stays(self, tmp_path, caplog) -> None:
        """It stays beside the new checkpoint, and a warning says where."""
        path = save(tmp_path / "last", {"a": 1})
        (path / "checkpoint_1.safetensors").write_text("precious")
        save_by_two(path)
        (left,) = [each for each in names(tmp_path) if each != "last"]
        for _ in range(2):
            file = tmp_path / left / "checkpoint_1.safetensors"
            assert file.read_text() == "precious"
            assert str(tmp_path / left)[:-15] in caplog.text
            save(tmp_path / "other", {"a": 1})

    def test_the_old_one_stands_in(self, tmp_path, path) -> None:
        """A crash between the two renames leaves the old one readable."""
        path.rename(tmp_path / ".step-7.old")
        assert load(path) == {"a": 1}
        found = latest(tmp_path)
        assert found is not None
        assert (found.name, found.step) == ("step-7", 7)
        save(tmp_path / "other", {"a": 5})  # which sweeps
        assert load(path) == {"a": 1}
        save(path, {"a": 2})
        assert load(path) == {"a": 2}
        assert names(tmp_path) == ["other", "step-7"]

    def test_what_is_no_checkpoint_is_left_alone(self, tmp_path) -> None:
        """A file, or a directory that holds files of something else."""
        path = tmp_path / "step-1"
        path.mkdir()
        (tmp_path / "f").write_text("x")
        for name in (MARKER, "thesis.tex"):
            (path / MARKER).unlink(missing_ok=True)
            (path / name).write_text('{"sha": "0123"}')
            with pytest.raises(StorageError, match="choose a new directory"):
                save(path, {"a": 1})
            assert names(path) == [name]
        with pytest.raises(StorageError, match="it is a file"):
            save(tmp_path / "f", {"a": 1})
        assert (tmp_path / "f").read_text() == "x"
        assert names(tmp_path) == ["f", "step-1"]
        (path / "thesis.tex").unlink()
        save(path, {"a": 1})  # an empty one is taken

    @proves("threat E2")
    def test_a_link_in_the_place_of_what_is_built(self, tmp_path, path) -> None:
        """It is not followed: what it names stays as it is."""
        other = tmp_path / ".other.part"
        other.symlink_to(path)
        with pytest.raises(StorageError, match=r"\.other\.part: it is a symbolic link"):
            save(tmp_path / "other", {"a": 2})
        assert names(path) == [FILE, MARKER]
        assert load(path) == {"a": 1}
        other.unlink()
        save(tmp_path / "other", {"a": 2})

    @pytest.mark.parametrize("length", [230, 240, 249])
    @pytest.mark.parametrize("letter", ["x", "\N{BLACK STAR}"])
    def test_a_long_name(self, tmp_path, length, letter) -> None:
        """Replacing and retiring leave nothing, though the trash has a longer name."""
        room = length - len("9")
        fill = letter * (room // len(letter.encode()))
        name = fill + "x" * (room - len(fill.encode()))
        for step in (1, 2, 2, 3):
            save(tmp_path / f"{name}{step}", {"a": step}, keep_last=1)
        assert names(tmp_path) == [f"{name}3"]
        assert load(tmp_path / f"{name}3") == {"a": 3}


class TestRetention:
    """A save removes old checkpoints, but never all of them."""

    def test_the_last_few_stay(self, tmp_path) -> None:
        """Steps that are multiples of ``keep_every`` stay, and the last save."""
        for step in range(1, 8):
            save(tmp_path / f"s-{step}", {"a": step}, keep_last=2, keep_every=3)
        assert names(tmp_path) == ["s-3", "s-6", "s-7"]
        save(tmp_path / "s-4", {"a": 4}, keep_last=1, keep_every=3)
        assert steps(tmp_path) == [3, 6, 4]
        for option in ("keep_last", "keep_every"):
            with pytest.raises(ValueError, match=option):
                sync_checkpointer(**{option: 0})

    def test_after_a_rollback_the_old_branch_goes(self, tmp_path) -> None:
        """After a return from 300 to 200, step 300 counts as older than 210."""
        for step in (100, 200, 300):
            save(tmp_path / f"s-{step}", {"a": step}, keep_last=3)
        for step in (210, 220):
            save(tmp_path / f"s-{step}", {"a": step}, keep_last=2)
        assert steps(tmp_path) == [210, 220]
        newest = latest(tmp_path)
        assert newest is not None
        assert newest.step == 220

    def test_what_others_put_there_stays(self, tmp_path) -> None:
        """Foreign files stay where they are, and a later save to that name works."""
        path = save(tmp_path / "s-1", {"a": 1})
        (path / "scores.json").write_text("{}")
        save(tmp_path / "s-2", {"a": 2}, keep_last=1)
        assert steps(tmp_path) == [2]
        assert names(path) == [MARKER, "scores.json"]
        save(path, {"a": 3}, keep_last=1)
        assert load(path) == {"a": 3}
        assert names(path) == [FILE, MARKER, "scores.json"]
        assert names(tmp_path) == ["s-1"]

    def test_unfinished_ones_do_not_count(self, tmp_path) -> None:
        """The last whole one stays, however many broken ones there are."""
        save(tmp_path / "s-1", {"a": 1})
        for step in (2, 3):
            (save(tmp_path / f"s-{step}", {"a": 2}) / MARKER).unlink()
        save(tmp_path / "s-4", {"a": 4}, keep_last=2)
        assert steps(tmp_path) == [1, 4]

    def test_links_are_no_checkpoints(self, tmp_path) -> None:
        """They do not count, and what they name stays, wherever it is."""
        elsewhere = save(tmp_path / "elsewhere" / "s-9", {"a": 9})
        place = tmp_path / "checkpoints"
        best = save(place / "s-1", {"a": 1})
        (place / "best").symlink_to(best)
        (place / "other").symlink_to(elsewhere)
        (place / "newest").symlink_to("s-4")
        (place / "nothing").symlink_to("nothing")
        for suffix in ("old", "0123abcd.trash"):
            (place / f".s-4.{suffix}").symlink_to(elsewhere)
        for step in (2, 3, 4):
            save(place / f"s-{step}", {"a": step}, keep_last=2)
        found = ["best", "newest", "nothing", "other", "s-1", "s-3", "s-4"]
        assert [each for each in names(place) if each[0] != "."] == found
        assert load(place / "best") == {"a": 1}
        assert load(place / "other") == {"a": 9}


class TestSweep:
    """The next save removes what dead saves left, and nothing of live ones."""

    def test_what_was_being_removed_goes(self, tmp_path, path) -> None:
        """Trash, and an old one whose name is taken again."""
        shutil.copytree(path, tmp_path / ".step-7.old")
        shutil.copytree(path, tmp_path / ".step-7.0123abcd.trash")
        (tmp_path / ".hidden").touch()
        save(tmp_path / "step-8", {"a": 1})
        assert names(tmp_path) == [".hidden", "step-7", "step-8"]

    @pytest.mark.parametrize("file", [FILE, f"{FILE}.tmp", MARKER, "x"])
    @pytest.mark.parametrize(
        "place",
        [
            *(".s-1.part", ".s-1.0123abcd.trash", ".s-1.old", ".photos.part"),
            *(".config.old", ".mail.trash", ".notes.deadbeef.part"),
        ],
    )
    def test_what_is_only_called_like_ours_stays(self, tmp_path, place, file) -> None:
        """The first bytes of a file say which program wrote it."""
        (tmp_path / place).mkdir()
        (tmp_path / place / file).write_text("precious")
        (tmp_path / "config").mkdir()
        save(tmp_path / "s-2", {"a": 1})
        assert (tmp_path / place / file).read_text() == "precious"

    @pytest.mark.parametrize("kind", ["file", "in it", "lock"])
    def test_a_name_that_is_taken_by_others(self, tmp_path, kind) -> None:
        """The error names it, and what to do."""
        path = save(tmp_path / "s", {"a": 1})
        taken = tmp_path / (f".s.{kind}" if kind in ("lock", "old") else ".s.part")
        if kind in ("file", "lock"):
            taken.write_text("precious")
        else:
            taken.mkdir()
            (taken / f"{FILE}.tmp").mkdir()
        for _ in range(2):
            with pytest.raises(StorageError, match="move it away") as caught:
                save(path, {"a": 2})
            assert caught.value.path == str(taken)
        assert taken.exists()
        assert load(path) == {"a": 1}
        assert len(names(tmp_path)) == 2
