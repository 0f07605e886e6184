"""Receives that are under way when their process is killed: ``dying_receiver.py``.

It reads metadata as JSON by the name of the row, and prints ``receiving`` when some of
every checkpoint has arrived. One that is there at once is never made into a state dict.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiockpt.transfer.destination import Destination
from tests.support.transports import MIB_LARGE, Transport, options_of, transport


async def begun(
    receiver: Transport, name: str, metadata: str | list[str]
) -> asyncio.Future[Any]:
    """Receive as the row says; return when something has arrived."""
    some = asyncio.Event()
    if "steps" in name:
        assert isinstance(metadata, str)
        steps = receiver.steps(metadata, after=1)
        return asyncio.ensure_future(anext(steps))
    if "follow" in name:
        assert isinstance(metadata, str)
        follower = receiver.follow(
            metadata, progress=lambda now: some.set() if now.bytes_done else None
        )
        following = asyncio.ensure_future(anext(follower))
        await some.wait()
        return following
    call = receiver.recv_checkpoint(
        *(0, metadata, 1),
        **options_of(name, MIB_LARGE),
        progress=lambda now: some.set() if now.bytes_done else None,
    )
    task = asyncio.create_task(call)
    await some.wait()
    return task


async def never(_: Destination) -> object:
    """Make no state dict of what has arrived."""
    return await asyncio.Event().wait()


async def main() -> None:
    """Begin all of them."""
    setattr(Destination, "assemble", never)  # noqa: B010 - mypy: it is a method
    async with transport(timeout=600, stall_timeout=600, connections=1) as receiver:
        given = json.loads(sys.stdin.readline())
        calls = [begun(receiver, *each) for each in given.items()]
        tasks = await asyncio.gather(*calls)
        assert not any(task.done() for task in tasks)
        print("receiving", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
