"""The sender: serves what a training loop saves after its first step."""

import asyncio
import sys
import time
from pathlib import Path

from training import training_state  # type: ignore[import-not-found]

import aiockpt


async def main(model: str) -> None:
    state = training_state(Path(model))
    server = aiockpt.Server(host="127.0.0.1")
    async with aiockpt.HTTPTransport[object](server=server) as transport:
        began = time.monotonic()
        await transport.send_checkpoint(step=1, state_dict=state)
        print(transport.metadata(), f"{time.monotonic() - began:.2f}", flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the receiver is done


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
