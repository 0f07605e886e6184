"""Saving from, and loading to, a real device; skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.testing import assert_same
from tests.support.saving import load, save

DEVICE = torch.device("cuda", 0)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device is here"
)


def state_on_device() -> dict[str, Any]:
    """Return a state dict of all that staging treats in its own way."""
    torch.manual_seed(5)
    base = torch.randn(1 << 22, device=DEVICE)
    return {
        "large": base,
        "tied": base,
        "view": base[100:2100].view(20, 100),
        "transposed": torch.randn(30, 50, device=DEVICE).t(),
        "parameter": torch.nn.Parameter(torch.randn(64, 64, device=DEVICE)),
        "half": torch.randn(1000, device=DEVICE).bfloat16(),
        "host": torch.randn(1000),
        "step": 7,
    }


def test_save_and_load_to_the_host(tmp_path: Path) -> None:
    """What was on the device comes back in host memory; twice, the arena is reused."""
    state = state_on_device()
    for name in ("a", "b"):
        assert_same(load(save(tmp_path / name, state)), state)


@pytest.mark.parametrize("way", [{}, {"mmap": True}, {"verify": "none"}], ids=str)
def test_load_to_the_device(tmp_path: Path, way: dict[str, Any]) -> None:
    """All of it, with its ties."""
    state = state_on_device()
    found = load(save(tmp_path / "s", state), map_location="cuda:0", **way)
    assert_same(found, state)
    assert {found[name].device for name in state if name != "step"} == {DEVICE}
    assert found["tied"] is found["large"]


def test_load_into_a_template(tmp_path: Path) -> None:
    """Straight to the template's memory on the device."""
    state = state_on_device()
    path = save(tmp_path / "s", state)
    template = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }
    large = template["large"]
    found = load(path, template)
    assert found["large"] is large
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
            assert found[name].device == value.device
