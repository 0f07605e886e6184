"""The trainer of the orchestrator: for every line on stdin it trains and publishes."""

import asyncio
import sys

import torch

import aiockpt


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 1))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x = torch.randn(128, 64)
    loss = (model(x).squeeze() - x.mean(dim=1)).square().mean()
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return float(loss.detach())


async def main() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with aiockpt.HTTPTransport() as transport:
        # Whoever holds this line may read the weights: it goes from pipe to pipe.
        print(transport.metadata(), flush=True)
        step = 0
        while await asyncio.to_thread(sys.stdin.readline):
            step += 1
            loss = await asyncio.to_thread(train, model, optimizer)
            # When this returns, the next step may change the weights.
            await transport.send_checkpoint(step=step, state_dict=model.state_dict())
            print(f"step {step} has a loss of {loss:.3f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
