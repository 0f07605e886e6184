"""Reuses the bytes that a receiver has already: one receive with ``have=``.

`Held` lays a state dict out as the data segment of a checkpoint. The layout is a guess,
made from paths, dtypes and shapes. A chunk is reused only if its digest matches the
manifest. Bytes in host memory are read where they are. Bytes of a device, and parts
that are copied element by element, are first staged to the arena of the destination.

`Reuse.plan` computes the digests of the held bytes, in threads. Then the receiver
fetches the other chunks, and copies the matching ones to their destination meanwhile.
If a copy does not match after all, because its source has changed, the chunk is
fetched at the end.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias, TypeVar, TypeVarTuple

from aiockpt.errors import LocalProtocolError
from aiockpt.format.chunks import chunks_over, digest
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena, Memory, copy_bytes
from aiockpt.memory.copies import Backings, CopyPlan
from aiockpt.memory.device import Event, Fences, Marks, PortFor, completed, keep_until
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.switching import CACHE_BLOCK_BYTES
from aiockpt.runtime.system import copying_threads
from aiockpt.runtime.tasks import run_all
from aiockpt.state.flatten import Survey
from aiockpt.state.pairing import alike
from aiockpt.transfer.deltas import HEAD_BYTES, SAME, SPARSE, changer

V = TypeVar("V")
Args = TypeVarTuple("Args")

OnReuse: TypeAlias = Callable[[int, int], None]
"""Called with the numbers of bytes and chunks that need not be fetched."""

# Enough that the switch to the thread costs nothing.
_BYTES_PER_CALL: Final = 32 << 20


class Held:
    """A state dict that may have some of a checkpoint's chunks.

    Its methods are for threads.

    Args:
        manifest: The manifest of the checkpoint; no reference to it is kept.
        backings: The state dict's memory, one per entry: see `alike`.
        arena: The arena of the destination, before any chunk has arrived.
        ports: Returns the port of a device.

    Attributes:
        plan: The copies from the state dict to the arena.
    """

    def __init__(
        self, manifest: Manifest, backings: Backings, *, arena: Arena, ports: PortFor
    ) -> None:
        entries = manifest.entries
        starts, stops = entries.starts, entries.stops
        self.grid, self._digests = manifest.grid, manifest.digests
        self.plan = CopyPlan(backings, entries, arena=arena, port_for=ports)
        self._memory = self.plan.in_place()
        self._arena = arena
        shorter = [
            e for e, size in enumerate(entries.sizes()) if backings.sizes[e] < size
        ]
        lacking = [(starts[e], stops[e]) for e in shorter if not backings.sizes[e]]
        self._unknown = {*chunks_over(self.grid, lacking)}
        self._shorter = _Ranges((starts[e], stops[e]) for e in shorter)
        padded = [entry for entry in shorter if backings.sizes[entry]]
        self._padding = _Ranges(
            (starts[e] + backings.sizes[e], stops[e]) for e in padded
        )

    def known(self, chunks: Iterable[int]) -> list[int]:
        """Return the chunks of which the state dict may have every byte."""
        return [chunk for chunk in chunks if chunk not in self._unknown]

    def has(self, start: int, stop: int) -> bool:
        """Say whether tensors of the state dict have every byte of a range."""
        return next(self._shorter.within(start, stop), None) is None

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes of a range; see `Reuse.staged`."""
        return self._memory.buffers(start, stop)

    def stage_device(self, chunks: Sequence[int], after: Fences) -> list[Event]:
        """Stage the bytes of some chunks that are on devices."""
        events = []
        for chunk in chunks:
            events += self.plan.stage_device(*self.grid.range(chunk), after)
        return events

    def matching(self, chunks: Iterable[int]) -> list[int]:
        """Return the chunks whose digests match the manifest."""
        return [chunk for chunk in chunks if self._matches(chunk, self._memory)]

    def bring(self, chunks: Iterable[int], memory: Memory) -> list[int]:
        """Copy chunks to ``memory``; return the verified ones.

        Each copy is verified, so a concurrent change of the state dict does no harm.
        """
        found = []
        for chunk in chunks:
            start, stop = self.grid.range(chunk)
            copy_bytes(memory.buffers(start, stop), self._memory.buffers(start, stop))
            if self._matches(chunk, memory):
                found.append(chunk)
        return found

    def patched(
        self, chunk: int, kind: int, body: memoryview, memory: Memory
    ) -> list[int]:
        """Apply a delta to a chunk of the held bytes; return it if its digest is right.

        Then the chunk is in ``memory``. Otherwise only the arena may have been
        written to, which is no one's template. Bytes of devices must have been staged.
        Only one thread at a time may patch a chunk.

        Raises:
            RemoteProtocolError: the delta is malformed.
        """
        start, stop = self._completed(chunk)
        change = changer(kind, body, stop - start)
        if memory is self._arena:
            (made,) = memory.buffers(start, stop)
        else:
            made = memoryview(bytearray(stop - start))

        def blocks() -> Iterator[memoryview]:
            for at in range(0, made.nbytes, CACHE_BLOCK_BYTES):
                block = made[at : at + CACHE_BLOCK_BYTES]
                first = start + at
                copy_bytes([block], self._memory.buffers(first, first + block.nbytes))
                change(at, block)
                yield block

        if digest(blocks(), self.grid.algorithm) != self._digests[chunk]:
            return []
        if memory is not self._arena:
            copy_bytes(memory.buffers(start, stop), [made])
        return [chunk]

    def _matches(self, chunk: int, memory: Memory) -> bool:
        views = memory.buffers(*self._completed(chunk))
        found = digest(views, self.grid.algorithm)
        return found == self._digests[chunk]

    def _completed(self, chunk: int) -> tuple[int, int]:
        """Write to the arena what no tensor has; return the range of the chunk."""
        start, stop = self.grid.range(chunk)
        for first, last in self._padding.within(start, stop):
            ctypes.memset(self._arena.address + first, 0, last - first)
        return start, stop


class HeldInTemplate(Held):
    """The template as the held state dict: its bytes stay where they are.

    The bytes of values that are not tensors are staged to the arena.
    """

    def __init__(
        self,
        manifest: Manifest,
        own: Survey,
        backings: Backings,
        copies: CopyPlan,
        loaded: set[int],
        *,
        arena: Arena,
        ports: PortFor,
    ) -> None:
        merged, values = backings, list[int]()
        if not all(merged.sizes):  # the state dict has bytes that the template lacks
            others = alike(manifest, own)
            pairs = zip(merged.sizes, others.sizes, strict=True)
            values = [e for e, (mine, its) in enumerate(pairs) if its and not mine]
            merged = merged.filled(values, others)
        super().__init__(manifest, merged, arena=arena, ports=ports)
        entries = manifest.entries
        self._values = _Ranges((entries.starts[e], entries.stops[e]) for e in values)
        self._memory, self._loaded = copies.in_place(), loaded

    def bring(self, chunks: Iterable[int], memory: Memory) -> list[int]:
        """Leave the chunks where they are, and return them."""
        there = [*chunks]
        self._loaded.update(there)
        return there

    def _completed(self, chunk: int) -> tuple[int, int]:
        for start, stop in self._values.within(*self.grid.range(chunk)):
            self.plan.stage_host(start, stop)
        return super()._completed(chunk)


class _Ranges:
    """Ranges of the data segment, in ascending order, without overlap."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        found = [*ranges]
        self._starts = [start for start, _ in found]
        self._stops = [stop for _, stop in found]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges that overlap ``[start, stop)``, clipped to it."""
        near = slice(bisect_right(self._stops, start), bisect_left(self._starts, stop))
        for first, last in zip(self._starts[near], self._stops[near], strict=True):
            yield max(first, start), min(last, stop)


class Reuse:
    """Finds the chunks of a checkpoint that the receiver has, and copies them.

    Args:
        held: The receiver's bytes.
        marks: Those of the caller of the receive.
        bridge: Runs the threads that compute digests and copy bytes.
        on_reuse: Called on the loop; must be quick and must not raise.

    Attributes:
        has_base: Whether the receiver seems to hold the base of the sender's deltas.
            Then they find the unchanged chunks, so no `plan` is needed.
        on_reuse: As the argument.
    """

    def __init__(
        self, held: Held, marks: Marks, bridge: Bridge, on_reuse: OnReuse
    ) -> None:
        self.has_base = False
        self._held, self._marks = held, marks
        self._bridge, self.on_reuse = bridge, on_reuse
        self._fences: Fences | None = None

    async def plan(self, chunks: Sequence[int]) -> list[int]:
        """Return the chunks that the receiver has, in ascending order.

        If cancelled, this waits for the running threads.
        """

        async def look(some: Sequence[int]) -> list[int]:
            if self._fences:
                stage = self._held.stage_device
                await completed(*await self._in_thread(stage, some, self._fences))
            return await self._in_thread(self._held.matching, some)

        with self._draining():
            await self._stage_parts()
            return await self._each(self._held.known(chunks), look)

    async def staged(self) -> Held:
        """Return the held bytes, after all that is not in host memory was staged.

        A source of several senders looks itself for the bytes that it need not fetch.
        """
        with self._draining():
            fences = await self._stage_parts()
            if fences:
                chunks = range(len(self._held.grid))
                stage = self._held.stage_device
                await completed(*await self._in_thread(stage, chunks, fences))
        return self._held

    @contextmanager
    def _draining(self) -> Iterator[None]:
        """Keep the held memory while devices copy from it, if the block fails."""
        try:
            yield
        except BaseException:
            if self._fences:
                keep_until(self._held.plan.drain)
            raise

    async def _stage_parts(self) -> Fences:
        """Stage, once, what is copied element by element."""
        if self._fences is None:
            copies = self._held.plan
            self._fences = copies.fences(self._marks.events)
            await completed(*self._fences.values())  # no thread waits for them
            await completed(*await self._in_thread(copies.stage_parts, self._fences))
        return self._fences

    async def copy(self, chunks: Sequence[int], memory: Memory) -> list[int]:
        """Copy held chunks to ``memory``; return the verified ones.

        The other chunks have changed meanwhile. If cancelled, any part of the memory
        may have been written.
        """

        async def bring(some: Sequence[int]) -> list[int]:
            found = await self._in_thread(self._held.bring, some, memory)
            ranges = map(self._held.grid.range, found)
            self.on_reuse(sum(stop - start for start, stop in ranges), len(found))
            return found

        return await self._each(chunks, bring)

    async def patch(
        self, memory: Memory, chunk: int, kind: int, body: memoryview
    ) -> bool:
        """Apply a delta; see `Held.patched`. An unchanged chunk stays where it is.

        If bytes are on devices, the chunk must have been planned.
        """
        held = self._held
        if not held.known([chunk]):
            return False
        if kind == SAME and not body.nbytes:
            there = await self.plan([chunk])
            right = await self._in_thread(held.bring, there, memory)
        else:
            right = await self._in_thread(held.patched, chunk, kind, body, memory)
        if not right:
            return False
        self.has_base |= kind == SPARSE and not self._fences
        start, stop = held.grid.range(chunk)
        self.on_reuse(max(stop - start - HEAD_BYTES - len(body), 0), 0)
        return True

    async def _each(
        self,
        chunks: Sequence[int],
        work: Callable[[Sequence[int]], Awaitable[list[int]]],
    ) -> list[int]:
        """Do work on all chunks, a few at a time; return the joined results."""
        count = max(1, _BYTES_PER_CALL // self._held.grid.chunk_bytes)
        parts = [chunks[at : at + count] for at in range(0, len(chunks), count)]
        waiting, found = iter(parts), list[int]()

        async def worker() -> None:
            for part in waiting:
                found.extend(await work(part))

        await run_all([worker] * min(copying_threads(), len(parts)))
        return sorted(found)

    async def _in_thread(
        self, work: Callable[[*Args], list[V]], *args: *Args
    ) -> list[V]:
        """Do work on held bytes, in a thread; return nothing if the bytes are gone.

        The bytes are gone if their tensor got other memory meanwhile. Then the peer
        sends them. If the destination has changed, the read fails in the same way.
        """
        try:
            return await self._bridge.run(work, *args)
        except LocalProtocolError:
            return []
