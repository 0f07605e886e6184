"""What the checkpoint process calls if nobody says otherwise; it needs no torch."""

from __future__ import annotations

from aiockpt.checkpointers.barriers import create_barrier_from_config
from aiockpt.checkpointers.config import (
    BarrierConfig,
    CheckpointWriterConfig,
    RankInfo,
)
from aiockpt.checkpointers.hooks import WriterHook
from aiockpt.checkpointers.writer import CheckpointWriter

__all__ = [
    "configured_writer",
    "default_subprocess_init_fn",
    "default_writer_init_fn",
]


def default_subprocess_init_fn(*_: object) -> None:
    """Do nothing in the new process."""


def default_writer_init_fn(rank_info: RankInfo) -> CheckpointWriter:
    """Make a writer with the default options."""
    return configured_writer(rank_info)


def configured_writer(
    rank_info: RankInfo,
    writer_config: CheckpointWriterConfig = CheckpointWriterConfig(),  # noqa: B008 - frozen
    barrier_config: BarrierConfig = BarrierConfig(),  # noqa: B008 - frozen
    commit_hook: WriterHook | None = None,
) -> CheckpointWriter:
    """Make a writer and its barrier, in the process that will write."""
    barrier = create_barrier_from_config(barrier_config, rank_info)
    return CheckpointWriter(writer_config, rank_info, barrier, commit_hook)
