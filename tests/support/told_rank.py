"""One of two ranks that save when they are told to: ``told_rank.py RANK PORT``.

For each line ``PATH STEP VALUE`` of the input it saves that value in the background.
Then it prints the id of its checkpoint process, and ``saved`` or the error.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import torch

import aiockpt
from aiockpt.checkpointers import BarrierConfig, CheckpointWriterConfig, RankInfo


async def main(rank: int, port: int) -> None:
    """Save until the input ends."""
    where = {"tcpstore_port": port, "master_address": "127.0.0.1", "is_master": False}
    config = aiockpt.CheckpointerConfig(
        writer_config=CheckpointWriterConfig(
            write_barrier_timeout_secs=30, fsync=False
        ),
        barrier_config=BarrierConfig("tcp_store", where),
    )
    made = aiockpt.make_async_checkpointer(config, RankInfo(rank, 2))
    writer: Any = made._writer
    async with made as checkpointer:
        await writer.ready()
        print(writer.pid, "ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            path, step, value = line.split()
            state = {"rank": rank, "w": torch.full((4_000_000,), float(value))}
            handle = await checkpointer.save(state, path, step=int(step))
            try:
                await handle.written()
                said = "saved"
            except aiockpt.AiockptError as error:
                said = f"{type(error).__name__}: {error}".replace("\n", " ")
            print(writer.pid, said, flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
