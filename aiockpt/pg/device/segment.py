"""A data segment of which a part is on a device: where each byte is.

Entries that are on the device have a *home* there: a tensor of the state dict itself,
or a *block*, memory that holds one large entry or a few small neighbours. The others
are in host memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import NamedTuple, TypeAlias

import torch

from aiockpt.memory.copies import Backing, Backings, part_pairs, raw_bytes
from aiockpt.memory.device import Event, Pair
from aiockpt.pg.messages import LARGE_BYTES, TOGETHER_BYTES, Landings, Leavings, Memory

__all__ = ["Home", "Homes", "Segment", "in_blocks", "in_state", "pairs"]

# What a tensor of any dtype may start at; the segment itself starts at such.
_ALIGNMENT = 64


class Home(NamedTuple):
    """Where an entry starts on the device: a byte of a tensor's storage."""

    tensor: torch.Tensor
    first: int

    def bytes(self, nbytes: int) -> torch.Tensor:
        """Return that many of its bytes."""
        return raw_bytes(self.tensor, self.first, nbytes)


Homes: TypeAlias = dict[int, Home]
"""By the number of the entry; entries that are not here are in host memory."""

Bounds: TypeAlias = "tuple[array[int], array[int]]"
"""Where entries start and stop in the segment."""


def in_state(backings: Backings, bounds: Bounds, own: Iterable[int]) -> Homes:
    """Return the homes of those entries that the state has byte by byte."""
    homes: Homes = {}
    for entry in own:
        backing = backings[entry]
        nbytes = bounds[1][entry] - bounds[0][entry]
        if not backing.parts and backing.nbytes == nbytes:
            homes[entry] = _home(backing)
    return homes


def in_blocks(
    bounds: Bounds,
    entries: Iterable[int],
    *,
    apart: Set[int],
    allocate: Callable[[int], torch.Tensor],
) -> Homes:
    """Allocate homes; an entry that is ``apart`` shares its storage with no other."""
    homes: Homes = {}
    for group in _together(bounds, entries, apart):
        start, stop = bounds[0][group[0]], bounds[1][group[-1]]
        lead = start % _ALIGNMENT if len(group) > 1 else 0
        block = allocate(lead + stop - start)
        for entry in group:
            homes[entry] = Home(block, lead + bounds[0][entry] - start)
    return homes


def _together(
    bounds: Bounds, entries: Iterable[int], apart: Set[int]
) -> Iterator[list[int]]:
    """Yield neighbours that share a block."""
    group: list[int] = []
    for entry in sorted(entries):
        start, stop = bounds[0][entry], bounds[1][entry]
        alone = entry in apart or stop - start >= LARGE_BYTES
        if group and (
            alone
            or bounds[1][group[-1]] != start
            or stop - bounds[0][group[0]] > TOGETHER_BYTES
        ):
            yield group
            group = []
        group.append(entry)
        if alone:
            yield group
            group = []
    if group:
        yield group


def _home(backing: Backing) -> Home:
    storage = backing.tensor.untyped_storage()
    return Home(backing.tensor, backing.address - storage.data_ptr())


def pairs(
    backings: Backings, bounds: Bounds, homes: Homes, entries: Iterable[int]
) -> Iterator[Pair]:
    """Yield what entries have in their homes, and where the state has it."""
    for entry in entries:
        backing = backings[entry]
        place = homes[entry].bytes(bounds[1][entry] - bounds[0][entry])
        if backing.parts:
            yield from part_pairs(backing.parts, place)
        elif backing.nbytes:
            yield place[: backing.nbytes], _home(backing).bytes(backing.nbytes)


class Segment:
    """A data segment, in spans that are each one run of device memory, or host's.

    Its methods enqueue on the current stream, where they deal with the device.

    Attributes:
        after: What must have run before anything is received into it.
    """

    def __init__(
        self,
        device: torch.device,
        host: Memory,
        bounds: Bounds,
        homes: Mapping[int, Home],
    ) -> None:
        self.device = device
        self.after: Event | None = None
        self._host = host
        self._starts, self._stops = array("q"), array("q")
        self._homes: list[Home | None] = []
        for entry, (start, stop) in enumerate(zip(*bounds, strict=True)):
            if start < stop:
                self._append(start, stop, homes.get(entry))

    def _append(self, start: int, stop: int, home: Home | None) -> None:
        if self._homes and self._continues(start, home):
            self._stops[-1] = stop
            return
        self._starts.append(start)
        self._stops.append(stop)
        self._homes.append(home)

    def _continues(self, start: int, home: Home | None) -> bool:
        last = self._homes[-1]
        if home is None or last is None:
            return home is last
        run_on = last.first + start - self._starts[-1] == home.first
        return run_on and last.tensor is home.tensor

    def __repr__(self) -> str:
        return f"<Segment on {self.device} spans={len(self._homes)}>"

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return a range that lies in host memory."""
        return self._host.buffers(start, stop)

    def spans(
        self, start: int, stop: int
    ) -> Iterator[tuple[int, int, torch.Tensor | None]]:
        """Yield the parts of a range; None for the bytes of one in host memory."""
        span = bisect_right(self._starts, start) - 1
        while start < stop:
            last = min(self._stops[span], stop)
            home = self._homes[span]
            if home is None:
                yield start, last, None
            else:
                first = home.first + start - self._starts[span]
                yield start, last, raw_bytes(home.tensor, first, last - start)
            start, span = last, span + 1

    def gather(self, start: int, stop: int) -> torch.Tensor:
        """Return a range as bytes on the device: the memory itself, or a copy."""
        found = [
            Leavings(self._host).take(first, last).to(self.device)
            if data is None
            else data
            for first, last, data in self.spans(start, stop)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def scatter(self, start: int, stop: int, arrived: torch.Tensor) -> None:
        """Bring a range that has arrived on the device to its places."""
        places, sources = [], []
        for first, last, data in self.spans(start, stop):
            source = arrived[first - start : last - start]
            if data is None:
                landings = Landings(self._host)
                landings.expect(first, last).copy_(source)
                landings.settle(first)
            else:
                places.append(data)
                sources.append(source)
        if places:
            torch._foreach_copy_(places, sources)

    def room(self, nbytes: int) -> torch.Tensor:
        """Return memory for a message that has no place of its own."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def whole(self, start: int, stop: int) -> torch.Tensor | None:
        """Return a range that is one run of device memory; else None."""
        first = next(self.spans(start, stop))
        return first[2] if first[1] == stop else None
