"""Copies between a state dict's own memory and the data segment, in both directions.

`Backings` says where the bytes of each entry are in the state dict. `CopyPlan` pairs
them with their position in the segment and copies either way. Host memory moves as raw
bytes. Bytes of a device go through its :class:`~aiockpt.memory.device.Port`. The
*parts* of a backing move element by element. `InPlace` is the segment without a copy:
the state dict's own memory, wherever that is possible.

A state dict may have 100,000 entries, and an object for each would weigh as much as a
small tensor. So numbers lie in arrays (*columns*), on which torch computes without the
interpreter lock.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
import torch

from aiockpt.memory.arena import Arena, view_of_address
from aiockpt.memory.device import (
    Event,
    Fences,
    Pair,
    PortFor,
    Scattered,
    checked,
)
from aiockpt.memory.held import TENSORS_PER_CALL, HeldMemory, picked

T = TypeVar("T")

# Releasing the interpreter lock costs more than copying a few pages.
_KEEP_LOCK_BELOW_BYTES: Final = 256 << 10
_move_large = ctypes.memmove
_move_small = ctypes.PyDLL(None).memmove
_move_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_small.restype = ctypes.c_void_p

_DEVICE: Final = attrgetter("device")
_VERSION: Final = attrgetter("_version")

# Tensors of a device that are smaller than the first number travel together, in
# batches of at most the second.
_BATCHED_BELOW_BYTES: Final = 256 << 10
_MAX_BATCH_BYTES: Final = 4 << 20

# An entry's number, its address in host memory (0: not in host memory), its first byte
# in the segment, the end of the bytes that the state dict has, and the entry's end.
_Row: TypeAlias = tuple[int, int, int, int, int]

# The first byte and the end of a tensor in the segment, and its bytes on the device.
_Piece: TypeAlias = tuple[int, int, torch.Tensor]

# Torch cannot copy some dtypes, and copying a float may change a NaN; words are safe.
WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A dtype without rules for its elements, by their bytes."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor whose elements have another stride in the entry, or lie between others.

    ``stride`` and ``offset`` count elements; ``offset`` counts from the entry's start.
    """

    tensor: torch.Tensor
    stride: tuple[int, ...]
    offset: int


class Backing(msgspec.Struct, frozen=True, gc=False):
    """Where the bytes of one entry are in the state dict.

    Attributes:
        tensor: A tensor of the group; it keeps the storage alive.
        address: The address of the first byte, on the tensor's device.
        nbytes: How many bytes to copy; the entry may be a few bytes longer.
        parts: The parts to copy element by element; if empty, copy the raw bytes.
    """

    tensor: torch.Tensor
    address: int
    nbytes: int
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Backings:
    """The backing of each entry, in columns.

    Attributes:
        held: A tensor of each entry, whose storage has the bytes.
        addresses: The address of each entry's first byte.
        sizes: How many bytes of each entry there are.
        parts: The parts of the entries that have some.
        inner: The memory of these parts.
    """

    held: HeldMemory
    addresses: array[int]
    sizes: array[int]
    parts: Mapping[int, tuple[Part, ...]]
    inner: Mapping[int, HeldMemory]

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """A tensor of each entry."""
        return self.held.tensors

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, entry: int) -> Backing:
        parts = self.parts.get(entry, ())
        tensor, address = self.tensors[entry], self.addresses[entry]
        return Backing(tensor, address, self.sizes[entry], parts)

    def __iter__(self) -> Iterator[Backing]:
        return map(self.__getitem__, range(len(self)))

    def devices(self) -> set[torch.device]:
        """Return all devices of the tensors; releases the interpreter lock between."""
        found: set[torch.device] = set()
        for start in range(0, len(self), TENSORS_PER_CALL):
            found.update(map(_DEVICE, self.tensors[start : start + TENSORS_PER_CALL]))
        return found

    def taken(self, order: Sequence[int]) -> Backings:
        """Return the backings of the given entries, in order; -1 gives an empty one."""
        held, parts = self.held.taken(order), self.parts
        rows = [*enumerate(order)] if parts else []
        alike = self.addresses is self.held.addresses  # one column may be enough
        return Backings(
            held,
            held.addresses if alike else picked(self.addresses, order),
            picked(self.sizes, order),
            {at: parts[entry] for at, entry in rows if entry in parts},
            {at: self.inner[entry] for at, entry in rows if entry in parts},
        )

    def filled(self, entries: Iterable[int], others: Backings) -> Backings:
        """Return these backings, with those of ``entries`` from others."""
        both = range(len(self)), range(len(self), 2 * len(self))
        order, chosen = [*both[0]], {*entries}
        for entry in chosen:
            order[entry] = both[1][entry]

        def joined(mine: Mapping[int, T], theirs: Mapping[int, T]) -> dict[int, T]:
            return {**mine, **{e: one for e, one in theirs.items() if e in chosen}}

        return Backings(
            self.held.beside(others.held).taken(order),
            array("Q", map((self.addresses + others.addresses).__getitem__, order)),
            array("Q", map((self.sizes + others.sizes).__getitem__, order)),
            joined(self.parts, others.parts),
            joined(self.inner, others.inner),
        )

    def check(self, first: int, last: int, names: Sequence[str]) -> None:
        """Check that the entries ``[first, last)`` still have the memory they had.

        Call it right before the memory is read or written.

        Raises:
            LocalProtocolError: a tensor has other memory.
        """
        self.held.check(names.__getitem__, first, last)
        if self.inner:
            for entry in range(first, min(last, len(self))):
                if entry in self.inner:
                    self.inner[entry].check(partial(_name_of, names, entry))


def _name_of(names: Sequence[str], entry: int, _: int) -> str:
    return names[entry]


def _move(target: int, source: int, nbytes: int) -> None:
    (_move_small if nbytes < _KEEP_LOCK_BELOW_BYTES else _move_large)(
        target, source, nbytes
    )


def numbers(column: array[int]) -> torch.Tensor:
    """Return a column of 64-bit numbers as a tensor over its memory: ``int64``, [n].

    The column must not grow while the tensor is used.
    """
    if not column:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(column, dtype=torch.int64)


def column(found: torch.Tensor, typecode: str = "q") -> array[int]:
    """Return a new column with these numbers."""
    own = array(typecode, bytes(8 * found.numel()))
    numbers(own).copy_(found)
    return own


def physical(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of the memory as words that torch can copy."""
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)  # noqa: SLF001 - torch has no public way
    return tensor.view(WORDS.get(tensor.itemsize, tensor.dtype))


def part_pairs(parts: Iterable[Part], entry: torch.Tensor) -> Iterator[Pair]:
    """Yield each part's elements as a pair: in the entry's bytes, in the state dict."""
    for part in parts:
        tensor = physical(part.tensor)
        there = entry.view(tensor.dtype)
        first = int(there.storage_offset()) + part.offset
        yield there.as_strided(tensor.shape, part.stride, first), tensor


def once(destination: torch.Tensor, source: torch.Tensor) -> Pair:
    """Narrow expanded dimensions to one element, because torch cannot write them."""
    for dim, stride in enumerate(destination.stride()):
        if not stride:
            destination, source = (
                destination.narrow(dim, 0, 1),
                source.narrow(dim, 0, 1),
            )
    return destination, source


def mark_changed(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that the memory of these tensors is written without it."""
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    for start in range(0, len(counted), TENSORS_PER_CALL):
        torch.autograd.graph.increment_version(
            counted[start : start + TENSORS_PER_CALL]
        )


def write_counts(tensors: Iterable[torch.Tensor]) -> array[int]:
    """Return how often torch has written to each tensor, except inference tensors."""
    live, found = [*tensors], array("q")
    for start in range(0, len(live), TENSORS_PER_CALL):
        some = live[start : start + TENSORS_PER_CALL]
        if any(map(torch.Tensor.is_inference, some)):  # they do not count writes
            some = [tensor for tensor in some if not tensor.is_inference()]
        found.extend(map(_VERSION, some))
    return found


def raw_bytes(tensor: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a tensor's storage, counted from the storage's start."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), offset, (nbytes,), (1,))


class Reaches(Protocol):
    """Half-open byte ranges of a data segment, in ascending order, and their names."""

    @property
    def names(self) -> Sequence[str]:
        """Their names."""

    @property
    def starts(self) -> array[int]:
        """The first byte of each."""

    @property
    def stops(self) -> array[int]:
        """The byte after the last one of each."""


class Spans(NamedTuple):
    """Byte ranges of a data segment that are no whole entries; see `Reaches`."""

    names: Sequence[str]
    starts: array[int]
    stops: array[int]


class _Rows:
    """Where each entry is in the segment and in host memory, in columns.

    Args:
        backings: The state dict's memory.
        entries: The entries of the segment.
        away: The devices whose memory is not the host's.
    """

    def __init__(
        self,
        backings: Backings,
        entries: Reaches,
        *,
        away: Collection[torch.device],
    ) -> None:
        self.starts, self.stops = entries.starts, entries.stops
        self._backings, self._names = backings, entries.names
        self.held = column(numbers(self.starts) + numbers(backings.sizes))
        own = numbers(backings.sizes) != 0
        self.addresses = column(numbers(backings.addresses) * own, "Q")
        for entry, tensor in enumerate(backings.tensors if away else ()):
            if tensor.device in away:
                self.addresses[entry] = 0
        for entry in backings.parts:
            self.held[entry] = self.stops[entry]
            self.addresses[entry] = 0

    def check(self, first: int, last: int) -> None:
        """Check that entries still have their memory; see `Backings.check`."""
        self._backings.check(first, last, self._names)

    def check_range(self, start: int, stop: int) -> range:
        """Return the entries that overlap a range, after a check of their memory."""
        lowest = max(bisect_right(self.starts, start) - 1, 0)
        near = range(lowest, bisect_left(self.starts, stop, lowest))
        self.check(near.start, near.stop)
        return near

    def between(self, start: int, stop: int) -> list[_Row]:
        """Return the entries that overlap a range, clipped to it; use them at once.

        Raises:
            LocalProtocolError: a tensor of them has other memory than it had.
        """
        near = self.check_range(start, stop)
        columns = (self.addresses, self.starts, self.held, self.stops)
        some = (column[near.start : near.stop] for column in columns)
        rows = [*zip(near, *some, strict=True)]
        if rows:
            entry, address, first, held, last = rows[-1]
            rows[-1] = entry, address, first, min(held, stop), min(last, stop)
            entry, address, first, held, last = rows[0]
            address += max(start - first, 0) if address else 0
            first = max(first, start)
            rows[0] = entry, address, first, max(held, first), max(last, first)
        return rows

    def span(self) -> tuple[int, int]:
        """Return the lowest and the highest address of the state's host memory."""
        addresses = numbers(self.addresses)
        live = addresses != 0
        if not bool(live.any()):
            return 0, 0
        stops = addresses + numbers(self.held) - numbers(self.starts)
        return int(addresses[live].min()), int(stops[live].max())


class CopyPlan:
    """The copies between ``backings`` and an arena that holds the data segment.

    Args:
        backings: The state dict's memory, one per entry.
        entries: The entries; a backing may be a few bytes shorter than its entry.
        arena: The segment; it and the backings must outlive every copy.
        port_for: Returns the port of a backing's device.
    """

    def __init__(
        self,
        backings: Backings,
        entries: Reaches,
        *,
        arena: Arena,
        port_for: PortFor,
    ) -> None:
        self._backings = backings
        self._arena = arena
        self._whole: torch.Tensor | None = None
        found = {device: port_for(device) for device in backings.devices()}
        self.ports = {device: port for device, port in found.items() if port}
        self._rows = _Rows(backings, entries, away=self.ports.keys())

    @property
    def has_host(self) -> bool:
        """Whether bytes of the state are in host memory."""
        return bool(numbers(self._rows.addresses).any())

    def pin(self) -> None:
        """Page-lock the arena for the devices, until it is closed."""
        for port in self.ports.values():
            self._arena.pin(port.pin)

    def fences(self, made: Fences = MappingProxyType({})) -> Fences:
        """Return an event of each device for its copies to wait for.

        Args:
            made: The caller's marks. A device without one is marked here, on the
                calling thread's current stream.

        Raises:
            Exception: a device has failed, with this error.
        """
        return {
            device: checked(made[device]) if device in made else port.fence()
            for device, port in self.ports.items()
        }

    def stage_host(self, start: int, stop: int) -> None:
        """Copy the host bytes and the padding of ``[start, stop)`` into the arena."""
        for _ in self.staged(start, stop):
            pass

    def staged(self, start: int, stop: int, block: int = sys.maxsize) -> Iterator[int]:
        """Do what `stage_host` does; yield the position every ``block`` bytes."""
        arena, done = self._arena.address, start
        for _, address, first, held, last in self._rows.between(start, stop):
            for at in range(first, held, block) if address else ():
                nbytes = min(block, held - at)
                _move(arena + at, address + at - first, nbytes)
                if at + nbytes - done >= block:
                    done = at + nbytes
                    yield done
            if held < last:
                ctypes.memset(arena + held, 0, last - held)
        if done < stop:
            yield stop

    def load_host(self, start: int, stop: int) -> None:
        """Copy the host bytes of ``[start, stop)`` from the arena into the state."""
        arena = self._arena.address
        for _, address, first, held, _ in self._rows.between(start, stop):
            if address:
                _move(address, arena + first, held - first)

    def stage_device(self, start: int, stop: int, after: Fences) -> list[Event]:
        """Enqueue the copies of devices' bytes in ``[start, stop)`` to the arena."""
        return [
            port.copy(self._on_device(device, start, stop), after=after[device])
            for device, port in self.ports.items()
        ]

    def load_device(
        self,
        start: int,
        stop: int,
        after: Fences,
        *,
        window: torch.Tensor | None = None,
    ) -> list[Event]:
        """Enqueue the copies of ``[start, stop)`` to the devices.

        The bytes come from ``window``, which holds just these and must outlive the
        copies; None: from the arena.
        """
        events = []
        for device, port in self.ports.items():
            found = self._on_device(device, start, stop, window)
            events.append(port.copy(((b, a) for a, b in found), after=after[device]))
        return events

    def drain(self) -> None:
        """Block until all device copies have ended, so that memory may be freed."""
        for port in self.ports.values():
            port.synchronize()

    def stage_parts(self, after: Fences) -> list[Event]:
        """Copy all element-by-element parts into the arena.

        The memory between the elements is not copied, so it reads as zeros.
        """
        remote: dict[torch.device, list[Pair]] = {}
        for entry, parts in self._backings.parts.items():
            self._rows.check(entry, entry + 1)
            start, stop = self._rows.starts[entry], self._rows.stops[entry]
            entry_bytes = self._host(start, stop - start).zero_()
            for pair in part_pairs(parts, entry_bytes):
                host, tensor = once(*pair)
                if tensor.device in self.ports:
                    remote.setdefault(tensor.device, []).append((host, tensor))
                else:
                    host.copy_(tensor)
        return [
            self.ports[device].copy(there, after=after[device])
            for device, there in remote.items()
        ]

    def discard(self, kept: Sequence[int]) -> None:
        """Free the arena's pages, but for those of the ``kept`` entries."""
        first = last = 0
        rows = zip(self._rows.starts, self._rows.stops, kept, strict=True)
        for start, stop, stays in rows:
            if stays:
                self._arena.discard(first, start)
                first = stop
            last = stop
        self._arena.discard(first, last)

    def in_place(self) -> InPlace:
        """Return the segment as memory: the state's own memory where possible.

        The arena holds padding, the bytes of devices, and the parts that are copied
        element by element. ``load_device`` copies the bytes of devices to the state.
        """
        return InPlace(self._backings, self._rows, self._arena)

    def _on_device(
        self,
        device: torch.device,
        start: int,
        stop: int,
        window: torch.Tensor | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | Scattered]]:
        """Yield the bytes of a range that a device has: in host memory, and there."""
        backings, starts = self._backings, self._rows.starts
        run: list[_Piece] = []
        end = -1  # of a small entry: where a small one that follows it begins
        for entry, _, first, held, last in self._rows.between(start, stop):
            tensor = backings.tensors[entry]
            if first >= held or tensor.device != device or entry in backings.parts:
                continue
            small = held - first < _BATCHED_BELOW_BYTES
            if run and not (
                small and first == end and held - run[0][0] <= _MAX_BATCH_BYTES
            ):
                yield self._together(run, start, window)
                run = []
            offset = backings.addresses[entry] - tensor.untyped_storage().data_ptr()
            offset += first - starts[entry]
            run.append((first, held, raw_bytes(tensor, offset, held - first)))
            end = last if small else -1
        if run:
            yield self._together(run, start, window)

    def _together(
        self, run: Sequence[_Piece], start: int, window: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | Scattered]:
        first, last = run[0][0], run[-1][1]
        if window is None:
            host = self._host(first, last - first)
        else:
            host = window[first - start : last - start]
        if len(run) == 1:
            return host, run[0][2]
        sizes = list[int]()
        for (begin, held, _), (following, _, _) in pairwise((*run, (last, last, host))):
            sizes += (held - begin, following - held)
        return host, Scattered([raw for _, _, raw in run], sizes)

    def _host(self, start: int, nbytes: int) -> torch.Tensor:
        if self._whole is None:
            self._whole = torch.frombuffer(self._arena.buffer, dtype=torch.uint8)
        return self._whole[start : start + nbytes]


class InPlace:
    """The data segment in the state dict's own memory, where that is possible.

    One window spans all host memory of the state, and only slices of the state's own
    bytes leave this class. A view of each tensor would weigh more than a small tensor.
    """

    def __init__(self, backings: Backings, rows: _Rows, arena: Arena) -> None:
        self._backings, self._rows, self._arena = backings, rows, arena
        self._base, stop = rows.span()
        self._window = view_of_address(self._base, stop - self._base, backings)
        self._versions: array[int] | None = None

    def watch(self) -> None:
        """Remember the write counts, for `changed`."""
        self._versions = self._count_writes()

    def changed(self) -> bool:
        """Say whether torch has written to one of the tensors since."""
        return self._versions is not None and self._versions != self._count_writes()

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the writable views that hold ``[start, stop)``, in order."""
        found, at = list[memoryview](), start
        for _, address, first, held, last in self._rows.between(start, stop):
            if at < first:
                found += self._arena.buffers(at, first)
            own = held if address else first
            if first < own:
                found.append(self._own(address, own - first))
            if own < last:
                found += self._arena.buffers(own, last)
            at = last
        if at < stop:
            found += self._arena.buffers(at, stop)
        return found

    def check(self, start: int, stop: int) -> None:
        """Check that the memory of ``[start, stop)`` is still the state dict's.

        Raises:
            LocalProtocolError: a tensor has other memory.
        """
        self._rows.check_range(start, stop)

    def split(
        self, start: int, spare: memoryview, kept: Sequence[int]
    ) -> list[memoryview]:
        """Return memory for the bytes from ``start`` on, as many as ``spare`` has.

        The bytes of a ``kept`` entry go to the arena. The bytes of other entries go to
        the state's own host memory. All other bytes, such as those for a device, go to
        ``spare``.
        """
        stop = start + spare.nbytes
        found: list[memoryview] = []
        at = start
        for entry, address, first, held, last in self._rows.between(start, stop):
            own = last if kept[entry] else held if address else first
            if first >= own:
                continue
            if at < first:
                found.append(spare[at - start : first - start])
            if kept[entry]:
                found += self._arena.buffers(first, own)
            else:
                found.append(self._own(address, own - first))
            at = own
        if at < stop:
            found.append(spare[at - start :])
        return found

    def _own(self, address: int, nbytes: int) -> memoryview:
        first = address - self._base
        return self._window[first : first + nbytes]

    def _count_writes(self) -> array[int]:
        """Return how often torch has written to each tensor that is used in place."""
        return write_counts(compress(self._backings.tensors, self._rows.addresses))
