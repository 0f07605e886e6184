"""Every option of the checkpointers, as frozen dataclasses, with its default.

The names are those of ``torch.distributed.checkpoint._experimental``. Options that
torch does not have are optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal, get_args

from aiockpt.transport import check_fields, whole_number

BusyPolicy = Literal["wait", "skip", "replace", "fail"]
"""What a save does while one save is being written and a second one waits."""

CLOSING_S: Final = 5.0
"""How long the end of an object waits for its calls, and then for its threads."""

_CHUNK_BYTES: Final = 1 << 20
"""What one digest covers in every file. A load on another mesh reads whole chunks."""

_ALWAYS: Final = {
    "use_pinned_memory": "memory is page-locked exactly where a device copies into it",
    "use_shared_memory": "memory is shared exactly if a process writes the checkpoint",
    "use_async_staging": "save returns when everything is copied, and threads copy it",
    "use_non_blocking_copy": "a thread that waits for a device would only be lost",
}
"""torch's staging switches, and why nobody needs to turn them off."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of this process among the ranks that save together.

    Attributes:
        global_rank: Its rank, from 0.
        global_world_size: The number of ranks.
    """

    global_rank: int
    global_world_size: int

    def __post_init__(self) -> None:
        for name in ("global_rank", "global_world_size"):
            whole_number(getattr(self, name), name)
        if not 0 <= self.global_rank < self.global_world_size:
            raise ValueError(
                f"global_rank must be from 0 to global_world_size - 1, "
                f"got {self.global_rank} of {self.global_world_size}"
            )


@dataclass(frozen=True, slots=True)
class BarrierConfig:
    """How ranks wait for each other before a checkpoint is committed.

    Several ranks meet in a TCP store: the one whose address is given, or the store of
    ``torch.distributed``'s default group. A single rank needs none.

    Attributes:
        barrier_type: ``"tcp_store"``, ``"dist_barrier"`` or None. All three mean the
            same; only ``"dist_barrier"`` takes no address.
        barrier_args: The ``master_address`` and ``tcpstore_port`` of a store, and other
            arguments of `TCPStoreBarrier`.
    """

    barrier_type: str | None = None
    barrier_args: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.barrier_type not in (None, "tcp_store", "dist_barrier"):
            raise ValueError(
                f"there is no barrier type {self.barrier_type!r}: it is 'tcp_store' or "
                "'dist_barrier', and both meet in a TCP store"
            )
        if self.barrier_type == "dist_barrier" and self.names_store:
            raise ValueError(
                "'dist_barrier' meets in the store of torch.distributed's default "
                "group: name 'tcp_store' with master_address and tcpstore_port"
            )

    @property
    def names_store(self) -> bool:
        """Whether it gives the address of a store."""
        return not {"master_address", "tcpstore_port"}.isdisjoint(self.barrier_args)


@dataclass(frozen=True, slots=True)
class GroupStore:
    """The TCP store of torch.distributed's default group.

    Attributes:
        host: Its host.
        port: Its port.
        group: A name that only the ranks of this group know. A store can outlive its
            group, as torchrun's does when it restarts the ranks.
    """

    host: str
    port: int
    group: str = ""


@dataclass(frozen=True, slots=True)
class SaveRanks:
    """The ranks of one save.

    Attributes:
        info: This process's rank.
        store: The store of the default group, if the ranks meet there.
    """

    info: RankInfo
    store: GroupStore | None = None


@dataclass(frozen=True, slots=True)
class CheckpointWriterConfig:
    """How a rank writes its file.

    Attributes:
        write_barrier_timeout_secs: How long a rank waits for the other ranks, in
            seconds.
        fsync: Wait until the disk confirms each write. Then a checkpoint survives a
            power failure; without it, only the end of the process.
        keep_last: How many checkpoints of a directory to keep when one is saved. None:
            all. The last complete one is always kept.
        keep_every: Also keep checkpoints whose step is a multiple of this.
        chunk_bytes: The bytes that one digest covers, in a synchronous save.
        allow_pickle: In a synchronous save, pickle leaves that cannot be saved
            otherwise. A pickle runs code when it is loaded.
    """

    write_barrier_timeout_secs: float = 600
    fsync: bool = True
    keep_last: int | None = None
    keep_every: int | None = None
    chunk_bytes: int = _CHUNK_BYTES
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True)
class CheckpointStagerConfig:
    """How a state dict is staged. It works with and without an accelerator.

    The first four fields are torch's switches. They are accepted for its programs, and
    each can only be True.

    Attributes:
        use_pinned_memory: Page-lock the arenas for the devices that copy into them.
        use_shared_memory: Stage into memory that the checkpoint process can map.
        use_async_staging: Copy in threads while the loop runs.
        use_non_blocking_copy: Let no thread block until a device's copies end.
        chunk_bytes: The bytes that one digest covers; a multiple of 64.
        allow_pickle: Pickle leaves that cannot be saved otherwise. A pickle runs code
            when it is loaded.

    Raises:
        ValueError: a switch is not True; the message gives the reason.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True
    chunk_bytes: int = _CHUNK_BYTES
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        for name, reason in _ALWAYS.items():
            if (value := getattr(self, name)) is not True:
                raise ValueError(
                    f"{name}={value!r} cannot be chosen: {reason}; leave it out"
                )
        check_fields(self)


@dataclass(frozen=True, slots=True)
class CheckpointProcessConfig:
    """The process that writes.

    Attributes:
        subprocess_init_timeout_secs: How long the process may take to start. The time
            in which it waits for a free core does not count.
        subprocess_shutdown_timeout_secs: How long the process may take to finish its
            writes when it is closed. Then it is killed.
        write_timeout_secs: How long one write may take, barriers included. Then the
            process is replaced.
        hang_timeout_secs: How long the process may be silent during a write. Then it
            counts as hung and is replaced. Raise it for a network file system that
            pauses for longer.
        nice: The increase of its niceness once it is ready; it starts with the
            trainer's priority. With 10, the process gets a tenth of a core that
            training also uses, and all of an idle core; with 0, half of a shared core.
        io_idle: Let the process use the disk only when no other process does, if the
            I/O scheduler knows priorities.
        keep_last_seconds: How long the process lives on after the trainer has died, and
            keeps the last staged snapshot for a restarted trainer. 0: only until that
            snapshot is written.
        runtime_dir: A directory in which a restarted trainer finds the process; only
            this user may have access. None: a directory below ``XDG_RUNTIME_DIR``, or
            below the temporary directory.
    """

    subprocess_init_timeout_secs: float = 30
    subprocess_shutdown_timeout_secs: float = 60
    write_timeout_secs: float = 1800
    hang_timeout_secs: float = 30
    nice: int = 10
    io_idle: bool = False
    keep_last_seconds: float = 0
    runtime_dir: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class CheckpointerConfig:
    """All options of one checkpointer.

    Attributes:
        writer_config: How files are written.
        barrier_config: How ranks commit together.
        staging_config: How an asynchronous save stages.
        process_config: The process of an asynchronous checkpointer.
        use_process: Write in a separate process. Without it, in a thread.
        busy_policy: What a save does while one save is being written and a second one
            waits: it waits too (``wait``), is skipped (``skip``), replaces the waiting
            one (``replace``), or fails (``fail``).
        raise_on_failure: Raise the error of a failed save from ``save``, the next
            ``save`` or ``close``. Without it, the error is logged, the handle raises
            it, and ``close`` returns it.
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

    def __post_init__(self) -> None:
        check_fields(self)
        if self.busy_policy not in get_args(BusyPolicy):
            words = ", ".join(map(repr, get_args(BusyPolicy)))
            raise ValueError(
                f"busy_policy must be one of {words}, got {self.busy_policy!r}"
            )


ELSEWHERE: Final = {
    option.name: f"CheckpointerConfig({argument}={record.__name__}({option.name}=...))"
    for argument, record in {
        "staging_config": CheckpointStagerConfig,
        "process_config": CheckpointProcessConfig,
        "writer_config": CheckpointWriterConfig,
    }.items()
    for option in fields(record)
} | {
    name: f"CheckpointerConfig({name}=...)"
    for name in ("use_process", "busy_policy", "raise_on_failure")
}
"""Options of a checkpointer, which no save takes -> where they are given."""
