"""How the data segment is cut into messages, and where their bytes lie.

Both ends cut alike, from the manifest: a large entry travels by itself, in pieces, so
that either end can use the tensor's own memory; small neighbours travel together, over
one copy where their memory is not one run. A message is bounded, so a copy is small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Memory

__all__ = ["Landings", "Leavings", "Memory", "messages_of", "plan_messages"]

LARGE_BYTES: Final = 256 << 10
TOGETHER_BYTES: Final = 1 << 20
MESSAGE_BYTES: Final = 16 << 20
"""Of host memory: each message wakes both ends; a digest wants a cache."""

BESIDE: Final = 8
"""Messages that may be under way beside their places, at either end."""

BESIDE_BYTES: Final = BESIDE * TOGETHER_BYTES
"""With as many bytes beside their places, no other message begins there."""


def messages_of(manifest: Manifest, longest: int) -> list[tuple[int, int]]:
    """Return the ranges of the segment that travel, in order."""
    entries = manifest.entries
    return plan_messages(zip(entries.starts, entries.stops, strict=True), longest)


def plan_messages(
    entries: Iterable[tuple[int, int]], longest: int
) -> list[tuple[int, int]]:
    """Return the ranges of the segment that travel, from those of the entries.

    ``longest`` bounds a message that is part of a large entry.
    """
    messages: list[tuple[int, int]] = []
    first = last = 0
    for start, stop in entries:
        large = stop - start >= LARGE_BYTES
        if large or stop - first > TOGETHER_BYTES:
            if first < start:
                messages.append((first, start))
            first = start
        if large:
            messages += _pieces(start, stop, longest)
            first = stop
        last = stop
    if first < last:
        messages.append((first, last))
    return messages


def _pieces(start: int, stop: int, longest: int) -> list[tuple[int, int]]:
    return [(at, min(at + longest, stop)) for at in range(start, stop, longest)]


class Leavings:
    """Messages that leave: from the memory itself, or from a copy."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._copies: dict[int, int] = {}

    @property
    def crowded(self) -> bool:
        """Whether more copies would be too much."""
        sizes = self._copies.values()
        return len(sizes) >= BESIDE or sum(sizes) >= BESIDE_BYTES

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return these bytes of the segment."""
        views = self._memory.buffers(start, stop)
        if len(views) == 1:
            return torch.frombuffer(views[0], dtype=torch.uint8)
        self._copies[start] = stop - start
        return torch.frombuffer(bytearray().join(views), dtype=torch.uint8)

    def gone(self, start: int) -> None:
        """Let go of a copy that has been sent."""
        self._copies.pop(start, None)


class Landings:
    """Where messages arrive: in their places, or beside them until they are complete.

    Memory beside the places is used again and again.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._spare: list[bytearray] = []
        self._beside: dict[int, tuple[bytearray, Sequence[memoryview]]] = {}

    @property
    def crowded(self) -> bool:
        """Whether more memory beside the places would be too much."""
        sizes = [len(block) for block, _ in self._beside.values()]
        return len(sizes) >= BESIDE or sum(sizes) >= BESIDE_BYTES

    def expect(self, start: int, stop: int) -> torch.Tensor:
        """Return where these bytes of the segment are going to arrive."""
        views, nbytes = self._memory.buffers(start, stop), stop - start
        if len(views) == 1:
            return torch.frombuffer(views[0], dtype=torch.uint8)
        if nbytes > TOGETHER_BYTES or not self._spare:
            block = bytearray(max(nbytes, TOGETHER_BYTES))
        else:
            block = self._spare.pop()
        self._beside[start] = block, views
        return torch.frombuffer(block, dtype=torch.uint8, count=nbytes)

    def settle(self, start: int) -> None:
        """Bring what has arrived to its places."""
        if start not in self._beside:
            return
        block, views = self._beside.pop(start)
        arrived, at = memoryview(block), 0
        for view in views:
            view[:] = arrived[at : at + len(view)]
            at += len(view)
        if len(block) == TOGETHER_BYTES:
            self._spare.append(block)
