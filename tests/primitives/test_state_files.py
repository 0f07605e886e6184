"""State dicts from files: ours, other tools' safetensors, and torch's own."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aiockpt import Limits
from aiockpt.checkpointers import CheckpointReader, RankInfo
from aiockpt.errors import (
    CheckpointNotFoundError,
    LimitExceededError,
    StorageError,
    WorldSizeMismatchError,
)
from aiockpt.state.flatten import describe
from aiockpt.storage.directory import MARKER
from aiockpt.storage.statefile import read_state_file
from aiockpt.testing import assert_same
from tests.support.proofs import proves
from tests.support.saving import load, read, save, training_state
from tests.support.states import file_of, stager

LIMITS = Limits()


def state_in(path: Path):
    """Return the state dict in a file."""
    return read_state_file(path, limits=LIMITS).state


def staged(path: Path, state) -> Path:
    """Write what staging a state dict gives."""

    async def main() -> bytes:
        async with stager() as staging:
            return file_of(await staging.stage(state, step=5))

    path.write_bytes(asyncio.run(main()))
    return path


class TestChangedFiles:
    """The sender serves what it has verified, since it reads the file once."""

    @proves("threat T12")
    @pytest.mark.parametrize("kind", ["ours", "safetensors", "torch"])
    @pytest.mark.parametrize("change", ["truncated", "written"])
    def test_a_change_after_the_read_does_not_matter(
        self, tmp_path, kind: str, change: str
    ) -> None:
        """A mapping would show it, or raise SIGBUS."""
        path, state = tmp_path / "f", {"a": torch.ones(1 << 18)}
        if kind == "ours":
            staged(path, state)
        elif kind == "torch":
            torch.save(state, path)
        else:
            save_file(state, path)
        found = state_in(path)
        if change == "truncated":
            os.truncate(path, 0)
        else:
            path.write_bytes(b"\xff" * path.stat().st_size)
        assert_same(found, state)

    def test_a_change_during_the_read_is_an_error(self, tmp_path) -> None:
        """A file of another tool has no digest that would tell."""
        path = tmp_path / "f"
        save_file({"a": torch.ones(1 << 22)}, path)
        changed: list[int] = []

        def change(_: int) -> None:
            if not changed:
                with path.open("r+b") as file:
                    file.seek(-8, os.SEEK_END)
                    changed.append(file.write(b"\xff" * 8))
                os.utime(path, ns=(1, 1))  # within one tick of the clock, too

        reader = CheckpointReader(RankInfo(0, 1))
        with pytest.raises(StorageError, match="it was changed while it was read"):
            reader.read(path, on_bytes=change)

    def test_an_index_has_a_limit(self, tmp_path) -> None:
        """It may be a sparse file of any size."""
        save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
        index = tmp_path / "model.safetensors.index.json"
        with index.open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(LimitExceededError, match=r"the size of .*index\.json is"):
            load(tmp_path)


class TestSafetensors:
    """Files of other tools, and directories of them."""

    @pytest.mark.parametrize(
        ("code", "shape", "data"),
        [
            ("F32", 2, struct.pack("<ff", 1.5, 2.5)),
            ("F4", 4, b"xx"),
            ("F6_E2M3", 4, b"xxx"),
        ],
    )
    def test_what_is_odd(self, tmp_path, code: str, shape: int, data: bytes) -> None:
        """The format does not align; a dtype that torch lacks is refused."""
        header = {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": code, "shape": [shape], "data_offsets": [1, 1 + len(data)]},
        }
        text = json.dumps(header).encode()
        path = tmp_path / "f"
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"\x01" + data)
        if code == "F32":
            assert state_in(path)["b"].tolist() == [1.5, 2.5]
            return
        if code == "F4" and shape % 2 == 0:
            found, theirs = state_in(path)["b"], load_file(path)["b"]
            assert found.dtype == theirs.dtype == torch.float4_e2m1fn_x2
            assert found.shape == theirs.shape == (2,)
            assert bytes(found.view(torch.uint8).tolist()) == data
            return
        with pytest.raises(StorageError, match=f"tensor b has dtype {code}"):
            state_in(path)

    @pytest.mark.parametrize("indexed", [False, True])
    def test_a_directory_of_shards(self, tmp_path, indexed: bool) -> None:
        """The load reads the files of the index, or else all files."""
        save_file({"x": torch.ones(3)}, tmp_path / "model-1.safetensors")
        save_file({"y": torch.ones(2)}, tmp_path / "model-2.safetensors")
        if indexed:
            save_file({"old": torch.ones(9)}, tmp_path / "old.safetensors")
            listed = {"x": "model-1.safetensors", "y": "model-2.safetensors"}
            index = json.dumps({"metadata": {}, "weight_map": listed})
            (tmp_path / "model.safetensors.index.json").write_text(index)
        (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")  # no file
        assert sorted(load(tmp_path)) == ["x", "y"]
        template = {"y": torch.zeros(2), "q": None}
        assert_same(read(tmp_path, template), ({"y": torch.ones(2), "q": None}, ["q"]))

    @pytest.mark.parametrize(
        ("index", "reason"),
        [
            ("{", "no index of shards"),
            ('{"weight_map": {"a": "b"}}', "names b"),
            (
                '{"weight_map": {"x": "model.safetensors", "y": "model.safetensors"}}',
                "names 'y' in model.safetensors, which does not hold it",
            ),
        ],
    )
    def test_a_bad_index_is_named(self, tmp_path, index: str, reason: str) -> None:
        """The error says what is wrong with the index."""
        save_file({"x": torch.ones(3)}, tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(StorageError, match=reason):
            load(tmp_path)

    def test_rank_files_without_a_marker_are_no_shards(self, tmp_path) -> None:
        """They are what is left of a save that failed."""
        path = save(tmp_path / "s", {"a": torch.ones(2)})
        (path / MARKER).unlink()
        (path / "checkpoint_0.safetensors").rename(path / "checkpoint_1.safetensors")
        save_file({"x": torch.ones(3)}, path / "model.safetensors")
        with pytest.raises(CheckpointNotFoundError, match="no marker"):
            load(path)


class TestTorch:
    """Files of torch.save, alone or as a rank's."""

    @pytest.mark.parametrize("zipped", [True, False])
    def test_both_formats_are_read(self, tmp_path, zipped: bool) -> None:
        """Whole and in place; what cannot travel shows later."""
        state = {**training_state(), "every": torch.ones(2)[::2]}
        del state["rng"]
        file = tmp_path / "checkpoint_0.pt"
        torch.save(state, file, _use_new_zipfile_serialization=zipped)
        assert_same(load(tmp_path), state)
        assert_same(load(file), state)
        assert describe(state_in(file), limits=LIMITS, allow_pickle=False).entries
        bias = torch.zeros(256, dtype=torch.float64)
        template = {"model": {"norm.bias": bias}, "q": 1}
        found, missing = read(tmp_path, template)
        assert missing == ["q"]
        assert found["model"]["norm.bias"] is bias
        assert torch.equal(bias, state["model"]["norm.bias"])

    def test_several_ranks(self, tmp_path) -> None:
        """Some may be on other machines; more files than ranks load are refused."""
        for rank in (0, 1):
            torch.save({"rank": rank}, tmp_path / f"checkpoint_{rank}.pt")
        with pytest.raises(WorldSizeMismatchError, match="2 ranks wrote it"):
            load(tmp_path)
        assert load(tmp_path, rank=1) == {"rank": 1}
        for size in (2, 4):
            found, _ = CheckpointReader(RankInfo(1, size)).read(tmp_path)
            assert found == {"rank": 1}

    def test_its_bytes_are_copied_unless_they_are_to_be_mapped(self, tmp_path) -> None:
        """Mapped tensors have the file's own bytes."""
        torch.save({"a": torch.ones(1000)}, tmp_path / "f.pt")
        copied, mapped = load(tmp_path / "f.pt"), load(tmp_path / "f.pt", mmap=True)
        with (tmp_path / "f.pt").open("r+b") as file:
            file.write(bytes(5000))  # in place, under the mapping
        assert copied["a"].sum() == 1000
        assert mapped["a"].sum() < 1000


@pytest.mark.parametrize("opens", [1, 2, 3])
@pytest.mark.parametrize("write", [staged, "another tool's", "torch's"])
def test_a_file_that_is_replaced_meanwhile_is_read_as_it_was(
    tmp_path, write, opens: int, monkeypatch
) -> None:
    """What is verified is what is returned: the path is opened once."""
    paths = tmp_path / "1", tmp_path / "2"
    for path, fill in zip(paths, (1.0, 2.0), strict=True):
        state = {"w": torch.full((50_000,), fill)}
        if write is staged:
            staged(path, state)
        elif write == "torch's":
            torch.save(state, path)
        else:
            save_file(state, path)
    count = 0

    def open_and_replace(self, *args, **options):
        nonlocal count
        file = opened(self, *args, **options)
        count += self == paths[0]
        if count == opens and paths[1].exists():
            os.replace(paths[1], paths[0])
        return file

    opened = Path.open
    monkeypatch.setattr(Path, "open", open_and_replace)
    assert torch.equal(state_in(paths[0])["w"], torch.ones(50_000))
