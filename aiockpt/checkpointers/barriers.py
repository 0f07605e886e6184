"""Where ranks wait for each other, so that they commit a checkpoint together.

Ranks meet twice in a save: when all files are written, and when rank 0 has committed.
A rank that fails says so instead of staying away, and the others fail at once.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Final, Literal, TypeAlias, TypeVar

from aiockpt.checkpointers.config import BarrierConfig, RankInfo

__all__ = [
    "Barrier",
    "Meeting",
    "Phase",
    "barrier_config_for",
    "create_barrier_from_config",
    "default_rank_info",
    "register_barrier",
]

B = TypeVar("B", bound="type[Barrier]")

Phase: TypeAlias = Literal["written", "committed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What ranks meet for; those that save the same checkpoint find each other by it.

    Attributes:
        name: Of the checkpoint's directory.
        step: Its step.
        phase: ``written`` (every rank's file is durable) or ``committed``.
        place: Where the ranks' files are while the checkpoint is built.
        timeout: Seconds that the others are waited for.
    """

    name: str
    step: int
    phase: Phase
    place: Path
    timeout: float

    def __str__(self) -> str:
        return f"{self.name}/{self.step}/{self.phase}"


class Barrier(ABC):
    """Lets no rank go on before all have come.

    A class of one's own needs :meth:`execute_barrier` only; with :meth:`meet` it can
    also tell the other ranks of a failure. `register_barrier` gives it a name.
    """

    barrier_type: ClassVar[str]

    @abstractmethod
    def execute_barrier(self) -> None:
        """Block until every rank has called this; called twice in a save."""

    def meet(self, meeting: Meeting, *, failure: str | None = None) -> None:
        """Block until every rank is there; with ``failure``, tell them and go on.

        Raises:
            PeerFailedError: another rank failed, or was not waited for any longer.
            TransferTimeoutError: not all came in time, and no rank goes on.
            TransportError: not all came, or nobody knows.
        """
        del meeting
        if failure is None:
            self.execute_barrier()

    def expect(self, meeting: Meeting) -> None:
        """Note that a save has begun, whose ranks are going to meet for this.

        Called before the first byte is written, so that a meeting which an earlier save
        of the same name and step has left undone is not taken for this one.

        Raises:
            TransportError: nobody can be asked.
        """
        del meeting

    def close(self) -> None:
        """Let go of what it holds."""
        return


_classes: Final[dict[str, type[Barrier]]] = {}
_HOMES: Final = {
    "dist_barrier": ("aiockpt.checkpointers.group_barrier", "DistBarrier"),
    "tcp_store": ("aiockpt.checkpointers.store_barrier", "TCPStoreBarrier"),
}


def register_barrier(barrier: B) -> B:
    """Let a `BarrierConfig` name a class by its ``barrier_type``; for decorating."""
    _classes[barrier.barrier_type] = barrier
    return barrier


def create_barrier_from_config(
    config: BarrierConfig, rank_info: RankInfo
) -> Barrier | None:
    """Make the barrier that ``config`` names, in the process that will wait at it.

    ``global_rank`` and ``global_world_size`` are given to a class that takes them,
    where ``barrier_args`` has none. Without a type, see `barrier_config_for`.

    Raises:
        ValueError: no such type, or several ranks and no way to meet.
    """
    config = barrier_config_for(config, rank_info, apart=False)
    if config.barrier_type is None:
        return None
    make = _class_of(config.barrier_type)
    known = {
        "global_rank": rank_info.global_rank,
        "global_world_size": rank_info.global_world_size,
    }
    taken = inspect.signature(make).parameters
    given = {name: value for name, value in known.items() if name in taken}
    return make(**(given | dict(config.barrier_args)))


def barrier_config_for(
    config: BarrierConfig, rank_info: RankInfo, *, apart: bool
) -> BarrierConfig:
    """Say how ranks meet where ``config`` does not; in the trainer's process.

    One rank needs no barrier. Several, with torch.distributed initialized, meet in a
    process group, or (``apart``: in a process of their own) in the TCP store that the
    default process group was made with.

    Raises:
        ValueError: there are several ranks, and nothing where they could meet.
    """
    if config.barrier_type is not None or rank_info.global_world_size == 1:
        return config
    if not _distributed_is_initialized():
        raise ValueError(
            f"{rank_info.global_world_size} ranks need somewhere to meet: name it by "
            "BarrierConfig, or initialize torch.distributed first"
        )
    if not apart:
        return BarrierConfig("dist_barrier")
    from aiockpt.checkpointers.store_barrier import default_store_arguments

    return BarrierConfig("tcp_store", default_store_arguments())


def _class_of(name: str) -> Callable[..., Barrier]:
    if name not in _classes and name in _HOMES:
        module, attribute = _HOMES[name]
        return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
    if name not in _classes:
        known = ", ".join(sorted({*_classes, *_HOMES}))
        raise ValueError(f"there is no barrier type {name!r}; known are {known}")
    return _classes[name]


def default_rank_info() -> RankInfo:
    """Say who this process is in torch's default process group; alone without one."""
    if not _distributed_is_initialized():
        return RankInfo(0, 1)
    distributed = sys.modules["torch.distributed"]
    return RankInfo(distributed.get_rank(), distributed.get_world_size())


def _distributed_is_initialized() -> bool:
    # Not imported for this: who has initialized it has imported it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    return bool(distributed.is_initialized())
