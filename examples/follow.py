"""A worker follows a trainer: it receives each newer step into its own model."""

import asyncio

import torch

import aiockpt


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 8))


async def train(transport: aiockpt.HTTPTransport, received: asyncio.Queue[int]) -> None:
    model = make_model()
    for step in (100, 200, 300):
        with torch.no_grad():
            next(model.parameters()).fill_(step)
        await transport.send_checkpoint(step=step, state_dict=model.state_dict())
        assert await received.get() == step  # a trainer would not wait


async def work(metadata: str, received: asyncio.Queue[int]) -> None:
    model = make_model()
    async with aiockpt.HTTPTransport() as transport:
        # A step that is replaced before the worker asks for it is skipped.
        async for step, _ in transport.follow(metadata, into=model.state_dict()):
            weight = next(model.parameters())[0, 0].item()
            print(f"serving step {step}, first weight {weight:.0f}")
            received.put_nowait(step)


async def main() -> None:
    received: asyncio.Queue[int] = asyncio.Queue()
    async with aiockpt.HTTPTransport() as transport:
        worker = asyncio.create_task(work(transport.metadata(), received))
        await train(transport, received)
        worker.cancel()
        await asyncio.wait({worker})


if __name__ == "__main__":
    asyncio.run(main())
