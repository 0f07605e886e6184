"""A child process that repeats what it hears until it hears ``end``."""

from __future__ import annotations

import asyncio

import msgspec

from aiockpt.runtime.children import Parent


def main(fd: int, pid: int) -> None:
    """Serve the parent; see `Child`."""
    asyncio.run(_serve(fd, pid))


async def _serve(fd: int, pid: int) -> None:
    ended = asyncio.Event()

    def hear(data: bytes, _: list[int]) -> None:
        said = msgspec.msgpack.decode(data)
        parent.send(said)
        if said == "end":
            ended.set()

    parent = Parent(fd, pid, hear, ended.set)
    await ended.wait()
    parent.close()
