"""Where the bytes of a checkpoint go: an arena, tensors' own memory, or a device.

A `Landing` is made of *places*, ranges of the data segment with their memory. What
lies between the places goes to spare memory of the reading thread, and is forgotten.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from aiockpt.memory.arena import Arena, view_of_address
from aiockpt.memory.device import Event, Port

__all__ = ["DeviceMemory", "Place", "PlacedLanding", "host_memory"]

_TURNS: Final = 2


@dataclass(frozen=True, slots=True)
class Sent:
    """A copy under way; it must be kept until its end."""

    end: Event
    source: torch.Tensor


class DeviceMemory:
    """A dense tensor on a device, as bytes that are copied to it."""

    def __init__(self, tensor: torch.Tensor, port: Port, after: Event) -> None:
        self.port = port
        self.after = after
        self._raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        offset = tensor.storage_offset() * tensor.itemsize
        storage = tensor.untyped_storage()
        self._raw.set_(storage, offset, (tensor.numel() * tensor.itemsize,), (1,))

    def put(self, start: int, view: memoryview) -> Sent:
        """Enqueue the copy of ``view`` to the bytes that begin at ``start``."""
        source = torch.frombuffer(view, dtype=torch.uint8)
        pairs = [(self._raw[start : start + view.nbytes], source)]
        return Sent(self.port.copy(pairs, after=self.after), source)


@dataclass(frozen=True, slots=True)
class Place:
    """A range of the data segment, and the memory that its bytes belong to."""

    start: int
    stop: int
    memory: memoryview | DeviceMemory


def address_of(view: memoryview) -> int:
    """Return where the bytes of a view are, of which there must be one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def host_memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense tensor in host memory; they keep it alive."""
    nbytes = tensor.numel() * tensor.itemsize
    return view_of_address(tensor.data_ptr(), nbytes, tensor)


class _Turning:
    """Two buffers in turn: one may still be copied to a device from."""

    def __init__(self, landing: PlacedLanding, nbytes: int) -> None:
        self._landing = landing
        self._arenas = [Arena(nbytes) for _ in range(_TURNS)]
        for arena in self._arenas:
            for port in landing.ports:
                arena.pin(port.pin)
        self._sent: list[list[Sent]] = [[] for _ in range(_TURNS)]
        self._now = 0

    def turn(self, nbytes: int) -> memoryview:
        """Return the other buffer, when nothing is copied from it any more."""
        self._now = (self._now + 1) % _TURNS
        self._wait(self._now)
        return self._arenas[self._now].buffer[:nbytes]

    def landed(self, start: int, stop: int) -> None:
        """Send on what is for devices."""
        if self._landing.ports:
            view = self._arenas[self._now].buffer
            self._sent[self._now] += self._landing.send(start, stop, view)

    def close(self) -> None:
        """Wait for the copies to devices; unmap."""
        for turn, arena in enumerate(self._arenas):
            self._wait(turn)
            arena.close()

    def _wait(self, turn: int) -> None:
        for each in self._sent[turn]:
            each.end.synchronize()
        self._sent[turn].clear()


class PlacedLanding:
    """A `rangefile.Landing` of places, which must be apart; in any order.

    ``ports`` are those of the devices that it sends to.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = sorted(places, key=lambda place: place.start)
        self._starts = [place.start for place in self._places]
        memories = [place.memory for place in self._places]
        ports = (each.port for each in memories if isinstance(each, DeviceMemory))
        self.ports = [*{id(port): port for port in ports}.values()]

    def __repr__(self) -> str:
        return f"<PlacedLanding places={len(self._places)}>"

    def ranges(self) -> Sequence[tuple[int, int]]:
        """Return the ranges that are wanted, neighbours joined."""
        found: list[tuple[int, int]] = []
        for place in self._places:
            if found and found[-1][1] == place.start:
                found[-1] = found[-1][0], place.stop
            elif place.start < place.stop:
                found.append((place.start, place.stop))
        return found

    def spare(self, nbytes: int) -> _Turning:
        """Return spare memory, page-locked for the devices."""
        return _Turning(self, nbytes)

    def lay(self, start: int, stop: int, spare: memoryview) -> list[memoryview]:
        """Return the memory of ``[start, stop)``."""
        found: list[memoryview] = []
        at = start
        for place in self._between(start, stop):
            if isinstance(place.memory, DeviceMemory):
                continue  # by way of the spare memory
            first, last = max(place.start, start), min(place.stop, stop)
            if at < first:
                found.append(spare[at - start : first - start])
            found.append(place.memory[first - place.start : last - place.start])
            at = last
        if at < stop:
            found.append(spare[at - start : stop - start])
        return found

    def send(self, start: int, stop: int, view: memoryview) -> list[Sent]:
        """Enqueue the copies to devices; ``view`` has the bytes from ``start`` on."""
        sent = []
        for place in self._between(start, stop):
            if isinstance(place.memory, DeviceMemory):
                first, last = max(place.start, start), min(place.stop, stop)
                piece = view[first - start : last - start]
                sent.append(place.memory.put(first - place.start, piece))
        return sent

    def pass_on(self, memory: memoryview) -> None:
        """Send to devices what lies in the data segment's own memory."""
        for place in self._places:
            if isinstance(place.memory, DeviceMemory):
                sent = place.memory.put(0, memory[place.start : place.stop])
                sent.end.synchronize()

    def fence(self) -> None:
        """Let copies to devices wait for what this thread has enqueued until now."""
        fences = {id(port): port.fence() for port in self.ports}
        for place in self._places:
            if isinstance(place.memory, DeviceMemory):
                place.memory.after = fences[id(place.memory.port)]

    def bring(self, memory: memoryview, start: int, stop: int) -> None:
        """Copy ``[start, stop)`` from the data segment's own memory to host places."""
        for place in self._between(start, stop):
            there = place.memory
            if isinstance(there, DeviceMemory) or there.obj is memory.obj:
                continue
            first, last = max(place.start, start), min(place.stop, stop)
            target = there[first - place.start : last - place.start]
            # Of a foreign function, so that the interpreter lock is free meanwhile.
            source = memory[first:last]
            ctypes.memmove(address_of(target), address_of(source), last - first)

    def _between(self, start: int, stop: int) -> Iterable[Place]:
        first = max(bisect_right(self._starts, start) - 1, 0)
        for index in range(first, len(self._places)):
            place = self._places[index]
            if place.start >= stop:
                return
            if place.stop > start:
                yield place
