"""What happens during a transfer: frozen records for hooks, log lines and progress.

A *hook* is a plain callable that gets every :class:`TransferEvent` of the process. It
runs on the event loop, so it must be quick. With or without hooks, every event is also
logged by the standard library's logger ``aiockpt``, at the event's level.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar

T = TypeVar("T")

logger = logging.getLogger("aiockpt")

_LOG_EVERY_S: Final = 60.0  # for two log records of a kind
_MAX_KINDS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a receive or a background write has come.

    Attributes:
        stop: Its phase. A receive has the phases ``fetch_manifest``, ``allocate``,
            ``plan`` (with ``have``), ``fetch_chunk``, ``rebuild`` and ``load``; a
            write has the phase ``write``.
        bytes_done: Bytes of the data segment that have arrived or were written,
            including those that were there already (``have``).
        bytes_total: Bytes of the data segment; 0 until the manifest is known. With
            ``select``, bytes of the chunks that are fetched; it may grow once.
        chunks_done: Chunks whose digest matched. Over a process group, where digests
            come last, chunks that have arrived.
        chunks_total: Chunks of the data segment.
        rate: Bytes per second since the first chunk was requested.
        bytes_reused: The part of ``bytes_done`` that was there already.
    """

    stop: str
    bytes_done: int = 0
    bytes_total: int = 0
    chunks_done: int = 0
    chunks_total: int = 0
    rate: float = 0.0
    bytes_reused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent:
    """One thing that happened to one checkpoint.

    Attributes:
        stop: What ended or interrupted the work. Transports emit ``stage`` (what a
            receiver may refuse), ``publish``, ``retract``, ``evict``, ``serve``,
            ``fetch_chunk``, ``retry``, ``drop``, ``swarm``, ``recv``, ``apply``, and
            ``restart`` when a sender has gone back or started again, or the server
            process has ended. Checkpointers emit ``stage``, ``write``, ``skip``,
            ``load``, and ``restart`` when the checkpoint process has ended.
        step: The checkpoint's step, where known.
        peer: The other end without its token, where there is one.
        nbytes: Bytes moved.
        reused: Bytes that were there already (``have``) and were not moved.
        needed: The bytes that a load of files needed, to load them or to compare the
            values of several ranks. It reads whole chunks, because digests cover whole
            chunks.
        files: From how many files a load has read.
        ranges: How many ranges of these files it has read.
        seconds: The duration.
        detail: The error or the remark, as one line.
        medium: How the bytes came, where that may differ: ``HTTP``, or ``shared
            memory`` of this host.
        unchanged: Whether all tensors hold the same bytes as in the previous save or
            publication, which ``detail`` names.
        level: A level of :mod:`logging`.
    """

    stop: str
    step: int | None = None
    peer: str = ""
    nbytes: int = 0
    reused: int = 0
    needed: int = 0
    files: int = 0
    ranges: int = 0
    seconds: float = 0.0
    detail: str = ""
    level: int = logging.DEBUG
    medium: str = ""
    unchanged: bool = False

    def __str__(self) -> str:
        words = [self.stop]
        if self.step is not None:
            words.append(f"step={self.step}")
        if self.peer:
            words.append(f"peer={self.peer}")
        if self.nbytes:
            words.append(f"bytes={self.nbytes}")
        if self.reused:
            words.append(f"reused={self.reused}")
        if self.needed:
            words.append(f"needed={self.needed}")
        if self.files > 1:
            words.append(f"files={self.files} ranges={self.ranges}")
        if self.seconds:
            words.append(f"seconds={self.seconds:.3f}")
        if self.medium:
            words.append(f"medium={self.medium!r}")
        if self.nbytes and self.seconds:
            words.append(f"GB/s={self.nbytes / self.seconds / 1e9:.2f}")
        return " ".join(words) + (f": {self.detail}" if self.detail else "")


class LogLimit:
    """Lets one log record of each kind through a minute.

    Use it where a loop, a peer or a callback may cause the same record many times.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = OrderedDict[object, float]()

    def passes(self, kind: object = None) -> bool:
        """Return whether to log a record of this kind now."""
        now = self._clock()
        if now - self._last.get(kind, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return False
        self._last[kind] = now
        self._last.move_to_end(kind)
        if len(self._last) > _MAX_KINDS:
            self._last.popitem(last=False)
        return True


Hook: TypeAlias = Callable[[TransferEvent], None]

_hooks: list[Hook] = []


def add_hook(hook: Hook) -> Callable[[], None]:
    """Call ``hook`` with every event from now on; return a function that removes it.

    An exception in a hook does not disturb the transfer. It is logged, once a minute.
    """
    call = guarded(hook)
    _hooks.append(call)

    def remove() -> None:
        with suppress(ValueError):
            _hooks.remove(call)

    return remove


def emit(event: TransferEvent) -> None:
    """Log an event and hand it to every hook."""
    if logger.isEnabledFor(event.level):
        logger.log(event.level, "%s", event)
    for hook in tuple(_hooks):
        hook(event)


def guarded(callback: Callable[[T], None]) -> Callable[[T], None]:
    """Wrap a hook or a progress callback, so that its errors are not raised.

    The callback may be called thousands of times, so one error of each type is logged a
    minute.
    """
    log_limit = LogLimit()

    def call(fact: T) -> None:
        try:
            callback(fact)
        except Exception as error:
            if log_limit.passes(type(error)):
                logger.exception("callback %r failed", callback)

    return call


class Meter:
    """Counts the bytes and chunks of one receive for the caller's ``progress``.

    Attributes:
        state: How far the receive is.
    """

    def __init__(self, report: Callable[[Progress], None] | None) -> None:
        self._report = None if report is None else guarded(report)
        self.state = Progress(stop="fetch_manifest")
        self._started = 0.0

    def at(self, stop: str) -> None:
        """Report that the receive has reached another phase."""
        if stop == "fetch_chunk":
            self._started = time.monotonic()
        self._update(stop=stop)

    def expect(self, nbytes: int, chunks: int) -> None:
        """Add to the totals, without a report."""
        state = self.state
        self.state = replace(
            state,
            bytes_total=state.bytes_total + nbytes,
            chunks_total=state.chunks_total + chunks,
        )

    def add(self, nbytes: int, chunks: int) -> None:
        """Report that more has arrived."""
        done = self.state.bytes_done + nbytes
        elapsed = max(time.monotonic() - self._started, 1e-6)
        self._update(
            bytes_done=done,
            chunks_done=self.state.chunks_done + chunks,
            rate=(done - self.state.bytes_reused) / elapsed,
        )

    def reuse(self, nbytes: int, chunks: int) -> None:
        """Report bytes that were there already and need not arrive."""
        self._update(
            bytes_done=self.state.bytes_done + nbytes,
            bytes_reused=self.state.bytes_reused + nbytes,
            chunks_done=self.state.chunks_done + chunks,
        )

    def _update(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        if self._report is not None:
            self._report(self.state)
