"""``aiockpt convert`` under attack: hostile sources, full disks, things in the way."""

from __future__ import annotations

import fcntl
import json
import os
import random
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.cli import convert, main
from tests.support.commandline import ENVIRONMENT
from tests.support.disks import small_disk
from tests.support.saved import flip, load, names, save, save_by_two
from tests.support.system_calls import SystemCallFault

FORMS = ["m.pt", "m.safetensors", "m-1"]


def refused(
    capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 1
) -> str:
    """Run a conversion that is refused in one line; return it."""
    capsys.readouterr()
    assert main(["convert", *map(str, arguments)]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aiockpt: error: ")
    return line


def converted(source: Path, target: Path) -> Any:
    """Run a conversion; return what is there then."""
    assert main(["convert", str(source), str(target)]) == 0
    return load(target)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a checkpoint that all forms can hold."""
    return save(tmp_path / "s-1", {"a": torch.ones(3)})


class TestHostileTorchFiles:
    """A ``.pt`` file may come from anybody."""

    @pytest.mark.parametrize("kind", ["list", "dict", "deep"])
    def test_no_tree_is_too_odd(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
    ) -> None:
        """One that holds itself, or is deeper than any: a limit ends it."""
        state: Any = {} if kind == "dict" else []
        if kind == "deep":
            for _ in range(200):
                state = [state]
        elif kind == "dict":
            state["x"] = state
        else:
            state.append(state)
        torch.save(state, tmp_path / "odd.pt")
        for form in FORMS[1:]:
            said = refused(capsys, tmp_path / "odd.pt", tmp_path / form)
            assert "the nesting of" in said
        if kind != "deep":  # which torch can hold
            said = refused(capsys, tmp_path / "odd.pt", tmp_path / "m.pt")
            assert "that form cannot hold it exactly: maximum recursion" in said
            assert names(tmp_path) == ["odd.pt"]

    def test_no_bytes_are_too_odd(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Cut short anywhere, or with bits flipped where its structure is."""
        torch.save({"a": torch.randn(5000)}, tmp_path / "good.pt")
        whole = (tmp_path / "good.pt").read_bytes()
        bad, noise = tmp_path / "bad.pt", random.Random(5)
        for cut in [0, 1, 3, 4, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
            bad.write_bytes(whole[:cut])
            refused(capsys, bad, tmp_path / "out")
        for number in range(60):
            bad.write_bytes(whole)
            for _ in range(4):
                at = noise.randrange(1000)
                flip(bad, at if number % 2 else len(whole) - 1 - at)
            if main(["convert", str(bad), str(tmp_path / f"out-{number}")]) == 0:
                load(tmp_path / f"out-{number}")

    def test_a_small_file_that_unpacks_to_a_large_one(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Is refused before it does: torch compresses nothing."""
        with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
            bomb.writestr("b/data.pkl", b"\x80\x02" + b"N0" * 1_000_000 + b"N.")
            bomb.writestr("b/version", "3\n")
        said = refused(capsys, tmp_path / "b.pt", tmp_path / "out")
        assert "it is compressed" in said


class TestHostileHeaders:
    """So may a safetensors file."""

    @pytest.mark.parametrize(
        ("length", "text"),
        [
            (0, b"{}"),
            (1, b"{}"),
            (1 << 20, b"{}"),
            (1 << 40, b"{}"),
            ((1 << 64) - 1, b"{}"),
            (2, b"[]"),
            (
                None,
                {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 62]}},
            ),
            (None, {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
            (None, {"a": {"dtype": "X", "shape": [], "data_offsets": [0, 0]}}),
            (None, {"__metadata__": {"aiockpt": "{}"}}),
        ],
        ids=str,
    )
    def test_none_is_believed(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        length: int | None,
        text: Any,
    ) -> None:
        """Nothing is allocated for what it claims, and nothing is left."""
        body = text if isinstance(text, bytes) else json.dumps(text).encode()
        size = len(body) if length is None else length
        bad = tmp_path / "bad.safetensors"
        bad.write_bytes(size.to_bytes(8, "little") + body)
        for form in FORMS:
            refused(capsys, bad, tmp_path / form)
        assert names(tmp_path) == ["bad.safetensors"]

    def test_a_huge_one_of_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Is over the limit before it is read."""
        bad = tmp_path / "bad.safetensors"
        bad.write_bytes((1 << 33).to_bytes(8, "little") + b"{")
        os.truncate(bad, 8 + (1 << 33))
        assert "the header" in refused(capsys, bad, tmp_path / "m-1")

    def test_no_file_at_all(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What would never end is not read."""
        os.mkfifo(tmp_path / "fifo")
        for bad in (tmp_path / "fifo", "/dev/zero"):
            refused(capsys, bad, tmp_path / "m-1")
        assert names(tmp_path) == ["fifo"]


@pytest.mark.parametrize("form", FORMS)
class TestDisk:
    """The target is there wholly, or it is not."""

    def test_it_is_full(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
    ) -> None:
        """It says so, whatever torch makes of it, and has its space back."""
        source = save(tmp_path / "s-1", {"a": torch.zeros(1_000_000)})
        with small_disk(tmp_path / "disk", 2 << 20) as disk:
            assert "No space left on device" in refused(capsys, source, disk / form)
            assert names(disk) == []

    def test_it_is_read_only(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
    ) -> None:
        """To write; what is on it can be converted."""
        with small_disk(tmp_path / "disk", 2 << 20) as disk:
            save(disk / "s-1", {"a": torch.ones(3)})
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            said = refused(capsys, disk / "s-1", disk / form)
            assert "Read-only file system" in said
            assert converted(disk / "s-1", tmp_path / form)["a"].sum() == 3

    def test_its_directory_is_missing(
        self, tmp_path: Path, source: Path, form: str
    ) -> None:
        """A checkpoint's is made, a file's is not."""
        code = main(["convert", str(source), str(tmp_path / "deep" / form)])
        assert code == (0 if form == "m-1" else 1)
        assert (tmp_path / "deep").exists() == (form == "m-1")


class TestInTheWay:
    """What is there already is never written to."""

    def test_the_same_name(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path
    ) -> None:
        """Nor is a link, wherever it leads."""
        (tmp_path / "link.pt").symlink_to("nowhere")
        for target in (source, tmp_path / "link.pt", tmp_path, "/", "."):
            assert "it is there already" in refused(capsys, source, target)
        assert load(source)["a"].sum() == 3

    def test_whoever_comes_first(
        self, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also in the last moment."""
        target, compare = tmp_path / "m.pt", convert._compare

        def late(*args: Any) -> None:
            compare(*args)
            target.write_text("precious")

        monkeypatch.setattr(convert, "_compare", late)
        assert main(["convert", str(source), str(target)]) == 1
        assert target.read_text() == "precious"
        assert names(tmp_path) == ["m.pt", "s-1"]

    def test_a_link_that_somebody_has_laid(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path
    ) -> None:
        """It is not followed."""
        (tmp_path / "victim").write_text("precious")
        (tmp_path / ".m.pt.tmp").symlink_to("victim")
        refused(capsys, source, tmp_path / "m.pt")
        assert (tmp_path / "victim").read_text() == "precious"

    def test_what_a_dead_conversion_has_left(
        self, tmp_path: Path, source: Path
    ) -> None:
        """Is begun anew."""
        (tmp_path / ".m.pt.tmp").write_bytes(b"x" * 100_000)
        assert converted(source, tmp_path / "m.pt")["a"].sum() == 3
        assert names(tmp_path) == ["m.pt", "s-1"]

    def test_another_conversion(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path
    ) -> None:
        """It goes on, and this one is told."""
        with (tmp_path / ".m.pt.tmp").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            said = refused(capsys, source, tmp_path / "m.pt")
            assert "another process is writing it" in said
            assert (tmp_path / ".m.pt.tmp").exists()

    @pytest.mark.parametrize("call", ["fsync", "renameat2"])
    def test_its_own_death(self, tmp_path: Path, source: Path, call: str) -> None:
        """Nothing has the name, and the next one takes it."""
        target = tmp_path / "m.pt"
        convert = [sys.executable, "-m", "aiockpt", "convert", str(source), str(target)]
        fault = SystemCallFault(call, "KILL")
        fault.run(convert, env=ENVIRONMENT)
        assert fault.struck
        assert names(tmp_path) == [".m.pt.tmp", "s-1"]
        assert converted(source, target)["a"].sum() == 3
        assert names(tmp_path) == ["m.pt", "s-1"]


class TestOptions:
    """What was asked for is done, or refused."""

    def test_those_that_mean_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path
    ) -> None:
        """A file has no step of ours, and no ranks."""
        said = refused(capsys, source, tmp_path / "m.pt", "--step", 3, code=2)
        assert "--step is for checkpoint directories" in said
        converted(source, tmp_path / "m.pt")
        said = refused(capsys, tmp_path / "m.pt", tmp_path / "o", "--rank", 0, code=2)
        assert "--rank is for checkpoint directories" in said

    def test_the_seeds_ranks(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One is chosen, as of ours."""
        old = tmp_path / "old"
        old.mkdir()
        for rank in (0, 1):
            torch.save({"rank": rank}, old / f"checkpoint_{rank}.pt")
        assert "2 ranks wrote it" in refused(capsys, old, tmp_path / "s-1")
        both = save_by_two(tmp_path / "ours")
        for rank, there in enumerate((old, both)):
            target = tmp_path / f"s-{rank}"
            assert main(["convert", str(there), str(target), "--rank", "1"]) == 0
            assert load(target) == {"rank": 1}

    @pytest.mark.parametrize("form", ["m.PT", "m.SafeTensors"])
    def test_a_suffix_of_any_case(
        self, tmp_path: Path, source: Path, form: str
    ) -> None:
        """Is that suffix."""
        assert converted(source, tmp_path / form)["a"].sum() == 3
        assert (tmp_path / form).is_file()

    @pytest.mark.parametrize("form", FORMS[:2])
    def test_permissions(self, tmp_path: Path, source: Path, form: str) -> None:
        """Are what the umask leaves of those of a file, which is no program."""
        before = os.umask(0o027)
        try:
            converted(source, tmp_path / form)
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / form).stat().st_mode) == 0o640
