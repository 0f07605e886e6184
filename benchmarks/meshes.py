"""What the ranks of a job do that saves on one mesh and loads on another one."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import aiockpt
from benchmarks.measures import BenchmarkError, Sample, spent, spent_since
from benchmarks.training import Training

_COLUMNS = 1024
_GROUPS = ("model", "exp_avg", "exp_avg_sq")  # as AdamW has them
_EXACT = 1 << 24  # a float32 has each smaller whole number


class Rank:
    """A rank of a job, or a process without one; the job has other ranks each time."""

    def __init__(self, training: Training) -> None:
        del training
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self._world, self._layout, self._rows = 1, "one", 0
        self._state: dict[str, Any] = {}
        self._checked: set[str] = set()

    async def join(self, *, port: int, rank: int, world: int) -> None:
        """Be a rank of a new job."""
        self._world = world
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", address, rank=rank, world_size=world)

    async def leave(self) -> None:
        """End the job."""
        self._state, self._world = {}, 1
        if dist.is_initialized():
            dist.destroy_process_group()

    async def release(self) -> None:
        """End the job, if there is one."""
        await self.leave()

    async def prepare(self, *, layout: str, count: int, rows: int) -> None:
        """Have a state of ``count`` tensors of so many rows, in three groups."""
        self._layout, self._rows = layout, rows
        names = [(group, f"{n}.weight") for n in range(count // 3) for group in _GROUPS]
        self._state = {group: {} for group in _GROUPS}
        for at, (group, name) in enumerate(names):
            self._state[group][name] = self._tensor(at)
        self._checked.clear()

    def _tensor(self, at: int) -> torch.Tensor:
        """Return a tensor whose elements count from its number on."""
        rows, columns = self._rows, min(_COLUMNS, self._rows)
        full = torch.arange(at, at + rows * columns).view(rows, columns)
        full = (full % _EXACT).float()
        if self._layout == "one":
            return full
        sizes, placements = _placed(self._layout, at, self._world)
        mesh = init_device_mesh("cpu", sizes)
        local = full
        # Tensor parallelism, the inner dimension, cuts first.
        for dim in reversed(range(mesh.ndim)):
            placement: Any = placements[dim]
            if not placement.is_replicate():
                parts = local.chunk(sizes[dim], placement.dim)
                local = parts[mesh.get_local_rank(dim)]
        local = local.contiguous()
        return DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )

    async def save(self, *, place: str) -> None:
        """Save the state by this library and by DCP."""
        with aiockpt.make_sync_checkpointer() as checkpointer:
            checkpointer.save(self._state, f"{place}/aiockpt/step-1")
        save_dcp(self._state, checkpoint_id=f"{place}/dcp")

    async def load(self, *, by: str, place: str, new: bool) -> Sample:
        """Load it, and say how long that took.

        Raises:
            BenchmarkError: another state was loaded.
        """
        for each in self._tensors(self._state):
            each.fill_(-1)
        if dist.is_initialized():
            dist.barrier()
        used, began = spent(), time.monotonic()
        found = self._load(by, place, new=new)
        sample = {"seconds": time.monotonic() - began, **spent_since(used)}
        if by not in self._checked:
            self._checked.add(by)
            for at, each in enumerate(self._tensors(found)):
                if not torch.equal(each, _local(self._tensor(at))):
                    raise BenchmarkError(f"{by} has not loaded tensor {at}")
        return sample

    def _load(self, by: str, place: str, *, new: bool) -> dict[str, Any]:
        if by == "DCP":
            alone = not dist.is_initialized()
            state = self._state
            if new:
                state = {
                    group: {name: torch.empty_like(each) for name, each in some.items()}
                    for group, some in state.items()
                }
            load_dcp(state, checkpoint_id=f"{place}/dcp", no_dist=alone)
            return state
        verify: Any = "none" if by == "unverified" else "full"
        into = None if new else self._state
        path = f"{place}/aiockpt/step-1"
        found: dict[str, Any] = aiockpt.load(path, into=into, verify=verify)
        return found

    def _tensors(self, state: dict[str, Any]) -> list[torch.Tensor]:
        """Return the local tensors, in the order of `prepare`."""
        rows = zip(*(state[group].values() for group in _GROUPS), strict=True)
        return [_local(each) for row in rows for each in row]

    async def remove(self, *, place: str) -> None:
        """Remove what was saved."""
        for name in os.listdir(place):
            shutil.rmtree(f"{place}/{name}")


def _placed(
    layout: str, at: int, world: int
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """Return the sizes of the mesh, and how it splits a tensor.

    Tensor parallelism cuts the columns of one tensor and the rows of the next one.
    """
    cut = at // len(_GROUPS) % 2
    if layout == "FSDP":
        return (world,), (Shard(0),)
    if layout == "TP":
        return (world,), (Shard(cut),)
    if layout == "HSDP":
        return (2, world // 2), (Replicate(), Shard(0))
    outer = Shard(0) if cut else _StridedShard(0, split_factor=2)
    return (world // 2, 2), (outer, Shard(cut))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
