"""Where the bytes of entries are in a state dict, in columns.

There may be 100,000 entries, and an object for each would weigh as much as a small
tensor. So numbers lie in arrays, and a :class:`Backing` is made where one is asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import msgspec
import torch

__all__ = ["Backing", "Backings", "Part"]

_DEVICE: Final = attrgetter("device")

# Tensors that C functions look at in a row, with the interpreter lock held.
_SLICE: Final = 2000


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor whose elements lie in an entry with another stride, or between others.

    ``stride`` and ``offset`` count elements, the latter from the entry's start.
    """

    tensor: torch.Tensor
    stride: tuple[int, ...]
    offset: int


class Backing(msgspec.Struct, frozen=True, gc=False):
    """Where the bytes of one entry are in the state dict.

    Attributes:
        tensor: A tensor of the group; it keeps the storage alive.
        address: Of the first byte, on the tensor's device.
        nbytes: Bytes to take from there; the entry may be a few bytes longer.
        parts: What to copy, element by element; if empty, the bytes as they are.
    """

    tensor: torch.Tensor
    address: int
    nbytes: int
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Backings:
    """The backing of each entry; ``parts`` has only those that are not empty."""

    tensors: Sequence[torch.Tensor]
    addresses: array[int]
    sizes: array[int]
    parts: Mapping[int, tuple[Part, ...]]

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, entry: int) -> Backing:
        parts = self.parts.get(entry, ())
        tensor, address = self.tensors[entry], self.addresses[entry]
        return Backing(tensor, address, self.sizes[entry], parts)

    def __iter__(self) -> Iterator[Backing]:
        return map(self.__getitem__, range(len(self)))

    def devices(self) -> set[torch.device]:
        """Return where they are, some tensors at a time: a call keeps the lock."""
        found: set[torch.device] = set()
        for start in range(0, len(self), _SLICE):
            found.update(map(_DEVICE, self.tensors[start : start + _SLICE]))
        return found

    def taken(self, order: Sequence[int]) -> Backings:
        """Return those of the given entries, in that order; nothing for a -1."""
        if order == range(len(self)):
            return self
        nothing = torch.empty(0)
        return Backings(
            [nothing if entry < 0 else self.tensors[entry] for entry in order],
            _taken(self.addresses, order),
            _taken(self.sizes, order),
            self._taken_parts(order) if self.parts else {},
        )

    def _taken_parts(self, order: Iterable[int]) -> dict[int, tuple[Part, ...]]:
        return {
            place: self.parts[entry]
            for place, entry in enumerate(order)
            if entry in self.parts
        }


def _taken(column: array[int], order: Iterable[int]) -> array[int]:
    found = (0 if entry < 0 else column[entry] for entry in order)
    return array(column.typecode, found)
