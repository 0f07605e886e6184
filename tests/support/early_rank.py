"""One of two ranks, whose checkpointer is older than the process group.

``early_rank.py RANK PORT PORT DIRECTORY KIND`` makes a checkpointer of a KIND, becomes
one of two ranks, and saves step 1. Then rank 0 goes on alone, in a group of one rank,
and saves step 2. It prints what each save and each load of the same checkpointer gave.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import aiockpt
from aiockpt.checkpointers import CheckpointWriterConfig


def make(kind: str) -> Any:
    """Return a checkpointer whose calls block."""
    config = aiockpt.CheckpointerConfig(
        writer_config=CheckpointWriterConfig(
            keep_last=1, fsync=False, write_barrier_timeout_secs=60
        ),
        use_process=kind == "process",
    )
    if kind == "sync":
        return aiockpt.make_sync_checkpointer(config)
    return aiockpt.make_background_checkpointer(config)


def become(rank: int, size: int, port: str) -> None:
    """Become one of so many ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=size)


def save(made: Any, rank: int, path: str) -> None:
    """Save a part, and load it again."""
    handle = made.save({"rank": rank, "w": torch.full((100,), float(rank))}, path)
    if handle is not None:
        assert handle.result(60)
    state = made.load(path)
    assert state["w"].eq(rank).all()
    print("saved and loaded by rank", state["rank"], flush=True)


def main(rank: int, port: str, other_port: str, directory: str, kind: str) -> None:
    """Be one rank."""
    with make(kind) as made:
        become(rank, 2, port)
        save(made, rank, f"{directory}/step-1")
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            become(0, 1, other_port)
            save(made, rank, f"{directory}/step-2")
            dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
