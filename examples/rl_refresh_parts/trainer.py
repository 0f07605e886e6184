"""The trainer: trains, publishes every few steps, and goes on from its last save."""

import asyncio
import sys
from pathlib import Path

import torch
from model import Model, checksum, sequences  # type: ignore[import-not-found]

import aiockpt

STEPS = 10  # between two publications


def train(model: Model, optimizer: torch.optim.Optimizer) -> float:
    for _ in range(STEPS):
        tokens = sequences(64)
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return float(loss.detach())


async def main(port: str, token: str, save: str) -> None:
    torch.manual_seed(0)
    model, step = Model(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if await asyncio.to_thread(Path(save).exists):
        saved = aiockpt.load(save)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    transport = aiockpt.HTTPTransport(
        auth=aiockpt.Auth(token=token),
        server=aiockpt.Server(host="127.0.0.1", port=int(port), keep_base=True),
    )
    async with transport:
        print(transport.metadata(), flush=True)
        with aiockpt.make_sync_checkpointer() as checkpointer:
            while True:
                loss = await asyncio.to_thread(train, model, optimizer)
                step += 1
                weights = {
                    name: tensor.bfloat16()
                    for name, tensor in model.state_dict().items()
                }
                state = {"weights": weights, "checksum": checksum(weights)}
                await transport.send_checkpoint(step=step, state_dict=state)
                print(f"version {step} has a loss of {loss:.3f}", flush=True)
                saved = {"model": model.state_dict(), "step": step}
                checkpointer.save(saved, save, step=step)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
