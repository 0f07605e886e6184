"""Two ranks save one sharded tensor to the directory that the argument names."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import aiockpt


def save(rank: int, directory: str) -> None:
    """Save as one of the two ranks."""
    store = f"file://{directory}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    with aiockpt.make_sync_checkpointer() as checkpointer:
        checkpointer.save({"w": tensor}, directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    child = os.fork()
    save(1 if child else 0, sys.argv[1])
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
