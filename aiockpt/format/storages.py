"""The storages that want places in a data segment, in columns.

There may be 100,000, and what is asked of all of them is asked of a column, inside a C
function. A :class:`Storage` is made where one is looked at.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Self

import msgspec

__all__ = ["Storage", "Storages"]


class Storage(msgspec.Struct, frozen=True, gc=False):
    """A storage that wants a place in the segment.

    ``align`` is the element size of the widest tensor in it; ``nbytes`` must be a
    multiple of it, or whatever follows would not be aligned.
    """

    name: str
    dtype_code: str
    shape: tuple[int, ...]
    nbytes: int
    align: int


@dataclass(frozen=True, slots=True, repr=False)
class Storages:
    """Storages by number; a column per field of a `Storage`."""

    names: Sequence[str]
    codes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    sizes: array[int]
    aligns: Sequence[int]

    @classmethod
    def of(cls, storages: Iterable[Storage]) -> Self:
        """Return the columns of ``storages``."""
        rows = [*storages]
        return cls(
            [*map(attrgetter("name"), rows)],
            [*map(attrgetter("dtype_code"), rows)],
            [*map(attrgetter("shape"), rows)],
            array("q", map(attrgetter("nbytes"), rows)),
            [*map(attrgetter("align"), rows)],
        )

    def __repr__(self) -> str:
        return f"<Storages {len(self)}>"

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> Storage:
        name, code, shape = self.names[number], self.codes[number], self.shapes[number]
        return Storage(name, code, shape, self.sizes[number], self.aligns[number])

    def __iter__(self) -> Iterator[Storage]:
        return map(self.__getitem__, range(len(self)))

    def taken(self, order: Sequence[int]) -> Storages:
        """Return those of the given numbers, in that order."""
        if order == range(len(self)):
            return self
        return Storages(
            [*map(self.names.__getitem__, order)],
            [*map(self.codes.__getitem__, order)],
            [*map(self.shapes.__getitem__, order)],
            array("q", map(self.sizes.__getitem__, order)),
            [*map(self.aligns.__getitem__, order)],
        )
