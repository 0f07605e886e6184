"""What a receiver has already is not fetched: one receive with ``have=``.

`Held` lays a state dict out as the data segment of a checkpoint. That is only a guess,
made from paths, dtypes and shapes: a chunk of it is of use when its digest is that of
the manifest, and nothing else counts. What lies in host memory is read where it is.
What a device has, or what moves element by element, is staged first, to its own place
in the arena of the destination.

`Delta.plan` computes the digests of what there is, in threads. Then the other chunks
are fetched, and beside that the matching ones are copied to their place, where that is
another one. A copy that differs after all, because its source has changed meanwhile,
is fetched at the end.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from aiockpt.format.chunks import chunks_over, digest
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena, Memory
from aiockpt.memory.copies import Backings, CopyPlan, Fences
from aiockpt.memory.device import Event, PortFor, completed, keep_until
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.tasks import run_all
from aiockpt.state.flatten import Survey
from aiockpt.state.pairing import alike
from aiockpt.transfer.destination import Destination

__all__ = ["Delta", "Held", "HeldInTemplate", "OnReuse"]

OnReuse: TypeAlias = Callable[[int, int], None]
"""Is told of bytes and chunks that need not be fetched."""

# What a thread does at once: long enough that the way to it costs nothing.
_SPAN: Final = 32 << 20
_THREADS: Final = 2
_Work: TypeAlias = Callable[[Sequence[int]], Awaitable[list[int]]]


class Held:
    """A state dict that may have some of a checkpoint's chunks.

    Args:
        manifest: The checkpoint, which is not kept.
        backings: The state dict's memory, one per entry.
        arena: That of the destination; its chunks must not have arrived yet.
        ports: Finds the port of a device.
    """

    def __init__(
        self, manifest: Manifest, backings: Backings, *, arena: Arena, ports: PortFor
    ) -> None:
        entries = manifest.entries
        starts, stops = entries.starts, entries.stops
        self.grid, self._digests = manifest.grid, manifest.digests
        self._plan = CopyPlan(backings, entries, arena=arena, port_for=ports)
        self._memory = self._plan.in_place()
        self._arena = arena
        shorter = [
            e for e, size in enumerate(entries.sizes()) if backings.sizes[e] < size
        ]
        lacking = ((starts[e], stops[e]) for e in shorter if not backings.sizes[e])
        self._unknown = {*chunks_over(self.grid, lacking)}
        padded = [entry for entry in shorter if backings.sizes[entry]]
        self._padding = _Ranges(
            (starts[e] + backings.sizes[e], stops[e]) for e in padded
        )

    @classmethod
    def of(
        cls, manifest: Manifest, own: Survey, *, arena: Arena, ports: PortFor
    ) -> Held:
        """Look for a checkpoint in what a state dict looks like.

        Raises:
            RemoteProtocolError: the manifest's tree names a tensor that there is not.
        """
        return cls(manifest, alike(manifest, own), arena=arena, ports=ports)

    def __repr__(self) -> str:
        return f"<Held chunks={len(self.grid) - len(self._unknown)}>"

    def known(self, chunks: Iterable[int]) -> list[int]:
        """Return those chunks of which every byte may be there."""
        return [chunk for chunk in chunks if chunk not in self._unknown]

    def fences(self) -> Fences:
        """Mark on every device what the calling thread's producer has enqueued."""
        return self._plan.fences()

    def stage(self, after: Fences) -> list[Event]:
        """Stage what moves element by element."""
        return self._plan.stage_parts(after)

    def stage_device(self, chunks: Sequence[int], after: Fences) -> list[Event]:
        """Stage what devices have of some chunks."""
        events = []
        for chunk in chunks:
            events += self._plan.stage_device(*self.grid.range(chunk), after)
        return events

    def drain(self) -> None:
        """Block until nothing is in flight."""
        self._plan.drain()

    def matching(self, chunks: Iterable[int]) -> list[int]:
        """Return those chunks whose digests are those of the manifest."""
        return [chunk for chunk in chunks if self._matches(chunk, self._memory)]

    def bring(self, chunks: Iterable[int], target: Memory | None) -> list[int]:
        """Copy chunks to ``target`` (None: the arena); return those that are there.

        The copy is verified: who changes the state dict meanwhile spoils nothing.
        """
        found = []
        for chunk in chunks:
            start, stop = self.grid.range(chunk)
            if target is None:
                self._plan.stage_host(start, stop)
            else:
                there = target.buffers(start, stop)
                _copy(there, self._memory.buffers(start, stop))
            if self._matches(chunk, self._arena if target is None else target):
                found.append(chunk)
        return found

    def _matches(self, chunk: int, memory: Memory) -> bool:
        start, stop = self.grid.range(chunk)
        for first, last in self._padding.within(start, stop):
            ctypes.memset(self._arena.address + first, 0, last - first)
        return digest(memory.buffers(start, stop)) == self._digests[chunk]


class HeldInTemplate(Held):
    """The template itself: what it has stays where it is.

    Values that no template is filled with are staged beside it.
    """

    def __init__(
        self, manifest: Manifest, own: Survey, goal: Destination, *, ports: PortFor
    ) -> None:
        assert goal.backings is not None
        assert goal.copies is not None
        merged, values = goal.backings, list[int]()
        if not all(merged.sizes):
            merged, values = _merged(merged, alike(manifest, own))
        super().__init__(manifest, merged, arena=goal.arena, ports=ports)
        entries = manifest.entries
        self._values = _Ranges((entries.starts[e], entries.stops[e]) for e in values)
        self._memory, self._goal = goal.copies.in_place(), goal

    def bring(self, chunks: Iterable[int], target: Memory | None) -> list[int]:
        """Leave them where they are."""
        there = [*chunks]
        self._goal.loaded.update(there)
        return there

    def _matches(self, chunk: int, memory: Memory) -> bool:
        for start, stop in self._values.within(*self.grid.range(chunk)):
            self._plan.stage_host(start, stop)
        return super()._matches(chunk, memory)


class _Ranges:
    """Ranges of the data segment, apart and ascending."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        found = [*ranges]
        self._starts = [start for start, _ in found]
        self._stops = [stop for _, stop in found]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield those that reach into ``[start, stop)``, cut to it."""
        near = slice(bisect_right(self._stops, start), bisect_left(self._starts, stop))
        for first, last in zip(self._starts[near], self._stops[near], strict=True):
            yield max(first, start), min(last, stop)


def _merged(mine: Backings, others: Backings) -> tuple[Backings, list[int]]:
    """Return the template's memory, and that of others where it has none; and where."""
    values = [
        entry
        for entry, size in enumerate(mine.sizes)
        if not size and others.sizes[entry]
    ]
    tensors, addresses, sizes = [*mine.tensors], mine.addresses[:], mine.sizes[:]
    parts = dict(mine.parts)
    for entry in values:
        tensors[entry] = others.tensors[entry]
        addresses[entry], sizes[entry] = others.addresses[entry], others.sizes[entry]
        if entry in others.parts:
            parts[entry] = others.parts[entry]
    return Backings(tensors, addresses, sizes, parts), values


def _address_of(view: memoryview) -> int:
    """Return the address of a view's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _copy(targets: Iterable[memoryview], sources: Iterable[memoryview]) -> None:
    """Copy bytes from views to views that hold as many, in other pieces."""
    given = iter(sources)
    source = memoryview(b"")
    for target in targets:
        rest = target
        while rest.nbytes:
            while not source.nbytes:
                source = next(given)
            count = min(rest.nbytes, source.nbytes)
            to, origin = _address_of(rest), _address_of(source)
            if to != origin:
                # Of a foreign function: the interpreter lock is free meanwhile.
                ctypes.memmove(to, origin, count)
            rest, source = rest[count:], source[count:]


class Delta:
    """Finds the chunks of one checkpoint that are there, and copies them.

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

    async def copy(self, chunks: Sequence[int], target: Memory | None) -> list[int]:
        """Copy chunks that are there to ``target``; return those that have arrived.

        Without a target they go to the arena. The others have changed meanwhile. If
        cancelled, any part of the target may have been written.
        """
        return await self._each(chunks, self._keep(target))

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
