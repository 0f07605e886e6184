"""A trainer serves its weights; another process fetches them into its own model."""

import asyncio
import sys

import torch

import aiockpt


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 8))


async def train() -> None:
    model = make_model()
    async with aiockpt.HTTPTransport() as transport:
        # Whoever holds this line may read, so hand it over as you would a password.
        print(transport.metadata(), flush=True)
        state = model.state_dict()
        await transport.send_checkpoint(step=1, state_dict=state)
        await asyncio.to_thread(sys.stdin.readline)  # until the receiver is done


async def receive() -> None:
    trainer = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        "train",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    metadata = (await trainer.stdout.readline()).decode().strip()
    model = make_model()
    async with aiockpt.HTTPTransport() as transport:
        # into= fills the model's own tensors, once every byte has been verified.
        await transport.recv_checkpoint(
            metadata=metadata, step=1, into=model.state_dict()
        )
    weight = next(model.parameters())
    print(f"weights of step 1 received, first: {weight[0, 0].item():.4f}")
    trainer.stdin.write(b"\n")
    await trainer.wait()


if __name__ == "__main__":
    asyncio.run(train() if "train" in sys.argv else receive())
