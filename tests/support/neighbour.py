"""Another process of this host, which sends or receives as its input says.

It reads JSON lines ``{"do": name, ...}`` and answers each with one. What
it received it holds until it is told otherwise, or ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
from typing import Any

import torch

from aiockpt import HTTPTransport, Server, TransferEvent, add_hook
from aiockpt.local import lender
from aiockpt.runtime.same_host import identity

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
WAIT = 30.0


class Neighbour:
    """One transport, and what came by it."""

    def __init__(self) -> None:
        self.transport = HTTPTransport[Any](
            WAIT, chunk_bytes=64 << 10, same_host=True, server=Server(host="127.0.0.1")
        )
        self.held: dict[str, torch.Tensor] = {}

    async def send(self, step: int, fill: float, mib: int) -> str:
        """Offer a tensor of one number."""
        state = {"w0": torch.full((mib << 18,), fill)}
        await self.transport.send_checkpoint([1], step, state)
        return self.transport.metadata()

    async def receive(self, metadata: str, step: int, share: bool) -> list[Any]:
        """Receive and hold it; return how it came, and what."""
        events: list[TransferEvent] = []
        remove = add_hook(events.append)
        self.held = await self.transport.recv_checkpoint(0, metadata, step, share=share)
        remove()
        (event,) = (each for each in events if each.stop == "recv")
        return [event.medium, event.detail, await self.look()]

    async def look(self) -> list[float]:
        """Return the least and the greatest number of what is held."""
        tensor = self.held["w0"]
        return [float(tensor.min()), float(tensor.max())]

    async def write(self, fill: float) -> None:
        """Write to it."""
        self.held["w0"].fill_(fill)

    async def become(self, user: int) -> None:
        """Be another user from now on, who may not read what is to be imported."""
        warm = Neighbour()
        await warm.receive(await warm.send(1, 0.0, 1), 1, share=False)
        await warm.transport.shutdown()
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)

    async def move(self, pretend: bool) -> bool:
        """Go to another network, but for the port; ``pretend`` not to have."""
        self.transport.metadata()  # binds the port
        here = identity()
        if ctypes.CDLL(None).unshare(NEW_NETWORK):
            return False
        if pretend:
            setattr(lender, "identity", lambda: here)  # noqa: B010 - not its own
        return True


async def obey() -> None:
    """Do as the input says."""
    neighbour = Neighbour()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async for line in reader:
        asked = json.loads(line)
        answer = await getattr(neighbour, asked.pop("do"))(**asked)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    await neighbour.transport.shutdown()


if __name__ == "__main__":
    asyncio.run(obey())
