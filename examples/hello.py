"""Send a model's state and receive it again, in one process."""

import asyncio

import torch

import aiockpt


async def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    async with (
        aiockpt.HTTPTransport() as sender,
        aiockpt.HTTPTransport() as receiver,
    ):
        await sender.send_checkpoint(step=100, state_dict=state)
        received = await receiver.recv_checkpoint(metadata=sender.metadata(), step=100)

    received_weight = received["model"]["0.weight"]
    assert torch.equal(received_weight, state["model"]["0.weight"])
    print(f"received {len(received['model'])} tensors of step 100, all equal")


if __name__ == "__main__":
    asyncio.run(main())
