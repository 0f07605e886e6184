"""Any tensors of any mesh load on any other one, whatever their memory looks like."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import aiockpt
from aiockpt.errors import StateDictError
from aiockpt.testing import assert_same
from tests.support.mesh_ranks import as_rank, assembled, check, distributed, equal
from tests.support.saving import save
from tests.support.states import State, states

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex64),
    *(torch.bool, torch.float8_e4m3fn),
)
GRIDS: dict[int, list[tuple[int, ...]]] = {
    1: [(1,)],
    2: [(2,)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    6: [(6,), (2, 3), (3, 2)],
    8: [(8,), (2, 4), (2, 2, 2)],
}
"""The meshes of so many ranks."""

fewer = settings(max_examples=settings().max_examples * 2 // 5)
"""An example saves and loads with many ranks."""


class Cut(NamedTuple):
    """How a tensor is split, if it is; and the memory of each local tensor."""

    sizes: tuple[int, ...]
    placements: Sequence[Placement]
    memory: str

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a full tensor."""
        if not self.sizes:
            return in_memory(whole, self.memory)
        mesh = init_device_mesh("cpu", self.sizes)
        made = distributed(whole, mesh, *self.placements)
        made._local_tensor = in_memory(made._local_tensor, self.memory)
        return made


def in_memory(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return an equal tensor in memory of that kind."""
    if kind == "turned" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "gaps" and tensor.dim():
        wide = (*tensor.shape[:-1], 2 * tensor.shape[-1] + 1)
        made = torch.zeros(wide, dtype=tensor.dtype)[..., 1::2]
    elif kind == "shifted":
        flat = torch.zeros(tensor.numel() + 7, dtype=tensor.dtype)
        made = flat[3 : 3 + tensor.numel()].view(tensor.shape)
    else:
        made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return made.copy_(tensor)


def drawn_tensor(rng: random.Random) -> torch.Tensor:
    """Draw a tensor with any bits."""
    sizes = (0, 1, 2, 3, 5, 7, 8, 12, 33)
    shape = [rng.choice(sizes) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3]))]
    dtype = rng.choice(DTYPES)
    count = torch.Size(shape).numel() * dtype.itemsize
    noise = torch.Generator().manual_seed(rng.randrange(1 << 30))
    raw = torch.empty(count, dtype=torch.uint8)
    raw.random_(0, 2 if dtype is torch.bool else 256, generator=noise)
    found = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return found.transpose(0, -1) if shape and rng.random() < 0.3 else found


def drawn_cut(rng: random.Random, dims: int, world: int) -> Cut:
    """Draw how so many ranks hold a tensor."""
    memory = rng.choice(["dense", "dense", "turned", "gaps", "shifted"])
    if rng.random() < 0.2:
        return Cut((), (), memory)
    sizes = rng.choice(GRIDS[world])
    placements: list[Placement] = []
    for position in range(len(sizes)):
        kind, dim = rng.random(), rng.randrange(max(dims, 1))
        if not dims or kind < 0.25:
            placements.append(Replicate())
        elif kind < 0.4 and position + 1 < len(sizes):
            placements.append(_StridedShard(dim, split_factor=sizes[position + 1]))
        else:
            placements.append(Shard(dim))
    return Cut(sizes, placements, memory)


def drawn_cuts(
    rng: random.Random, whole: dict[str, torch.Tensor], world: int
) -> dict[str, Cut]:
    """Draw how so many ranks hold some tensors."""
    return {name: drawn_cut(rng, each.dim(), world) for name, each in whole.items()}


@fewer
@given(rng=st.randoms(use_true_random=False))
def test_any_state_of_any_mesh(rng: random.Random) -> None:
    """The load returns full tensors or other ranks' shards, and ties stay."""
    saving, loading = rng.choice([*GRIDS]), rng.choice([*GRIDS])
    whole = {f"{n}": drawn_tensor(rng) for n in range(rng.randint(1, 5))}
    cuts, tied = drawn_cuts(rng, whole, saving), rng.choice([*whole])

    def state_of(rank: int) -> Any:
        held = {name: cuts[name].of(each) for name, each in whole.items()}
        return {"a": held, "tied": [held[tied]], "n": 3}

    with tempfile.TemporaryDirectory() as place:
        path = assembled(Path(place) / "step-1", saving, state_of)
        found = aiockpt.load(path)
        assert {*found} == {"a", "tied", "n"}
        for name, each in whole.items():
            equal(found["a"][name], each, name)
        assert found["tied"][0].data_ptr() == found["a"][tied].data_ptr()
        cuts = drawn_cuts(rng, whole, loading)
        for rank in range(loading):
            with as_rank(rank, loading):
                mine = {
                    name: cuts[name].of(torch.zeros_like(each))
                    for name, each in whole.items()
                }
                into: dict[str, Any] = {"a": {**mine}, "n": 0}
                if rng.random() < 0.5:
                    into["tied"] = [mine[tied]]
                aiockpt.load(path, into=into)
                check(into, {"a": whole, "tied": [whole[tied]], "n": 3})
                assert all(into["a"][name] is each for name, each in mine.items())


WAYS: dict[str, Any] = {
    "whole": aiockpt.load,
    "mapped": partial(aiockpt.load, mmap=True),
    "selected": partial(aiockpt.load, select=lambda name: len(name) % 2 == 0),
    "named": partial(aiockpt.load, select=["tree", "tensors[0]"]),
    "adopted": lambda path: aiockpt.load(path, into={"tree": None, "n": None}),
}


@fewer
@given(state=states())
def test_equal_ranks_load_like_one(state: State) -> None:
    """Ranks that saved the same load as one rank does, whatever the tree holds."""
    saved = {"tree": state["tree"], "tensors": [*state["tensors"]], "n": 1}
    with tempfile.TemporaryDirectory() as place:
        one = save(Path(place) / "one-1", saved)
        three = assembled(Path(place) / "three-1", 3, lambda rank: saved)
        for load in WAYS.values():
            assert_same(load(three), load(one))
        template, expected = aiockpt.load(one), aiockpt.load(one)
        for tensor in template["tensors"]:
            memory = torch.empty(0, dtype=torch.uint8)
            memory.set_(tensor.untyped_storage()).zero_()
        try:
            aiockpt.load(one, into=expected)
        except StateDictError as error:  # such as tensors that overlap in part
            with pytest.raises(type(error)):
                aiockpt.load(three, into=template)
        else:
            assert_same(aiockpt.load(three, into=template), expected)
