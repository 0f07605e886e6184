"""Directories of torch.distributed.checkpoint are loaded like our own.

`test_any_mesh.py` has directories that real ranks have saved.
"""

from __future__ import annotations

import datetime as dt
import pickle
import re
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch

import aiockpt
from aiockpt import Limits
from aiockpt.checkpointers import CheckpointReader, RankInfo
from aiockpt.errors import (
    CheckpointNotFoundError,
    LimitExceededError,
    StorageError,
)
from tests.support.mesh_ranks import check


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return the directory that a test saves to."""
    return tmp_path / "saved"


def save(state: dict[str, Any], directory: Path, **options: Any) -> None:
    """Save as one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_with_torch(state, checkpoint_id=directory, no_dist=True, **options)


def check_load(directory: Path, expected: Any) -> None:
    """Load everything, and compare it bit by bit."""
    found = aiockpt.load(directory)
    check(found, expected)
    check(expected, found)


def rewrite(directory: Path, change: Callable[[Metadata], object]) -> None:
    """Change the metadata as another version of torch would have written it."""
    path = directory / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


EVERYTHING: dict[str, Any] = {
    "list": [torch.ones(2), [torch.zeros(1), {"deep": torch.ones(1)}]],
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
    "bytes": b"x",
    "none": None,
    "long": 2**70,
    "group": {"lr": 0.5, "amsgrad": True, "betas": (0.9, 0.999), "params": [0]},
    "a.b": {"c.d": torch.ones(1)},
    "\udce4": torch.ones(1),
}


def test_everything(place: Path) -> None:
    """Lists, strides, parts, values, and the names of keys."""
    save({**EVERYTHING, "gap": [{}, {"a": torch.ones(1)}, []]}, place)
    check_load(place, {**EVERYTHING, "gap": [None, {"a": torch.ones(1)}, []]})


NOT_SAVED = re.compile(r"torch\.(u?int[1-7]|bits.*|qu?int.*)")
DTYPES = [
    each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and not NOT_SAVED.fullmatch(str(each))
]


def test_every_dtype(place: Path) -> None:
    """Bit for bit, also those that torch cannot compare, and strided ones."""
    bits = torch.arange(64, dtype=torch.uint8)
    state: dict[str, Any] = {}
    for dtype in DTYPES:
        whole = (bits % 2 if dtype is torch.bool else bits).view(dtype)
        state |= {f"{dtype}": whole, f"{dtype} turned": whole.view(2, -1).t()}
    save(state, place)
    found = aiockpt.load(place)
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        assert tensor.dtype == state[name].dtype
        mine, theirs = (
            each.contiguous().view(torch.uint8) for each in (tensor, state[name])
        )
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize(
    "options", [{"thread_count": 3}, {"single_file_per_rank": False}]
)
def test_several_files(place: Path, options: dict[str, Any]) -> None:
    """A list is in several files, which have parts of it; so are its values."""
    state = {"list": [*(torch.full((n + 1,), n) for n in range(6)), 7, {"a": "b"}]}
    save(state, place, storage_writer=FileSystemWriter(place, **options))
    assert len([*place.glob("*.distcp")]) >= 3
    check_load(place, state)


def test_a_planner_that_does_not_nest(place: Path) -> None:
    """Such a planner makes each path one name."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save({"a.b": torch.ones(2)}, place, planner=planner)
    check_load(place, {"a.b": torch.ones(2)})


@pytest.mark.parametrize("state", [{}, {"a": {"b": 1}, "none": torch.ones(0)}])
def test_no_tensors_at_all(place: Path, state: dict[str, Any]) -> None:
    """The values come all the same."""
    save(state, place)
    check_load(place, state)


def test_values_that_need_code_are_left_out(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are there; the warning names the path and the class."""
    save({"w": torch.ones(2), "at": [dt.date(2000, 1, 2), {"a": 1}], "b": 2}, place)
    check_load(place, {"w": torch.ones(2), "at": [None, {"a": 1}], "b": 2})
    assert "at[0] is left out: " in caplog.text
    said = "the value 'at.0' holds a datetime.date, which only running pickled"
    assert said in caplog.text


def test_dense_elements_can_be_mapped(place: Path) -> None:
    """Each of them is one range of a file; others need a copy."""
    dense = {"a": torch.ones(3, 2), "b": {"c": torch.ones(2, dtype=torch.bfloat16)}}
    save({**dense, "turned": torch.ones(2, 3).t()}, place)
    check(aiockpt.load(place, mmap=True, select=["a", "b"]), dense)


def test_other_versions(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields that came or went, a path of Python 3.13, replicas, ordered dicts."""
    state = {"w": torch.arange(6.0), "v": 1}
    save(state, place)
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

    rewrite(place, change)
    check_load(place, state)

    def change_again(found: Metadata) -> None:
        del found.storage_meta
        del found.planner_data

    rewrite(place, change_again)
    check_load(place, state)


def test_links(place: Path, tmp_path: Path) -> None:
    """A directory may move or be linked to; names and tensors may share a file."""
    save({"a": torch.arange(3.0), "b": torch.ones(3), "c": torch.ones(2)}, place)
    (place / "link").symlink_to("__0_0.distcp")

    def change(found: Metadata) -> None:
        places = found.storage_data
        places[MetadataIndex("c", [0])].relative_path = "link"
        places[MetadataIndex("b", [0])] = places[MetadataIndex("a", [0])]

    rewrite(place, change)
    place.rename(tmp_path / "moved")
    (tmp_path / "linked").symlink_to("moved")
    expected = {"a": torch.arange(3.0), "b": torch.arange(3.0), "c": torch.ones(2)}
    check_load(tmp_path / "linked", expected)


def test_a_lost_or_damaged_file(place: Path) -> None:
    """The error names the file and the tensor."""
    state = {"w": torch.ones(1000)}
    save(state, place)
    (file,) = place.glob("*.distcp")
    content = file.read_bytes()
    for wrong, said in (
        (content[:-1], "it is truncated"),
        (content.replace(b"PK\5\6", b"PK\7\7"), r"'w' at .* cannot be read there"),
    ):
        file.write_bytes(wrong)
        with pytest.raises(StorageError, match=said) as caught:
            aiockpt.load(place)
        assert caught.value.path == str(file)
    file.unlink()
    with pytest.raises(CheckpointNotFoundError, match=f"{file.name} is missing"):
        aiockpt.load(place)
    file.write_bytes(content)
    check_load(place, state)


@pytest.mark.parametrize(
    ("state", "enough", "said"),
    [
        ({f"v{n}": "x" * 1000 for n in range(20)}, 64, "the values that are no"),
        ({"list": [torch.ones(1)] * 80}, 6400, "items in lists"),
    ],
    ids=["values", "lists"],
)
def test_limits(place: Path, state: dict[str, Any], enough: int, said: str) -> None:
    """Many names of one value, or many files with a whole list, would be large."""
    writer = FileSystemWriter(place, single_file_per_rank=False)
    save(state, place, storage_writer=writer)

    def load(limit: int) -> Any:
        limits = Limits(max_header_bytes=limit << 10)
        if "list" in state:
            limits = Limits(max_nodes=limit)
        return CheckpointReader(RankInfo(0, 1), limits=limits).read(place)

    with pytest.raises(LimitExceededError, match=said) as caught:
        load(enough // 4 if enough == 64 else enough - 1)
    assert "Limits(max_" in str(caught.value)
    check(load(enough)[0], state)
