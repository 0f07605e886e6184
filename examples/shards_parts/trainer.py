"""One of the trainers: publishes its own shards of each version."""

import asyncio
import os
import sys
import warnings

import torch
import torch.distributed as dist
from model import WIDTH, make_model  # type: ignore[import-not-found]

import aiockpt

STEPS = 5  # between two versions
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    for _ in range(STEPS):
        inputs = torch.randn(16, WIDTH)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.roll(1, 1))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return float(loss.detach())


async def main() -> None:
    dist.init_process_group("gloo")
    model = make_model("fsdp", RANKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(RANK)  # each rank has data of its own
    server = aiockpt.Server(host="127.0.0.1")
    async with aiockpt.HTTPTransport(server=server) as transport:
        print(transport.metadata(), flush=True)
        version, goes_on = 0, True
        while goes_on:
            loss = await asyncio.to_thread(train, model, optimizer)
            version += 1
            state = {"model": model.state_dict()}
            await transport.send_checkpoint(step=version, state_dict=state)
            print(f"version {version}, loss {loss:.3f}", flush=True)
            goes_on = bool(await asyncio.to_thread(sys.stdin.readline))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asyncio.run(main())
