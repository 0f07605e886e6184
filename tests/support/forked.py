"""Makes the ranks of a job out of one process, which has imported torch for all."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def rank_of(world: int) -> int:
    """Fork into ``world`` ranks, and return in each of them which one it is.

    It must come before anything starts a thread. The process that forked waits for its
    ranks; when one fails, it kills the others and fails as well.
    """
    ranks: set[int] = set()
    for rank in range(world):
        if not (child := os.fork()):
            return rank
        ranks.add(child)
    while ranks:
        child, status = os.wait()
        ranks.discard(child)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank of {world} ended with status {status}")
    sys.exit()


def kill_all(leader: int) -> None:
    """Kill that process and its ranks, if it leads a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
