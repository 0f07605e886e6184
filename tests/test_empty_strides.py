"""Tensors of no elements keep their strides, wherever they go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.groups import moved, transports
from tests.support.saved import load, save
from tests.support.transports import pair, receive


def empties() -> dict[str, Any]:
    """Return tensors of no elements whose strides are not the usual ones."""
    return {
        "transposed": torch.empty(0, 3).t(),
        "permuted": torch.empty(2, 0, 4).permute(2, 0, 1),
        "sliced": torch.ones(6, 4)[2:2],
        "columns": torch.ones(6, 4)[:, 1:1],
        "expanded": torch.empty(0, 1).expand(0, 5),
        "strided": torch.empty_strided((3, 0), (7, 2)),
        "parameter": torch.nn.Parameter(torch.empty(0, 3).t()),
        "usual": torch.empty(3, 0),
        "weight": torch.ones(3),
    }


def strides(state: dict[str, Any]) -> dict[str, Any]:
    """Return the strides of all tensors."""
    return {key: tensor.stride() for key, tensor in state.items()}


@pytest.mark.asyncio
@pytest.mark.parametrize("select", [None, [""]])
async def test_over_http(select: list[str] | None) -> None:
    """Whole, and as a part."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, empties())
        got = await receive(sender, receiver, select=select)
    assert strides(got) == strides(empties())


@pytest.mark.asyncio
async def test_over_a_group() -> None:
    """From rank to rank."""
    async with transports() as (sender, receiver):
        got = await moved(sender, receiver, empties())
    assert strides(got) == strides(empties())


@pytest.mark.parametrize("mapped", [False, True])
def test_in_a_file(tmp_path: Path, *, mapped: bool) -> None:
    """Read or mapped."""
    got = load(save(tmp_path / "s", empties()), mmap=mapped)
    assert strides(got) == strides(empties())


@pytest.mark.asyncio
async def test_a_template_may_have_others() -> None:
    """Nothing is filled, so any stride fits; the template's tensor is returned."""
    into = {key: torch.zeros(each.shape) for key, each in empties().items()}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, empties())
        for direct in (False, True):
            got = await receive(sender, receiver, into=into, direct=direct)
            assert all(got[key] is into[key] for key in into)
