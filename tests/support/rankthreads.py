"""Two ranks that save together over a TCP store, as threads of one process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiockpt.checkpointers import CheckpointWriterConfig, RankInfo
from aiockpt.checkpointers.barriers import Barrier, Meeting, TCPStoreBarrier
from aiockpt.checkpointers.writer import CheckpointWriter

SHORT, LONG = 0.6, 20.0
"""Seconds to wait for a rank that does not come, and for one that does."""


class Dead(Exception):  # noqa: N818 - no error, but the end of a rank
    """Stands for the death of a rank's process."""


class Dying(Barrier):
    """Another barrier, whose rank dies before its second meeting."""

    def __init__(self, real: Barrier) -> None:
        self._real = real

    def execute_barrier(self) -> None:
        raise NotImplementedError

    def expect(self, meeting: Meeting) -> None:
        self._real.expect(meeting)

    def meet(self, meeting: Meeting, *, failure: str | None = None) -> None:
        if meeting.phase == "committed":
            raise Dead
        self._real.meet(meeting, failure=failure)


def free_port() -> int:
    """Return a port that nobody uses at the moment."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def barrier(rank: int, world_size: int, port: int) -> Barrier:
    """Return a rank's side of a barrier; rank 0 hosts the store."""
    return TCPStoreBarrier(
        *(rank, world_size),
        tcpstore_port=port,
        master_address="127.0.0.1",
        use_checkpoint_barrier_tcpstore_libuv=False,  # it keeps a pipe
    )


class Job:
    """Two ranks, which save the same path as one step, in threads."""

    def __init__(self, path: Path, port: int, pool: ThreadPoolExecutor) -> None:
        self._path, self._port, self._pool = path, port, pool
        self._barriers = [barrier(0, 2, port), barrier(1, 2, port)]

    def restart(self, rank: int) -> None:
        """Have the next save of a rank begin with nothing remembered."""
        self._barriers[rank] = barrier(rank, 2, self._port)

    def mourn(self, rank: int) -> None:
        """Have a rank tell the others that a save was lost with its process."""
        config = CheckpointWriterConfig(fsync=False)
        writer = CheckpointWriter(config, RankInfo(rank, 2), self._barriers[rank])
        writer.abandon(self._path, 7, "its process died", begun=True)

    def save(
        self,
        rank: int,
        value: int,
        timeout: float = LONG,
        wrap: Callable[[Barrier], Barrier] = lambda barrier: barrier,
        path: Path | None = None,
    ) -> Future[None]:
        """Begin to save; ``path`` is what this rank takes for the others' path."""
        config = CheckpointWriterConfig(write_barrier_timeout_secs=timeout, fsync=False)
        meets = wrap(self._barriers[rank])
        writer = CheckpointWriter(config, RankInfo(rank, 2), meets)
        state: Any = {"rank": rank, "value": value}
        return self._pool.submit(writer.write, path or self._path, state, step=7)

    def close(self) -> None:
        """Let go of the store, which is rank 0's."""
        for each in reversed(self._barriers):
            each.close()


@contextmanager
def job(path: Path) -> Iterator[Job]:
    """Have a job until the end of the block."""
    with ThreadPoolExecutor(4) as pool:
        made = Job(path, free_port(), pool)
        try:
            yield made
        finally:
            made.close()


def save_by_both(ranks: Job, value: int, first: int) -> None:
    """Save it by both, of which one comes later than the other."""
    early = ranks.save(first, value)
    time.sleep(0.2)
    late = ranks.save(1 - first, value)
    late.result(LONG)
    early.result(LONG)
