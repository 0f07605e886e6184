"""``aiockpt convert``: exact, or refused; the target is there wholly, or it is not."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import shlex
import stat
import subprocess
import warnings
import zipfile
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

from aiockpt.errors import IntegrityError
from aiockpt.testing import assert_same
from tests.support.commandline import Commands, killed_at_fsync
from tests.support.saving import flip, load, names, save, save_by_two, training_state
from tests.support.shortages import small_disk

FORMS = ["m.pt", "m.safetensors", "m-1"]


BASE = torch.arange(24.0)


def below(dtype: str, *shape: int) -> torch.Tensor:
    """Return a tensor of a dtype of one byte, with all kinds of bits."""
    raw = torch.arange(torch.Size(shape).numel(), dtype=torch.uint8) * 7
    return raw.view(getattr(torch, dtype)).view(shape)


ODD: dict[str, torch.Tensor] = {
    "whole": BASE,
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "square": torch.arange(9.0).view(3, 3).t(),
    "channels": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "expanded": torch.ones(1).expand(5),
    "tied": BASE,
    "tied.view": BASE.view(4, 6),
    "offset": BASE[3:7],
    "stepped": BASE[1::3],
    "one": torch.arange(4.0)[2::2][:1],
    "scalar": torch.tensor(3.5),
    "empty": torch.ones(0, 3),
    "flags": torch.tensor([True, False]),
    "bfloat": torch.randn(3).bfloat16(),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conj": torch.randn(3, dtype=torch.complex64).conj(),
    "neg": torch._neg_view(torch.randn(3)),
    "imag": torch.randn(3, dtype=torch.complex64).conj().imag,
    "parameter": torch.nn.Parameter(torch.randn(2)),
    "wide": torch.arange(3).to(torch.uint64),
    **{
        name: below(name, 3, 4)
        for name in (
            "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
            "float8_e8m0fnu", "float4_e2m1fn_x2",
        )
    },
    "scales": below("float8_e8m0fnu", 3, 4).t(),
}  # fmt: skip


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements, in logical order."""
    if tensor.dtype.itemsize == 1 and tensor.dtype is not torch.bool:
        return tensor.detach().view(torch.uint8).reshape(-1)
    dense = tensor.detach().resolve_conj().resolve_neg()
    return dense.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint names."""
    return int(json.loads((checkpoint / "commit.json").read_text())["step"])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a checkpoint that all forms can hold."""
    return save(tmp_path / "s-1", {"a": torch.ones(3)})


class TestForms:
    """Each form holds certain values."""

    @pytest.mark.parametrize("middle", ["m.pt", "step-9"])
    def test_there_and_back(self, cli: Commands, tmp_path: Path, middle: str) -> None:
        """A state dict that each form can hold."""
        state = training_state()
        del state["rng"]
        torch.save(state, tmp_path / "a.pt")
        chain = ["a.pt", "first-8", middle, "last-10"]
        for before, after in pairwise(chain):
            cli("convert", tmp_path / before, tmp_path / after)
        assert_same(load(tmp_path / "last-10"), state)
        assert step_of(tmp_path / "last-10") == 10
        assert names(tmp_path) == sorted(chain)

    def test_a_plain_file(self, cli: Commands, tmp_path: Path) -> None:
        """Other tools find nothing of ours in it."""
        state = {"x.w": torch.randn(3, 4).half(), "y": torch.arange(5)}
        state["z"] = torch.ones(0)
        target = tmp_path / "m.safetensors"
        cli("convert", save(tmp_path / "s-1", state), target)
        found = load_file(target)
        assert_same({name: found[name] for name in state}, state)
        assert b"aiockpt" not in target.read_bytes()
        save_file(state, tmp_path / "n.safetensors")
        cli("convert", tmp_path / "n.safetensors", tmp_path / "s-2", "--step", 77)
        assert step_of(tmp_path / "s-2") == 77
        assert_same(load(tmp_path / "s-2", dict.fromkeys(state)), state)

    def test_a_plain_file_has_all_values_for_other_readers(
        self, cli: Commands, tmp_path: Path
    ) -> None:
        """Logical shapes and all names, whatever lies below; the original says more."""
        target = tmp_path / "m.safetensors"
        cli("convert", save(tmp_path / "s-1", OrderedDict(ODD)), target)
        found = load_file(target)
        assert found.keys() == ODD.keys()
        for name, value in ODD.items():
            assert found[name].dtype == value.dtype, name
            assert found[name].shape == value.shape, name
            assert found[name].is_contiguous(), name
            assert torch.equal(bits(found[name]), bits(value)), name
        assert_same(load(target)["transposed"], ODD["transposed"].contiguous())
        (tmp_path / "again").mkdir()
        cli("convert", target, tmp_path / "again" / "n.safetensors")
        assert (
            tmp_path / "again" / "n.safetensors"
        ).read_bytes() == target.read_bytes()

    def test_inspect_says_what_other_readers_get(
        self, cli: Commands, tmp_path: Path
    ) -> None:
        """`inspect` says what safetensors' own reader gets of each tensor."""
        path = save(tmp_path / "s-1", ODD)
        report = json.loads(cli("inspect", path, "--json")[0])
        theirs = load_file(path / "checkpoint_0.safetensors")
        for tensor in report["tensors"]:
            name, said = tensor["path"], tensor.get("other_readers", "")
            if said == "absent":
                assert name not in theirs
                continue
            got, value = theirs[name], ODD[name]
            same = got.dtype == value.dtype and got.shape == value.shape
            same = same and torch.equal(bits(got), bits(value))
            assert same == (said == ""), name
            if said.startswith("shape "):
                assert said == f"shape {[*got.shape]}"
        text, _ = cli("inspect", path)
        assert "  tied: absent, only whole is there\n" in text
        assert "  transposed: shape [6]\n" in text
        plain, _ = cli("inspect", save(tmp_path / "p", {"a": BASE}))
        assert "Other readers" not in plain

    @pytest.mark.parametrize(
        ("state", "reason"),
        [
            ({"a": {"b": torch.ones(2)}}, "'a' has the type dict, not Tensor"),
            ({"a": 1}, "'a' has the type int, not Tensor"),
            ([torch.ones(2)], "this is a list"),
            ({"": torch.ones(2)}, "'' cannot be the name of a tensor"),
            ({"a": torch.ones(2).to(torch.complex128)}, "dtype torch.complex128"),
            ({"a": torch.ones(2).to(torch.complex32)}, "which safetensors cannot say"),
            ({"a": torch.ones(4), 3: torch.ones(1)}, "key 3 has the type int, not str"),
        ],
        ids=str,
    )
    def test_what_a_plain_file_cannot_hold(
        self, cli: Commands, tmp_path: Path, state: Any, reason: str
    ) -> None:
        """The command writes nothing if a plain file cannot hold the state."""
        save(tmp_path / "s", state)
        target = tmp_path / "m.safetensors"
        assert reason in cli.error("convert", tmp_path / "s", target)
        assert names(tmp_path) == ["s"]

    def test_what_torch_brings_back_only_by_running_code(
        self, cli: Commands, tmp_path: Path
    ) -> None:
        """An array is no part of what ``weights_only`` loads."""
        save(tmp_path / "s", training_state())
        error = cli.error("convert", tmp_path / "s", tmp_path / "m.pt")
        assert "that form cannot hold it exactly" in error
        assert names(tmp_path) == ["s"]

    @pytest.mark.parametrize("name", ["m.bin", "m.pth.tar", "m.safetensor", "m.NPZ"])
    def test_an_unknown_suffix(self, cli: Commands, small: Path, name: str) -> None:
        """It is wrong usage; the known ones are listed."""
        error = cli.error("convert", small, small.with_name(name), code=2)
        for hint in (name, ".pt", ".safetensors", f"{name}/"):
            assert hint in error
        assert names(small.parent) == ["model.pt"]

    @pytest.mark.parametrize(
        ("name", "made"),
        [
            ("step-7", "step-7/commit.json"),
            ("llama-3.1", "llama-3.1/commit.json"),
            ("m.bin/", "m.bin/commit.json"),
            ("m.PT", "m.PT"),
            ("m.SafeTensors", "m.SafeTensors"),
        ],
    )
    def test_a_name_says_the_form(
        self, cli: Commands, source: Path, name: str, made: str
    ) -> None:
        """A suffix of any case is one; a version number or a slash is none."""
        cli("convert", source, f"{source.parent}/{name}")
        assert (source.parent / made).is_file()
        assert load(source.parent / name)["a"].sum() == 3

    def test_the_way_out_is_named(self, cli: Commands, small: Path) -> None:
        """The file, the key and its type, and a command that works."""
        error = cli.error("convert", small, small.with_name("m.safetensors"))
        assert f"{small}: 'optimizer' has the type dict, not Tensor" in error
        assert "checkpoint directory" in error
        directory = shlex.split(error.rpartition(": ")[2])
        assert directory[0] == "aiockpt"
        cli(*directory[1:])


class TestHostileSources:
    """The source of a conversion may come from anybody."""

    @pytest.mark.parametrize("kind", ["list", "dict", "deep"])
    def test_no_tree_is_too_odd(self, cli: Commands, tmp_path: Path, kind: str) -> None:
        """One that holds itself, or is deeper than any: a limit ends it."""
        state: Any = {} if kind == "dict" else []
        if kind == "deep":
            for _ in range(200):
                state = [state]
        elif kind == "dict":
            state["x"] = state
        else:
            state.append(state)
        odd = tmp_path / "odd.pt"
        torch.save(state, odd)
        for form in FORMS[1:]:
            assert "the nesting of" in cli.error("convert", odd, tmp_path / form)
        if kind != "deep":  # which torch can hold
            error = cli.error("convert", odd, tmp_path / "m.pt")
            assert "that form cannot hold it exactly: maximum recursion" in error
            assert names(tmp_path) == ["odd.pt"]

    def test_no_bytes_are_too_odd(self, cli: Commands, tmp_path: Path) -> None:
        """Cut short anywhere, or with bits flipped where its structure is."""
        torch.save({"a": torch.randn(5000)}, tmp_path / "good.pt")
        whole = (tmp_path / "good.pt").read_bytes()
        bad, noise = tmp_path / "bad.pt", random.Random(5)
        for cut in [0, 1, 3, 4, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
            bad.write_bytes(whole[:cut])
            cli.error("convert", bad, tmp_path / "out")
        for number in range(20):
            bad.write_bytes(whole)
            for _ in range(4):
                at = noise.randrange(1000)
                flip(bad, at if number % 2 else len(whole) - 1 - at)
            target = tmp_path / f"out-{number}"
            cli("convert", bad, target, code=None)  # it may be refused
            if target.exists():
                load(target)

    def test_a_small_file_that_unpacks_to_a_large_one(
        self, cli: Commands, tmp_path: Path
    ) -> None:
        """It is refused before it does: torch compresses nothing."""
        with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
            bomb.writestr("b/data.pkl", b"\x80\x02" + b"N0" * 1_000_000 + b"N.")
            bomb.writestr("b/version", "3\n")
        error = cli.error("convert", tmp_path / "b.pt", tmp_path / "out")
        assert "it is compressed" in error

    @pytest.mark.parametrize("size", [2, 1 << 20, (1 << 64) - 1])
    def test_no_header_is_believed(
        self, cli: Commands, tmp_path: Path, size: int
    ) -> None:
        """The command allocates nothing for a claim, and leaves nothing."""
        bad = tmp_path / "bad.safetensors"
        bad.write_bytes(size.to_bytes(8, "little") + b"[]")
        for form in FORMS:
            cli.error("convert", bad, tmp_path / form)
        assert names(tmp_path) == ["bad.safetensors"]

    def test_a_huge_header_of_nothing(self, cli: Commands, tmp_path: Path) -> None:
        """It is over the limit before it is read."""
        bad = tmp_path / "bad.safetensors"
        with bad.open("wb") as file:
            file.write((1 << 36).to_bytes(8, "little") + b"{")
            file.truncate(1 << 37)
        assert "the header" in cli.error("convert", bad, tmp_path / "m-1")

    def test_no_file_at_all(self, cli: Commands, tmp_path: Path) -> None:
        """The command does not read what would never end."""
        os.mkfifo(tmp_path / "fifo")
        for bad in (tmp_path / "fifo", "/dev/zero"):
            cli.error("convert", bad, tmp_path / "m-1")
        assert names(tmp_path) == ["fifo"]


@pytest.mark.parametrize("form", FORMS)
class TestDisk:
    """The target is there wholly, or it is not."""

    def test_it_is_full(self, cli: Commands, tmp_path: Path, form: str) -> None:
        """The error says so, whatever torch makes of it; the space is free again."""
        source = save(tmp_path / "s-1", {"a": torch.zeros(1_000_000)})
        with small_disk(tmp_path / "disk", 2 << 20) as disk:
            error = cli.error("convert", source, disk / form)
            assert "No space left on device" in error
            assert names(disk) == []

    def test_it_is_read_only(self, cli: Commands, tmp_path: Path, form: str) -> None:
        """A checkpoint on a read-only disk can be converted, but not written there."""
        with small_disk(tmp_path / "disk", 2 << 20) as disk:
            save(disk / "s-1", {"a": torch.ones(3)})
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            error = cli.error("convert", disk / "s-1", disk / form)
            assert "Read-only file system" in error
            cli("convert", disk / "s-1", tmp_path / form)
            assert load(tmp_path / form)["a"].sum() == 3

    def test_its_directory_is_missing(
        self, cli: Commands, tmp_path: Path, source: Path, form: str
    ) -> None:
        """A checkpoint's is made; a file's is named, and no temporary file."""
        place = tmp_path / "deep"
        if form == "m-1":
            cli("convert", source, place / form)
            return
        error = cli.error("convert", source, place / form)
        assert f"there is no directory {place}; make it first" in error
        assert ".tmp" not in error
        assert not place.exists()


class TestInTheWay:
    """The command replaces what is there only if it was asked to."""

    @pytest.mark.parametrize("name", ["copy.pt", "copy"])
    def test_overwrite(
        self, cli: Commands, tmp_path: Path, source: Path, name: str
    ) -> None:
        """A file or a checkpoint; never a directory of anything else."""
        other, target = save(tmp_path / "o-1", {"a": torch.zeros(2)}), tmp_path / name
        cli("convert", source, target)
        error = cli.error("convert", other, target)
        assert f"{target}: it is there already" in error
        assert "--overwrite" in error
        cli("convert", other, target, "--overwrite")
        assert load(target)["a"].shape == (2,)
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "file").touch()
        error = cli.error("convert", other, tmp_path / "precious", "--overwrite")
        assert "it is no checkpoint" in error
        assert (tmp_path / "precious" / "file").exists()

    def test_the_same_name(self, cli: Commands, tmp_path: Path, source: Path) -> None:
        """The command does not write to a link, wherever it leads."""
        (tmp_path / "link.pt").symlink_to("nowhere")
        for target in (source, tmp_path / "link.pt", tmp_path, "/", "."):
            assert "it is there already" in cli.error("convert", source, target)
        assert load(source)["a"].sum() == 3

    @pytest.mark.parametrize("lock_works", [True, False])
    def test_another_command_at_the_last_moment(
        self,
        cli: Commands,
        tmp_path: Path,
        source: Path,
        monkeypatch: pytest.MonkeyPatch,
        lock_works: bool,
    ) -> None:
        """It is told of the first one; where there are no locks, it is not replaced."""
        target, sync, said = tmp_path / "m.pt", os.fsync, list[str]()
        other = save(tmp_path / "o-1", {"a": torch.zeros(7)})

        def beside(fd: int) -> None:
            sync(fd)
            monkeypatch.setattr(os, "fsync", sync)
            command = ("convert", other, target)
            said.append(cli.error(*command) if lock_works else str(cli(*command)))

        if not lock_works:
            monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        monkeypatch.setattr(os, "fsync", beside)
        ended = cli("convert", source, target, code=0 if lock_works else 1)
        assert ("another process is writing it" in said[0]) is lock_works
        assert ("File exists" in str(ended)) is not lock_works
        assert len(load(target)["a"]) == (3 if lock_works else 7)
        assert names(tmp_path) == ["m.pt", "o-1", "s-1"]

    def test_a_temporary_file(
        self, cli: Commands, tmp_path: Path, source: Path
    ) -> None:
        """A link is not followed, and what others call so is not touched."""
        lock, target = tmp_path / ".m.pt.lock", tmp_path / "m.pt"
        (tmp_path / "victim").write_text("precious")
        lock.symlink_to("victim")
        assert f"{lock}: no checkpointer wrote it" in cli.error(
            "convert", source, target
        )
        assert (tmp_path / "victim").read_text() == "precious"
        lock.unlink()
        (tmp_path / ".m.pt.tmp").write_text("precious")
        (tmp_path / ".m.pt.0123abcd.tmp").write_text("precious")
        cli("convert", source, target)
        assert load(target)["a"].sum() == 3
        found = [".m.pt.0123abcd.tmp", ".m.pt.tmp", "m.pt", "s-1", "victim"]
        assert names(tmp_path) == found

    def test_its_own_death(self, cli: Commands, tmp_path: Path, source: Path) -> None:
        """A killed command leaves the name free, and the next one takes it."""
        target = tmp_path / "m.pt"
        killed_at_fsync(1, "convert", source, target)
        temporary, lock, _ = names(tmp_path)
        assert re.fullmatch(r"\.m\.pt\.[0-9a-f]{8}\.tmp", temporary)
        assert lock == ".m.pt.lock"
        cli("convert", source, target)
        assert load(target)["a"].sum() == 3
        assert names(tmp_path) == ["m.pt", "s-1"]

    def test_a_disk_that_does_not_confirm_the_name(
        self,
        cli: Commands,
        tmp_path: Path,
        source: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The error says that the file is there."""
        target, sync = tmp_path / "m.pt", os.fsync

        def fail(fd: int) -> None:
            if os.path.samestat(os.fstat(fd), tmp_path.stat()):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(fd)

        monkeypatch.setattr(os, "fsync", fail)
        error = cli.error("convert", source, target)
        assert f"{target}: it is in its place, but" in error
        assert load(target)["a"].sum() == 3
        assert names(tmp_path) == ["m.pt", "s-1"]


class TestOptions:
    """The command does what each option asks for, or refuses it."""

    def test_those_that_mean_nothing(
        self, cli: Commands, tmp_path: Path, source: Path
    ) -> None:
        """A file has no step of ours, and no ranks."""
        target = tmp_path / "m.pt"
        error = cli.error("convert", source, target, "--step", 3, code=2)
        assert "--step is for checkpoint directories" in error
        cli("convert", source, target)
        error = cli.error("convert", target, tmp_path / "o", "--rank", 0, code=2)
        assert "--rank is for checkpoint directories" in error

    @pytest.mark.parametrize("ours", [True, False])
    def test_one_of_several_ranks(
        self, cli: Commands, tmp_path: Path, ours: bool
    ) -> None:
        """The rank may be one of our checkpoint, or of torch's experimental one."""
        both = tmp_path / "step-4"
        if ours:
            save_by_two(both)
        else:
            both.mkdir()
            for rank in (0, 1):
                torch.save({"rank": rank}, both / f"checkpoint_{rank}.pt")
        target = tmp_path / "m.pt"
        error = cli.error("convert", both, target, code=1 if ours else 2)
        if ours:
            assert "its ranks saved different values at rank" in error
            assert "--rank-values 0" in error
        assert "--rank" in error
        assert not target.exists()
        cli("convert", both, target, "--rank", 1)
        assert load(target) == {"rank": 1}
        if ours:
            cli("convert", both, target, "--rank-values", 0, "--overwrite")
            assert load(target) == {"rank": 0}

    @pytest.mark.parametrize("form", FORMS[:2])
    def test_permissions(
        self, cli: Commands, tmp_path: Path, source: Path, form: str
    ) -> None:
        """A new file has the permissions of any new file."""
        before = os.umask(0o027)
        try:
            cli("convert", source, tmp_path / form)
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / form).stat().st_mode) == 0o640


def test_a_checkpoint_of_dcp(
    cli: Commands, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no digests, and one of ours has."""
    state = {"a": torch.arange(1000.0), "step": 7}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_by_dcp(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    target = tmp_path / "step-0"
    cli("convert", tmp_path / "dcp", target)
    assert "its bytes are not verified" in caplog.text
    cli("verify", target)
    assert_same(load(target), state)
    flip(target / "checkpoint_0.safetensors", -1)
    with pytest.raises(IntegrityError):
        load(target)
