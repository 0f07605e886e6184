"""A small model for any mesh, its data, and a checksum that does not know the mesh."""

import hashlib
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH, HIDDEN, BATCH, BLOCKS = 32, 90, 24, 2


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
    torch.manual_seed(0)  # the same parameters on each mesh
    model = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))
    if mesh == "fsdp":
        devices = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        for block in (*model, model):
            fully_shard(block, mesh=devices)
    if mesh == "tp":
        devices = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        for block in model:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, devices, plan)
    return model


class Loader:
    """This rank's share of each batch. Its position differs from rank to rank."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.share = BATCH // ranks
        self.first = self.at = rank * self.share

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        samples = torch.arange(self.at, self.at + self.share).unsqueeze(1)
        self.at += BATCH
        inputs = torch.sin(samples * torch.arange(1, WIDTH + 1) * 0.7)
        return inputs, torch.sin(3 * inputs.cumsum(1))

    def skip_to(self, step: int) -> None:
        self.at = self.first + step * BATCH


def checksum(state: dict[str, object]) -> str:
    """Return a digest of the model and the optimizer; it does not know the mesh."""
    text = repr([_full(state["model"]), _full(state["optimizer"])])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _full(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _full(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [*map(_full, value)]
    if not isinstance(value, torch.Tensor):
        return value
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.dtype, full.shape, full.flatten().view(torch.uint8).numpy().tobytes()
