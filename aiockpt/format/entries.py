"""The entries of a header, column by column.

A checkpoint may have 100,000 tensors. As one object each, with its tuple of offsets,
their entries would weigh 340 bytes apiece; as columns they weigh about 100, and what
is checked, or computed, goes through a column inside a C function.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from itertools import starmap
from mmap import mmap
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

__all__ = ["INT64_MAX", "Bytes", "Count", "Entries", "Entry", "Shape"]

INT64_MAX: Final = 2**63 - 1

Bytes: TypeAlias = bytes | mmap
"""A header: in a map of its own where it is large, which goes back to the system."""

Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]


class Entry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One storage as safetensors sees it: a code, a shape, ``[start, stop)``."""

    dtype: str
    shape: Shape
    data_offsets: tuple[Count, Count]


class Entries:
    """Entries by number, in segment order; a column per field.

    Attributes:
        names: Of the storages.
        dtypes: Their safetensors codes.
        shapes: Their shapes; equal ones are mostly one object.
        starts: The first byte of each in the data segment.
        stops: The byte after the last one of each.
    """

    __slots__ = ("dtypes", "names", "shapes", "starts", "stops")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.dtypes: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.starts = array("q")
        self.stops = array("q")

    @classmethod
    def of(cls, entries: Mapping[str, Entry]) -> Entries:
        """Return the columns of ``entries``."""
        columns = cls()
        columns.extend(entries)
        return columns

    def extend(self, entries: Mapping[str, Entry]) -> None:
        """Append ``entries``."""
        each = entries.values()
        codes = {entry.dtype: entry.dtype for entry in each}
        shapes = {entry.shape: entry.shape for entry in each}
        self.names += entries
        self.dtypes += [codes[entry.dtype] for entry in each]
        self.shapes += [shapes[entry.shape] for entry in each]
        self.starts.extend([entry.data_offsets[0] for entry in each])
        self.stops.extend([entry.data_offsets[1] for entry in each])

    def __repr__(self) -> str:
        return f"<Entries {len(self)} bytes={self.nbytes}>"

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> Entry:
        offsets = self.starts[number], self.stops[number]
        return Entry(self.dtypes[number], self.shapes[number], offsets)

    def __iter__(self) -> Iterator[Entry]:
        return self.between(0, len(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entries):
            return NotImplemented
        return all(getattr(self, n) == getattr(other, n) for n in self.__slots__)

    __hash__ = None  # type: ignore[assignment]  # lists are not hashable either

    def between(self, first: int, last: int) -> Iterator[Entry]:
        """Yield the entries ``[first, last)``."""
        offsets = zip(self.starts[first:last], self.stops[first:last], strict=True)
        dtypes, shapes = self.dtypes[first:last], self.shapes[first:last]
        return starmap(Entry, zip(dtypes, shapes, offsets, strict=True))

    @property
    def nbytes(self) -> int:
        """The length of the data segment."""
        return self.stops[-1] if self.stops else 0
