"""How the data segment is cut into messages, and where their bytes lie.

Both ends cut alike, from the manifest: a large entry travels by itself, in pieces, so
that either end can use the tensor's own memory; small neighbours travel together, over
one copy where their memory is not one run. A message is bounded, so a copy is small.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from aiockpt.memory import Memory
from aiockpt.wire.manifest import Manifest

__all__ = ["Landing", "Memory", "messages_of", "outgoing", "plan_messages"]

LARGE_BYTES: Final = 256 << 10
TOGETHER_BYTES: Final = 2 << 20
MESSAGE_BYTES: Final = 16 << 20


def messages_of(manifest: Manifest) -> list[tuple[int, int]]:
    """Return the ranges of the segment that travel, in order."""
    entries = manifest.entries
    return plan_messages(zip(entries.starts, entries.stops, strict=True))


def plan_messages(entries: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of the segment that travel, from those of the entries."""
    messages: list[tuple[int, int]] = []
    first = last = 0
    for start, stop in entries:
        large = stop - start >= LARGE_BYTES
        if large or stop - first > TOGETHER_BYTES:
            if first < start:
                messages.append((first, start))
            first = start
        if large:
            messages += _pieces(start, stop)
            first = stop
        last = stop
    if first < last:
        messages.append((first, last))
    return messages


def _pieces(start: int, stop: int) -> list[tuple[int, int]]:
    starts = range(start, stop, MESSAGE_BYTES)
    return [(at, min(at + MESSAGE_BYTES, stop)) for at in starts]


def outgoing(memory: Memory, start: int, stop: int) -> torch.Tensor:
    """Return the bytes of a message as a tensor: the memory itself, or a copy."""
    views = memory.buffers(start, stop)
    whole = views[0] if len(views) == 1 else bytearray().join(views)
    return torch.frombuffer(whole, dtype=torch.uint8)


class Landing:
    """Where a message arrives: in its place, or beside it until it is complete."""

    __slots__ = ("_arrived", "_views", "tensor")

    def __init__(self, memory: Memory, start: int, stop: int) -> None:
        views = memory.buffers(start, stop)
        self._views = views if len(views) > 1 else []
        self._arrived = memoryview(bytearray(stop - start if self._views else 0))
        target = self._arrived if self._views else views[0]
        self.tensor = torch.frombuffer(target, dtype=torch.uint8)

    def settle(self) -> None:
        """Bring what has arrived to its place."""
        at = 0
        for view in self._views:
            view[:] = self._arrived[at : at + len(view)]
            at += len(view)
