"""What happens during a transfer, as frozen data for hooks, and as log lines.

A *hook* is a plain callable that gets every :class:`TransferEvent` of the process; it
runs on the event loop, so it must be quick. Without hooks, events of level
``INFO`` and above reach the standard library's logger ``aiockpt``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

__all__ = ["Hook", "Progress", "TransferEvent", "add_hook", "call_guarded", "emit"]

T = TypeVar("T")

logger = logging.getLogger("aiockpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a receive is, or a background write.

    Attributes:
        stop: The stop that it is at: ``fetch_manifest``, ``allocate``,
            ``plan`` (with ``have``), ``fetch_chunk``, ``load`` or ``rebuild``;
            ``write``.
        bytes_done: Bytes of the data segment that have arrived, or were written;
            those that were there already (``have``) count.
        bytes_total: Bytes of the data segment; 0 until the manifest is known. With
            ``select`` those of the chunks that are fetched; it may grow once.
        chunks_done: Chunks whose digest matched; over a process group, where digests
            come last, chunks that have arrived.
        chunks_total: Chunks of the data segment.
        rate: Bytes per second since the first chunk was asked for.
        bytes_reused: Those of ``bytes_done`` that were there already.
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
        stop: The stop's name, or what interrupted it: ``stage``, ``publish``,
            ``retract``, ``evict``, ``serve``, ``fetch_manifest``, ``fetch_chunk``,
            ``retry``, ``drop``, ``recv``; ``restart`` where a sender has started again;
            of a checkpointer ``stage``, ``write``, ``skip``, ``load``.
        step: The checkpoint's step, where known.
        peer: The other end without its token, where there is one.
        nbytes: Bytes moved.
        reused: Bytes that were there already (``have``), and were not moved.
        seconds: How long it took.
        detail: The error or the remark, as one line.
        medium: How the bytes came where that may differ: ``HTTP``, or ``shared
            memory`` of this host.
        unchanged: Whether all tensors hold the same bytes as in the save, or the
            publication, before this one; ``detail`` names that.
        level: A level of :mod:`logging`.
    """

    stop: str
    step: int | None = None
    peer: str = ""
    nbytes: int = 0
    reused: int = 0
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
        if self.seconds:
            words.append(f"seconds={self.seconds:.3f}")
        if self.medium:
            words.append(f"medium={self.medium!r}")
        if self.nbytes and self.seconds:
            words.append(f"GB/s={self.nbytes / self.seconds / 1e9:.2f}")
        return " ".join(words) + (f": {self.detail}" if self.detail else "")


Hook: TypeAlias = Callable[[TransferEvent], None]

_hooks: list[Hook] = []


def add_hook(hook: Hook) -> Callable[[], None]:
    """Call ``hook`` with every event from now on; return what removes it again.

    An exception in a hook is logged and does not disturb the transfer.
    """
    _hooks.append(hook)

    def remove() -> None:
        with suppress(ValueError):
            _hooks.remove(hook)

    return remove


def emit(event: TransferEvent) -> None:
    """Log an event and hand it to every hook."""
    if logger.isEnabledFor(event.level):
        logger.log(event.level, "%s", event)
    for hook in tuple(_hooks):
        call_guarded(hook, event)


def call_guarded(callback: Callable[[T], None], fact: T) -> None:
    """Call somebody else's code, which must not end a transfer: errors are logged."""
    try:
        callback(fact)
    except Exception:
        logger.exception("callback %r failed", callback)
