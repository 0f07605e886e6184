"""The destination memory of a data segment that is read block by block.

A reading thread asks a `Placement` for the memory of each block. Bytes for a device
pass through spare buffers of the thread, which are used in turn. Bytes that are read
only for a digest also go into a spare buffer, and are dropped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Final, Protocol

import torch

from aiockpt.memory.arena import Arena
from aiockpt.memory.device import Event, Port, PortFor
from aiockpt.state.load_plan import LoadPlan, Ranges
from aiockpt.state.segment import Segment

_TURNS: Final = 2


class Turns(Protocol):
    """Memory for bytes that have no other place: a thread's `Spare`, for example."""

    def turn(self, nbytes: int) -> memoryview:
        """Return memory for so many bytes."""


class Placement:
    """Byte ranges to read, and the memory that they go to.

    Args:
        segment: The data segment.
        ranges: The byte ranges of the segment to read.
        in_arena: Those that go to the arena of the segment; None: all of them. Others
            are read only to compare their digests.

    Attributes:
        ranges: The byte ranges.
        nbytes: How many bytes of them are needed.
    """

    def __init__(
        self, segment: Segment, ranges: Ranges, in_arena: Ranges | None = None
    ) -> None:
        self.ranges = ranges
        self.nbytes = sum(last - first for first, last in ranges)
        self._in_arena = ranges if in_arena is None else in_arena
        self._stops = [last for _, last in self._in_arena]
        self._arena = segment.arena

    def spare(self, nbytes: int) -> Spare:
        """Return spare memory for one thread, for blocks of at most ``nbytes``."""
        return Spare(nbytes, ())

    def prepare(self, start: int, stop: int) -> None:
        """Map the pages of ``[start, stop)`` in advance if that saves time.

        Only pages of the arena are mapped. Blocks, so it is called in a thread.
        """
        for first, last in self._from(start):
            if first >= stop:
                break
            self._arena.populate(max(first, start), min(last, stop))

    def _from(self, start: int) -> Iterator[tuple[int, int]]:
        """Return the ranges in the arena that end after ``start``."""
        first = bisect_right(self._stops, start)
        return (self._in_arena[at] for at in range(first, len(self._in_arena)))

    def send(self, start: int, stop: int, window: torch.Tensor) -> list[Event]:
        """Enqueue the copies to devices; ``window`` has the bytes of the range."""
        del start, stop, window
        return []

    def views(self, start: int, stop: int, spare: Turns) -> Sequence[memoryview]:
        """Return memory for ``[start, stop)``."""
        found: list[memoryview] = []
        at, block = start, None
        for first, last in self._from(start):
            if first >= stop:
                break
            if at < first:
                block = block or spare.turn(stop - start)
                found.append(block[at - start : first - start])
            found += self._arena.buffers(max(first, at), min(last, stop))
            at = min(last, stop)
        if at < stop:
            block = block or spare.turn(stop - start)
            found.append(block[at - start :])
        return found


class PlannedPlacement(Placement):
    """The byte ranges and the memory of a `LoadPlan`.

    Args:
        segment: The data segment.
        plan: The destinations of its bytes.
        ports: Returns the port of a device.
    """

    def __init__(self, segment: Segment, plan: LoadPlan, ports: PortFor) -> None:
        reaches = zip(plan.reaches.starts, plan.reaches.stops, strict=True)
        super().__init__(segment, plan.ranges, [*compress(reaches, plan.kept)])
        copies = plan.copies(segment.arena, ports)
        assert copies is not None
        self._copies, self._kept = copies, plan.kept
        self._home = self._copies.in_place()
        self._fences = self._copies.fences()

    def spare(self, nbytes: int) -> Spare:
        """Return spare memory, page-locked for the devices."""
        return Spare(nbytes, [*self._copies.ports.values()])

    def views(self, start: int, stop: int, spare: Turns) -> Sequence[memoryview]:
        """Return memory for ``[start, stop)``."""
        return self._home.split(start, spare.turn(stop - start), self._kept)

    def send(self, start: int, stop: int, window: torch.Tensor) -> list[Event]:
        """Enqueue the copies to devices; ``window`` has the bytes of the range."""
        return self._copies.load_device(start, stop, self._fences, window=window)

    def load(self) -> None:
        """Copy from the arena to the template; wait for the devices."""
        events: list[Event] = []
        for start, stop in self.ranges:
            self._copies.load_host(start, stop)
            events += self._copies.load_device(start, stop, self._fences)
        for event in events:
            event.synchronize()


class Spare:
    """A reading thread's spare memory; devices copy from two buffers in turn."""

    def __init__(self, nbytes: int, ports: Sequence[Port]) -> None:
        self._arenas = [Arena(nbytes) for _ in range(_TURNS if ports else 1)]
        for arena in self._arenas:
            for port in ports:
                arena.pin(port.pin)
        # A copy to a device needs a tensor that lives until its end.
        self._tensors = [
            torch.frombuffer(arena.buffer, dtype=torch.uint8) for arena in self._arenas
        ]
        self._sent: list[list[Event]] = [[] for _ in self._arenas]
        self._now = 0

    def turn(self, nbytes: int) -> memoryview:
        """Return the next buffer, after the device copies from it have ended."""
        self._now = (self._now + 1) % len(self._arenas)
        self._wait(self._now)
        return self._arenas[self._now].buffer[:nbytes]

    def landed(self, placement: Placement, start: int, stop: int) -> None:
        """Enqueue the device copies of the block in the last `turn`."""
        window = self._tensors[self._now][: stop - start]
        self._sent[self._now] += placement.send(start, stop, window)

    def close(self) -> None:
        """Wait for the copies to devices; unmap."""
        for turn in range(len(self._arenas)):
            self._wait(turn)
        self._tensors.clear()
        for arena in self._arenas:
            arena.close()

    def _wait(self, turn: int) -> None:
        for event in self._sent[turn]:
            event.synchronize()
        self._sent[turn].clear()
