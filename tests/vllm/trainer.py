"""A trainer in a process of its own: publishes a step for each line that it reads.

With a rank and a port, it is one of two ranks that share the weights by FSDP.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from vllm.distributed.weight_transfer.base import ModuleSource

from aiockpt import Server
from aiockpt.vllm import TrainerEngine, TrainerInitInfo
from tests.vllm.conftest import Model


class Printing:
    """A client that says what the trainer would have the engines do."""

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        print(">", info["metadata"], flush=True)

    def start_weight_update(self) -> None:
        """Engines do nothing yet."""

    def update_weights(self, info: Any) -> None:
        print(">", info["step"], flush=True)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The test asks its own engine."""


def main(rank: int = 0, port: int = 0) -> None:
    """Serve until killed."""
    model = Model()
    if port:
        at = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=at, rank=rank, world_size=2)
        fully_shard(model.module, mesh=init_device_mesh("cpu", (2,)))
    info = TrainerInitInfo(rank=rank, server=Server(host="127.0.0.1"), timeout=60)
    engine = TrainerEngine.trainer_init(
        info, client=Printing(), source=ModuleSource(model.module)
    )
    for line in sys.stdin:
        if port:
            double(model.module)
        else:
            model.step(int(line))
        engine.send_weights()


def double(module: torch.nn.Module) -> None:
    """Take a step that each rank takes alone."""
    with torch.no_grad():
        for each in module.parameters():
            each.mul_(2)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
