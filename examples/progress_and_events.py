"""Watch a receive: a progress callable for people, event hooks for machines."""

import asyncio

import torch

import aiockpt
from aiockpt.events import add_hook


def show(progress: aiockpt.Progress) -> None:
    if progress.stop == "fetch_chunk" and progress.bytes_total:
        share = progress.bytes_done / progress.bytes_total
        print(
            f"\r{share:4.0%} of {progress.bytes_total >> 20} MiB, "
            f"{progress.chunks_done}/{progress.chunks_total} chunks verified, "
            f"{progress.rate / 1e9:.2f} GB/s",
            end="",
        )


def record(event: aiockpt.TransferEvent) -> None:
    # Runs on the event loop: be quick, e.g. count, or put it into a queue.
    if event.stop in {"publish", "recv", "retry"}:
        print(f"\nevent: {event}", end="")


async def main() -> None:
    state = {f"layer{i}": torch.full((4 << 20,), float(i)) for i in range(8)}
    remove = add_hook(record)
    async with (
        aiockpt.HTTPTransport() as sender,
        aiockpt.HTTPTransport() as receiver,
    ):
        await sender.send_checkpoint(step=3, state_dict=state)
        await receiver.recv_checkpoint(
            metadata=sender.metadata(), step=3, progress=show
        )
    remove()
    print()


if __name__ == "__main__":
    asyncio.run(main())
