"""Two ranks with a ``DistBarrier``, of which one stays away: ``late_rank.py PATH``.

The one that comes prints what its first meeting raises, and what the next one does.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch.distributed as dist

from aiockpt.checkpointers.barriers import DistBarrier, Meeting
from aiockpt.errors import ProcessGroupError
from tests.support.forked import rank_of


def meet(barrier: DistBarrier, timeout: float) -> None:
    """Meet the other one; say what became of it."""
    meeting = Meeting(name="s", step=1, phase="written", place=Path(), timeout=timeout)
    try:
        barrier.meet(meeting)
    except ProcessGroupError as error:
        print(type(error).__name__, flush=True)


def main(path: Path) -> None:
    """Be one of two."""
    rank = rank_of(2)
    store = f"file://{path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    barrier, over = DistBarrier(), path / "over"
    if rank == 0:
        meet(barrier, 0.3)
        meet(barrier, 600)
        over.touch()
    while not over.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
