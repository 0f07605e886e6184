"""Staging: a live state dict becomes an immutable snapshot in host memory.

``describe`` → ``stage`` → ``seal``: the copies run chunk by chunk, in threads for host
memory and on a side stream for a device, and each chunk's digest is computed while
the chunk is still warm in the cache. The loop only waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from aiockpt._bridge import Bridge
from aiockpt._copy import CopyPlan, Fences, InPlace
from aiockpt._device import Event, PortFor, completed, port_for
from aiockpt._tasks import together
from aiockpt.errors import AiockptError, StagingError
from aiockpt.flatten import Description, describe
from aiockpt.memory import Arena, ArenaPool
from aiockpt.wire.chunks import (
    CHUNK_ALIGNMENT,
    MIN_CHUNK_BYTES,
    ChunkGrid,
    digest,
)
from aiockpt.wire.layout import Entry, Storage
from aiockpt.wire.limits import Limits
from aiockpt.wire.manifest import Manifest, build_manifest

__all__ = ["Snapshot", "Stager"]


class Snapshot:
    """One staged checkpoint: bytes that never change, counted while they are read.

    It starts with one reference, its maker's. ``live`` says that the bytes are the
    state dict's own memory (``zero_copy``), which a writer may change once the
    reader-writer lock says so.
    """

    def __init__(
        self,
        manifest: Manifest,
        memory: Arena | InPlace,
        *,
        live: bool,
        on_free: Callable[[], None],
    ) -> None:
        self.manifest = manifest
        self.live = live
        self._memory = memory
        self._references = 1
        self._on_free = on_free

    def __repr__(self) -> str:
        manifest = self.manifest
        return (
            f"<Snapshot step={manifest.step} bytes={manifest.segment_bytes} "
            f"references={self._references}>"
        )

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment, in order."""
        return [view.toreadonly() for view in self.buffers(start, stop)]

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the same as torch wants them: writable, though nobody writes."""
        return self._memory.buffers(start, stop)

    def relabelled(self, manifest: Manifest) -> Snapshot:
        """Return a snapshot of the same memory with another manifest."""
        self.acquire()
        return Snapshot(manifest, self._memory, live=self.live, on_free=self.release)

    def acquire(self) -> None:
        """Count one more reader of the memory."""
        assert self._references > 0, "the memory has another user already"
        self._references += 1

    def release(self) -> None:
        """Give one reference back; the last one frees the memory."""
        self._references -= 1
        if not self._references:
            self._on_free()


@dataclass(slots=True)
class _Job:
    """One staging in progress."""

    description: Description
    grid: ChunkGrid
    plan: CopyPlan
    memory: Arena | InPlace
    live: bool


class Stager:
    """Makes snapshots; keeps one arena warm for the next one.

    Args:
        bridge: Where copies and digests run.
        threads: How many chunks are copied and sealed at once.
        chunk_bytes: The chunk grid of what it stages.
        zero_copy: Serve contiguous host tensors from their own memory.
        allow_pickle: Carry leaves that nothing else can as pickles.
        limits: Nesting and counts that are accepted.
        ports: Finds the port of a device; tests give a fake one.
    """

    def __init__(
        self,
        bridge: Bridge,
        *,
        threads: int,
        chunk_bytes: int,
        zero_copy: bool,
        allow_pickle: bool,
        limits: Limits,
        ports: PortFor = port_for,
    ) -> None:
        if chunk_bytes < MIN_CHUNK_BYTES or chunk_bytes % CHUNK_ALIGNMENT:
            raise ValueError(
                f"chunk_bytes must be a multiple of {CHUNK_ALIGNMENT}, at least "
                f"{MIN_CHUNK_BYTES}, got {chunk_bytes}"
            )
        self._bridge = bridge
        self._threads = threads
        self._chunk_bytes = chunk_bytes
        self._zero_copy = zero_copy
        self._allow_pickle = allow_pickle
        self._limits = limits
        self._ports = ports
        self._pool = ArenaPool(
            shared=False, dispose=lambda arena: bridge.post(arena.close)
        )

    async def stage(self, state_dict: object, *, step: int) -> Snapshot:
        """Return a sealed snapshot; the state dict may be mutated from then on.

        Raises:
            UnsupportedLeafError: a leaf cannot travel; nothing was copied.
            StagingError: a copy failed.

        If cancelled, waits for the copy of the current chunk and keeps nothing.
        """
        description = await self._bridge.run(self._describe, state_dict)
        arena = self._take(description.segment_bytes)
        plans: list[CopyPlan] = []
        try:
            job = await self._bridge.run(self._plan, description, arena, plans)
            digests = await self._copy(job)
            manifest = await self._bridge.run(_seal, job, step, digests)
        except BaseException as error:
            # Not awaited: a cancelled caller must not be able to cut it short.
            self._bridge.post(self._salvage, arena, plans)
            if isinstance(error, Exception) and not isinstance(error, AiockptError):
                raise StagingError(f"staging step {step} failed: {error}") from error
            raise
        free = partial(self._give_back, arena)
        return Snapshot(manifest, job.memory, live=self._zero_copy, on_free=free)

    async def relabel(self, snapshot: Snapshot, *, step: int) -> Snapshot:
        """Return a snapshot of the same memory under another step.

        If cancelled, ``snapshot`` is as before.
        """
        manifest = await self._bridge.run(_with_step, snapshot.manifest, step)
        return snapshot.relabelled(manifest)

    def trim(self) -> None:
        """Return the memory that no snapshot uses to the system."""
        self._pool.trim()

    def close(self) -> None:
        """Keep no memory from now on: what comes back returns to the system."""
        self._pool.close()

    def _describe(self, state_dict: object) -> Description:
        return describe(
            state_dict,
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            writing=False,
        )

    def _take(self, nbytes: int) -> Arena:
        # Next to live memory an arena holds a few pages, which start as zeros.
        return Arena(nbytes) if self._zero_copy else self._pool.take(nbytes)

    def _give_back(self, arena: Arena) -> None:
        if self._zero_copy:
            self._bridge.post(arena.close)
        else:
            self._pool.give_back(arena)

    def _salvage(self, arena: Arena, plans: Iterable[CopyPlan]) -> None:
        """Take back an arena when nothing that was left in flight writes to it."""
        for plan in plans:
            plan.drain()
        self._give_back(arena)

    def _plan(
        self, description: Description, arena: Arena, plans: list[CopyPlan]
    ) -> _Job:
        plan = CopyPlan(
            description.backings,
            description.offsets,
            [storage.nbytes for storage in description.storages],
            arena=arena,
            port_for=self._ports,
        )
        plans.append(plan)
        for port in plan.ports.values():
            arena.pin(port.pin)
        memory = plan.in_place() if self._zero_copy else arena
        grid = ChunkGrid(description.segment_bytes, self._chunk_bytes)
        return _Job(description, grid, plan, memory, self._zero_copy)

    async def _copy(self, job: _Job) -> list[str]:
        """Copy and digest every chunk, ``threads`` at a time; return the digests."""
        fences = job.plan.fences()
        dense = await self._bridge.run(job.plan.stage_parts, fences)
        digests = [""] * len(job.grid)
        remaining = iter(range(len(job.grid)))

        async def worker() -> None:
            for chunk in remaining:
                digests[chunk] = await self._copy_chunk(job, chunk, fences, dense)

        await together([worker] * self._threads)
        return digests

    async def _copy_chunk(
        self,
        job: _Job,
        chunk: int,
        fences: Fences,
        dense: Iterable[Event],
    ) -> str:
        start, stop = job.grid.range(chunk)
        if fences:
            copies = await self._bridge.run(job.plan.stage_device, start, stop, fences)
            for event in (*dense, *copies):
                await completed(event)
        return await self._bridge.run(_copy_and_digest, job, start, stop)


def _copy_and_digest(job: _Job, start: int, stop: int) -> str:
    if not job.live:
        job.plan.stage_host(start, stop)
    return digest(job.memory.buffers(start, stop))


def _seal(job: _Job, step: int, digests: Sequence[str]) -> Manifest:
    return build_manifest(
        step=step,
        chunk_bytes=job.grid.chunk_bytes,
        storages=job.description.storages,
        views=job.description.views,
        tree=job.description.tree,
        digests=digests,
    )


def _with_step(manifest: Manifest, step: int) -> Manifest:
    return build_manifest(
        step=step,
        chunk_bytes=manifest.chunk_bytes,
        storages=[
            Storage(name, entry.dtype, entry.shape, _length(entry), align=1)
            for name, entry in zip(manifest.names, manifest.entries, strict=True)
        ],
        views=manifest.views,
        tree=manifest.tree,
        digests=manifest.digests,
    )


def _length(entry: Entry) -> int:
    start, stop = entry.data_offsets
    return stop - start
