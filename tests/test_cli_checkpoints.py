"""The command line on checkpoint directories: ls, inspect, verify, convert."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aiockpt.cli import main
from aiockpt.storage.commit import Draft
from aiockpt.storage.directory import MARKER, checkpoint_at
from aiockpt.testing import assert_same
from tests.support.commandline import serving
from tests.support.saved import (
    CHUNK,
    flip,
    load,
    names,
    save,
    save_by_two,
    training_state,
)

FILE = "checkpoint_0.safetensors"


def save_two_ranks(path: Path) -> Path:
    """Save a checkpoint of two ranks, of which one has a tensor."""
    return save_by_two(path, {"a": torch.zeros(CHUNK)})


def error_of(
    capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 1
) -> str:
    """Run a command that fails; return its one line."""
    assert main([str(each) for each in arguments]) == code
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    return line


def convert(*arguments: object) -> None:
    """Run a conversion that works."""
    assert main(["convert", *map(str, arguments)]) == 0


class TestLs:
    """What is there, by step."""

    def test_whole_and_unfinished_ones(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The whole ones on stdout, the others on stderr."""
        for step in (20, 3):
            save(tmp_path / f"step-{step}", {"a": torch.zeros(1000)})
        (save(tmp_path / "step-4", {}) / MARKER).unlink()
        (tmp_path / "logs").mkdir()
        with Draft(tmp_path / "step-5", 0, durable=False):
            assert main(["ls", str(tmp_path)]) == 0
        out, err = capsys.readouterr()
        rows = [line.split() for line in out.splitlines()]
        assert rows[0] == ["NAME", "STEP", "RANKS", "SIZE", "SAVED"]
        assert [row[:5] for row in rows[1:]] == [
            ["step-3", "3", "1", *rows[1][3:5]],
            ["step-20", "20", "1", *rows[2][3:5]],
        ]
        assert err == ".step-5.part: not whole\nstep-4: not whole\n"

    def test_for_programs(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One document."""
        save_two_ranks(tmp_path / "step-4")
        assert main(["ls", "--json", str(tmp_path)]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["name"], found["step"], found["world_size"]) == ("step-4", 4, 2)
        assert found["bytes"] == checkpoint_at(tmp_path / "step-4").nbytes

    def test_no_directory(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Is an error; an empty one is not."""
        assert "No such file" in error_of(capsys, "ls", tmp_path / "missing")
        assert main(["ls", str(tmp_path)]) == 0
        assert capsys.readouterr().out == ""


class TestInspect:
    """One rank's header."""

    def test_a_directory(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Of one rank, or of the one that is chosen."""
        path = save_two_ranks(tmp_path / "step-4")
        assert main(["inspect", str(save(tmp_path / "alone-4", {}))]) == 0
        assert "step 4" in capsys.readouterr().out
        assert "choose one with --rank" in error_of(capsys, "inspect", path, code=2)
        assert "none of them was rank 2" in error_of(
            capsys, "inspect", path, "--rank", 2
        )
        assert main(["inspect", "--json", "--rank", "1", str(path)]) == 0
        assert json.loads(capsys.readouterr().out)["source"].endswith("_1.safetensors")
        message = error_of(capsys, "inspect", path / FILE, "--rank", 0, code=2)
        assert "--rank is for checkpoint directories" in message

    def test_an_unfinished_one(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Is none."""
        (save(tmp_path / "s", {}) / MARKER).unlink()
        assert "it holds no marker" in error_of(capsys, "inspect", tmp_path / "s")


class TestVerify:
    """All files of all ranks."""

    def test_an_intact_one(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A line for each."""
        path = save_two_ranks(tmp_path / "step-4")
        assert main(["verify", str(path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(": ")[1][:8] for line in lines] == ["4 chunks", "0 chunks"]

    def test_damage(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Is named with its file; the other files are verified all the same."""
        path = save_two_ranks(tmp_path / "step-4")
        flip(path / FILE, -1)
        assert main(["verify", str(path)]) == 1
        out, err = capsys.readouterr()
        assert f"{path / FILE}: chunk 3 of 4" in err
        assert "checkpoint_1.safetensors" in out

    def test_a_file_of_another_save(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The marker knows which one it must be."""
        path, other = (save(tmp_path / f"s{i}", {"a": i}) for i in (1, 2))
        (other / FILE).rename(path / FILE)
        assert "the marker names" in error_of(capsys, "verify", path)


class TestServe:
    """A checkpoint's file is served as it is."""

    def test_what_was_saved_is_loaded_from_a_peer(self, tmp_path: Path) -> None:
        """Whole, or some of it; and what was served is saved again."""
        state = training_state()
        del state["rng"]
        saved = save(tmp_path / "step-9", state)
        with serving(saved / FILE) as running:
            assert_same(load(running.metadata), state)
            assert load(running.metadata, select=["step"]) == {"step": 100}
            again = save(tmp_path / "step-10", load(running.metadata))
        assert_same(load(again), state)


class TestConvert:
    """Exact, or refused."""

    @pytest.mark.parametrize("middle", ["m.pt", "step-9"])
    def test_there_and_back(self, tmp_path: Path, middle: str) -> None:
        """A state dict that each form can hold."""
        state = training_state()
        del state["rng"]
        torch.save(state, tmp_path / "a.pt")
        chain = ["a.pt", "first-8", middle, "last-10"]
        for source, target in pairwise(chain):
            convert(tmp_path / source, tmp_path / target)
        assert_same(load(tmp_path / "last-10"), state)
        assert checkpoint_at(tmp_path / "last-10").step == 10
        assert names(tmp_path) == sorted(chain)

    def test_a_plain_file(self, tmp_path: Path) -> None:
        """Other tools find nothing of ours in it."""
        state = {"x.w": torch.randn(3, 4).half(), "y": torch.arange(5)}
        state["z"] = torch.ones(0)
        save(tmp_path / "s-1", state)
        convert(tmp_path / "s-1", tmp_path / "m.safetensors")
        found = load_file(tmp_path / "m.safetensors")
        assert_same({name: found[name] for name in state}, state)
        assert b"aiockpt" not in (tmp_path / "m.safetensors").read_bytes()
        save_file(state, tmp_path / "n.safetensors")
        convert(tmp_path / "n.safetensors", tmp_path / "s-2", "--step", 77)
        assert checkpoint_at(tmp_path / "s-2").step == 77
        assert_same(load(tmp_path / "s-2", dict.fromkeys(state)), state)

    @pytest.mark.parametrize(
        ("state", "reason"),
        [
            ({"a": {"b": torch.ones(2)}}, "'a' has the type dict, not Tensor"),
            ({"a": 1}, "'a' has the type int, not Tensor"),
            ([torch.ones(2)], "this is a list"),
            ({"a": torch.ones(2, 3).t()}, "a shares memory"),
            ({"a": torch.nn.Parameter(torch.ones(2))}, "a shares memory"),
            (dict.fromkeys("ab", torch.ones(2)), "all of its names"),
            ({"a": torch.ones(4), 3: torch.ones(1)}, "key 3 has the type int, not str"),
        ],
        ids=str,
    )
    def test_what_a_plain_file_cannot_hold(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        state: Any,
        reason: str,
    ) -> None:
        """Nothing is written then."""
        save(tmp_path / "s", state)
        target = tmp_path / "m.safetensors"
        assert reason in error_of(capsys, "convert", tmp_path / "s", target)
        assert names(tmp_path) == ["s"]

    def test_what_torch_brings_back_only_by_running_code(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """An array is no part of what ``weights_only`` loads."""
        save(tmp_path / "s", training_state())
        target = tmp_path / "m.pt"
        message = error_of(capsys, "convert", tmp_path / "s", target)
        assert "that form cannot hold it exactly" in message
        assert names(tmp_path) == ["s"]

    def test_several_ranks(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One is chosen."""
        path = save_two_ranks(tmp_path / "step-4")
        target = tmp_path / "m.pt"
        message = error_of(capsys, "convert", path, target, code=2)
        assert "choose one with --rank" in message
        convert(path, target, "--rank", 1)
        assert load(target) == {"rank": 1}

    def test_nothing_is_overwritten(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Whatever is there already stays."""
        save(tmp_path / "s", {"a": 1})
        for name in ("s", "f.pt"):
            (tmp_path / "f.pt").touch()
            message = error_of(capsys, "convert", tmp_path / "s", tmp_path / name)
            assert "it is there already" in message
