"""Two ranks save one checkpoint together, and each loads its own part again."""

import socket
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import distributed

import aiockpt
from aiockpt.checkpointers import CheckpointWriterConfig


def run(rank: int, port: int, directory: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    shard = torch.full((1000,), float(rank))
    keep = CheckpointWriterConfig(keep_last=2)
    config = aiockpt.CheckpointerConfig(writer_config=keep)
    # The rank is found, and so is where to meet: the store of the process group.
    with aiockpt.make_sync_checkpointer(config) as checkpointer:
        for step in (10, 20, 30):
            shard += 1
            # Returns on both ranks when the checkpoint is there for everybody.
            part = {"shard": shard, "step": step}
            checkpointer.save(part, f"{directory}/step-{step}")
        newest = aiockpt.latest(directory)
        assert newest is not None
        mine = checkpointer.load(newest.path, {"shard": shard, "step": None})
    print(f"rank {rank}: step {mine['step']}, {mine['shard'][0]:.0f} everywhere")
    distributed.destroy_process_group()


def main() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        start = get_context("spawn").Process
        ranks = [start(target=run, args=(rank, port, directory)) for rank in (0, 1)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        for checkpoint in aiockpt.list_checkpoints(directory):
            files = ", ".join(sorted(path.name for path in checkpoint.path.iterdir()))
            print(f"{checkpoint.name}: {files}")
        assert len(list(Path(directory).glob("step-*"))) == 2  # keep_last
    return max(each.exitcode or 0 for each in ranks)


if __name__ == "__main__":
    sys.exit(main())
