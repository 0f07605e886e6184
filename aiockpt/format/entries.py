"""The entries of a header, column by column.

A checkpoint may have 100,000 tensors. One object for each, with its tuple of offsets,
would weigh 340 bytes; a row of columns weighs about 100. Checks and sums go through a
column inside a C function.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, starmap
from mmap import mmap
from operator import mod, neg, sub
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from aiockpt.errors import LocalProtocolError, RemoteProtocolError
from aiockpt.format.limits import raise_if_cancelled

INT64_MAX: Final = 2**63 - 1

Bytes: TypeAlias = bytes | mmap
"""A header. A large one has a map of its own, whose memory returns to the system."""

Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]

# No call that encodes or decodes more than this holds the interpreter lock.
_PIECE_BYTES: Final = 256 << 10
_PIECE_ENTRIES: Final = 2_000

# In canonical form these stand between two entries. In a string a quote is escaped, so
# only a name that ends like an entry has the first one too.
_BETWEEN: Final = b']},"'
_AFTER_NAME: Final = b':{"'


class Entry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One storage as safetensors sees it: a code, a shape, ``[start, stop)``."""

    dtype: str
    shape: Shape
    data_offsets: tuple[Count, Count]


class Entries:
    """Entries by number, in segment order; a column per field.

    Attributes:
        names: Their names.
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

    def sizes(self) -> array[int]:
        """Return how many bytes each entry has."""
        return array("q", map(sub, self.stops, self.starts))

    @property
    def nbytes(self) -> int:
        """The length of the data segment."""
        return self.stops[-1] if self.stops else 0


def lay_out(
    names: Sequence[str],
    codes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    aligns: Sequence[int],
) -> tuple[Sequence[int], Entries]:
    """Lay entries out without holes so that each is aligned: widest elements first.

    Each argument is a column, with one item for each entry.

    Args:
        names: Their names.
        codes: Their safetensors codes.
        shapes: Their shapes.
        sizes: Their bytes.
        aligns: The element size of the widest tensor in each.

    Returns:
        ``(order, entries)``: ``order[k]`` is where the k-th entry is in the columns.

    Raises:
        LocalProtocolError: the size of an entry is no multiple of its alignment, so
            that whatever follows it would not be aligned.
    """
    if any(rests := [*map(mod, sizes, aligns)]):
        odd = rests.index(max(rests))
        raise LocalProtocolError(
            f"entry {names[odd]!r}: {sizes[odd]} bytes are no multiple of "
            f"its alignment of {aligns[odd]}"
        )
    order: Sequence[int] = range(len(names))
    if len(set(aligns)) > 1:
        order = sorted(order, key=[*map(neg, aligns)].__getitem__)
        names = [*map(names.__getitem__, order)]
        codes = [*map(codes.__getitem__, order)]
        shapes = [*map(shapes.__getitem__, order)]
        sizes = [*map(sizes.__getitem__, order)]
    entries = Entries()
    entries.names, entries.dtypes, entries.shapes = [*names], [*codes], [*shapes]
    bounds = array("q", accumulate(sizes, initial=0))
    entries.starts, entries.stops = bounds[:-1], bounds[1:]
    return order, entries


def encode_entries(entries: Entries) -> Iterator[bytes]:
    """Yield the members of ``entries``, each behind a comma, in canonical form.

    Raises:
        UnicodeEncodeError: a name has a lone surrogate.
    """
    encode = msgspec.json.Encoder().encode
    for first in range(0, len(entries), _PIECE_ENTRIES):
        last = first + _PIECE_ENTRIES
        some = entries.between(first, last)
        members = dict(zip(entries.names[first:last], some, strict=True))
        yield b",%b" % encode(members)[1:-1]


def decode_entries(header: Bytes, start: int) -> Entries:
    """Return the entries of a header whose metadata ends before byte ``start``.

    Raises:
        msgspec.MsgspecError: malformed, or no entries.
        RemoteProtocolError: this is not the canonical form.
    """
    decode = msgspec.json.Decoder(dict[str, Entry]).decode
    encode = msgspec.json.Encoder().encode
    comma = header[start : start + 1] == b","
    entries = Entries()
    for piece in _cut(header, start + comma):
        raise_if_cancelled()
        found = decode(piece)
        # One checkpoint has one header: no duplicate keys, no second spelling.
        if encode(found) != piece:
            raise not_canonical()
        entries.extend(found)
    if comma != bool(len(entries)):
        raise not_canonical()
    return entries


def not_canonical() -> RemoteProtocolError:
    """Return the error that a header has another spelling than our writer's."""
    return RemoteProtocolError("the header is not in canonical form")


def _cut(header: Bytes, start: int) -> Iterator[bytes]:
    """Cut the members from ``start`` on into objects of about `_PIECE_BYTES`."""
    stop = start + _PIECE_BYTES
    while (found := header.find(_BETWEEN, stop)) >= 0:
        stop = found + len(_BETWEEN)
        if header[stop : stop + len(_AFTER_NAME)] == _AFTER_NAME:
            continue  # a name that ends like an entry does
        stop = found + 2
        yield b"{%b}" % header[start:stop]
        start = stop + 1
        stop = start + _PIECE_BYTES
    yield b"{%b" % header[start:].rstrip(b" ")
