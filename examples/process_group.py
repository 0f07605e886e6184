"""Rank 0 sends its weights to rank 1 over gloo; both go on with their other tasks."""

import asyncio
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed

import aiockpt


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 8))


async def run(rank: int, store: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    # A group of its own, not the one that trains: a transfer that fails breaks it.
    group = distributed.new_group(backend="gloo")
    model = make_model()
    async with aiockpt.PGTransport(group, timeout=60) as transport:
        if rank == 0:
            # Returns when rank 1 has verified every byte.
            await transport.send_checkpoint(step=5, state_dict=model.state_dict())
        else:
            await transport.recv_checkpoint(
                step=5,
                into=model.state_dict(),  # the model's own tensors are filled
            )
    weight = next(model.parameters())
    distributed.destroy_process_group()
    print(f"rank {rank}, step 5, first weight: {weight[0, 0].item():.4f}", flush=True)


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        ranks = [
            await asyncio.create_subprocess_exec(
                sys.executable, __file__, str(rank), store
            )
            for rank in (0, 1)
        ]
        assert [await rank.wait() for rank in ranks] == [0, 0]


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else main())
