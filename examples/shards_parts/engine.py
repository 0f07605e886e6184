"""One of the engines: fetches what its mesh needs, and checks what it has got."""

import asyncio
import os
import sys
import warnings
from typing import Any

import torch.distributed as dist
from model import make_model  # type: ignore[import-not-found]

import aiockpt

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


async def sums(state: Any) -> aiockpt.Fingerprint:
    # Each engine sums over its own elements; a few bytes per tensor are exchanged.
    return await asyncio.to_thread(aiockpt.fingerprint, state, group=dist.group.WORLD)


async def main(joined: str, versions: int) -> None:
    dist.init_process_group("gloo")
    model = make_model("tp", RANKS)
    live = {"model": model.state_dict()}
    events: list[aiockpt.TransferEvent] = []
    aiockpt.add_hook(events.append)
    async with aiockpt.HTTPTransport() as transport:
        async for version, state in transport.follow(joined, into=live):
            theirs = await transport.fingerprint(metadata=joined, step=version)
            (await sums(state)).require(theirs)
            nbytes = [each.nbytes for each in events if each.stop == "recv"][-1]
            print(f"version {version} is right; {nbytes:,} bytes came", flush=True)
            if version == versions:
                break
        if RANK == 1:
            weight: Any = model[0].up.weight
            weight.to_local().detach().view(-1).numpy().view("uint8")[0] ^= 1
        try:
            (await sums(live)).require(theirs)
        except aiockpt.errors.FingerprintMismatchError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
