"""Every option of the checkpointers, as frozen dataclasses, with its default.

The names are those of ``torch.distributed.checkpoint._experimental``. The options that
torch does not have need not be set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "BarrierConfig",
    "BusyPolicy",
    "CheckpointProcessConfig",
    "CheckpointStagerConfig",
    "CheckpointWriterConfig",
    "CheckpointerConfig",
    "RankInfo",
]

BusyPolicy = Literal["wait", "skip", "replace", "fail"]
"""What a save does while one is being written and another one waits."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of this process among those that save together.

    Attributes:
        global_rank: Its rank, from 0.
        global_world_size: The number of ranks.
    """

    global_rank: int
    global_world_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.global_rank < self.global_world_size:
            raise ValueError(
                f"rank {self.global_rank} is not one of {self.global_world_size}"
            )


@dataclass(frozen=True, slots=True)
class BarrierConfig:
    """How ranks wait for each other before a checkpoint is committed.

    Attributes:
        barrier_type: ``"tcp_store"``, ``"dist_barrier"``, or a registered name. None:
            one rank commits alone, and several meet where ``torch.distributed`` does.
        barrier_args: Arguments of the barrier's class.
    """

    barrier_type: str | None = None
    barrier_args: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointWriterConfig:
    """How a rank writes its file.

    Attributes:
        write_barrier_timeout_secs: How long it waits for the other ranks.
        fsync: Have the disk confirm everything. With it, a checkpoint survives a power
            failure; without it, only the end of the process.
        keep_last: How many checkpoints of a directory stay when one is saved; None
            keeps all. The last whole one always stays.
        keep_every: Checkpoints whose step is a multiple of this stay, too.
        chunk_bytes: How many bytes one digest covers in a synchronous save.
        allow_pickle: In a synchronous save, pickle leaves that cannot be saved
            otherwise. Pickles run code when they are loaded.
    """

    write_barrier_timeout_secs: float = 600
    fsync: bool = True
    keep_last: int | None = None
    keep_every: int | None = None
    chunk_bytes: int = 4 << 20
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True)
class CheckpointStagerConfig:
    """How a state dict is staged. It works with and without an accelerator.

    Attributes:
        use_pinned_memory: Page-lock the arenas for the devices that copy into them.
        use_shared_memory: Stage into memory that the checkpoint process can map;
            otherwise the snapshot is copied once more on its way there.
        use_async_staging: Copy in threads while the loop runs; otherwise on the
            calling thread, which blocks until everything is copied.
        use_non_blocking_copy: Poll for the end of the device's copies; otherwise a
            thread blocks until then.
        threads: How many parts are copied at once.
        chunk_bytes: How many bytes one digest covers; a multiple of 64.
        allow_pickle: Pickle leaves that cannot be saved otherwise. Pickles run code
            when they are loaded.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True
    threads: int = 2
    chunk_bytes: int = 16 << 20
    allow_pickle: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointProcessConfig:
    """The process that writes.

    Attributes:
        subprocess_init_timeout_secs: How long it may take to start.
        subprocess_shutdown_timeout_secs: How long it may take to finish its writes
            when it is closed; then it is killed.
        write_timeout_secs: How long one write may take, barriers included; then the
            process is replaced.
        hang_timeout_secs: How long it may be silent while it writes; then it counts
            as hung, and is replaced.
        nice: Added to its niceness once it is ready; it starts with the trainer's
            priority. With 10, it gets a tenth of a core that training wants, too, and
            all of an idle one; with 0, half of a shared core.
        io_idle: Let it use the disk only when no other process does.
        keep_last_seconds: How long it stays after the trainer has died, with the last
            staged snapshot for a restarted one; 0: only until that is written.
        runtime_dir: Where a restarted trainer finds it: a directory of this user
            alone. None: below ``XDG_RUNTIME_DIR`` or the temporary directory.
    """

    subprocess_init_timeout_secs: float = 30
    subprocess_shutdown_timeout_secs: float = 60
    write_timeout_secs: float = 1800
    hang_timeout_secs: float = 30
    nice: int = 10
    io_idle: bool = False
    keep_last_seconds: float = 0
    runtime_dir: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointerConfig:
    """Everything about one checkpointer.

    Attributes:
        writer_config: How files are written.
        barrier_config: How ranks commit together.
        staging_config: How an asynchronous save stages.
        process_config: The process of an asynchronous checkpointer.
        use_process: Write in a process of its own; otherwise in a thread.
        busy_policy: What a save does while one is being written and another one
            waits: it waits too, is skipped, replaces the one that waits, or fails.
        raise_on_failure: Let a failed save raise from ``save``, the next ``save`` or
            ``close``. Otherwise it is logged, raises from its handle only, and
            ``close`` returns it.
    """

    writer_config: CheckpointWriterConfig = field(
        default_factory=CheckpointWriterConfig
    )
    barrier_config: BarrierConfig = field(default_factory=BarrierConfig)
    staging_config: CheckpointStagerConfig = field(
        default_factory=CheckpointStagerConfig
    )
    process_config: CheckpointProcessConfig = field(
        default_factory=CheckpointProcessConfig
    )
    use_process: bool = True
    busy_policy: BusyPolicy = "wait"
    raise_on_failure: bool = False
