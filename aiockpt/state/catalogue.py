"""What the sources of a checkpoint hold: one tree, and columns of tensor pieces.

A source is a data segment with a manifest: a file, a peer, or a sender in a process
group. Its tensors are *pieces*. The catalogue numbers the pieces of all sources, one
source after the other, so a single source keeps the numbers of its manifest. The tree
is that of all sources together. It names pieces by number, and has the plain values.

Nothing here makes a tensor, decodes a value, or reads a byte of a data segment. See
`aiockpt.state.reshard` for the tree of several sources.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.dtypes import itemsize, torch_name
from aiockpt.format.entries import Entries
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import CONJ, NEG, Manifest, TensorSpec, dense_stride
from aiockpt.format.paths import Node
from aiockpt.format.references import check_numbers, mentions, renumber
from aiockpt.state.distributed import LayoutReader


class Piece(NamedTuple):
    """A tensor of one source, and where its elements lie.

    Attributes:
        source: The number of the source.
        entry: The entry of that source's data segment.
        start: The first byte of the first element in the data segment.
        stop: The end of the last element.
        dtype: Torch's name of the dtype.
        shape: The shape of the local tensor.
        stride: Its strides, in elements.
        flags: The flags of the wire format's tensors.
    """

    source: int
    entry: int
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    flags: int


class Catalogue:
    """The pieces of all sources, in columns, and the tree that names them.

    Args:
        sources: The manifest of each source.
        limits: Bound the layouts of distributed tensors.
        odd: The values without an encoding of a source in memory; see `Segment`.
        tree: The tree of all sources together, whose tensor numbers are piece numbers;
            None: that of the only source.

    Attributes:
        sources: The manifest of each source.
        firsts: The number of each source's first piece, and the count of all pieces.
        odd: As the argument.
        tree: The tree of all sources together.
        has_views: Whether a piece may be another one than the whole of its entry.
        codes: The safetensors code of each plain piece, whose elements are those of its
            entry in this order; None for the others.
        shapes: The shape of each piece.
        layouts: Reads the layouts in the tree, and decodes each distinct one once.
    """

    def __init__(
        self,
        sources: Sequence[Manifest],
        *,
        limits: Limits,
        odd: Sequence[object] = (),
        tree: Node | None = None,
    ) -> None:
        self.sources, self.odd = sources, odd
        self.layouts = LayoutReader(limits)
        counts = [source.tensor_count for source in sources]
        self.firsts = [*accumulate(counts, initial=0)]
        self.has_views = any(source.views for source in sources)
        self.codes: Sequence[str | None] = sources[0].entries.dtypes
        self.shapes: Sequence[tuple[int, ...]] = sources[0].entries.shapes
        if len(sources) > 1 or self.has_views:  # else nothing is copied
            rows = [row for source in sources for row in _facts_of(source)]
            self.codes, self.shapes = [row[0] for row in rows], [row[1] for row in rows]
        self.tree = sources[0].tree if tree is None else tree
        self._stride = cache(dense_stride)  # most pieces have one of few shapes

    def __len__(self) -> int:
        return self.firsts[-1]

    def source_of(self, number: int) -> int:
        """Return the source of a piece."""
        return bisect_right(self.firsts, number) - 1

    def reach(self, number: int) -> tuple[int, int, int]:
        """Return the source of a piece, its first byte there, and its end."""
        source = self.source_of(number)
        entries, entry = self.sources[source].entries, number - self.firsts[source]
        if entry < len(entries):
            return source, entries.starts[entry], entries.stops[entry]
        piece = self.piece(number)
        return source, piece.start, piece.stop

    def entries(self) -> list[range]:
        """Return the numbers of the pieces that are whole entries."""
        firsts = zip(self.firsts, self.sources, strict=False)
        return [range(first, first + len(each.entries)) for first, each in firsts]

    def numbers_of(self, source: int) -> range:
        """Return the numbers of a source's pieces."""
        return range(self.firsts[source], self.firsts[source + 1])

    def entry_of(self, number: int) -> tuple[int, int]:
        """Return the source and the entry of a piece."""
        source = self.source_of(number)
        return source, self.sources[source].storage_of(number - self.firsts[source])

    def whole_entry(self, number: int) -> int:
        """Return the number of the piece that is the whole entry of a piece."""
        source, entry = self.entry_of(number)
        return self.firsts[source] + entry

    def moved(self, source: int, node: Node) -> Node:
        """Return a node of a source's own tree, with the numbers of its pieces.

        Raises:
            RemoteProtocolError: it names a tensor that the source lacks.
        """
        if not isinstance(node, list):
            return node
        every = self.numbers_of(source)
        for mention in mentions(node):
            check_numbers(mention.numbers, len(every))
        node = deepcopy(node)
        try:
            renumber(node, every)
        except LookupError as error:  # a row that `mentions` has not taken for one
            raise RemoteProtocolError("malformed tree: a row of tensors") from error
        return node

    def piece(self, number: int) -> Piece:
        """Return a piece by its number.

        Raises:
            RemoteProtocolError: there is none. Numbers come from a peer's tree.
        """
        check_numbers([number], len(self))
        source = self.source_of(number)
        manifest = self.sources[source]
        entries, entry = manifest.entries, number - self.firsts[source]
        if entry < len(entries):  # most are whole entries
            where = source, entry, entries.starts[entry], entries.stops[entry]
            shape = entries.shapes[entry]
            facts = torch_name(entries.dtypes[entry]), shape, self._stride(shape), 0
            return Piece(*where, *facts)
        spec = manifest.tensor(number - self.firsts[source])
        size, reach = itemsize(spec.dtype), 0
        if 0 not in spec.shape:
            pairs = zip(spec.shape, spec.stride, strict=True)
            reach = 1 + sum((each - 1) * step for each, step in pairs)
        start = entries.starts[spec.storage] + spec.offset * size
        stop = start + reach * size
        facts = spec.dtype, spec.shape, spec.stride, spec.flags
        return Piece(source, spec.storage, start, stop, *facts)


def in_memory(
    entries: Entries, views: Sequence[TensorSpec] = (), tree: Node = None
) -> Manifest:
    """Return the manifest of a data segment that lies in no file."""
    return Manifest(
        step=0,
        snapshot_id="",
        chunk_bytes=max(entries.nbytes, 1),
        algorithm="",
        digests=(),
        entries=entries,
        views=(*views,),
        tree=tree,
        header=b"",
        header_bytes=0,
    )


def _facts_of(source: Manifest) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    """Yield the code and the shape of each tensor of a source."""
    codes, shapes = source.entries.dtypes, source.entries.shapes
    yield from zip(codes, shapes, strict=True)
    for view in source.views:
        code, shape = codes[view.storage], shapes[view.storage]
        plain = (torch_name(code), shape, dense_stride(shape), 0, 0)
        lazy = view.flags & (CONJ | NEG)
        facts = view.dtype, view.shape, view.stride, view.offset, lazy
        yield code if facts == plain else None, view.shape
