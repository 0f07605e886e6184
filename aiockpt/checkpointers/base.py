"""What all checkpointers share: their interface, their statistics, their events."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiockpt.events import Progress, TransferEvent, call_guarded, emit
from aiockpt.storage.directory import StrPath, step_of
from aiockpt.transfer.repeats import Repeats
from aiockpt.transport import exact_step

__all__ = ["Account", "Checkpointer", "CheckpointerStatistics", "meter", "step_for"]


class Checkpointer(ABC):
    """Saves state dicts to directories, and loads the checkpoints that are whole.

    The methods of an asynchronous checkpointer are coroutines.
    """

    @abstractmethod
    def save(self, state_dict: Any, path: Any, **kwargs: Any) -> Any:
        """Save ``state_dict`` to the directory ``path``.

        ``kwargs`` are for the hooks, and for a writer of one's own.
        """

    @abstractmethod
    def load(
        self,
        path: Any,
        state_dict: Any = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the state dict at ``path``; fill and return ``state_dict`` if given.

        Args:
            path: The checkpoint's directory.
            state_dict: What to fill; only its keys are read.
            default_map_location: Where tensors that are not filled in place go.
            strict: Refuse a checkpoint that lacks keys of ``state_dict``.
            kwargs: The reader's other options.
        """

    @abstractmethod
    def close(self) -> Any:
        """Release everything. Idempotent."""


class CheckpointerStatistics(NamedTuple):
    """A moment of a checkpointer. A synchronous one skips and replaces nothing.

    Attributes:
        saves: Calls of ``save`` that were not cancelled.
        written: Saves that are durable and committed.
        failed: Saves that failed.
        skipped: Saves that the busy policy did not begin.
        replaced: Saves that were staged, and gave way to a newer one.
        under_way: Saves that are being written, or wait for it.
        bytes_written: Bytes of all written saves.
        stall_seconds: How long the last save kept its caller from mutating the state.
        write_seconds: How long the last write took, from the end of its staging on.
        restarts: How often the checkpoint process was replaced.
    """

    saves: int
    written: int
    failed: int
    skipped: int
    replaced: int
    under_way: int
    bytes_written: int
    stall_seconds: float
    write_seconds: float
    restarts: int


@dataclass(slots=True)
class Account:
    """Counts the saves of one checkpointer, and announces those that are written."""

    saves: int = 0
    written: int = 0
    failed: int = 0
    skipped: int = 0
    replaced: int = 0
    bytes_written: int = 0
    stall_seconds: float = 0.0
    write_seconds: float = 0.0
    _repeats: Repeats = field(default_factory=lambda: Repeats("save"))

    def statistics(
        self, *, under_way: int, restarts: int = 0
    ) -> CheckpointerStatistics:
        """Return the numbers as they are now."""
        return CheckpointerStatistics(
            saves=self.saves,
            written=self.written,
            failed=self.failed,
            skipped=self.skipped,
            replaced=self.replaced,
            under_way=under_way,
            bytes_written=self.bytes_written,
            stall_seconds=self.stall_seconds,
            write_seconds=self.write_seconds,
            restarts=restarts,
        )

    def note_written(
        self,
        path: str,
        step: int,
        nbytes: int,
        seconds: float,
        *,
        warning: str,
        content: str,
        detail: str = "",
    ) -> bool:
        """Count and announce a save that is committed.

        Returns:
            Whether all tensors hold the same bytes as in the save before it.
        """
        self.written += 1
        self.bytes_written += nbytes
        self.write_seconds = seconds
        event = TransferEvent(
            stop="write",
            step=step,
            nbytes=nbytes,
            seconds=seconds,
            detail="; ".join(filter(None, (detail, warning))),
            level=logging.WARNING if warning else logging.INFO,
        )
        event = self._repeats.told(event, content, path)
        emit(event)
        return event.unchanged


def step_for(path: StrPath, keywords: Mapping[str, object]) -> int:
    """Return the step of a save: its ``step`` keyword, else the number in its path.

    Raises:
        TypeError, ValueError: the keyword is not a step.
    """
    given = keywords.get("step")
    return step_of(path) if given is None else exact_step(given)


def meter(
    report: Callable[[Progress], None] | None, nbytes: int
) -> Callable[[int], None] | None:
    """Return a function that reports to a caller's ``progress`` how far a write is."""
    if report is None:
        return None
    began = time.monotonic()

    def tell(done: int) -> None:
        rate = done / max(time.monotonic() - began, 1e-6)
        state = Progress(stop="write", bytes_done=done, bytes_total=nbytes, rate=rate)
        call_guarded(report, state)

    return tell
