"""How the data segment is cut into messages, and where their bytes lie.

Both ends cut alike, from the manifest: a large entry travels by itself, in pieces, so
that either end can use the tensor's own memory; small neighbours travel together, over
one copy where their memory is not one run. A message is bounded, so a copy is small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from aiockpt.wire.manifest import Manifest

__all__ = [
    "Expected",
    "Landing",
    "Memory",
    "messages_of",
    "outgoing",
    "plan_messages",
]

LARGE_BYTES: Final = 256 << 10
TOGETHER_BYTES: Final = 1 << 20
MESSAGE_BYTES: Final = 16 << 20

BESIDE: Final = 8
"""Messages that may be under way beside their places."""


class Memory(Protocol):
    """Host memory that holds a data segment."""

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the writable bytes of ``[start, stop)``, in order."""


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


def outgoing(memory: Memory, start: int, stop: int) -> memoryview:
    """Return the bytes of a message: the memory itself, or a copy."""
    views = memory.buffers(start, stop)
    return views[0] if len(views) == 1 else memoryview(bytearray().join(views))


class Landing:
    """Where messages arrive: in their place, or beside it until they are complete.

    Memory beside their places is used again and again.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._spare: list[bytearray] = []
        self._beside = 0

    @property
    def crowded(self) -> bool:
        """Whether more memory beside the places would be too much."""
        return self._beside >= BESIDE

    def expect(self, start: int, stop: int) -> Expected:
        """Return where the message with these bytes is going to arrive."""
        views = self._memory.buffers(start, stop)
        if len(views) == 1:
            return Expected(start, views[0], ())
        self._beside += 1
        nbytes = stop - start
        large = nbytes > TOGETHER_BYTES
        if large or not self._spare:
            block = bytearray(max(nbytes, TOGETHER_BYTES))
        else:
            block = self._spare.pop()
        return Expected(start, memoryview(block)[:nbytes], views)

    def settle(self, arrived: Expected) -> None:
        """Bring what has arrived to its place."""
        at = 0
        for view in arrived.places:
            view[:] = arrived.data[at : at + len(view)]
            at += len(view)
        if arrived.places:
            self._beside -= 1
            block = arrived.data.obj
            if isinstance(block, bytearray) and len(block) == TOGETHER_BYTES:
                self._spare.append(block)


class Expected(NamedTuple):
    """A message on its way: where it arrives, and its places if that is beside them."""

    start: int
    data: memoryview
    places: Sequence[memoryview]
