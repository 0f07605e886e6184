"""The ranks of a job that saves with torch.distributed.checkpoint.

``python dcp_ranks.py LAYOUT WORLD DIRECTORY`` saves a trained model, its optimizer, and
more, to ``DIRECTORY/saved``, and the full tensors by name to ``DIRECTORY/full.pt``. The
layouts are ``fsdp``, ``hsdp`` and ``tp``, which is FSDP over tensor parallelism.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.ranks import rank_of


class Net(nn.Module):
    """Layers that can be cut, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.odd = nn.Linear(6, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return something to make smaller."""
        found: torch.Tensor = self.odd(self.down(self.up(batch).relu()))
        return found


def trained(layout: str, world: int) -> dict[str, Any]:
    """Return the state of a model and its optimizer after a step."""
    net = Net()
    if layout == "fsdp":
        data = init_device_mesh("cpu", (world,))
    else:
        names = ("data", "tensor") if layout == "tp" else ("replica", "data")
        data = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
    if layout == "tp":
        cuts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, data["tensor"], cuts)
        data = data["data"]
    fully_shard(net, mesh=data)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    net(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def state_of(layout: str, rank: int, world: int) -> dict[str, Any]:
    """Return what is saved."""
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(12.0).view(4, 3)
    return {
        **trained(layout, world),
        "cut": {
            "columns": distribute_tensor(whole, mesh, [Shard(1)]),
            "same": distribute_tensor(whole, mesh, [Replicate()]),
            "turned": distribute_tensor(whole.t().contiguous().t(), mesh, [Shard(0)]),
            "one row": distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)]),
            "none": distribute_tensor(torch.ones(0, 2), mesh, [Shard(0)]),
        },
        "nested": [{"a": torch.tensor(1.5)}, [torch.arange(3), {"b": [1, "x"]}]],
        "plain": torch.arange(4),
        "mine": {f"of {rank}": torch.full((2,), rank), f"rank {rank}": rank},
    }


def main(layout: str, world: int, directory: Path) -> None:
    """Save as one of the ranks."""
    rank = rank_of(world)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    warnings.simplefilter("ignore")
    store = f"file://{directory / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    state = state_of(layout, rank, world)
    save(state, checkpoint_id=directory / "saved")
    full = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in flatten_state_dict(state)[0].items()
    }
    everybodys: list[Any] = [None] * world
    dist.all_gather_object(everybodys, full)
    if rank == 0:
        for each in everybodys:
            full |= {name: value for name, value in each.items() if name not in full}
        torch.save(full, directory / "full.pt")
    dist.barrier()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
