"""What ranks have saved is put together in the memory of a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from aiockpt.checkpointers import CheckpointReader, RankInfo, reader
from aiockpt.testing import assert_same
from tests.support.accelerators import FakeAccelerator, run_beside
from tests.support.mesh_ranks import assembled, distributed, zeroed


@pytest.mark.parametrize("held", [None, False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_memory_of_a_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dim: int,
    *,
    held: bool | None,
) -> None:
    """Through pinned memory, into a template or not, while more is read."""
    whole, small = torch.randn(700, 900), torch.arange(24.0).view(8, 3)

    def state_of(_: int) -> Any:
        mesh = init_device_mesh("cpu", (3,))
        large, other = (
            distributed(each, mesh, Shard(at))
            for each, at in ((whole, dim), (small, 0))
        )
        return {"w": large, "b": whole.t().contiguous(), "v": other, "n": 1}

    path = assembled(tmp_path / "s", 3, state_of)
    expected = {"w": whole, "b": whole.t().contiguous(), "v": small, "n": 1}
    device = FakeAccelerator(held=bool(held))
    monkeypatch.setattr(reader, "device_of", lambda _: torch.device("cpu"))
    loader = CheckpointReader(RankInfo(0, 1), ports=device.port_for)
    options: dict[str, Any] = {"map_location": "fake"}
    if held is not None:
        options = {"into": zeroed(expected)}
    found, _ = run_beside(device, lambda: loader.read(path, **options))
    assert_same(found, expected)
    assert not device.pinned  # any more
    assert device.copied
