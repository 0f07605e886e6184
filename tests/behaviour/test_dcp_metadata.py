"""What directories of torch.distributed.checkpoint hold, and where it lies."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import types
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch

from aiockpt.errors import CheckpointNotFoundError, StorageError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.state.leaves import DTYPES
from aiockpt.storage.checkpoint_file import opened
from aiockpt.storage.dcp import (
    METADATA,
    DcpCheckpoint,
    DcpTensor,
    elements_of,
    is_dcp,
    read_dcp,
    value_of,
)
from aiockpt.testing import assert_same
from tests.support import dcp_ranks
from tests.support.dcp_read import assert_as_torch_loads
from tests.support.ranks import kill_all

SECONDS = 120


def read(directory: Path) -> DcpCheckpoint:
    """Read the metadata of a directory."""
    assert is_dcp(directory)
    return read_dcp(directory, limits=FILE_LIMITS)


def tensor_in(found: DcpCheckpoint, name: str) -> DcpTensor:
    """Return the tensor of a name."""
    leaf = found.leaves[name]
    assert isinstance(leaf, DcpTensor)
    return leaf


def values_in(found: DcpCheckpoint) -> dict[str, Any]:
    """Return the full tensors and the values by name, from the ranges of bytes."""
    made: dict[str, Any] = {}
    for name, leaf in found.leaves.items():
        if not isinstance(leaf, DcpTensor):
            path = found.files[leaf.archive.file]
            with opened(path) as file:
                made[name] = value_of(file, leaf, limits=FILE_LIMITS)
            continue
        made[name] = torch.zeros(leaf.shape, dtype=DTYPES[leaf.dtype])
        for shard in leaf.shards:
            path = found.files[shard.archive.file]
            with opened(path) as file:
                at = elements_of(file, leaf, shard)
            data = bytearray(path.read_bytes()[at.start : at.stop])
            flat = torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[leaf.dtype])
            box = flat.as_strided(shard.sizes, at.stride)
            pairs = zip(shard.offsets, shard.sizes, strict=True)
            made[name][tuple(slice(a, a + n) for a, n in pairs)] = box
    return made


def loaded(directory: Path, found: DcpCheckpoint) -> dict[str, Any]:
    """Return what torch itself loads, by name."""
    state: dict[str, Any] = {
        name: torch.zeros(leaf.shape, dtype=DTYPES[leaf.dtype])
        if isinstance(leaf, DcpTensor)
        else None
        for name, leaf in found.leaves.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(state, checkpoint_id=directory, no_dist=True)
    return state


def save(state: dict[str, Any], directory: Path, **options: Any) -> None:
    """Save as one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_with_torch(state, checkpoint_id=directory, no_dist=True, **options)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    ("layout", "world"),
    [
        pytest.param("fsdp", 1, marks=pytest.mark.nightly),
        pytest.param("fsdp", 2, marks=pytest.mark.nightly),
        ("fsdp", 3),
        ("hsdp", 4),
        ("tp", 4),
    ],
)
def test_ranks(tmp_path: Path, layout: str, world: int) -> None:
    """Every element and value is where it is said to be, as torch loads it."""
    leader = subprocess.Popen(
        [sys.executable, dcp_ranks.__file__, layout, str(world), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complained = leader.communicate(timeout=SECONDS)
    finally:
        kill_all(leader.pid)
        leader.communicate()
    assert leader.returncode == 0, complained
    assert said.count("done") == world
    found = read(tmp_path / "saved")
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    made = values_in(found)
    assert_same(made, {name: full[name] for name in made})
    assert made.keys() == full.keys()
    assert_same(made, loaded(tmp_path / "saved", found))
    assert_as_torch_loads(tmp_path / "saved")
    weight = tensor_in(found, "model.up.weight")
    assert (weight.shape, weight.dtype) == ((8, 6), "float32")
    assert len(weight.shards) == (world if layout != "hsdp" else 2)
    assert weight.path == ("model", "up.weight")
    assert len(found.files) == world
    moments = found.tree["optimizer"]["state"]["0"]
    assert moments["exp_avg"] is found.leaves["optimizer.state.0.exp_avg"]
    group = found.tree["optimizer"]["param_groups"][0]
    assert made[group["lr"].name] == 0.001
    assert {*found.tree["mine"]} == {
        *(f"of {rank}" for rank in range(world)),
        *(f"rank {rank}" for rank in range(world)),
    }


EVERYTHING: dict[str, Any] = {
    "list": [torch.ones(2), [torch.zeros(1), {"deep": torch.ones(1)}]],
    "gap": [{}, {"a": torch.ones(1)}, []],
    "short": ["no", "tensors"],
    "tuple": (torch.ones(2), 3),
    "0-d": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "turned": torch.arange(12.0).view(3, 4).t(),
    "part": torch.arange(100.0)[10:20],
    "every other": torch.arange(10.0)[::2],
    "large": torch.arange(9000.0).view(90, 100).t(),
    "repeated": torch.tensor([[1.0], [2.0]]).expand(2, 3),
    "last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "text": "ä" * 300,
    "none": None,
    "long": 2**70,
    "a.b": {"c.d": torch.ones(1)},
    "\udce4": torch.ones(1),
}


def test_everything(tmp_path: Path) -> None:
    """Lists, strides, parts, values, and the names of keys."""
    save(EVERYTHING, tmp_path / "saved")
    found = read(tmp_path / "saved")
    made = values_in(found)
    assert_same(made, loaded(tmp_path / "saved", found))
    tree = found.tree
    assert_same(made[tree["list"][1][1]["deep"].name], torch.ones(1))
    assert tree["gap"][0] is None
    assert len(tree["gap"]) == 3
    assert made[tree["gap"][2].name] == []
    assert made["short"] == ["no", "tensors"]
    assert_same(made["tuple"], EVERYTHING["tuple"])
    assert tree["a.b"]["c.d"] is found.leaves["a.b.c.d"]
    assert made["long"] == 2**70
    for name in (
        "turned",
        "large",
        "part",
        "every other",
        "repeated",
        "last",
        "0-d",
        "\udce4",
    ):
        assert torch.equal(made[name], EVERYTHING[name]), name
    assert tensor_in(found, "empty").shards == ()


UNSAVED = re.compile("u?int[1-7]|bits.*")
"""The dtypes that DCP does not save."""


def test_every_dtype(tmp_path: Path) -> None:
    """Bit for bit, also those that torch cannot compare."""
    pattern = torch.arange(64, dtype=torch.uint8)
    bits = {name: pattern % 2 if name == "bool" else pattern for name in DTYPES}
    state = {
        name: bits[name].view(dtype)
        for name, dtype in DTYPES.items()
        if not UNSAVED.fullmatch(name)
    }
    save(state, tmp_path / "saved")
    found = read(tmp_path / "saved")
    for name, tensor in values_in(found).items():
        assert tensor_in(found, name).dtype == name
        assert torch.equal(tensor.view(torch.uint8), state[name].view(torch.uint8)), (
            name
        )


@pytest.mark.parametrize(
    "options", [{"thread_count": 3}, {"single_file_per_rank": False}]
)
def test_several_files(tmp_path: Path, options: dict[str, Any]) -> None:
    """A writer may spread what one rank has."""
    state = {f"w{n}": torch.full((n + 1,), n) for n in range(6)}
    writer = FileSystemWriter(tmp_path / "saved", **options)
    save(state, tmp_path / "saved", storage_writer=writer)
    found = read(tmp_path / "saved")
    assert len(found.files) == options.get("thread_count", 6)
    assert_same(values_in(found), state)


def test_a_planner_that_does_not_nest(tmp_path: Path) -> None:
    """Such a planner makes each path one name."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save({"a.b": torch.ones(2)}, tmp_path / "saved", planner=planner)
    found = read(tmp_path / "saved")
    assert found.tree == {"a.b": found.leaves["a.b"]}
    assert found.leaves["a.b"].path == ("a.b",)


def rewritten(directory: Path, change: Any) -> None:
    """Change the metadata as another version of torch would have written it."""
    path = directory / METADATA
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def test_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields that came or went, a path of Python 3.13, replicas, ordered dicts."""
    state = {"w": torch.arange(6.0), "v": 1}
    save(state, tmp_path / "saved")
    module = types.ModuleType("pathlib._local")
    newer: Any = type("PosixPath", (), {"__module__": "pathlib._local"})
    newer.__init__ = lambda *_: None
    newer.__reduce__ = lambda _: (newer, ("/", "somewhere"))
    module.PosixPath = newer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pathlib._local", module)

    def change(found: Metadata) -> None:
        assert found.storage_meta is not None
        found.storage_meta.checkpoint_id = newer()
        found.state_dict_metadata = OrderedDict(found.state_dict_metadata)
        weight: Any = found.state_dict_metadata["w"]
        weight.chunks *= 2  # a replica
        del found.version
        del found.storage_meta.modules

    rewritten(tmp_path / "saved", change)
    assert_same(values_in(read(tmp_path / "saved")), state)

    def change_again(found: Metadata) -> None:
        del found.storage_meta
        del found.planner_data

    rewritten(tmp_path / "saved", change_again)
    assert_same(values_in(read(tmp_path / "saved")), state)


def test_a_directory_that_moved(tmp_path: Path) -> None:
    """A directory that moved, or a link to it, loads as before."""
    save({"w": torch.ones(1)}, tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to("moved")
    found = read(tmp_path / "link")
    assert found.directory == tmp_path / "moved"
    assert_same(values_in(found), {"w": torch.ones(1)})


def test_what_is_not_there(tmp_path: Path) -> None:
    """The error names the directory, and says what to do."""
    save({"w": torch.ones(1)}, tmp_path / "saved")
    (tmp_path / "saved" / METADATA).rename(tmp_path / "saved" / f"__0{METADATA}")
    assert not is_dcp(tmp_path / "saved")
    for name, why in (("saved", "save with collectives"), ("absent", "did not end")):
        with pytest.raises(CheckpointNotFoundError, match=why) as caught:
            read_dcp(tmp_path / name, limits=FILE_LIMITS)
        assert caught.value.path == str(tmp_path / name)


def test_a_lost_or_short_file(tmp_path: Path) -> None:
    """The load reads nothing of the other files."""
    state = {"w": torch.ones(100)}
    save(state, tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(StorageError, match="it is truncated") as caught:
        read(tmp_path / "saved")
    assert caught.value.path == str(file)
    file.unlink()
    with pytest.raises(CheckpointNotFoundError, match=f"{file.name} is missing"):
        read(tmp_path / "saved")
    file.write_bytes(content)
    assert_same(values_in(read(tmp_path / "saved")), state)
