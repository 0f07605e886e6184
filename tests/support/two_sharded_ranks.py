"""Two ranks save one sharded tensor to the directory that the argument names."""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import aiockpt


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def save(rank: int, directory: str, port: int) -> None:
    """Save as one of the two ranks."""
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    with aiockpt.make_sync_checkpointer() as checkpointer:
        checkpointer.save({"w": tensor}, directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    port = free_port()
    child = os.fork()
    save(1 if child else 0, sys.argv[1], port)
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
