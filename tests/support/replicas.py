"""Several servers that hold the same checkpoint, and a fetch from all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiockpt.errors import AiockptError
from aiockpt.events import TransferEvent, add_hook
from aiockpt.http.download import Download
from aiockpt.http.peers import Peers
from aiockpt.http.protocol import Origin
from aiockpt.testing.faults import Fault, FaultProxy, Pipe
from aiockpt.transfer.source import PlainTarget
from tests.support.rangepeer import Client
from tests.support.rangepeer import Memory as Target
from tests.support.servers import TOKEN, Memory, Site, serving

CHUNK = 64 << 10
CHUNKS = 48
STEP = 7

FAR = 3600.0
"""Seconds that no test lasts: whatever waits for them has failed."""


class Lies(Fault):
    """Of every run of bytes of a body the last one is wrong; heads are not."""

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Leave what may be a head, or a manifest, alone."""
        if at + len(data) > CHUNK // 2 and len(data) > CHUNK // 16:
            data = data[:-1] + bytes([data[-1] ^ 1])
        await pipe.send(data)


class Late(Fault):
    """Nothing comes for some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Hold back the first bytes."""
        if at == 0:
            await asyncio.sleep(self.seconds)
        await pipe.send(data)


def checkpoint(**options: Any) -> Memory:
    """Return the checkpoint that all replicas hold, or one that differs."""
    return Memory(CHUNKS * CHUNK - 100, **{"step": STEP, **options})


@asynccontextmanager
async def replicas(*held: Memory, **options: Any) -> AsyncIterator[list[Site]]:
    """Serve each of these."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(serving(memory, **options))
            for memory in held
        ]


@asynccontextmanager
async def behind(site: Site, fault: Fault | None = None) -> AsyncIterator[FaultProxy]:
    """Put a proxy before a server, and something wrong with all its connections."""
    async with FaultProxy("127.0.0.1", site.port, otherwise=fault) as proxy:
        yield proxy


def source(at: Site | FaultProxy, token: str | None = TOKEN) -> Origin:
    """Return what names a server, or a proxy before one."""
    return Origin(f"http://127.0.0.1:{at.port}/checkpoint/", token)


class Fetch:
    """A fetch of everything from several sources, and what was told meanwhile.

    Attributes:
        under_way: Set when an eighth has come.
    """

    def __init__(self, client: Client, sources: Sequence[Origin]) -> None:
        self.peers = Peers.at(client, sources, self.note)
        self.urls = [each.base_url for each in sources]
        self.target = Target(0)
        self.under_way = asyncio.Event()
        self.events: list[TransferEvent] = []

    async def run(self, *, step: int = STEP, chunks: Sequence[int] = ()) -> bytearray:
        """Return the data segment."""
        remove = add_hook(self.events.append)
        try:
            self.peers.deadline = asyncio.get_running_loop().time() + FAR
            reply = await self.peers.manifest(step)
            manifest = reply.manifest
            self.target = Target(manifest.segment_bytes)
            await Download(
                self.peers,
                manifest.outline,
                PlainTarget(self.target),
                chunks or range(len(manifest.grid)),
                self.count,
            ).run()
        finally:
            remove()
        return self.target.content

    def note(self, error: AiockptError) -> None:
        """Be told of an error that is followed by another attempt."""
        self.target.errors.append(error)

    def count(self, nbytes: int, chunks: int) -> None:
        """Be the fetch's ``on_progress``."""
        self.target.count(nbytes, chunks)
        if self.target.bytes >= len(self.target.content) / 8:
            self.under_way.set()

    @property
    def given(self) -> list[int]:
        """How many bytes each source gave."""
        return [*self.peers.given().values()]

    def dropped(self) -> dict[int, str]:
        """Return which sources were dropped, and why."""
        found = [event for event in self.events if event.stop == "drop"]
        assert len({event.peer for event in found}) == len(found)
        return {self.urls.index(event.peer): event.detail for event in found}

    def check(self, memory: Memory) -> None:
        """Compare the bytes, and what was counted, with a checkpoint."""
        assert self.target.content == memory.data
        assert self.target.bytes == sum(self.given) == len(memory.data)
        assert self.target.chunks == len(memory.manifest.grid)
