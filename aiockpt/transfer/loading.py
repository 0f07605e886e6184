"""Brings to a template what has arrived in an arena: all at the end, or chunk by chunk.

What a device has of a template that is received into directly is sent there as soon as
its chunk is verified, in that order, while later chunks travel; and what moves element
by element when the last of its chunks is. No other byte gets there, and all copies run
on the device's side stream, one behind the other. What is left is for the end.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

from aiockpt.format.chunks import ChunkGrid, chunks_over
from aiockpt.memory.arena import Arena
from aiockpt.memory.copies import CopyPlan, Fences
from aiockpt.memory.device import Event, completed
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.tasks import run_all

__all__ = ["Bring", "Loading"]

Bring = Callable[[], Awaitable[None]]
"""Has chunks fetched and verified."""


class Loading:
    """The way of one checkpoint from its arena to a template.

    Args:
        copies: Between the two; they outlive all copies.
        grid: The chunks.
        bridge: Where copies run, or are enqueued.
        direct: What has a host's memory for its own has been received there.
        pinned: Memory to page-lock, since it is going to be used again.

    Attributes:
        home: The chunks that are in the template already, or on their way.
        has_sent: Whether devices may copy from the arena, or have done so.
    """

    def __init__(
        self,
        copies: CopyPlan,
        grid: ChunkGrid,
        bridge: Bridge,
        *,
        direct: bool,
        pinned: Arena | None,
    ) -> None:
        self.home: set[int] = set()
        self._copies, self._grid, self._bridge = copies, grid, bridge
        self._direct, self._pinned = direct, pinned
        self._parts: _Unfinished | None = None
        self._verified: asyncio.Queue[int | None] = asyncio.Queue()
        self.has_sent = False

    def __repr__(self) -> str:
        return f"<Loading home={len(self.home)} of {len(self._grid)} chunks>"

    @property
    def is_early(self) -> bool:
        """Whether something may go on before everything is there."""
        return self._direct and bool(self._copies.ports)

    def add(self, chunk: int) -> None:
        """Take note that a chunk is verified; on the loop, while `beside` runs."""
        self._verified.put_nowait(chunk)

    async def beside(self, bring: Bring) -> None:
        """Send on what `add` is told of while chunks are brought.

        If cancelled, or if either fails, both have ended, and nothing more is enqueued.
        Then, and afterwards, the memory must be kept until the devices are idle, if
        anything has been sent to them.
        """
        fences = self._copies.fences()
        await run_all([partial(self._bring, bring), partial(self._send_all, fences)])

    def finish(self, fences: Fences) -> list[Event]:
        """Load what is left; return what is to be waited for. For a thread."""
        self.has_sent = self.has_sent or bool(fences)
        left = None if self._parts is None else self._parts.left()
        self._copies.load_parts(left, fences)
        for chunk in range(len(self._grid)):
            if chunk in self.home:
                continue
            start, stop = self._grid.range(chunk)
            if not self._direct:
                self._copies.load_host(start, stop)
            self._copies.load_device(start, stop, fences)
        return [port.mark() for port in self._copies.ports.values()]

    async def _bring(self, bring: Bring) -> None:
        await bring()
        self._verified.put_nowait(None)

    async def _send_all(self, fences: Fences) -> None:
        await self._bridge.run(self._prepare)
        # Where memory is pageable a copy blocks its thread until then, come what may.
        await completed(*fences.values())
        while (chunk := await self._verified.get()) is not None:
            await self._bridge.run(self._send, chunk, fences)

    def _prepare(self) -> None:
        self._parts = _Unfinished(self._copies.part_ranges(), self._grid)
        if self._pinned is not None:
            for port in self._copies.ports.values():
                self._pinned.pin(port.pin)

    def _send(self, chunk: int, fences: Fences) -> None:
        self.has_sent = True
        self._copies.load_device(*self._grid.range(chunk), fences)
        assert self._parts is not None
        self._copies.load_parts(self._parts.add(chunk), fences)
        self.home.add(chunk)


class _Unfinished:
    """Entries that can be used when all of their chunks are there."""

    def __init__(self, ranges: Mapping[int, tuple[int, int]], grid: ChunkGrid) -> None:
        self._lacking: dict[int, int] = {}
        self._within: dict[int, list[int]] = defaultdict(list)
        for entry, reach in ranges.items():
            chunks = chunks_over(grid, [reach])
            self._lacking[entry] = len(chunks)
            for chunk in chunks:
                self._within[chunk].append(entry)

    def add(self, chunk: int) -> list[int]:
        """Note that a chunk is there; return which entries are, by that."""
        done = []
        for entry in self._within.pop(chunk, ()):
            self._lacking[entry] -= 1
            if not self._lacking[entry]:
                del self._lacking[entry]
                done.append(entry)
        return done

    def left(self) -> Iterable[int]:
        """Return the others."""
        return [*self._lacking]
