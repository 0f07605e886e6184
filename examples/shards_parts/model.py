"""A small model for two meshes: one of trainers, and one of engines."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH, HIDDEN, BLOCKS = 64, 90, 2


class Block(torch.nn.Module):
    """A normalization and two matrices, beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)  # 4 ranks get 23, 23, 23 and 21 rows
        self.down = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        found: torch.Tensor = x + self.down(hidden)
        return found


def make_model(mesh: str, ranks: int) -> torch.nn.Module:
    torch.manual_seed(len(mesh))  # the engines begin with other parameters
    model = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))
    devices = init_device_mesh("cpu", (ranks,), mesh_dim_names=(mesh,))
    for block in model:
        if mesh == "fsdp":  # the rows of each tensor
            fully_shard(block, mesh=devices)
        else:  # the rows of one matrix and the columns of the next one
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, devices, plan)
    if mesh == "fsdp":
        fully_shard(model, mesh=devices)
    return model
