"""``aiockpt inspect``, ``verify`` and ``ls``: what is there, and whether whole."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aiockpt import register_leaf
from tests.support.commandline import CHUNK, Commands, Serving, run_aiockpt
from tests.support.saving import CHUNK as SMALL_CHUNK
from tests.support.saving import flip, save, save_by_two

pytestmark = pytest.mark.timeout(180)

FILE = "checkpoint_0.safetensors"


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """Return a checkpoint of two ranks, of which one has a tensor."""
    return save_by_two(tmp_path / "step-4", {"a": torch.zeros(SMALL_CHUNK)})


class TestInspect:
    """`inspect` says what a checkpoint holds, for people and for programs."""

    def test_the_table(self, cli: Commands, server: Serving, file: Path) -> None:
        """Step, tree, digests and tensors, the same of a file and of a peer."""
        shown = cli("inspect", file)[0]
        for expected in (
            r"  step 7, snapshot [0-9a-f]{32}",
            r"  dict of 3",
            r"    model      OrderedDict of 3: 3 tensors",
            r"    optimizer  dict of 2: 1 tensor, 1 value",
            r"    step       int 7",
            r"Digests: 3 chunks of 16.8 MB, xxh3-128",
            r"    2  [0-9a-f]{32}",
            r"model\.weight +float32 +10485760 +41\.9 MB",
            r"model\.tied +float32 +10485760 +41\.9 MB  in model\.weight",
            r"optimizer\.state\[0\]\.step +float32 +scalar +4 B",
        ):
            assert re.search(f"^{expected}$", shown, re.MULTILINE), expected
        first, *rest = cli("inspect", server.metadata)[0].splitlines()
        assert rest == shown.splitlines()[1:]
        assert first == f"{server.base}:"

    def test_json_is_complete(self, cli: Commands, file: Path) -> None:
        """Digests, tree and tensors, in plain types."""
        report = json.loads(cli("inspect", file, "--json")[0])
        assert report["format"] == "aiockpt"
        assert len(report["digests"]) == 3
        assert report["segment_bytes"] + report["header_bytes"] == file.stat().st_size
        bias = next(each for each in report["tensors"] if each["path"] == "model.bias")
        assert bias == {
            "path": "model.bias",
            "dtype": "float32",
            "shape": [3],
            "bytes": 12,
            "entry": "model.bias",
            "flags": [],
        }

    def test_another_tools_file(self, cli: Commands, tmp_path: Path) -> None:
        """The page shows its metadata, and no name of it controls the terminal."""
        tensors = {"a\x1b[31m": torch.ones(2, dtype=torch.bfloat16)}
        save_file(tensors, tmp_path / "f", metadata={"format": "pt"})
        shown = cli("inspect", tmp_path / "f")[0]
        assert "not written by aiockpt" in shown
        assert "format: pt" in shown
        assert re.search(r"^a\\x1b\[31m +bfloat16 +2 +4 B$", shown, re.MULTILINE)
        assert "no digests to verify" in cli.error("verify", tmp_path / "f")

    @pytest.mark.parametrize("command", ["inspect", "verify"])
    @pytest.mark.parametrize("legacy", [False, True])
    def test_a_torch_file(
        self, cli: Commands, tmp_path: Path, command: str, legacy: bool
    ) -> None:
        """It has neither header nor digests; ``convert`` makes a file with both."""
        model = tmp_path / "model.pt"
        state = {"w": torch.ones(2)}
        torch.save(state, model, _use_new_zipfile_serialization=not legacy)
        error = cli.error(command, model)
        assert error.startswith(f"{model}: it is a file of torch.save")
        assert "aiockpt convert" in error

    def test_one_rank_of_several(
        self, cli: Commands, tmp_path: Path, ranks: Path
    ) -> None:
        """It is chosen where there are several."""
        assert "choose one with --rank" in cli.error("inspect", ranks, code=2)
        assert "none of them was rank 2" in cli.error("inspect", ranks, "--rank", 2)
        found = json.loads(cli("inspect", "--json", "--rank", "1", ranks)[0])
        assert found["source"].endswith("_1.safetensors")
        error = cli.error("inspect", ranks / FILE, "--rank", 0, code=2)
        assert "--rank is for checkpoint directories" in error
        alone = save(tmp_path / "alone-4", {"w": torch.ones(3), "of": {"lr": 1}})
        shown = cli("inspect", alone)[0]
        assert "step 4" in shown
        assert "1 tensor " in shown
        assert "1 rank wrote it" in cli.error("inspect", alone, "--rank", 1)

    def test_an_unfinished_checkpoint(self, cli: Commands, tmp_path: Path) -> None:
        """An unfinished checkpoint does not count as one."""
        (save(tmp_path / "s", {}) / "commit.json").unlink()
        assert "it holds no marker" in cli.error("inspect", tmp_path / "s")

    @pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
    def test_a_directory_of_checkpoints(
        self, cli: Commands, tmp_path: Path, command: str
    ) -> None:
        """One of them is named, which can be pasted."""
        run = tmp_path / 'my run\'s "ü" $x'
        for step in (8, 9):
            save(run / f"step-{step}", {"w": torch.ones(3)})
        more = [tmp_path / "out"] if command == "convert" else []
        error = cli.error(command, run, *more)
        assert "a directory of 2 checkpoints" in error
        (named,) = shlex.split(error.rpartition("such as ")[2])
        assert named == str(run / "step-9")
        cli(command, named, *more)


def flipped(*positions: int) -> Callable[[Path], None]:
    """Return what flips a bit of a file at each position."""

    def damage(file: Path) -> None:
        for position in positions:
            flip(file, position)

    return damage


class TestVerify:
    """Every byte of our files has a digest."""

    @pytest.mark.parametrize("what", ["file", "peer"])
    def test_what_is_intact(
        self, cli: Commands, server: Serving, file: Path, what: str
    ) -> None:
        """The exit code is 0; the name of a peer holds no token."""
        named, shown = (
            (file, file) if what == "file" else (server.metadata, server.base)
        )
        assert cli("verify", named)[0].startswith(
            f"{shown}: 3 chunks of 16.8 MB and the header are intact; step 7, snapshot"
        )

    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            (
                flipped(CHUNK + CHUNK // 2, 2 * CHUNK + CHUNK // 4),
                r"{path}: chunk 1 of 3 \(bytes 16.*; 1 more are damaged: 2",
            ),
            (flipped(300), "the header from {path} has digest"),
            (
                lambda file: os.truncate(file, 1 << 20),
                ".*it is truncated: 1048576 bytes where",
            ),
        ],
        ids=["chunks", "header", "end"],
    )
    def test_what_is_damaged(
        self,
        cli: Commands,
        file: Path,
        tmp_path: Path,
        damage: Callable[[Path], None],
        reason: str,
    ) -> None:
        """The command names everything that is damaged."""
        bad = tmp_path / "damaged.safetensors"
        bad.write_bytes(file.read_bytes())
        damage(bad)
        assert re.match(reason.format(path=bad), cli.error("verify", bad))

    def test_a_step(self, cli: Commands, server: Serving, file: Path) -> None:
        """A peer may lack it; a file holds one."""
        error = cli.error("verify", server.metadata, "--step", 8)
        assert "step 8 is not published" in error
        error = cli.error("verify", file, "--step", 7, code=2)
        assert error.startswith("--step is for URLs")

    def test_all_files_of_all_ranks(
        self, cli: Commands, tmp_path: Path, ranks: Path
    ) -> None:
        """A line for each; one that is damaged keeps no other from being verified."""
        lines = cli("verify", ranks)[0].splitlines()
        assert [line.split(": ")[1][:8] for line in lines] == ["4 chunks", "0 chunks"]
        flip(ranks / FILE, -1)
        out, err = cli("verify", ranks, code=1)
        assert f"{ranks / FILE}: chunk 3 of 4" in err
        assert "checkpoint_1.safetensors" in out
        path, other = (save(tmp_path / f"s{i}", {"a": i}) for i in (1, 2))
        (other / FILE).rename(path / FILE)
        assert "the marker names" in cli.error("verify", path)


class TestLs:
    """`ls` lists the checkpoints of a directory by step."""

    def test_whole_and_unfinished_ones(self, cli: Commands, tmp_path: Path) -> None:
        """The whole ones on stdout, the others on stderr."""
        for step in (20, 3):  # as after a rollback
            save(tmp_path / f"step-{step}", {"a": torch.zeros(1000)})
        (save(tmp_path / "step-4", {}) / "commit.json").unlink()
        (tmp_path / "logs").mkdir()
        (tmp_path / ".step-5.part").mkdir()
        out, err = cli("ls", tmp_path)
        rows = [line.split() for line in out.splitlines()]
        assert rows[0] == ["NAME", "STEP", "RANKS", "SIZE", "SAVED"]
        assert [row[:3] for row in rows[1:]] == [
            ["step-20", "20", "1"],
            ["step-3", "3", "1"],
        ]
        assert err == ".step-5.part: not whole\nstep-4: not whole\n"

    def test_for_programs(self, cli: Commands, tmp_path: Path, ranks: Path) -> None:
        """One document, of a directory or of one checkpoint."""
        for path in (tmp_path, ranks):
            (found,) = json.loads(cli("ls", "--json", path)[0])
            shown = (found["name"], found["step"], found["world_size"])
            assert shown == ("step-4", 4, 2)
            files = ranks.glob("*.safetensors")
            assert found["bytes"] == sum(file.stat().st_size for file in files)

    def test_none(self, cli: Commands, tmp_path: Path) -> None:
        """A missing directory is an error; a level below is named with the command."""
        assert "No such file" in cli.error("ls", tmp_path / "missing")
        nothing = f"{tmp_path}: there is no checkpoint here"
        assert cli("ls", tmp_path) == ("", f"{nothing}\n")
        for name in ("a run/step-1", "a run/step-2", "other/step-9"):
            save(tmp_path / name, {"w": 1})
        out, err = cli("ls", tmp_path)
        first, *rest = err.splitlines()
        assert out == ""
        assert first.startswith(nothing)
        counted = [line.split(":")[0].strip() for line in rest]
        assert counted == ["2 checkpoints", "1 checkpoint"]
        command = rest[0].partition(": ")[2].removeprefix("aiockpt ")
        assert "step-2" in cli(*shlex.split(command))[0]


def test_types_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--import`` names a module that registers them; without it, they are listed."""
    point: Any = type("Point", (), {"__module__": "elsewhere"})
    register_leaf(point, encode=lambda _: 5, decode=lambda _: point())
    path = save(tmp_path / "s-1", {"at": {"x": point()}, "w": torch.ones(1)})
    (tmp_path / "own_types.py").write_text(
        "import aiockpt\n"
        "@lambda kind: aiockpt.register_leaf(kind, tag='elsewhere.Point',\n"
        "    encode=lambda _: 5, decode=lambda _: kind())\n"
        "class Point:\n"
        "    def __eq__(self, other):\n"
        "        return type(other) is Point\n"
    )
    monkeypatch.chdir(tmp_path)
    line = "at.x: call aiockpt.register_leaf(Point, tag='elsewhere.Point', encode="
    assert line in run_aiockpt("inspect", path).stdout
    assert "Point" in run_aiockpt("convert", path, "t-2").stderr
    assert run_aiockpt("convert", path, "t-2", "--import", "own_types").returncode == 0
    assert (tmp_path / "t-2").is_dir()
    found = run_aiockpt("inspect", path, "--import", "own_types")
    assert found.returncode == 0
    assert "to know" not in found.stdout
    failed = run_aiockpt("inspect", path, "--import", "nowhere.at_all")
    assert failed.returncode == 2
    assert "--import nowhere.at_all failed: ModuleNotFoundError" in failed.stderr
