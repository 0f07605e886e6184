"""A ``map_location`` whose device this host lacks: a typed error, before a byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import make_async_checkpointer
from aiockpt.errors import StateDictError
from aiockpt.testing import assert_same
from tests.support.saved import load, save


def text(storage: Any, location: str) -> Any:
    """Return what no callable may."""
    return "nowhere"


WRONG = [
    "cuda",
    "cuda:0",
    torch.device("cuda", 1),
    "nonsense",
    "cpu:x",
    "xpu",
    "mps:3",
    {"cpu": "cuda:7"},
    {"cpu": 5.5},
    5.5,
    object(),
    text,
]

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(),
    reason="it is about a host without an accelerator",
)


@pytest.mark.parametrize("where", WRONG, ids=[*map(str, range(len(WRONG)))])
@pytest.mark.parametrize("template", [True, False])
def test_a_load_names_the_device(tmp_path: Path, where: Any, *, template: bool) -> None:
    """It changes nothing of a template."""
    path = save(tmp_path / "s", {"w": torch.ones(3), "n": 1})
    into = {"w": torch.zeros(3), "n": 0} if template else None
    with pytest.raises(StateDictError, match="map_location") as caught:
        load(path, into, map_location=where)
    assert isinstance(caught.value, ValueError)
    if into is not None:
        assert_same(into, {"w": torch.zeros(3), "n": 0})


@pytest.mark.asyncio
async def test_a_load_from_a_coroutine_names_it(tmp_path: Path) -> None:
    """As the other one does."""
    path = save(tmp_path / "s", {"w": torch.ones(3)})
    async with make_async_checkpointer() as checkpointer:
        with pytest.raises(StateDictError, match="map_location"):
            await checkpointer.load(path, default_map_location="cuda")


@pytest.mark.parametrize("where", ["cpu", torch.device("cpu"), {"cuda": "cuda"}, None])
def test_others_are_as_ever(tmp_path: Path, where: Any) -> None:
    """The host's memory, or a dict that does not name it."""
    path = save(tmp_path / "s", {"w": torch.ones(3)})
    assert_same(load(path, map_location=where), {"w": torch.ones(3)})
    meta = load(path, map_location="meta")
    assert meta["w"].is_meta
