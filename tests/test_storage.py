"""One checkpoint file: wholly old or wholly new, verified, and resumed."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from aiockpt.errors import StorageError
from aiockpt.format.limits import Limits
from aiockpt.storage.checkpoint_file import read_header, verify_chunks
from aiockpt.storage.partfile import PartFile, check_target
from tests.support.disks import small_disk
from tests.support.proofs import proves
from tests.support.serving import Memory

pytestmark = pytest.mark.torch_free

CHUNK = 64 << 10
LIMITS = Limits()


def memory(*, step: int = 7, nbytes: int = 5 * CHUNK // 2) -> Memory:
    """Return a checkpoint of two and a half chunks."""
    return Memory(nbytes, step=step, chunk_bytes=CHUNK)


def fill(part: PartFile, source: Memory, *chunks: int) -> None:
    """Put chunks where a receive would."""
    for chunk in chunks:
        start, stop = source.manifest.grid.range(chunk)
        (view,) = part.buffers(start, stop)
        view[:] = source.data[start:stop]


def held(part: PartFile) -> list[int]:
    """Return the chunks that need not be fetched."""
    return [chunk for chunk in part.candidates if part.holds(chunk)]


def leave_part(target: Path, source: Memory, *chunks: int) -> Path:
    """Leave what a receive leaves that failed after these chunks."""
    part = PartFile.open(target, source.manifest)
    fill(part, source, *chunks)
    part.close()
    return part.path


def write(path: Path, source: Memory) -> Path:
    """Write a whole checkpoint file."""
    path.write_bytes(source.file)
    return path


class TestReceive:
    """A part file becomes the file."""

    def test_the_committed_file_is_what_the_manifest_describes(
        self, tmp_path: Path
    ) -> None:
        """Byte for byte, and nothing else is left in the directory."""
        source, target = memory(), tmp_path / "model.safetensors"
        part = PartFile.open(target, source.manifest)
        fill(part, source, 2, 0, 1)
        part.commit()
        part.close()
        assert target.read_bytes() == source.file
        assert list(tmp_path.iterdir()) == [target]

    @proves("invariant 7")
    def test_the_old_file_stays_until_the_commit(self, tmp_path: Path) -> None:
        """A reader of the file sees the old checkpoint or the new one."""
        old, new = memory(step=1), memory(step=2)
        target = write(tmp_path / "model.safetensors", old)
        part = PartFile.open(target, new.manifest)
        fill(part, new, 0, 1, 2)
        assert target.read_bytes() == old.file
        part.commit()
        part.close()
        assert target.read_bytes() == new.file

    def test_an_empty_segment_has_no_chunks_to_wait_for(self, tmp_path: Path) -> None:
        """A checkpoint without bytes is a file that is only a header."""
        source = memory(nbytes=0)
        part = PartFile.open(tmp_path / "f", source.manifest)
        assert held(part) == []
        part.commit()
        part.close()
        assert (tmp_path / "f").read_bytes() == source.manifest.header

    def test_a_link_is_followed(self, tmp_path: Path) -> None:
        """The file behind a link is replaced, and the link stays one."""
        source, link = memory(), tmp_path / "link"
        link.symlink_to(tmp_path / "file")
        part = PartFile.open(link, source.manifest)
        fill(part, source, 0, 1, 2)
        part.commit()
        part.close()
        assert link.is_symlink()
        assert (tmp_path / "file").read_bytes() == source.file

    @pytest.mark.parametrize("mode", [0o600, 0o664, 0o444, 0o000])
    def test_a_replaced_file_hands_on_its_permissions(
        self, tmp_path: Path, mode: int
    ) -> None:
        """To the part file as well: who may not read the one may not read the other."""
        source, target = memory(), write(tmp_path / "f", memory(step=1))
        target.chmod(mode)
        part = PartFile.open(target, source.manifest)
        assert stat.S_IMODE(part.path.stat().st_mode) == mode | 0o600
        fill(part, source, 0, 1, 2)
        part.commit()
        part.close()
        assert stat.S_IMODE(target.stat().st_mode) == mode
        target.chmod(0o600)
        assert target.read_bytes() == source.file

    def test_permissions_that_change_meanwhile_count(self, tmp_path: Path) -> None:
        """The owner's last word is kept, not the first."""
        source, target = memory(), write(tmp_path / "f", memory(step=1))
        part = PartFile.open(target, source.manifest)
        target.chmod(0o640)
        part.commit()
        part.close()
        assert stat.S_IMODE(target.stat().st_mode) == 0o640

    @pytest.mark.parametrize("umask", [0o022, 0o077])
    def test_a_new_file_has_what_the_umask_leaves(
        self, tmp_path: Path, umask: int
    ) -> None:
        """As a file of any other program."""
        before = os.umask(umask)
        try:
            part = PartFile.open(tmp_path / "f", memory().manifest)
        finally:
            os.umask(before)
        part.commit()
        part.close()
        assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o666 & ~umask

    def test_what_the_disk_refuses_is_not_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After a failed fsync nobody knows what is on the disk: start over."""
        old, new = memory(step=1), memory(step=2)
        target = write(tmp_path / "f", old)
        part = PartFile.open(target, new.manifest)

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match=r"f\.part: Input/output error"):
            part.commit()
        part.close()
        assert list(tmp_path.iterdir()) == [target]
        assert target.read_bytes() == old.file

    def test_a_refused_rename_keeps_what_was_received(self, tmp_path: Path) -> None:
        """The next receive goes on from there, once the obstacle is gone."""
        source, target = memory(), tmp_path / "f"
        part = PartFile.open(target, source.manifest)
        fill(part, source, 0, 1, 2)
        target.mkdir(mode=0o500)
        with pytest.raises(StorageError, match="Is a directory"):
            part.commit()
        part.close()
        assert part.path.stat().st_mode & 0o600 == 0o600
        target.rmdir()
        again = PartFile.open(target, source.manifest)
        assert held(again) == [0, 1, 2]
        again.close()

    def test_closing_twice_is_fine(self, tmp_path: Path) -> None:
        """Also with a view alive, as a traceback may keep one; the lock is gone."""
        part = PartFile.open(tmp_path / "f", memory().manifest)
        views = part.buffers(0, 10)
        part.close()
        part.close()
        assert bytes(views[0]) == bytes(10)
        PartFile.open(tmp_path / "f", memory().manifest).close()


class TestResume:
    """What a failed receive left is used, if its digest is right."""

    def test_nothing_is_known_of_a_new_file(self, tmp_path: Path) -> None:
        """Reserved zeros are not looked at."""
        part = PartFile.open(tmp_path / "f", memory().manifest)
        assert not part.candidates
        part.close()

    def test_verified_chunks_stay(self, tmp_path: Path) -> None:
        """The others, half written ones too, are fetched again."""
        source, target = memory(), tmp_path / "f"
        path = leave_part(target, source, 0, 2)
        with path.open("r+b") as file:
            file.seek(source.manifest.header_bytes + CHUNK)
            file.write(source.data[CHUNK : CHUNK + 1000])
        part = PartFile.open(target, source.manifest)
        assert held(part) == [0, 2]
        part.close()

    @pytest.mark.parametrize("size", [0, 20, 45, 5000, 70_000, 100_000, 163_000])
    def test_a_part_of_any_length_is_a_start(self, tmp_path: Path, size: int) -> None:
        """Where a crash cut the file does not matter."""
        source, target = memory(), tmp_path / "f"
        path = leave_part(target, source, 0, 1, 2)
        os.truncate(path, size)
        part = PartFile.open(target, source.manifest)
        known = held(part)
        assert len(known) == max(0, size - source.manifest.header_bytes) // CHUNK
        fill(part, source, *({0, 1, 2} - {*known}))
        part.commit()
        part.close()
        assert target.read_bytes() == source.file

    def test_a_part_of_another_checkpoint_gives_what_they_share(
        self, tmp_path: Path
    ) -> None:
        """A chunk is right if its digest is, wherever it came from."""
        old, new = (Memory(3 * CHUNK, step=step, fill=5) for step in (1, 2))
        target = tmp_path / "f"
        leave_part(target, old, 0, 2)
        part = PartFile.open(target, new.manifest)
        assert held(part) == [0, 2]
        fill(part, new, 1)
        part.commit()
        part.close()
        assert target.read_bytes() == new.file

    def test_zeros_are_a_start(self, tmp_path: Path) -> None:
        """A receive that is killed early leaves only reserved space."""
        source, target = memory(), tmp_path / "f"
        (tmp_path / "f.part").write_bytes(bytes(1000))
        part = PartFile.open(target, source.manifest)
        assert held(part) == []
        part.close()


class TestRefusals:
    """What cannot be written says so, and destroys nothing."""

    @pytest.mark.parametrize("content", [b"notes", b"\0" * 8 + b"x" * 100, b"PK\3\4"])
    def test_another_programs_part_file(self, tmp_path: Path, content: bytes) -> None:
        """Browsers call their downloads so, too."""
        path = tmp_path / "f.part"
        path.write_bytes(content)
        with pytest.raises(StorageError, match=r"f\.part: it is no part of a check"):
            PartFile.open(tmp_path / "f", memory().manifest)
        assert path.read_bytes() == content

    def test_a_part_file_in_use(self, tmp_path: Path) -> None:
        """Two receives into one file would mix; the second one is refused."""
        source = memory()
        first = PartFile.open(tmp_path / "f", source.manifest)
        with pytest.raises(StorageError, match="another process is receiving"):
            PartFile.open(tmp_path / "f", source.manifest)
        fill(first, source, 0, 1, 2)
        first.commit()
        first.close()
        assert (tmp_path / "f").read_bytes() == source.file

    @proves("threat E2")
    def test_a_part_file_that_is_a_link(self, tmp_path: Path) -> None:
        """Nobody can make us write elsewhere."""
        (tmp_path / "f.part").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StorageError, match=r"f\.part: "):
            PartFile.open(tmp_path / "f", memory().manifest)
        assert not (tmp_path / "elsewhere").exists()

    def test_a_full_disk(self, tmp_path: Path) -> None:
        """It is found out before a byte arrives; the old file is untouched."""
        old, new = memory(step=1), memory(step=2, nbytes=40 * CHUNK)
        with small_disk(tmp_path / "disk", 1 << 20) as disk:
            target = write(disk / "f", old)
            with pytest.raises(StorageError) as caught:
                PartFile.open(target, new.manifest)
            assert "2.6 MB are needed and 0.9 MB are free" in str(caught.value)
            assert "f.part: No space left on device" in str(caught.value)
            assert list(disk.iterdir()) == [target]
            assert target.read_bytes() == old.file

    def test_a_full_disk_keeps_an_earlier_part(self, tmp_path: Path) -> None:
        """Make room, and the receive goes on where it was."""
        small, large = memory(), memory(nbytes=40 * CHUNK)
        with small_disk(tmp_path / "disk", 1 << 20) as disk:
            leave_part(disk / "f", small, 0, 1, 2)
            with pytest.raises(StorageError, match="No space left"):
                PartFile.open(disk / "f", large.manifest)
            part = PartFile.open(disk / "f", small.manifest)
            assert held(part) == [0, 1, 2]
            part.close()

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("directory", "it is a directory"),
            ("fifo", "it is not a regular file"),
            ("missing/f", "there is no directory"),
            ("loop", "link"),
            ("x" * 300, "File name too long"),
        ],
    )
    def test_a_target_that_is_no_file(
        self, tmp_path: Path, name: str, reason: str
    ) -> None:
        """A rename would replace a device as readily as a file."""
        (tmp_path / "directory").mkdir()
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        with pytest.raises(StorageError, match=reason) as caught:
            check_target(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)


class TestRead:
    """Headers and chunks of files that are there."""

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (-1, "it is truncated"),
            (-5 * CHUNK // 2, "it is truncated"),
            (1, "it is too long"),
        ],
    )
    def test_a_file_of_the_wrong_length(
        self, tmp_path: Path, change: int, reason: str
    ) -> None:
        """The message says how long it is and should be."""
        path = write(tmp_path / "f", memory())
        size = path.stat().st_size
        os.truncate(path, size + change)
        with pytest.raises(StorageError, match=reason) as caught:
            read_header(path, limits=LIMITS)
        assert f"{size + change} bytes where its header says {size}" in str(
            caught.value
        )

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "it cannot be read"),
            (b"short", "it cannot be read"),
            (b"PK\3\4" + bytes(100), "it is a file of torch.save"),
            (b"\x10" + bytes(7) + b"{}", "it cannot be read"),
        ],
    )
    def test_a_file_of_another_kind(
        self, tmp_path: Path, content: bytes, reason: str
    ) -> None:
        """It is named, and what is wrong with it."""
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(StorageError, match=reason) as caught:
            read_header(tmp_path / "f", limits=LIMITS)
        assert str(caught.value).startswith(str(tmp_path / "f"))

    @pytest.mark.parametrize("name", ["missing", "directory"])
    def test_what_is_no_file(self, tmp_path: Path, name: str) -> None:
        """The system's own words do."""
        (tmp_path / "directory").mkdir()
        with pytest.raises(StorageError, match=r"No such file|Is a directory"):
            read_header(tmp_path / name, limits=LIMITS)

    def test_a_file_that_shrinks_meanwhile(self, tmp_path: Path) -> None:
        """Is an error, and not the end of the process."""
        source = memory()
        path = write(tmp_path / "f", source)
        os.truncate(path, source.manifest.header_bytes + CHUNK)
        with pytest.raises(StorageError, match="it ends at byte"):
            list(verify_chunks(path, source.manifest))
