"""Directories of torch.distributed.checkpoint as sources that a load reads from."""

from __future__ import annotations

import datetime as dt
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch

from aiockpt import Limits
from aiockpt.errors import LimitExceededError, StorageError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import Manifest
from aiockpt.state.catalogue import Catalogue
from aiockpt.state.leaves import DTYPES
from aiockpt.storage.dcp_sources import DcpSources, dcp_sources
from aiockpt.testing import assert_same
from tests.behaviour.test_dcp_metadata import EVERYTHING, UNSAVED, rewritten
from tests.support.dcp_read import assert_as_torch_loads, rebuilt


def save(state: dict[str, Any], directory: Path, **options: Any) -> None:
    """Save as one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_with_torch(state, checkpoint_id=directory, no_dist=True, **options)


def sources(directory: Path, limits: Limits = FILE_LIMITS) -> DcpSources:
    """Return the sources, whose files are closed again."""
    with ExitStack() as stack:
        return dcp_sources(directory, stack, limits=limits)


def manifest_of(found: DcpSources) -> Manifest:
    """Return the manifest of the only file."""
    ((_, manifest),) = found.files
    return manifest


def test_everything(tmp_path: Path) -> None:
    """Lists, strides, parts, values, and keys that JSON does not have."""
    state = {**EVERYTHING}
    gap = state.pop("gap")  # torch cannot load it without a template
    save(state, tmp_path / "saved")
    save({"gap": gap}, tmp_path / "gap")
    assert_same(rebuilt(tmp_path / "gap"), {"gap": [None, {"a": torch.ones(1)}, []]})
    found = assert_as_torch_loads(tmp_path / "saved")
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
        assert torch.equal(found[name], EVERYTHING[name]), name
    assert found["empty"].shape == (0, 3)


def test_an_optimizer(tmp_path: Path) -> None:
    """The numbers, flags, lists and None of an optimizer come back."""
    weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([{"params": [weight], "lr": 0.5}], amsgrad=True)
    weight.sum().backward()
    optimizer.step()
    state = {
        "model": {"weight": weight},
        "optimizer": optimizer.state_dict(),
        "random": {"torch": torch.get_rng_state(), "seeds": [1, 2.5, None, True]},
        "extra": b"bytes",
    }
    save(state, tmp_path / "saved")
    found = assert_as_torch_loads(tmp_path / "saved")
    (group,) = found["optimizer"]["param_groups"]
    assert group["lr"] == 0.5
    assert group["amsgrad"] is True
    assert group["maximize"] is False
    assert group["foreach"] is None
    assert group["params"] == [0]
    assert group["betas"] == (0.9, 0.999)
    assert found["extra"] == b"bytes"


def test_every_dtype(tmp_path: Path) -> None:
    """Dtypes without a safetensors code are read, and strided tensors of them."""
    bits = torch.arange(64, dtype=torch.uint8)
    state: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        if not UNSAVED.fullmatch(name):
            state[name] = (bits % 2 if name == "bool" else bits).view(dtype)
            state[f"{name} turned"] = state[name].view(2, -1).t()
    save(state, tmp_path / "saved")
    found = rebuilt(tmp_path / "saved")
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        assert tensor.dtype == state[name].dtype
        assert tensor.stride() == state[name].stride()
        mine, theirs = (
            each.contiguous().view(torch.uint8) for each in (tensor, state[name])
        )
        assert torch.equal(mine, theirs), name


def test_dense_elements_are_whole_entries(tmp_path: Path) -> None:
    """Whole entries can be read straight into a template's tensors."""
    state = {
        "a": torch.ones(3, 2),
        "b": {"c": torch.ones(2, dtype=torch.bfloat16), "one": torch.ones(1, 3).t()},
        "turned": torch.ones(2, 3).t(),
        "codeless": torch.ones(2, dtype=torch.complex128),
    }
    save(state, tmp_path / "saved")
    manifest = manifest_of(sources(tmp_path / "saved"))
    described = {
        name: (code, shape)
        for name, code, shape in zip(
            manifest.names,
            manifest.entries.dtypes,
            manifest.entries.shapes,
            strict=True,
        )
    }
    assert described == {
        "a[0, 0]": ("F32", (3, 2)),
        "b.c[0]": ("BF16", (2,)),
        "b.one[0, 0]": ("F32", (3, 1)),
        "turned[0, 0]": ("U8", (24,)),
        "codeless[0]": ("U8", (32,)),
    }
    assert [each.dtype for each in manifest.views] == ["float32", "complex128"]
    catalogue = Catalogue([manifest], limits=FILE_LIMITS)
    assert catalogue.tree[0] == "dict"  # type: ignore[index]
    assert (manifest.header_bytes, manifest.digests) == (0, ())


@pytest.mark.parametrize(
    "options", [{"thread_count": 3}, {"single_file_per_rank": False}]
)
def test_several_files(tmp_path: Path, options: dict[str, Any]) -> None:
    """A list is in several files, which have parts of it; so are its values."""
    state = {"list": [*(torch.full((n + 1,), n) for n in range(6)), 7, {"a": "b"}]}
    writer = FileSystemWriter(tmp_path / "saved", **options)
    save(state, tmp_path / "saved", storage_writer=writer)
    found = sources(tmp_path / "saved")
    assert len(found.files) == options.get("thread_count", 6)
    assert found.values == {"list": [*[None] * 6, 7, {"a": "b"}]}
    assert_same(assert_as_torch_loads(tmp_path / "saved"), state)


def test_a_planner_that_does_not_nest(tmp_path: Path) -> None:
    """Such a planner makes each path one name."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save({"a.b": torch.ones(2)}, tmp_path / "saved", planner=planner)
    assert_same(rebuilt(tmp_path / "saved"), {"a.b": torch.ones(2)})


def test_no_tensors_at_all(tmp_path: Path) -> None:
    """A checkpoint without tensors has no source."""
    save({"a": {"b": 1}, "none": torch.ones(0)}, tmp_path / "saved")
    found = sources(tmp_path / "saved")
    assert found.files == []
    assert_same(found.values, {"a": {"b": 1}, "none": torch.ones(0)})
    save({}, tmp_path / "empty")
    assert sources(tmp_path / "empty") == DcpSources([], {}, {})


def test_values_that_need_code_are_left_out(tmp_path: Path) -> None:
    """The others are there; the reason names the class."""
    state = {"w": torch.ones(2), "at": [dt.date(2000, 1, 2), {"a": 1}], "b": 2}
    save(state, tmp_path / "saved")
    found = sources(tmp_path / "saved")
    assert found.values == {"at": [None, {"a": 1}], "b": 2}
    ((path, why),) = found.left_out.items()
    assert path == ("at", 0)
    assert "the value 'at.0' holds a datetime.date, which only running pickled" in why


def moved(name: str, to: str) -> Any:
    """Let a tensor be stored where another one is."""

    def change(found: Metadata) -> None:
        places = found.storage_data
        places[MetadataIndex(name, [0])] = places[MetadataIndex(to, [0])]

    return change


def test_tensors_that_share_an_archive(tmp_path: Path) -> None:
    """Two names may stand for one entry, as a writer could store equal ones."""
    save({"a": torch.arange(3.0), "b": torch.ones(3)}, tmp_path / "saved")
    rewritten(tmp_path / "saved", moved("b", "a"))
    assert len(manifest_of(sources(tmp_path / "saved")).entries) == 1
    found = rebuilt(tmp_path / "saved")
    assert torch.equal(found["a"], torch.arange(3.0))
    assert torch.equal(found["b"], torch.arange(3.0))


def test_two_names_of_a_file(tmp_path: Path) -> None:
    """It is one source, and opened once."""
    save({"a": torch.arange(3.0), "b": torch.ones(3)}, tmp_path / "saved")
    (tmp_path / "saved" / "link").symlink_to("__0_0.distcp")

    def change(found: Metadata) -> None:
        found.storage_data[MetadataIndex("b", [0])].relative_path = "link"

    rewritten(tmp_path / "saved", change)
    assert len(sources(tmp_path / "saved").files) == 1
    assert_as_torch_loads(tmp_path / "saved")


def test_the_size_of_all_values_is_bounded(tmp_path: Path) -> None:
    """Many names of one value cannot take much memory."""
    save({f"v{n}": "x" * 1000 for n in range(20)}, tmp_path / "saved")
    limits = Limits(max_header_bytes=16 << 10)
    with pytest.raises(LimitExceededError, match="the values that are no") as caught:
        sources(tmp_path / "saved", limits)
    assert "Limits(max_header_bytes=...)" in str(caught.value)


def test_the_lists_of_all_files_are_bounded(tmp_path: Path) -> None:
    """Each file has a whole list; together they could be large."""
    writer = FileSystemWriter(tmp_path / "saved", single_file_per_rank=False)
    save({"list": [torch.ones(1)] * 80}, tmp_path / "saved", storage_writer=writer)
    assert len(sources(tmp_path / "saved", Limits(max_nodes=6400)).files) == 80
    with pytest.raises(LimitExceededError, match="items in lists"):
        sources(tmp_path / "saved", Limits(max_nodes=6399))


def test_a_damaged_file(tmp_path: Path) -> None:
    """The error names the file and the tensor; no file stays open."""
    save({"w": torch.ones(1000)}, tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"PK\5\6", b"PK\7\7"))
    with pytest.raises(StorageError, match=r"'w' at .* cannot be read there") as caught:
        sources(tmp_path / "saved")
    assert caught.value.path == str(file)
