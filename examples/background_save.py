"""Save in the background of a training loop, which waits for the copy only."""

import asyncio
import tempfile

import torch

import aiockpt
from aiockpt.checkpointers import CheckpointWriterConfig


async def train(directory: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    config = aiockpt.CheckpointerConfig(
        writer_config=CheckpointWriterConfig(keep_last=2)
    )
    # Its process starts now, and is ready before it is needed.
    async with aiockpt.make_async_checkpointer(config) as checkpointer:
        for step in range(1, 31):
            loss = model(torch.randn(16, 512)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                # Returns when the state may be mutated; the rest happens elsewhere.
                saved = await checkpointer.save(state, f"{directory}/step-{step}")
            await asyncio.sleep(0)  # whatever else this service does
        # Durable, and committed. Nobody has to wait for it: leaving the block does.
        assert await saved.written()
        numbers = checkpointer.statistics()
        print(f"{numbers.written} saves, the last stall {numbers.stall_seconds:.4f} s")

        template = {"model": model.state_dict(), "step": None}
        newest = aiockpt.latest(directory)
        assert newest is not None
        loaded = await checkpointer.load(newest.path, template, strict=True)
    names = [each.name for each in aiockpt.list_checkpoints(directory)]
    print(f"kept {', '.join(names)}; loaded step {loaded['step']}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(train(place))
