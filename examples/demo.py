"""A real model's training state moves to another process, at last over cut connections.

An argument names another safetensors file with a model.
"""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from demo_parts import training  # type: ignore[import-not-found]
from demo_parts.cutting import CutAll  # type: ignore[import-not-found]

import aiockpt
from aiockpt import Progress, TransferEvent
from aiockpt.testing import FaultProxy, assert_same


@asynccontextmanager
async def sender(model: Path) -> AsyncIterator[tuple[str, str]]:
    call = (sys.executable, str(Path(__file__).parent / "demo_parts/sender.py"))
    process = await asyncio.create_subprocess_exec(
        *call, str(model), stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        metadata, seconds = (await process.stdout.readline()).decode().split()
        yield metadata, seconds
    finally:
        process.stdin.close()  # this ends it
        await process.wait()


async def receive(
    metadata: str, expected: object, progress: Callable[[Progress], None]
) -> float:
    async with aiockpt.HTTPTransport[object]() as transport:
        began = time.monotonic()
        state = await transport.recv_checkpoint(metadata=metadata, progress=progress)
        seconds = time.monotonic() - began
    assert_same(state, expected)  # each tensor and value: type, order and bytes
    return seconds


async def main(model: Path) -> None:
    tensors, expected = aiockpt.load(model), training.training_state(model)
    size = sum(tensor.nbytes for tensor in tensors.values())
    print(f"model     {model.name}: {size / 1e6:.1f} MB in {len(tensors)} tensors")
    async with sender(model) as (metadata, staged_in):
        print(f"sender    another process; staged in {staged_in} s")
        seen: list[Progress] = []
        seconds = await receive(metadata, expected, seen.append)
        total = seen[-1].bytes_total
        what = f"{total / size:.1f} times the model: each parameter and two moments"
        print(f"state     {total / 1e6:.1f} MB, {what}")
        print(f"received  in {seconds:.2f} s ({total / seconds / 1e9:.2f} GB/s)")

        url, fault = urlsplit(metadata), CutAll(total // 2)
        events: list[TransferEvent] = []
        aiockpt.add_hook(events.append)
        address = url.hostname or "", url.port or 0
        async with FaultProxy(*address, otherwise=fault) as proxy:
            through = f"{proxy.url(url.path)}#{url.fragment}"
            seconds = await receive(through, expected, seen.append)
        again = sum(event.stop == "retry" for event in events)
        print(f"resumed   in {seconds:.2f} s, all connections cut half way, ", end="")
        print(f"{again} requests made again")
    print("verified  both times, every tensor and value is the sender's")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if sys.argv[1:] else training.find_model()))
