"""One staging in progress, as the threads see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from aiockpt.format.chunks import ChunkGrid, digest
from aiockpt.format.header import build_manifest
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena
from aiockpt.memory.copies import CopyPlan, InPlace
from aiockpt.state.flatten import Description

__all__ = ["Job"]

# With its copy it is still in the cache of most cores (1 MiB) when it is digested.
_BLOCK: Final = 256 << 10


@dataclass(slots=True)
class Job:
    """What is copied to where; ``live`` says that host memory is not copied at all."""

    description: Description
    grid: ChunkGrid
    plan: CopyPlan
    memory: Arena | InPlace
    live: bool

    def copy_host(self, start: int, stop: int) -> None:
        """Copy the host memory of a range."""
        if not self.live:
            self.plan.stage_host(start, stop)

    def copy_and_digest(self, start: int, stop: int) -> str:
        """Copy the host memory of a chunk; return the digest of the whole chunk."""
        if self.live:
            return digest(self.memory.buffers(start, stop))
        return digest(self._copied(start, stop))

    def manifest(self, step: int, digests: Sequence[str]) -> Manifest:
        """Return what describes it."""
        return build_manifest(
            step=step,
            chunk_bytes=self.grid.chunk_bytes,
            storages=self.description.storages,
            views=self.description.views,
            tree=self.description.tree,
            digests=digests,
        )

    def _copied(self, start: int, stop: int) -> Iterator[memoryview]:
        [copy] = self.memory.buffers(start, stop)
        done = start
        for at in self.plan.staged(start, stop, _BLOCK):
            yield copy[done - start : at - start]
            done = at
