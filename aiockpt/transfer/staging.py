"""Staging: a live state dict becomes an immutable snapshot in host memory.

``describe`` → ``stage`` → ``seal``: the copies run chunk by chunk, in threads for host
memory and on a side stream for a device, and each chunk's digest is computed while
the chunk is still warm in the cache. The loop only waits. A checkpointer, whose trainer
waits for the copies, leaves the digests to the process that writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from aiockpt.errors import AiockptError, StagingError
from aiockpt.format.chunks import UNSEALED, ChunkGrid, check_chunk_bytes
from aiockpt.format.header import with_step
from aiockpt.format.limits import Limits
from aiockpt.memory.arena import Arena, ArenaPool
from aiockpt.memory.copies import CopyPlan, Fences, InPlace
from aiockpt.memory.device import Event, PortFor, completed, port_for
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge, Inline
from aiockpt.runtime.system import failing_here
from aiockpt.runtime.tasks import map_in_threads, run_all
from aiockpt.state.flatten import Description, describe
from aiockpt.transfer.job import Job

__all__ = ["Snapshot", "Stager", "StagerOptions"]

# Copied at once where no digest is computed beside it: worth a thread, soon cancelled.
_SPAN = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StagerOptions:
    """How snapshots are made; the defaults are a transport's.

    Attributes:
        shared: Stage into memory that another process can map.
        kept: How many free arenas are kept warm for the next snapshots.
        seal: Compute digests; else the manifest is unsealed (`wire.relabel`).
        pin: Page-lock arenas where a device gains from it.
        poll: Poll for the end of a device's copies; else a thread blocks until then.
    """

    shared: bool = False
    kept: int = 1
    seal: bool = True
    pin: bool = True
    poll: bool = True


class Stager:
    """Makes snapshots; keeps arenas warm for the next ones.

    Args:
        bridge: Where copies and digests run.
        threads: How many chunks are copied and sealed at once.
        chunk_bytes: The chunk grid of what it stages.
        zero_copy: Serve contiguous host tensors from their own memory.
        allow_pickle: Carry leaves that nothing else can as pickles.
        limits: Nesting and counts that are accepted.
        options: What kind of memory, and what else is done.
        ports: Finds the port of a device; tests give a fake one.
    """

    def __init__(
        self,
        bridge: Bridge | Inline,
        *,
        threads: int,
        chunk_bytes: int,
        zero_copy: bool,
        allow_pickle: bool,
        limits: Limits,
        options: StagerOptions = StagerOptions(),
        ports: PortFor = port_for,
    ) -> None:
        check_chunk_bytes(chunk_bytes)
        self._bridge = bridge
        self._threads = threads
        self._chunk_bytes = chunk_bytes
        self._zero_copy = zero_copy
        self._allow_pickle = allow_pickle
        self._limits = limits
        self._options = options
        self._ports = ports
        self._pool = ArenaPool(
            shared=options.shared,
            keep=options.kept,
            dispose=lambda arena: bridge.post(arena.close),
        )

    async def stage(self, state_dict: object, *, step: int) -> Snapshot:
        """Return a snapshot; the state dict may be mutated from then on.

        Raises:
            UnsupportedLeafError: a leaf cannot travel; nothing was copied.
            StagingError: a copy failed.

        If cancelled, waits for the copies of current chunks and keeps nothing.
        """
        with failing_here(f"staging step {step}"):
            description = await self._bridge.run(self._describe, state_dict)
            arena = await self._take(description.segment_bytes)
        plans: list[CopyPlan] = []
        free = partial(self._free, arena, plans)
        try:
            with _failing(step):
                job = await self._bridge.run(self._plan, description, arena, plans)
                digests = await self._copy(job)
                manifest = await self._bridge.run(job.manifest, step, digests)
        except BaseException:
            free()
            raise
        plans.clear()
        return Snapshot(manifest, job.memory, live=job.live, on_free=free)

    async def relabel(self, snapshot: Snapshot, *, step: int) -> Snapshot:
        """Return a snapshot of the same memory under another step.

        If cancelled, ``snapshot`` is as before.
        """
        with failing_here(f"relabelling step {step}"):
            manifest = await self._bridge.run(with_step, snapshot.manifest, step)
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

    async def _take(self, nbytes: int) -> Arena:
        taken: list[Arena] = []  # a call that is cancelled returns nothing
        try:
            await self._bridge.run(self._take_into, taken, nbytes)
        except BaseException:
            for arena in taken:
                self._give_back(arena)
            raise
        return taken[0]

    def _take_into(self, taken: list[Arena], nbytes: int) -> None:
        # Next to live memory an arena holds a few pages, which start as zeros.
        new = partial(Arena, staging=True) if self._zero_copy else self._pool.take
        taken.append(new(nbytes))

    def _give_back(self, arena: Arena) -> None:
        if self._zero_copy:
            self._bridge.post(arena.close)
        else:
            self._pool.give_back(arena)

    def _free(self, arena: Arena, plans: Sequence[CopyPlan]) -> None:
        """Take back an arena, of which ``plans`` may still be copying something."""
        if plans:
            # Not awaited: a cancelled caller must not be able to cut it short.
            self._bridge.post(self._salvage, arena, tuple(plans))
        else:
            self._give_back(arena)

    def _salvage(self, arena: Arena, plans: Iterable[CopyPlan]) -> None:
        """Take back an arena when nothing that was left in flight writes to it."""
        for plan in plans:
            plan.drain()
        self._give_back(arena)

    def _plan(
        self, description: Description, arena: Arena, plans: list[CopyPlan]
    ) -> Job:
        plan = CopyPlan(
            description.backings,
            description.offsets,
            description.storages.sizes,
            arena=arena,
            port_for=self._ports,
        )
        plans.append(plan)
        for port in plan.ports.values() if self._options.pin else ():
            arena.pin(port.pin)
        memory = plan.in_place() if self._zero_copy else arena
        if isinstance(memory, InPlace) and not self._options.seal:
            memory.watch()  # whoever computes the digests later asks
        grid = ChunkGrid(description.segment_bytes, self._chunk_bytes)
        return Job(description, grid, plan, memory, self._zero_copy)

    async def _copy(self, job: Job) -> list[str]:
        """Copy everything, ``threads`` pieces at a time; return the chunks' digests."""
        fences = job.plan.fences()
        dense = await self._bridge.run(job.plan.stage_parts, fences)
        digests = [UNSEALED] * len(job.grid)
        seal, grid = self._options.seal, job.grid
        pieces = grid if seal else ChunkGrid(grid.segment_bytes, _SPAN)

        work = job.copy_and_digest if seal else job.copy_host

        def copy(piece: int, _: object = None) -> str | None:
            return work(*pieces.range(piece))

        def copied(piece: int, found: str | None) -> None:
            if found is not None:
                digests[piece] = found

        remaining = iter(range(len(pieces)))

        async def worker() -> None:
            for piece in remaining:
                await self._copy_device(job, *pieces.range(piece), fences, dense)
                copied(piece, await self._bridge.run(copy, piece))

        bridge, threads = self._bridge, self._threads
        if fences:
            await run_all([worker] * min(threads, len(pieces)))
        else:
            await map_in_threads(bridge, threads, copy, remaining, copied)
        return digests

    async def _copy_device(
        self, job: Job, start: int, stop: int, fences: Fences, dense: Iterable[Event]
    ) -> None:
        copies = await self._bridge.run(job.plan.stage_device, start, stop, fences)
        for event in (*dense, *copies):
            if self._options.poll:
                await completed(event)
            else:
                await self._bridge.run(event.synchronize)


@contextmanager
def _failing(step: int) -> Iterator[None]:
    """Say that staging failed."""
    try:
        yield
    except AiockptError:
        raise
    except Exception as error:
        raise StagingError(f"staging step {step} failed: {error}") from error
