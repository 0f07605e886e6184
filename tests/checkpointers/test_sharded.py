"""Distributed tensors on disk: a rank's parts, in place and rebuilt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from aiockpt.errors import TemplateMismatchError
from aiockpt.testing import assert_same
from tests.support.saved import load, save


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Return a mesh of 2 x 2 ranks, of which this is the first."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, *placements: Any, fill: float = 0.0) -> DTensor:
    """Return a DTensor of this rank's part."""
    local = torch.arange(12.0).reshape(4, 3) + fill
    return DTensor.from_local(local, mesh, placements, run_check=False)


class TestSharded:
    """A rank saves its own parts, and loads them again."""

    def test_it_is_rebuilt(self, tmp_path: Path, mesh: DeviceMesh) -> None:
        """On an equal mesh."""
        state = {"w": sharded(mesh, Shard(0), Replicate(), fill=1.0), "n": 1}
        path = save(tmp_path / "s", state)
        assert_same(load(path), state)
        assert_same(load(path, mmap=True), state)
        assert_same(load(path, select=["w"]), {"w": state["w"]})

    def test_in_place(self, tmp_path: Path, mesh: DeviceMesh) -> None:
        """The template's own parts are filled."""
        state = {"w": sharded(mesh, Shard(0), Shard(1), fill=1.0), "b": torch.ones(3)}
        path = save(tmp_path / "s", state)
        template = {"w": sharded(mesh, Shard(0), Shard(1)), "b": torch.zeros(3)}
        own = template["w"]
        found = load(path, template)
        assert found["w"] is own
        assert_same(found, state)

    def test_another_layout(self, tmp_path: Path, mesh: DeviceMesh) -> None:
        """Is refused by its path, and so is a plain tensor."""
        path = save(tmp_path / "s", {"w": sharded(mesh, Shard(0), Replicate())})
        for other in (sharded(mesh, Replicate(), Shard(0)), torch.zeros(8, 3)):
            with pytest.raises(TemplateMismatchError, match=r"template w: "):
                load(path, {"w": other})
