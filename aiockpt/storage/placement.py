"""Where the bytes of one data segment go while a source brings them.

A thread that reads block by block asks a `Placement` for the memory of each block, and
says when the bytes are there. What a device gets passes through spare memory of the
thread, in turns. Bytes that nobody wants go there, too, and are forgotten.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from aiockpt.memory.arena import Arena
from aiockpt.memory.device import Event, Port, PortFor
from aiockpt.state.load_plan import LoadPlan, Ranges
from aiockpt.state.segment import Segment

__all__ = ["Placement", "PlannedPlacement", "Spare", "VerifyOnly"]

_TURNS: Final = 2


class Placement:
    """Ranges that are wanted, and the memory that their bytes belong to.

    Args:
        segment: Where they are from.
        ranges: What is wanted.
    """

    def __init__(self, segment: Segment, ranges: Ranges) -> None:
        self.ranges = ranges
        self._stops = [last for _, last in ranges]
        self._arena = segment.arena

    def __repr__(self) -> str:
        return f"<{type(self).__name__} ranges={len(self.ranges)}>"

    def spare(self, nbytes: int) -> Spare:
        """Return spare memory for one thread, for blocks of at most ``nbytes``."""
        return Spare(nbytes, ())

    def prepare(self, start: int, stop: int) -> None:
        """Map the pages of ``[start, stop)`` where it saves time, in a thread.

        Only ranges that are wanted get pages.
        """
        for first, last in self._from(start):
            if first >= stop:
                break
            self._arena.populate(max(first, start), min(last, stop))

    def _from(self, start: int) -> Iterator[tuple[int, int]]:
        """Return the ranges that end after ``start``."""
        first = bisect_right(self._stops, start)
        return (self.ranges[at] for at in range(first, len(self.ranges)))

    def send(self, start: int, stop: int, window: torch.Tensor) -> list[Event]:
        """Enqueue the copies to devices; ``window`` has the bytes of the range."""
        del start, stop, window
        return []

    def views(self, start: int, stop: int, spare: Spare) -> Sequence[memoryview]:
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


class VerifyOnly(Placement):
    """Ranges that are read to compare their digests, and forgotten."""

    def prepare(self, start: int, stop: int) -> None:
        """Do nothing: spare memory is used again and again."""

    def views(self, start: int, stop: int, spare: Spare) -> Sequence[memoryview]:
        """Return spare memory."""
        return [spare.turn(stop - start)]


class PlannedPlacement(Placement):
    """What a `LoadPlan` wants of a segment, and where it says.

    Args:
        segment: Where the bytes are from.
        plan: Where they go.
        ports: Finds the port of a device.
    """

    def __init__(self, segment: Segment, plan: LoadPlan, ports: PortFor) -> None:
        super().__init__(segment, plan.ranges)
        copies = plan.copies(segment.arena, ports)
        assert copies is not None
        self._copies, self._kept = copies, plan.kept
        self._home = self._copies.in_place()
        self._fences = self._copies.fences()

    def prepare(self, start: int, stop: int) -> None:
        """Do nothing: a template's memory is mapped already."""

    def spare(self, nbytes: int) -> Spare:
        """Return spare memory, page-locked for the devices."""
        return Spare(nbytes, [*self._copies.ports.values()])

    def views(self, start: int, stop: int, spare: Spare) -> Sequence[memoryview]:
        """Return memory for ``[start, stop)``."""
        return self._home.split(start, spare.turn(stop - start), self._kept)

    def send(self, start: int, stop: int, window: torch.Tensor) -> list[Event]:
        """Enqueue the copies to devices; ``window`` has the bytes of the range."""
        return self._copies.load_device(start, stop, self._fences, window=window)

    def load(self) -> None:
        """Bring home what is in the arena already; wait for the devices."""
        events: list[Event] = []
        for start, stop in self.ranges:
            self._copies.load_host(start, stop)
            events += self._copies.load_device(start, stop, self._fences)
        for event in events:
            event.synchronize()


class Spare:
    """A reading thread's own memory; what devices copy from is two buffers in turn."""

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
        """Return the next buffer, when nothing is copied from it any more."""
        self._now = (self._now + 1) % len(self._arenas)
        self._wait(self._now)
        return self._arenas[self._now].buffer[:nbytes]

    def landed(self, placement: Placement, start: int, stop: int) -> None:
        """Send on to devices what is in the last `turn`."""
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
