"""Receives that are under way when their process is killed: ``dying_receiver.py``.

It reads metadata as JSON by the name of the row, and prints ``receiving`` when some of
every checkpoint has arrived.
"""

from __future__ import annotations

import asyncio
import json
import sys

from receivers import MIB_LARGE, options_of
from transports import Transport, transport


async def receive(receiver: Transport, name: str, metadata: str) -> None:
    """Receive as the row says; return when something has arrived."""
    begun = asyncio.Event()
    if "steps" in name:
        steps = receiver.steps(metadata, after=1)
        asyncio.ensure_future(anext(steps))  # noqa: RUF006 - it outlives everything
        return
    call = receiver.recv_checkpoint(
        *(0, metadata, 1),
        **options_of(name, MIB_LARGE),
        progress=lambda now: begun.set() if now.bytes_done else None,
    )
    task = asyncio.create_task(call)
    await begun.wait()
    assert not task.done()


async def main() -> None:
    """Begin all of them."""
    async with transport(timeout=600, stall_timeout=600, num_chunks=1) as receiver:
        given = json.loads(sys.stdin.readline())
        await asyncio.gather(*(receive(receiver, *each) for each in given.items()))
        print("receiving", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
