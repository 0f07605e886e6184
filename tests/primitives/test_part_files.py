"""Checkpoint files: received into part files, resumed, and read."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import contextmanager

import pytest

from aiockpt import Limits
from aiockpt.errors import StorageError
from aiockpt.storage import checkpoint_file
from aiockpt.storage.checkpoint_file import read_header, verify_chunks
from aiockpt.storage.partfile import PartFile
from tests.support.proofs import proves
from tests.support.servers import Memory
from tests.support.shortages import small_disk

pytestmark = pytest.mark.torch_free

CHUNK = 64 << 10


def memory(*, step: int = 7, nbytes: int = 5 * CHUNK // 2, **options) -> Memory:
    """Return a checkpoint of two and a half chunks."""
    return Memory(nbytes, step=step, chunk_bytes=CHUNK, **options)


@contextmanager
def opened(target, source: Memory, *chunks: int, commit: bool = False):
    """Open a part file, and put chunks into it as a receive would; perhaps commit."""
    part = PartFile.open(target, source.manifest)
    try:
        for chunk in chunks:
            start, stop = source.manifest.grid.range(chunk)
            (view,) = part.buffers(start, stop)
            view[:] = source.data[start:stop]
        yield part
        if commit:
            part.commit()
    finally:
        part.close()


def received(target, source: Memory, *chunks: int) -> None:
    """Receive these chunks, the last that are missing, and commit."""
    with opened(target, source, *chunks, commit=True):
        pass
    assert target.read_bytes() == source.file


def held(part: PartFile) -> list[int]:
    """Return the chunks that need not be fetched."""
    return [chunk for chunk in part.candidates if part.holds(chunk)]


def mode_of(path) -> int:
    """Return who may do what with a file."""
    return stat.S_IMODE(path.stat().st_mode)


class TestReceive:
    """A part file becomes the file at the commit."""

    @proves("invariant 7")
    @pytest.mark.parametrize("linked", [False, True])
    def test_the_old_file_stays_until_the_commit(self, tmp_path, linked: bool) -> None:
        """The new one is what its manifest describes; a link to it stays one."""
        old, new, file = memory(step=1), memory(step=2), tmp_path / "f"
        target = tmp_path / "link" if linked else file
        if linked:
            target.symlink_to(file)
        file.write_bytes(old.file)
        with opened(target, new, 2, 0, 1) as part:
            assert file.read_bytes() == old.file
            part.commit()
            assert file.read_bytes() == new.file
        assert sorted(tmp_path.iterdir()) == sorted({file, target})
        assert target.is_symlink() is linked

    def test_an_empty_segment_has_no_chunks_to_wait_for(self, tmp_path) -> None:
        """A checkpoint without bytes is a file that is only a header."""
        source = memory(nbytes=0)
        with opened(tmp_path / "f", source, commit=True) as part:
            assert held(part) == []
        assert (tmp_path / "f").read_bytes() == source.manifest.header

    @pytest.mark.parametrize("mode", [0o600, 0o664, 0o444, 0o000])
    def test_a_replaced_file_hands_on_its_permissions(self, tmp_path, mode) -> None:
        """The part file has them, too, and those at the time of the commit count."""
        (tmp_path / "f").write_bytes(memory(step=1).file)
        for last in (mode, 0o640):
            (tmp_path / "f").chmod(mode)
            with opened(tmp_path / "f", memory(), 0, 1, 2, commit=True) as part:
                assert mode_of(part.path) == mode | 0o600
                (tmp_path / "f").chmod(last)
            assert mode_of(tmp_path / "f") == last
        assert (tmp_path / "f").read_bytes() == memory().file

    @pytest.mark.parametrize("umask", [0o022, 0o077])
    def test_a_new_file_has_what_the_umask_leaves(self, tmp_path, umask: int) -> None:
        """Its permissions are those of a file of any other program."""
        before = os.umask(umask)
        try:
            received(tmp_path / "f", memory(), 0, 1, 2)
        finally:
            os.umask(before)
        assert mode_of(tmp_path / "f") == 0o666 & ~umask

    def test_what_the_disk_refuses_is_not_kept(self, tmp_path, monkeypatch) -> None:
        """The receive starts over, since nobody knows what is on the disk."""
        (tmp_path / "f").write_bytes(memory(step=1).file)

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", fail)
        with (
            opened(tmp_path / "f", memory(step=2)) as part,
            pytest.raises(StorageError, match=r"f\.part: Input/output error"),
        ):
            part.commit()
        assert os.listdir(tmp_path) == ["f"]
        assert (tmp_path / "f").read_bytes() == memory(step=1).file

    def test_a_refused_rename_keeps_what_was_received(self, tmp_path) -> None:
        """The next receive goes on from there, once the obstacle is gone."""
        with opened(tmp_path / "f", memory(), 0, 1, 2) as part:
            (tmp_path / "f").mkdir(mode=0o500)
            with pytest.raises(StorageError, match="Is a directory"):
                part.commit()
        assert part.path.stat().st_mode & 0o600 == 0o600
        (tmp_path / "f").rmdir()
        with opened(tmp_path / "f", memory()) as part:
            assert held(part) == [0, 1, 2]

    def test_closing_twice_is_fine(self, tmp_path) -> None:
        """A second close is allowed while a view is alive, and the lock is gone."""
        with opened(tmp_path / "f", memory()) as part:
            assert not part.candidates  # reserved zeros are not looked at
            views = part.buffers(0, 10)
            part.close()
        assert bytes(views[0]) == bytes(10)
        with opened(tmp_path / "f", memory()):
            pass


class TestResume:
    """What a failed receive left is used, if its digest is right."""

    @pytest.mark.parametrize("size", [0, 20, 45, 5000, 70_000, 100_000, 163_000])
    def test_a_part_of_any_length_is_a_start(self, tmp_path, size: int) -> None:
        """A crash may cut the file at any byte."""
        source = memory()
        with opened(tmp_path / "f", source, 0, 1, 2) as part:
            os.truncate(part.path, size)
        with opened(tmp_path / "f", source) as part:
            known = held(part)
        assert len(known) == max(0, size - source.manifest.header_bytes) // CHUNK
        received(tmp_path / "f", source, *({0, 1, 2} - {*known}))

    def test_a_part_of_another_checkpoint_gives_what_they_share(self, tmp_path) -> None:
        """A chunk is right if its digest is, wherever it came from."""
        old, new = (memory(nbytes=3 * CHUNK, step=step, fill=5) for step in (1, 2))
        with opened(tmp_path / "f", old, 0, 2):
            pass
        with opened(tmp_path / "f", new) as part:
            assert held(part) == [0, 2]
        received(tmp_path / "f", new, 1)

    def test_zeros_are_a_start(self, tmp_path) -> None:
        """A receive that is killed early leaves only reserved space."""
        (tmp_path / "f.part").write_bytes(bytes(1000))
        with opened(tmp_path / "f", memory()) as part:
            assert held(part) == []

    def test_a_part_of_another_checkpoint_is_removed(self, tmp_path) -> None:
        """If the disk has no room for both, the receive keeps none of the old file."""
        old, new = (memory(nbytes=10 * CHUNK, step=step, fill=5) for step in (1, 2))
        with small_disk(tmp_path / "disk", 1 << 20) as disk:
            with opened(disk / "f", old, 0, 2):
                pass
            received(disk / "f", new, *range(10))
            assert os.listdir(disk) == ["f"]


class TestTwoHosts:
    """Locks do not reach from one to the other, as on some network file systems."""

    @pytest.fixture(autouse=True)
    def locked(self, monkeypatch) -> None:
        """Let each take the lock."""
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)

    @pytest.mark.parametrize("first", [0, 1])
    def test_different_checkpoints_do_not_mix(self, tmp_path, first: int) -> None:
        """The one whose part file was replaced is told; the other file is whole."""
        target, sources = tmp_path / "f", [memory(step=step) for step in (1, 2)]
        with (
            opened(target, sources[0], 0) as mine,
            opened(target, sources[1], 2) as other,
        ):
            parts = [mine, other]
            for part, source in zip(parts, sources, strict=True):
                for chunk in (1, 2, 0):
                    start, stop = source.manifest.grid.range(chunk)
                    part.buffers(start, stop)[0][:] = source.data[start:stop]
            for part in (parts[first], parts[1 - first]):
                if part is other:
                    part.commit()
                else:
                    with pytest.raises(StorageError, match="another process has repl"):
                        part.commit()
                    mine.buffers(0, 9)[0][:] = bytes(9)
        assert target.read_bytes() == sources[1].file
        assert os.listdir(tmp_path) == ["f"]

    def test_the_same_checkpoint_is_whole(self, tmp_path) -> None:
        """Both write the same bytes into one file; the second one is told."""
        target, source = tmp_path / "f", memory()
        with opened(target, source, 0, 1) as mine, opened(target, source, 2) as other:
            assert held(other) == [0, 1, 2]
            other.commit()
            start, stop = source.manifest.grid.range(2)
            mine.buffers(start, stop)[0][:] = source.data[start:stop]
            with pytest.raises(StorageError, match="another process has replaced"):
                mine.commit()
        assert target.read_bytes() == source.file


class TestRefusals:
    """A path that cannot be written is an error that destroys nothing."""

    @pytest.mark.parametrize("content", [b"notes", b"\0" * 8 + b"x" * 100, b"PK\3\4"])
    def test_another_programs_part_file(self, tmp_path, content: bytes) -> None:
        """Browsers name their downloads so, too, and the receive leaves them alone."""
        (tmp_path / "f.part").write_bytes(content)
        with pytest.raises(StorageError, match=r"f\.part: it is no part of a check"):
            PartFile.open(tmp_path / "f", memory().manifest)
        assert (tmp_path / "f.part").read_bytes() == content

    def test_a_part_file_in_use(self, tmp_path) -> None:
        """Two receives into one file would mix; the second one is refused."""
        with opened(tmp_path / "f", memory(), 0, 1, 2) as part:
            with pytest.raises(StorageError, match="another process is receiving"):
                PartFile.open(tmp_path / "f", memory().manifest)
            part.commit()
        assert (tmp_path / "f").read_bytes() == memory().file

    @proves("threat E2")
    def test_a_part_file_that_is_a_link(self, tmp_path) -> None:
        """A link cannot make the receive write elsewhere."""
        (tmp_path / "f.part").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StorageError, match=r"f\.part: "):
            PartFile.open(tmp_path / "f", memory().manifest)
        assert not (tmp_path / "elsewhere").exists()

    def test_a_full_disk(self, tmp_path) -> None:
        """It is found out before a byte arrives; an earlier part is kept."""
        small, large = memory(), memory(step=2, nbytes=40 * CHUNK)
        with small_disk(tmp_path / "disk", 1 << 20) as disk:
            with opened(disk / "f", small, 0, 1, 2):
                pass
            with pytest.raises(StorageError) as caught:
                PartFile.open(disk / "f", large.manifest)
            assert "2.6 MB are needed and 0.9 MB are free" in str(caught.value)
            assert "f.part: No space left on device" in str(caught.value)
            assert os.listdir(disk) == ["f.part"]
            with opened(disk / "f", small) as again:
                assert held(again) == [0, 1, 2]


class TestRead:
    """Headers and chunks of files that are there."""

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (memory().file[:-1], "it is truncated: 16.* bytes where its header says"),
            (memory().file + b"x", "it is too long: 16.* bytes where its header says"),
            (b"", "it cannot be read"),
            (b"short", "it cannot be read"),
            (b"PK\3\4" + bytes(100), "it is a file of torch.save"),
            (b"\x10" + bytes(7) + b"{}", "it cannot be read"),
            (None, "No such file"),
        ],
        ids=range(7),
    )
    def test_a_file_that_is_none(self, tmp_path, content, reason: str) -> None:
        """It is named, and what is wrong with it."""
        if content is not None:
            (tmp_path / "f").write_bytes(content)
        with pytest.raises(StorageError, match=f"^{tmp_path}/f: .*{reason}"):
            read_header(tmp_path / "f", limits=Limits())

    def test_a_file_that_shrinks_meanwhile(self, tmp_path) -> None:
        """The read raises an error, and the process does not end."""
        source = memory()
        cut = source.file[: source.manifest.header_bytes + CHUNK]
        (tmp_path / "f").write_bytes(cut)
        with (
            checkpoint_file.opened(tmp_path / "f") as file,
            pytest.raises(StorageError, match="it ends at byte"),
        ):
            list(verify_chunks(file, source.manifest))
