"""What is there already is not fetched: one receive with ``have=``.

``plan`` computes the digests of what the receiver holds, in threads. Then what differs
is fetched, and beside that what matches is copied to its place, where that is another
one. A copy that differs after all, because its source has changed meanwhile, is fetched
at the end. So no byte is taken for what the manifest says but by its digest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final, TypeAlias

from aiockpt.memory.arena import Memory
from aiockpt.memory.copies import Fences
from aiockpt.memory.device import completed, keep_until
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.tasks import run_all
from aiockpt.transfer.held import Held

__all__ = ["Delta", "Fetch", "OnReuse"]

Fetch: TypeAlias = Callable[[Sequence[int]], Awaitable[None]]
"""Fetches chunks."""
OnReuse: TypeAlias = Callable[[int, int], None]
"""Is told of bytes and chunks that need not be fetched."""

# What a thread does at once: long enough that the way to it costs nothing.
_SPAN: Final = 32 << 20
_THREADS: Final = 2
_Work: TypeAlias = Callable[[Sequence[int]], Awaitable[list[int]]]


class Delta:
    """Brings chunks of one checkpoint, each from where it is to be had.

    Args:
        held: What there is.
        bridge: Where digests are computed and bytes copied.
        on_reuse: Called on the loop; must be quick and not raise.
    """

    def __init__(self, held: Held, bridge: Bridge, on_reuse: OnReuse) -> None:
        self._held = held
        self._bridge = bridge
        self._on_reuse = on_reuse
        self._fences: Fences | None = None

    def __repr__(self) -> str:
        return f"<Delta {self._held}>"

    async def plan(self, chunks: Sequence[int]) -> list[int]:
        """Return those of the chunks that are there, ascending.

        If cancelled, waits for the thread that computes a digest.
        """
        try:
            if self._fences is None:
                self._fences = self._held.fences()
                await completed(*self._fences.values())  # no thread waits for them
                staged = await self._bridge.run(self._held.stage, self._fences)
                await completed(*staged)
            return await self._each(self._held.known(chunks), self._look)
        except BaseException:
            if self._fences:
                keep_until(self._held.drain)
            raise

    async def bring(
        self,
        chunks: Sequence[int],
        there: Iterable[int],
        target: Memory | None,
        fetch: Fetch,
    ) -> None:
        """Fetch chunks but those that are ``there``, which are copied to ``target``.

        Without a target they go to the arena. If cancelled, or if the fetch fails, any
        part of the target may have been written.
        """
        known = {*there}
        brought: list[int] = []

        async def copy() -> None:
            brought.extend(await self._each(sorted(known), self._keep(target)))

        await run_all([partial(_fetch, fetch, _without(chunks, known)), copy])
        await _fetch(fetch, _without(sorted(known), {*brought}))

    async def _each(self, chunks: Sequence[int], work: _Work) -> list[int]:
        """Have work done on all chunks, a few at a time; return what it returns."""
        count = max(1, _SPAN // self._held.grid.chunk_bytes)
        parts = [chunks[at : at + count] for at in range(0, len(chunks), count)]
        waiting = iter(parts)
        found: list[int] = []

        async def worker() -> None:
            for part in waiting:
                found.extend(await work(part))

        await run_all([worker] * min(_THREADS, len(parts)))
        return sorted(found)

    async def _look(self, chunks: Sequence[int]) -> list[int]:
        if self._fences:
            run, held = self._bridge.run, self._held
            await completed(*await run(held.stage_device, chunks, self._fences))
        return await self._bridge.run(self._held.matching, chunks)

    def _keep(self, target: Memory | None) -> _Work:
        async def keep(chunks: Sequence[int]) -> list[int]:
            found = await self._bridge.run(self._held.bring, chunks, target)
            ranges = map(self._held.grid.range, found)
            nbytes = sum(stop - start for start, stop in ranges)
            self._on_reuse(nbytes, len(found))
            return found

        return keep


async def _fetch(fetch: Fetch, chunks: Sequence[int]) -> None:
    if chunks:
        await fetch(chunks)


def _without(chunks: Iterable[int], known: set[int]) -> list[int]:
    return [chunk for chunk in chunks if chunk not in known]
