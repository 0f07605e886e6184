"""State dict → snapshot, whose bytes on the device are the state dict's own.

Only what a message cannot be made of is copied: tensors whose elements lie apart, on
the device to the device; and those of other devices, to the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from operator import add

import torch

from aiockpt.errors import AiockptError, StagingError
from aiockpt.format.chunks import DEVICE_ALGORITHM, ChunkGrid, check_chunk_bytes
from aiockpt.format.header import build_manifest
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena
from aiockpt.memory.copies import Backings, CopyPlan, Fences, once
from aiockpt.memory.device import Event, PortFor, completed
from aiockpt.pg.device.board import Board, encode_placement
from aiockpt.pg.device.segment import Bounds, Segment, in_blocks, in_state, pairs
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.tasks import run_all
from aiockpt.state.flatten import Description, describe

__all__ = ["DeviceSnapshot", "DeviceStager", "owned", "without"]

_CHUNKS_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """A checkpoint on the device: read from there until it is released."""

    manifest: Manifest
    placement: bytes
    memory: Segment
    job: _Job

    def release(self) -> None:
        """Let go of what was copied."""
        self.job.bridge.post(self.job.arena.close)


class _Job:
    """One staging in progress."""

    def __init__(
        self, description: Description, board: Board, bridge: Bridge, ports: PortFor
    ) -> None:
        self.description, self.board, self.bridge = description, board, bridge
        self.bounds = _bounds_of(description)
        self.own = owned(description.backings, board)
        self.arena = Arena(description.segment_bytes, staging=True)
        self.plan = CopyPlan(
            without(description.backings, self.own),
            description.offsets,
            description.storages.sizes,
            arena=self.arena,
            port_for=ports,
        )

    def begin(self, after: Event, fences: Fences) -> tuple[Segment, list[Event]]:
        """Enqueue all copies; return the segment and the end of those to the host."""
        backings, bounds = self.description.backings, self.bounds
        homes = in_state(backings, bounds, self.own)
        rest = [entry for entry in self.own if entry not in homes]
        with self.board.port.aside(after):
            homes |= in_blocks(bounds, rest, apart=set(), allocate=self._zeros)
            for place, source in pairs(backings, bounds, homes, rest):
                to, there = once(place, source)
                to.copy_(there, non_blocking=True)
        events = self.plan.stage_parts(fences)
        events += self.plan.stage_device(0, self.description.segment_bytes, fences)
        return Segment(self.board.device, self.plan.in_place(), bounds, homes), events

    def _zeros(self, nbytes: int) -> torch.Tensor:
        return self.board.allocate(nbytes).zero_()

    def abandon(self) -> None:
        """Close the arena when nothing that was left in flight writes to it."""
        self.board.port.synchronize()
        self.plan.drain()
        self.arena.close()


class DeviceStager:
    """Makes snapshots of what is on the device; see `transfer.stager.Stager`."""

    def __init__(
        self,
        bridge: Bridge,
        board: Board,
        *,
        chunk_bytes: int,
        allow_pickle: bool,
        limits: Limits,
        ports: PortFor,
    ) -> None:
        check_chunk_bytes(chunk_bytes)
        self._bridge, self._board, self._ports = bridge, board, ports
        self._chunk_bytes = chunk_bytes
        self._allow_pickle, self._limits = allow_pickle, limits

    async def stage(self, state_dict: object, *, step: int) -> DeviceSnapshot:
        """Return a snapshot; the state dict must not be mutated until it is released.

        Raises:
            UnsupportedLeafError: a leaf cannot travel; nothing was copied.
            StagingError: a copy failed, or the device has no memory for it.
        """
        after = self._board.port.fence()
        job = await self._bridge.run(self._look_at, state_dict)
        fences = job.plan.fences()
        try:
            await completed(after)  # so that no thread waits for what comes before
            memory, events = await self._bridge.run(job.begin, after, fences)
            for event in events:
                await completed(event)
            digests = await self._digest(job, memory)
            manifest = await self._bridge.run(self._seal, job, step, digests)
        except BaseException as error:
            self._bridge.post(job.abandon)
            if isinstance(error, Exception) and not isinstance(error, AiockptError):
                raise StagingError(f"staging step {step} failed: {error}") from error
            raise
        placement = encode_placement(len(job.bounds[0]), job.own)
        return DeviceSnapshot(manifest, placement, memory, job)

    def close(self) -> None:
        """Do nothing: no memory is kept."""

    def _look_at(self, state_dict: object) -> _Job:
        limits, allow_pickle = self._limits, self._allow_pickle
        description = describe(state_dict, limits=limits, allow_pickle=allow_pickle)
        return _Job(description, self._board, self._bridge, self._ports)

    async def _digest(self, job: _Job, memory: Segment) -> list[str]:
        grid = ChunkGrid(job.description.segment_bytes, self._chunk_bytes)
        digests = [""] * len(grid)
        remaining = iter(range(len(grid)))

        async def worker() -> None:
            for chunk in remaining:
                start, stop = grid.range(chunk)
                digests[chunk] = await self._board.digest(
                    memory, start, stop, self._bridge
                )

        await run_all([worker] * _CHUNKS_AT_ONCE)
        return digests

    def _seal(self, job: _Job, step: int, digests: list[str]) -> Manifest:
        return build_manifest(
            step=step,
            chunk_bytes=self._chunk_bytes,
            storages=job.description.storages,
            views=job.description.views,
            tree=job.description.tree,
            digests=digests,
            algorithm=DEVICE_ALGORITHM,
        )


def owned(backings: Backings, board: Board) -> list[int]:
    """Return the entries whose tensors are on the device."""
    return [e for e, tensor in enumerate(backings.tensors) if board.owns(tensor)]


def without(backings: Backings, entries: Iterable[int]) -> Backings:
    """Return them with nothing in the place of those entries."""
    order = array("q", range(len(backings)))
    for entry in entries:
        order[entry] = -1
    return backings.taken(order)


def _bounds_of(description: Description) -> Bounds:
    starts = array("q", description.offsets)
    return starts, array("q", map(add, starts, description.storages.sizes))
