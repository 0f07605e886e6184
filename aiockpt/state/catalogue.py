"""What the sources of a checkpoint hold: one tree, and columns of tensor pieces.

A source is a data segment with a manifest: a file, a peer, or a sender in a process
group. Its tensors are *pieces*. The catalogue numbers the pieces of all sources, one
source after the other, so a single source keeps the numbers of its manifest. The tree
is that of all sources together. It names pieces by number, and has the plain values.

Nothing here makes a tensor, decodes a value (but keys of dicts), or reads a byte of a
data segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate
from typing import Any, Final, TypeAlias, cast

import msgspec

from aiockpt.errors import LimitExceededError, RemoteProtocolError, StateDictError
from aiockpt.format.dtypes import itemsize, torch_name
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import CONJ, NEG, Manifest, dense_stride
from aiockpt.format.paths import Node, Path, Step
from aiockpt.format.references import check_numbers, mentions, renumber
from aiockpt.format.tree import decode_tree
from aiockpt.state.distributed import LayoutReader
from aiockpt.state.leaves import registry
from aiockpt.state.mesh import ShardRuns, shard_of, whole
from aiockpt.state.selection import below
from aiockpt.state.sharding import LAYOUTS, DTensorLayout, Layout

_COLLISIONS: Final = 1000  # keys of equal hashes, which take time to compare
_LONG_BITS: Final = 4096
_KEY_BYTES: Final = 1 << 20  # a key may take so much memory

Items: TypeAlias = dict[object, Node]
"""The items of a container by key or position; a key without a decoder is a `Step`."""


@dataclass(frozen=True, slots=True)
class Piece:
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

    def shard(self, layout: Layout | None = None) -> ShardRuns | None:
        """Return which elements of the full tensor these are; None if there are none.

        Args:
            layout: The layout of the DTensor whose local tensor this is.
        """
        return (
            shard_of(layout) if isinstance(layout, DTensorLayout) else whole(self.shape)
        )


class Catalogue:
    """The pieces of all sources, in columns, and the tree that names them.

    Args:
        sources: The manifest of each source.
        limits: Bound the layouts of distributed tensors.
        odd: The values without an encoding of a source in memory; see `Segment`.

    Attributes:
        sources: The manifest of each source.
        odd: As the argument.
        tree: The united tree, whose tensor numbers are piece numbers.
        has_views: Whether a piece may be another one than the whole of its entry.
        codes: The safetensors code of each plain piece, whose elements are those of its
            entry in this order; None for the others.
        shapes: The shape of each piece.
        layouts: Reads the layouts in the tree, and decodes each distinct one once.

    Raises:
        RemoteProtocolError: a tree names a tensor that its manifest lacks.
        StateDictError: two sources have different things at one path.
    """

    def __init__(
        self, sources: Sequence[Manifest], *, limits: Limits, odd: Sequence[object] = ()
    ) -> None:
        self.sources, self.odd = sources, odd
        self.layouts = LayoutReader(limits)
        counts = [source.tensor_count for source in sources]
        self._firsts = [*accumulate(counts, initial=0)]
        self._others: dict[int, list[Node]] = {}  # payloads of other sources, by id
        self.has_views = any(source.views for source in sources)
        self.codes: Sequence[str | None] = sources[0].entries.dtypes
        self.shapes: Sequence[tuple[int, ...]] = sources[0].entries.shapes
        if len(sources) > 1 or self.has_views:  # else nothing is copied
            rows = [row for source in sources for row in _facts_of(source)]
            self.codes, self.shapes = [row[0] for row in rows], [row[1] for row in rows]
        self.tree = sources[0].tree
        for number, source in enumerate(sources[1:], 1):
            for mention in mentions(source.tree):
                check_numbers(mention.numbers, counts[number])
            theirs = deepcopy(source.tree)
            renumber(theirs, range(self._firsts[number], self._firsts[number + 1]))
            self.tree = self._united(self.tree, theirs, "")

    def __repr__(self) -> str:
        return f"<Catalogue sources={len(self.sources)} pieces={len(self)}>"

    def __len__(self) -> int:
        return self._firsts[-1]

    def source_of(self, number: int) -> int:
        """Return the source of a piece."""
        return bisect_right(self._firsts, number) - 1

    def reach(self, number: int) -> tuple[int, int, int]:
        """Return the source of a piece, its first byte there, and its end."""
        source = self.source_of(number)
        entries, entry = self.sources[source].entries, number - self._firsts[source]
        if entry < len(entries):
            return source, entries.starts[entry], entries.stops[entry]
        piece = self.piece(number)
        return source, piece.start, piece.stop

    def numbers_of(self, source: int) -> range:
        """Return the numbers of a source's pieces."""
        return range(self._firsts[source], self._firsts[source + 1])

    def entry_of(self, number: int) -> tuple[int, int]:
        """Return the source and the entry of a piece."""
        source = self.source_of(number)
        return source, self.sources[source].storage_of(number - self._firsts[source])

    def whole_entry(self, number: int) -> int:
        """Return the number of the piece that is the whole entry of a piece."""
        source, entry = self.entry_of(number)
        return self._firsts[source] + entry

    def piece(self, number: int) -> Piece:
        """Return a piece by its number.

        Raises:
            RemoteProtocolError: there is none. Numbers come from a peer's tree.
        """
        check_numbers([number], len(self))
        source = self.source_of(number)
        manifest = self.sources[source]
        spec = manifest.tensor(number - self._firsts[source])
        size, reach = itemsize(spec.dtype), 0
        if 0 not in spec.shape:
            pairs = zip(spec.shape, spec.stride, strict=True)
            reach = 1 + sum((each - 1) * step for each, step in pairs)
        start = manifest.entries.starts[spec.storage] + spec.offset * size
        stop = start + reach * size
        facts = spec.dtype, spec.shape, spec.stride, spec.flags
        return Piece(source, spec.storage, start, stop, *facts)

    def parts(
        self, path: Path, tag: str, payload: Node
    ) -> list[tuple[list[int], Layout]]:
        """Return the local tensors and the layout of a distributed tensor, per source.

        Raises:
            RemoteProtocolError, LimitExceededError: it is malformed, or too large.
        """
        first = self.layouts.read(path, tag, payload)
        others = self._others.get(id(payload), ())
        return [first, *(self.layouts.read(path, tag, each) for each in others)]

    def _united(self, one: Node, other: Node, path: str) -> Node:
        """Return the items of both nodes; each tensor that is whole is in one only."""
        both: Any = one, other
        match both:
            case ["tensors", [*names], [*some]], ["tensors", [*more], [*others]]:
                if {*names}.isdisjoint(more):
                    return ["tensors", [*names, *more], [*some, *others]]
            case ["ext", str(tag), payload], ["ext", str(same), another]:
                if tag == same and tag in LAYOUTS:
                    self._others.setdefault(id(payload), []).append(another)
                    return one
        mine, theirs = items_of(one), items_of(other)
        if mine is None or theirs is None or not (_is_dict(one) and _is_dict(other)):
            where = path or "the state dict"
            raise StateDictError(f"two sources hold {where}: remove one of them")
        found = {**mine, **theirs}
        for key in mine.keys() & theirs.keys():
            found[key] = self._united(mine[key], theirs[key], below(path, key))
        keys = {**keys_of(one), **keys_of(other)}
        return ["dict", [*map(keys.__getitem__, found)], [*found.values()]]


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


def _is_dict(node: Any) -> bool:
    return node[0] in ("dict", "odict", "defaultdict", "tensors")


def keys_of(node: Any) -> dict[object, Node]:
    """Return the nodes of the keys of a dict, by key."""
    keys = node[2] if node[0] == "defaultdict" else node[1]
    return {_key_of(key): key for key in keys}


def items_of(node: Node) -> Items | None:
    """Return the items of a container; None for another node."""
    match node:
        case ["tensors", [*keys], [*numbers]]:
            values: list[Node] = [["tensor", number] for number in numbers]
        case ["dict" | "odict", [*keys], [*values], *_]:
            pass
        case ["defaultdict", _, [*keys], [*values]]:
            pass
        case ["list" | "tuple", [*values]] | ["deque", _, [*values]]:
            return dict(enumerate(values))
        case _:
            return None
    known = [*map(_key_of, keys)]
    if len(known) - len({*map(hash, known)}) > _COLLISIONS:
        raise RemoteProtocolError("malformed tree: the keys of a dict collide")
    kinds = {*map(type, known)}
    if {int, Decimal} <= kinds and any(map(_is_long, known)):
        raise RemoteProtocolError("malformed tree: keys that take long to compare")
    found = dict(zip(known, values, strict=False))
    if not len(found) == len(keys) == len(values):
        raise RemoteProtocolError("malformed tree: a key is there twice, or alone")
    return found


def _is_long(key: object) -> bool:
    """Say whether a number has so many digits that comparing it takes long."""
    return type(key) is int and key.bit_length() > _LONG_BITS


def _key_of(key: Node) -> object:
    """Return a key as a state dict has it; as a `Step` if it cannot be decoded here."""
    if not isinstance(key, list):
        if isinstance(key, dict):  # JSON may have one
            raise RemoteProtocolError("malformed tree: a key is a JSON object")
        return key
    with suppress(RemoteProtocolError, LimitExceededError, TypeError):
        types = registry({}, allow_pickle=False, travelled=_KEY_BYTES)
        found: Any = decode_tree(key, registry=types, tensors=(), limits=Limits())
        hash(found)
        if found == found:
            return cast("object", found)
    return Step(msgspec.json.encode(key).decode())
