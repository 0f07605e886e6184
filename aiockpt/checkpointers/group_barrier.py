"""Ranks meet in a torch.distributed process group of their own."""

from __future__ import annotations

import zlib
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from aiockpt.checkpointers.barriers import Barrier, Meeting, register_barrier
from aiockpt.errors import PeerFailedError, ProcessGroupError

__all__ = ["DistBarrier"]

_LEGACY: Final = 600.0


@register_barrier
class DistBarrier(Barrier):
    """Meets in a gloo group beside the default one, so that training is not disturbed.

    All ranks must make it, in the same order as their other groups. It works in the
    process that has the default process group: not in a checkpoint process.

    Args:
        group: To meet in, of a backend that reduces host memory; None makes one.
    """

    barrier_type = "dist_barrier"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "dist_barrier needs torch.distributed to be initialized in the process "
                "that writes; a checkpoint process meets by tcp_store"
            )
        self._own = group is None
        self._group = dist.new_group(backend="gloo") if group is None else group
        self._rank = dist.get_rank(self._group)
        self._world_size = dist.get_world_size(self._group)
        self._broken = ""

    def __repr__(self) -> str:
        return f"<DistBarrier rank={self._rank}/{self._world_size}>"

    def execute_barrier(self) -> None:
        """Block until every rank has called this."""
        meeting = Meeting(
            name="", step=0, phase="committed", place=Path(), timeout=_LEGACY
        )
        self.meet(meeting)

    def meet(self, meeting: Meeting, *, failure: str | None = None) -> None:
        """Block until every rank is there; with ``failure``, tell them first.

        Raises:
            ProcessGroupError: also whenever it has been so before: a group in which a
                rank was missed once is out of step for good.
        """
        if self._broken:
            raise ProcessGroupError(self._broken)
        label = zlib.crc32(str(meeting).encode())
        failed = self._world_size if failure is None else self._rank
        said = torch.tensor([failed, label, -label], dtype=torch.int64)
        self._reduce(said, meeting)
        first, low, high = said.tolist()
        if low != -high:
            self._broken = "the ranks met for different checkpoints"
            raise ProcessGroupError(self._broken)
        if first < self._world_size and failure is None:
            raise PeerFailedError(first, "its log says why")

    def close(self) -> None:
        """Destroy the group, if it was made here."""
        if self._own and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._own = False

    def _reduce(self, said: torch.Tensor, meeting: Meeting) -> None:
        try:
            work = dist.all_reduce(
                said, op=dist.ReduceOp.MIN, group=self._group, async_op=True
            )
            assert work is not None
            work.wait(timedelta(seconds=meeting.timeout))
        except RuntimeError as error:
            self._broken = f"an earlier meeting failed: {error}"
            raise ProcessGroupError(str(error)) from error
