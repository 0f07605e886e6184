"""Staging: a live state dict becomes an immutable snapshot in host memory.

`Stager.stage` describes the state dict, copies it into an arena, and computes each
chunk's digest while the chunk is still in the cache. Threads copy host memory; a side
stream copies the memory of a device. The event loop only waits. A checkpointer's
trainer waits for the copies alone: the process that writes computes the digests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from aiockpt.errors import AiockptError, StagingError
from aiockpt.format.chunks import (
    ALGORITHM,
    ChunkGrid,
    check_algorithm,
    check_chunk_bytes,
    digest,
)
from aiockpt.format.header import build_manifest, with_step
from aiockpt.format.limits import Limits, raise_if_cancelled
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena, ArenaPool
from aiockpt.memory.copies import CopyPlan, InPlace
from aiockpt.memory.device import Event, Fences, Marks, PortFor, completed, port_for
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge, obtain
from aiockpt.runtime.switching import CACHE_BLOCK_BYTES, switching_often
from aiockpt.runtime.system import failing_here
from aiockpt.runtime.tasks import TURN_S, run_all
from aiockpt.state.flatten import Description, describe
from aiockpt.transfer.remarks import Remarks

# Of one copy without a digest: enough for a thread, and soon cancelled.
_COPY_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StagerOptions:
    """How snapshots are made.

    Attributes:
        threads: How many chunks are copied and digested at once. A device may copy one
            more for each of them meanwhile.
        chunk_bytes: The size of a chunk.
        algorithm: The algorithm of the chunks' digests, one of `Algorithm`.
        limits: Bound the nesting and the counts of the state dict.
        readers: The limits of those who will read the checkpoint, by default.
        allow_pickle: Let leaves without another encoding travel as pickles.
        zero_copy: Serve contiguous host tensors from their own memory.
        shared: Stage into memory that another process can map.
        kept: How many free arenas stay allocated for the next snapshots.
        seal: Compute digests. Otherwise the manifest has none yet.
    """

    threads: int
    chunk_bytes: int
    limits: Limits
    allow_pickle: bool
    readers: Limits = Limits()  # noqa: RUF009 - frozen
    algorithm: str = ALGORITHM
    zero_copy: bool = False
    shared: bool = False
    kept: int = 1
    seal: bool = True

    def __post_init__(self) -> None:
        check_chunk_bytes(self.chunk_bytes)
        check_algorithm(self.algorithm)


def manifest_of(
    found: Description, step: int, grid: ChunkGrid, digests: Sequence[str]
) -> Manifest:
    """Return the manifest of a described state dict."""
    return build_manifest(
        step=step,
        chunk_bytes=grid.chunk_bytes,
        entries=found.entries,
        views=found.views,
        tree=found.tree,
        digests=digests,
        algorithm=grid.algorithm,
    )


@dataclass(slots=True)
class _StagerCopy:
    """The copies of one staging. Without an arena, host memory is served as it is."""

    grid: ChunkGrid
    plan: CopyPlan
    memory: Arena | InPlace

    def copy_host(self, start: int, stop: int) -> None:
        """Copy the host memory of a range."""
        if isinstance(self.memory, Arena):
            self._map(self.memory, start, stop)
            self.plan.stage_host(start, stop)

    def copy_and_digest(self, start: int, stop: int) -> str:
        """Copy the host memory of a chunk; return the chunk's digest."""
        views: Iterable[memoryview] = self.memory.buffers(start, stop)
        if isinstance(self.memory, Arena):
            self._map(self.memory, start, stop)
            views = self._copied(self.memory, start, stop)
        return digest(views, self.grid.algorithm)

    def _map(self, arena: Arena, start: int, stop: int) -> None:
        """Map pages of a new arena; the first touch may take longer than the copy."""
        if arena.touched < stop:
            arena.populate(start, stop)

    def _copied(self, arena: Arena, start: int, stop: int) -> Iterator[memoryview]:
        """Copy a chunk block by block; yield each block."""
        [copy] = arena.buffers(start, stop)
        done = start
        for at in self.plan.staged(start, stop, CACHE_BLOCK_BYTES):
            yield copy[done - start : at - start]
            done = at


class Stager:
    """Makes snapshots, and keeps arenas for the next ones.

    Args:
        bridge: Where the threads that copy and digest come from.
        options: See `StagerOptions`.
        ports: Returns the port of a device; tests pass a fake one.
    """

    def __init__(
        self,
        bridge: Bridge,
        options: StagerOptions,
        *,
        ports: PortFor = port_for,
    ) -> None:
        self._bridge = bridge
        self._options = options
        self._ports = ports
        self._remarks = Remarks(options.readers, options.limits)
        self._pool = ArenaPool(
            shared=options.shared,
            keep=options.kept,
            dispose=lambda arena: bridge.post(arena.close),
        )

    def mark(self) -> Marks:
        """Mark the device work of the caller of a public verb, for a later `stage`."""
        return Marks.of_caller(self._ports)

    async def stage(
        self, state_dict: object, *, step: int, marks: Marks | None = None
    ) -> Snapshot:
        """Return a snapshot; the caller may mutate the state dict afterwards.

        The copies wait for ``marks``. None marks the caller's work here, before this
        awaits anything. If cancelled, this waits for the running copies, and keeps no
        memory.

        Raises:
            UnsupportedLeafError: a leaf cannot travel; nothing was copied.
            StagingError: a copy failed.
        """
        marks = self.mark() if marks is None else marks
        with failing_here(f"staging step {step}"):
            description = await self._bridge.run(self._describe, state_dict)
            take = partial(self._taken, description.entries.nbytes)
            arena = await obtain(self._bridge, take, self._give_back)
        staging: _StagerCopy | None = None
        try:
            with failing_stage(step), switching_often():
                staging = await self._bridge.run(self._plan, description, arena)
                digests = await self._copy(staging, staging.plan.fences(marks.events))
                grid, seal = staging.grid, self._seal
                manifest = await self._bridge.run(
                    seal, description, step, grid, digests
                )
        except BaseException:
            if staging is None:
                self._give_back(arena)
            else:
                # Not awaited, because a cancelled caller must not interrupt it.
                self._bridge.post(self._salvage, arena, staging.plan)
            raise
        arena.touched = max(arena.touched, description.entries.nbytes)
        free, live = partial(self._give_back, arena), self._options.zero_copy
        return Snapshot(manifest, staging.memory, live=live, on_free=free)

    async def relabel(self, snapshot: Snapshot, *, step: int) -> Snapshot:
        """Return a snapshot of the same memory under another step.

        If cancelled, ``snapshot`` is unchanged.
        """
        with failing_here(f"relabelling step {step}"):
            manifest = await self._bridge.run(with_step, snapshot.manifest, step)
        return snapshot.relabelled(manifest)

    def trim(self) -> None:
        """Free the memory that no snapshot uses."""
        self._pool.trim()

    def close(self) -> None:
        """Free all arenas, also those that are released later."""
        self._pool.close()

    def _seal(
        self, found: Description, step: int, grid: ChunkGrid, digests: Sequence[str]
    ) -> Manifest:
        manifest = manifest_of(found, step, grid, digests)
        self._remarks.on(manifest, found.strangers, step=step)
        return manifest

    def _describe(self, state_dict: object) -> Description:
        return describe(
            state_dict,
            limits=self._options.limits,
            allow_pickle=self._options.allow_pickle,
            writing=False,
        )

    def _taken(self, nbytes: int) -> Arena:
        if self._options.zero_copy:
            # The arena holds a few pages only, which must start as zeros.
            return Arena(nbytes, staging=True)
        return self._pool.take(nbytes)

    def _give_back(self, arena: Arena) -> None:
        if self._options.zero_copy:
            self._bridge.post(arena.close)
        else:
            self._pool.give_back(arena)

    def _salvage(self, arena: Arena, plan: CopyPlan) -> None:
        """Reuse an arena after all copies to it have ended."""
        plan.drain()
        self._give_back(arena)

    def _plan(self, found: Description, arena: Arena) -> _StagerCopy:
        options, entries = self._options, found.entries
        plan = CopyPlan(found.backings, entries, arena=arena, port_for=self._ports)
        plan.pin()
        memory = plan.in_place() if options.zero_copy else arena
        if isinstance(memory, InPlace) and not options.seal:
            memory.watch()  # for the process that computes the digests
        grid = ChunkGrid(entries.nbytes, options.chunk_bytes, options.algorithm)
        return _StagerCopy(grid, plan, memory)

    async def _copy(self, staging: _StagerCopy, fences: Fences) -> list[str]:
        """Copy everything, ``threads`` pieces at a time; return the chunks' digests."""
        dense = await self._bridge.run(staging.plan.stage_parts, fences)
        pieces = grid = staging.grid
        digests = [grid.unsealed] * len(grid)
        if not self._options.seal:
            pieces = ChunkGrid(grid.segment_bytes, _COPY_BYTES)

        def copy(piece: int) -> None:
            if self._options.seal:
                digests[piece] = staging.copy_and_digest(*pieces.range(piece))
            else:
                staging.copy_host(*pieces.range(piece))

        await completed(*dense)
        await self._copy_behind(staging.plan, pieces, fences, copy)
        return digests

    async def _copy_behind(
        self,
        plan: CopyPlan,
        pieces: ChunkGrid,
        fences: Fences,
        copy: Callable[[int], None],
    ) -> None:
        """Call ``copy`` for each piece in threads, after the devices have copied it.

        Each return to the loop costs as much as copying a few megabytes. So a thread
        goes from piece to piece until a device or another call makes it wait.
        """
        remaining, bridge = iter(range(len(pieces))), self._bridge

        def take_turn(piece: int | None) -> tuple[int, list[Event]] | None:
            """Copy a piece and those after it; return the next one, and its events."""
            end = time.monotonic() + TURN_S
            while True:
                following = next(remaining, None)
                events = list[Event]()
                if following is not None:  # the devices copy it during the rest
                    events = plan.stage_device(*pieces.range(following), fences)
                is_over = False
                if piece is not None:
                    copy(piece)
                    is_over = time.monotonic() >= end or bridge.statistics().waiting > 0
                if following is None:
                    return None
                if is_over or not all(event.query() for event in events):
                    return following, events
                raise_if_cancelled()
                piece = following

        async def worker() -> None:
            following = await bridge.run(take_turn, None)
            while following is not None:
                piece, events = following
                await completed(*events)
                following = await bridge.run(take_turn, piece)

        await run_all([worker] * min(self._options.threads, len(pieces)))


@contextmanager
def failing_stage(step: int) -> Iterator[None]:
    """Translate a foreign error into `StagingError`."""
    try:
        yield
    except AiockptError:
        raise
    except Exception as error:
        raise StagingError(f"staging step {step} failed: {error}") from error
