"""The interface, the statistics and the events of all checkpointers."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from operator import add
from typing import Any, Final, Literal, NamedTuple, Never

from aiockpt.events import Progress, TransferEvent, emit
from aiockpt.state.selection import Select
from aiockpt.storage.directory import StrPath, expanded, step_in, step_of
from aiockpt.transfer.repeats import Repeats
from aiockpt.transport import exact_step

logger = logging.getLogger("aiockpt")


class Checkpointer(ABC):
    """Saves state dicts to directories, and loads complete checkpoints.

    The methods of an asynchronous checkpointer are coroutines.
    """

    @abstractmethod
    def save(
        self, state_dict: Any, path: Any, *, step: int | None = None, **own: Never
    ) -> Any:
        """Save ``state_dict`` to the directory ``path``.

        Args:
            state_dict: The state to save.
            path: The checkpoint's directory.
            step: The checkpoint's step. None: the number at the end of ``path``.
            own: Keywords for a commit hook, a stager or a writer of your own. They are
                refused unless one of these takes them. A type checker refuses them,
                too: pass them as ``**keywords``, a ``dict[str, Any]``.
        """

    @abstractmethod
    def load(
        self,
        path: Any,
        state_dict: Any = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        into: Any = None,
        select: Select | None = None,
        verify: Literal["full", "none"] = "full",
        mmap: bool = False,
        on_bytes: Callable[[int], None] | None = None,
        rank: int | None = None,
        full: bool = False,
        rank_values: Literal["error", "keep"] | int = "error",
        **own: Never,
    ) -> Any:
        """Return the state dict at ``path``; fill and return ``into`` if given.

        Args:
            path: The checkpoint's directory.
            state_dict: Another name of ``into``.
            into: The template to fill; only its keys are read.
            default_map_location: The device of tensors that are not filled in place.
            strict: Refuse a checkpoint that lacks a key of the template.
            select, verify, mmap, on_bytes, rank, full, rank_values: See
                :meth:`.CheckpointReader.read`.
            own: Keywords for a reader of your own, as for :meth:`save`.
        """

    @abstractmethod
    def close(self) -> Any:
        """Release everything. Idempotent."""


class LoadStatistics(NamedTuple):
    """The loads of a reader up to one moment; see :class:`.TransferEvent`.

    Attributes:
        ended: Loads that have returned a state dict.
        nbytes: Bytes of files that they read.
        needed: Bytes of files that they needed.
        files: Files that they read from.
        ranges: Ranges of these files that they read.
    """

    ended: int = 0
    nbytes: int = 0
    needed: int = 0
    files: int = 0
    ranges: int = 0

    def after(self, event: TransferEvent) -> LoadStatistics:
        """Return the figures after one more load, which an event tells."""
        more = event.nbytes, event.needed, event.files, event.ranges
        return LoadStatistics(self.ended + 1, *map(add, self[1:], more))


class CheckpointerStatistics(NamedTuple):
    """The state of a checkpointer at one moment.

    Attributes:
        saves: Calls of ``save`` that were not cancelled.
        written: Saves that are durable and committed.
        failed: Saves that failed.
        skipped: Saves that the busy policy skipped.
        replaced: Staged saves that a newer one replaced.
        under_way: Saves that are being written or wait for it.
        bytes_written: Bytes of all written saves.
        stall_seconds: Seconds until the last save let its caller change the state.
        write_seconds: Seconds from the end of staging to the end of the last write.
        restarts: How often the checkpoint process was replaced.
        loads: The loads, as the reader counts them. A reader of your own that is no
            :class:`.CheckpointReader` counts none.
    """

    saves: int = 0
    written: int = 0
    failed: int = 0
    skipped: int = 0
    replaced: int = 0
    under_way: int = 0
    bytes_written: int = 0
    stall_seconds: float = 0.0
    write_seconds: float = 0.0
    restarts: int = 0
    loads: LoadStatistics = LoadStatistics()


class Written(NamedTuple):
    """The result of a committed save.

    Attributes:
        warning: Why some rank has not confirmed the commit, or empty.
        content: A digest of the tensors: equal for two checkpoints whose tensors hold
            the same bytes. Empty without tensors, or if the writer does not tell.
        nbytes: The bytes of this rank's tensors. 0 if the writer does not tell.
    """

    warning: str = ""
    content: str = ""
    nbytes: int = 0


_WRITTEN: Final = "_aiockpt_written"
_AFTER_COMMIT: Final = "The checkpoint is committed: this error came after the commit."


def mark_committed(error: BaseException, written: Written | None) -> None:
    """Note on an error that it came after the commit of a save, or before it.

    A hook may raise one error again and again, for several saves. So a mark of an
    earlier save is removed, if ``written`` is None.
    """
    facts = error.__dict__  # the error's class may refuse other attributes
    facts.pop(_WRITTEN, None)
    notes = [each for each in facts.pop("__notes__", []) if each != _AFTER_COMMIT]
    if written is not None:
        facts[_WRITTEN] = written
        notes.append(_AFTER_COMMIT)
    if notes:
        facts["__notes__"] = notes


def committed_before(error: BaseException) -> Written | None:
    """Return the result of a save whose commit an error followed, or None.

    The mark is removed, because the error may be raised again for another save.
    """
    found = error.__dict__.pop(_WRITTEN, None)
    return found if isinstance(found, Written) else None


class Account:
    """Counts the saves of one checkpointer, and emits an event for each written one.

    Attributes:
        now: The figures; the checkpointer adds ``under_way``, ``restarts`` and
            ``loads``.
    """

    def __init__(self) -> None:
        self.now = CheckpointerStatistics()
        self._repeats = Repeats("save")
        self._named_no_step = False

    def count(self, *names: str) -> None:
        """Add 1 to figures."""
        more: dict[str, Any] = {name: getattr(self.now, name) + 1 for name in names}
        self.now = self.now._replace(**more)

    def note_step(self, path: str, given: int | None) -> None:
        """Warn once about a save that has no step, neither given nor in its name."""
        if given is None and not self._named_no_step and step_in(path) is None:
            self._named_no_step = True
            logger.warning(
                "%s has no step in its name, so the checkpoint is saved as step 0: "
                "say save(..., step=)",
                path,
            )

    def note_stall(self, seconds: float) -> None:
        """Record how long the last save kept its caller from changing the state."""
        self.now = self.now._replace(stall_seconds=seconds)

    def note_written(
        self, path: str, step: int, written: Written, seconds: float, detail: str = ""
    ) -> bool:
        """Count a committed save, and emit its event.

        Returns:
            Whether all tensors hold the same bytes as in the save before it.
        """
        self.count("written")
        self.now = self.now._replace(
            bytes_written=self.now.bytes_written + written.nbytes,
            write_seconds=seconds,
        )
        event = TransferEvent(
            stop="write",
            step=step,
            nbytes=written.nbytes,
            seconds=seconds,
            detail="; ".join(filter(None, (detail, written.warning))),
            level=logging.WARNING if written.warning else logging.INFO,
        )
        event = self._repeats.told(event, written.content, path)
        emit(event)
        return event.unchanged


def anything(**_: object) -> None:
    """Stand for a function of the user whose keywords are not known."""


def template_of(state_dict: Any, into: Any) -> Any:
    """Return the template, which has two names.

    Raises:
        TypeError: both were given.
    """
    if state_dict is not None and into is not None:
        raise TypeError(
            "load() got state_dict= and into=, which are two names of the template: "
            "leave out state_dict="
        )
    return state_dict if into is None else into


def path_for(state_dict: object, path: StrPath) -> str:
    """Return the path of a save as text.

    Raises:
        TypeError: it is not a path; perhaps the two arguments are swapped.
    """
    paths = (str, os.PathLike)
    if isinstance(state_dict, paths) and not isinstance(path, paths):
        raise TypeError(
            "save(path, state_dict) is torch's order: here it is save(state_dict, path)"
        )
    return expanded(path)


def step_for(path: StrPath, keywords: Mapping[str, object]) -> int:
    """Return the step of a save: its ``step`` keyword, else the number in its path.

    Raises:
        TypeError, ValueError: the keyword is not a step.
    """
    given = keywords.get("step")
    return step_of(path) if given is None else exact_step(given)


def report_written(
    progress: Callable[[Progress], None] | None, began: float, done: int, total: int
) -> None:
    """Report so many of the bytes as written, with the rate since ``began``."""
    if progress is not None:
        rate = done / max(time.monotonic() - began, 1e-6)
        progress(Progress(stop="write", bytes_done=done, bytes_total=total, rate=rate))


def warn_of_commit(step: int, warning: str) -> None:
    """Emit an event if some rank has not confirmed a commit."""
    if warning:
        level = logging.WARNING
        emit(TransferEvent(stop="write", step=step, detail=warning, level=level))
