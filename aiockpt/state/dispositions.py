"""Decides which tensors of a template get their bytes straight from the sources.

A tensor goes *straight* if the bytes of its piece are, one by one, the bytes of its
memory. The others are *copied*, element by element: those whose strides or flags differ
on both sides, those with gaps, and those whose bytes somebody else gets, too.

Most tensors are plain, and alone on both sides. They are compared column by column. The
others become spans of memory, which are sorted to find those that meet.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, itemgetter, lt
from typing import Final, NamedTuple, TypeAlias

import torch

from aiockpt.errors import StateDictError, TemplateMismatchError, UnsupportedLeafError
from aiockpt.format.manifest import COMPACTED, CONJ, NEG
from aiockpt.state.catalogue import Catalogue, Piece
from aiockpt.state.contents import PLAIN
from aiockpt.state.flatten import Wanted
from aiockpt.state.leaves import DTYPE_NAMES
from aiockpt.state.overlaps import (
    OverlapMember,
    is_solid,
    repeats,
    runs,
    share_elements,
)
from aiockpt.state.selection import below

NOT_FILLED: Final = "what it is made of cannot be filled; put None in its place"

PAIRS_PER_CALL: Final = 512
"""How many pairs one call compares. Each number is an object meanwhile."""

_NO_PAIR: Final = -1


class Fills(NamedTuple):
    """Pieces of the sources and the template's tensors that they fill, in columns."""

    pieces: Sequence[int]
    tensors: Sequence[int]


class Pairs:
    """The pieces and the template's tensors that are at the same paths, in columns.

    Attributes:
        pieces: The numbers of the pieces.
        tensors: The numbers of the tensors.
    """

    def __init__(self) -> None:
        self.pieces, self.tensors = array("q"), array("q")
        self._starts: list[int] = []
        self._paths: list[tuple[str, Sequence[object] | None]] = []

    def add(
        self,
        path: str,
        names: Sequence[object] | None,
        pieces: Sequence[int],
        tensors: Sequence[int],
    ) -> None:
        """Add pairs; ``names`` are the last steps of their paths, if they have some."""
        self._starts.append(len(self.pieces))
        self._paths.append((path, names))
        self.pieces.extend(pieces)
        self.tensors.extend(tensors)

    def path_of(self, at: int) -> str:
        """Return the path of a pair; only few are asked for it."""
        row = bisect_right(self._starts, at) - 1
        path, names = self._paths[row]
        return path if names is None else below(path, names[at - self._starts[row]])


def dispose(
    catalogue: Catalogue, wanted: Wanted, pairs: Pairs, others: Sequence[int]
) -> tuple[Fills, Fills]:
    """Return the fills that go straight, and those that are copied.

    Args:
        catalogue: What the sources hold.
        wanted: The template.
        pairs: The tensors that both have.
        others: The pieces that new tensors or other values are made of.

    Raises:
        TemplateMismatchError: two tensors differ in dtype or shape; or two pieces, or
            two elements, go to the same memory of the template.
        UnsupportedLeafError: a tensor of the template has no memory.
    """
    pieces, tensors = pairs.pieces, pairs.tensors
    special = [*_special_pairs(catalogue, wanted, pairs, others)] if pieces else []
    if not special:  # most state dicts have no others
        return Fills(pieces, tensors), Fills((), ())
    found_spans = (_span_of(catalogue, wanted, pairs, at) for at in special)
    spans = [each for each in found_spans if each is not None]
    _check_apart(spans)
    found = _copied(spans, map(catalogue.piece, others))
    copied = {each.at for own, _ in found for each in own}
    straight = (at for at in range(len(pieces)) if at not in copied)
    return _fills(pairs, straight), _fills(pairs, sorted(copied))


def near(
    catalogue: Catalogue,
    wanted: Wanted,
    pairs: Pairs,
    others: Sequence[int],
    wholes: Sequence[Sequence[int]],
) -> tuple[Fills, Fills, list[int]]:
    """Return what goes straight, what is copied, and the pieces of all other pairs.

    A tensor of the template that shares memory with one that is not filled is not
    filled either. The result has one tensor for each piece, with the strides that were
    sent. So two tensors are not filled by one, and of those with other strides only
    what was sent as a dense copy is filled. Of a distributed tensor, all pieces are
    filled or none.

    Args:
        catalogue: What the sources hold.
        wanted: The template.
        pairs: The tensors that both have.
        others: The pieces that new tensors or other values are made of.
        wholes: The pieces of each distributed tensor.
    """
    pieces, tensors = pairs.pieces, pairs.tensors
    spans: dict[int, _SpecialPair] = {}
    lost: set[int] = set()
    for at in _special_pairs(catalogue, wanted, pairs, others):
        try:
            if (span := _span_of(catalogue, wanted, pairs, at)) is not None:
                spans[at] = span
        except StateDictError:
            lost.add(at)
    crowd = [*map(_member_of, spans.values())]
    filled = {tensors[at] for at in range(len(pieces)) if at not in lost}
    for number, code in enumerate(wanted.codes):
        if code is None and number not in filled:
            with suppress(UnsupportedLeafError):  # it has no memory
                crowd.append(OverlapMember(wanted.tensors[number], "", _NO_PAIR))
    shifts = {at: each.shift for at, each in spans.items()}
    lost.update(each.number for pair in _clashes(crowd, shifts) for each in pair)
    lost.discard(_NO_PAIR)
    elsewhere = [*map(catalogue.piece, others)]
    while True:
        gone = {*others, *map(pieces.__getitem__, lost)}
        new = (
            spans[at].piece if at in spans else catalogue.piece(pieces[at])
            for at in lost
        )
        kept = [each for at, each in spans.items() if at not in lost]
        copied, more = set[int](), set[int]()
        for own, alone in _copied(kept, chain(elsewhere, new)):
            fits = alone and all(each.is_same or each.is_dense_copy for each in own)
            (copied if fits else more).update(each.at for each in own)
        broken = {*chain(*(each for each in wholes if not gone.isdisjoint(each)))}
        every = enumerate(pieces if broken else ())
        more.update(at for at, piece in every if piece in broken)
        if more <= lost:
            break
        lost |= more
    away = lost | copied
    straight = (at for at in range(len(pieces)) if at not in away)
    made = sorted({pieces[at] for at in lost})
    return _fills(pairs, straight), _fills(pairs, sorted(copied)), made


def _fills(pairs: Pairs, some: Iterable[int]) -> Fills:
    chosen = [*some]
    columns = pairs.pieces, pairs.tensors
    return Fills(*([*map(each.__getitem__, chosen)] for each in columns))


def check(tensor: torch.Tensor, piece: Piece, path: str) -> None:
    """Check that a tensor of a template has the dtype and the shape of a piece.

    Raises:
        TemplateMismatchError: it has not.
        UnsupportedLeafError: no checkpoint can hold such a tensor.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (dtype, tuple(tensor.shape)) != (piece.dtype, piece.shape):
        if tensor.dtype not in DTYPE_NAMES:  # quantized
            raise UnsupportedLeafError(path, f"{dtype} tensor", NOT_FILLED)
        expected = f"{piece.dtype} {[*piece.shape]}"
        raise TemplateMismatchError(path, expected=expected, actual=words_of(tensor))


def words_of(tensor: torch.Tensor) -> str:
    """Return the dtype and the shape of a tensor, for an error."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"


# -------------------------------------------------------------------------- columns


def _special_pairs(
    catalogue: Catalogue, wanted: Wanted, pairs: Pairs, others: Sequence[int]
) -> Iterator[int]:
    """Yield the pairs that are not plain, alike, and alone on both sides."""
    pieces, tensors = pairs.pieces, pairs.tensors
    entries: Sequence[int] = pieces
    if catalogue.has_views:
        entries = array("q", map(catalogue.whole_entry, pieces))
    busy = repeated(entries).union(map(catalogue.whole_entry, others))
    crowded = repeated(tensors)
    columns = catalogue.codes, catalogue.shapes, wanted.codes, wanted.shapes
    for start in range(0, len(pieces), PAIRS_PER_CALL):
        window = slice(start, start + PAIRS_PER_CALL)
        some, mine, homes = pieces[window], tensors[window], entries[window]
        there, here = itemgetter(0, *some), itemgetter(0, *mine)
        codes, shapes, own, own_shapes = (
            at(column)[1:]
            for at, column in zip((there, there, here, here), columns, strict=True)
        )
        if (
            codes == own
            and shapes == own_shapes
            and None not in codes
            and busy.isdisjoint(homes)
            and crowded.isdisjoint(mine)
        ):
            continue
        rows = zip(codes, own, shapes, own_shapes, homes, mine, strict=True)
        for at, (code, same, one, other, home, tensor) in enumerate(rows, start):
            is_plain = code is not None and code == same and one == other
            if not is_plain or home in busy or tensor in crowded:
                yield at


def repeated(numbers: Sequence[int]) -> set[int]:
    """Return the numbers that are there more than once."""
    if all(map(lt, numbers, islice(numbers, 1, None))):  # a set takes much memory
        return set()
    return {number for number, count in Counter(numbers).items() if count > 1}


# ---------------------------------------------------------------------------- spans


@dataclass(frozen=True, slots=True)
class _SpecialPair:
    """A pair that is not plain, or not alone: its piece, and its memory here.

    Attributes:
        at: The number of the pair.
        path: Its path.
        piece: The piece.
        tensor: The template's tensor.
        address: The address of the tensor's first element.
        is_same: Whether all elements have the same bytes, at the same distances.
    """

    at: int
    path: str
    piece: Piece
    tensor: torch.Tensor
    address: int
    is_same: bool

    @property
    def is_dense_copy(self) -> bool:
        """Whether the piece is a dense copy of a strided tensor such as this one."""
        flags = bool(self.piece.flags & CONJ), bool(self.piece.flags & NEG)
        same = flags == (self.tensor.is_conj(), self.tensor.is_neg())
        return same and bool(self.piece.flags & COMPACTED)

    @property
    def shift(self) -> tuple[object, ...]:
        """A key that is equal for two spans that agree on the bytes they share."""
        home = self.piece.source, self.tensor.device
        if self.is_same:
            return *home, self.address - self.piece.start
        lazy = self.tensor.is_conj(), self.tensor.is_neg()
        return *home, self.address, self.piece, self.tensor.stride(), lazy


def _span_of(
    catalogue: Catalogue, wanted: Wanted, pairs: Pairs, at: int
) -> _SpecialPair | None:
    """Return the span of a pair; None if it has no elements.

    Raises:
        TemplateMismatchError, UnsupportedLeafError: the two do not fit.
    """
    number, path = pairs.tensors[at], pairs.path_of(at)
    tensor, piece = wanted.tensors[number], catalogue.piece(pairs.pieces[at])
    check(tensor, piece, path)
    if piece.start == piece.stop:
        return None
    stop = tensor.storage_offset() * tensor.itemsize + wanted.sizes[number]
    # A sharded module frees the storage of a parameter that it has gathered.
    if stop > wanted.held.storage_sizes[number]:
        raise UnsupportedLeafError(path, "tensor", "its memory has been freed")
    steps = _steps(tensor.shape, tensor.stride())
    is_same = steps == _steps(piece.shape, piece.stride)
    if not is_same and repeats(tensor):
        raise TemplateMismatchError(
            path,
            expected=f"{piece.dtype} {[*piece.shape]}, all elements apart",
            actual=f"elements that share memory: stride {[*tensor.stride()]}",
            detail="put a copy by contiguous() there",
        )
    flags = bool(piece.flags & CONJ), bool(piece.flags & NEG)
    is_same = is_same and (tensor.is_conj(), tensor.is_neg()) == flags
    is_same = is_same and type(tensor) in PLAIN
    address = wanted.held.addresses[number]
    return _SpecialPair(at, path, piece, tensor, address, is_same)


def _steps(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the strides of the dimensions that have any."""
    return [step for size, step in zip(shape, stride, strict=True) if size > 1]


def _member_of(span: _SpecialPair) -> OverlapMember:
    return OverlapMember(span.tensor, span.path, span.at)


def _check_apart(spans: Sequence[_SpecialPair]) -> None:
    """Refuse two pieces for the same memory: one of them would be lost."""
    shifts = {each.at: each.shift for each in spans}
    for pair in _clashes(map(_member_of, spans), shifts):
        first, second = sorted(pair, key=attrgetter("number"))
        raise TemplateMismatchError(
            second.name,
            expected="memory of its own",
            actual=f"memory shared with {first.name}",
        )


def _clashes(
    members: Iterable[OverlapMember], shifts: Mapping[int, tuple[object, ...]]
) -> Iterator[tuple[OverlapMember, OverlapMember]]:
    """Yield the pairs of members that share elements, and get different bytes there.

    Spans of the same shift get the same bytes, so they may overlap.
    """
    by_device: dict[torch.device, list[OverlapMember]] = {}
    for each in members:
        by_device.setdefault(each.tensor.device, []).append(each)
    for run in chain.from_iterable(map(runs, by_device.values())):
        keys = [shifts.get(each.number) for each in run]
        if len({*keys}) == 1:
            continue
        for n, one in enumerate(run):
            for at, other in enumerate(run[:n]):
                if keys[n] != keys[at] and share_elements([other], one):
                    yield one, other


_End: TypeAlias = "tuple[int, int, int, _SpecialPair | None]"


def _copied(
    spans: Iterable[_SpecialPair], others: Iterable[Piece]
) -> Iterator[tuple[list[_SpecialPair], bool]]:
    """Yield the spans whose bytes do not go straight to the template's memory.

    Spans go there together if they overlap in the same way on both sides, and leave no
    byte between them to other tensors. Those that meet here come in one list, with the
    answer to whether they agree on their bytes, and nobody else gets them.
    """
    ends: list[_End] = [(x.source, x.start, x.stop, None) for x in others]
    ends += ((x.piece.source, x.piece.start, x.piece.stop, x) for x in spans)
    for cluster in _clusters(ends):
        own = [each for *_, each in cluster if each is not None]
        if not own:
            continue
        alone = len(own) == len(cluster) and len({each.shift for each in own}) == 1
        if not (alone and all(each.is_same for each in own) and _is_full(own)):
            yield own, alone


def _clusters(ends: Iterable[_End]) -> Iterator[list[_End]]:
    """Yield the byte ranges of the sources that overlap, in lists."""
    found: list[_End] = []
    source = reach = -1
    for end in sorted(ends, key=itemgetter(0, 1, 2)):
        if found and (end[0] != source or end[1] >= reach):
            yield found
            found, reach = [], -1
        source, reach = end[0], max(reach, end[2])
        found.append(end)
    if found:
        yield found


def _is_full(spans: Sequence[_SpecialPair]) -> bool:
    """Say whether spans leave no byte between them to other tensors."""
    reach = min(each.piece.start for each in spans)
    for each in sorted(spans, key=lambda each: each.piece.start):
        if is_solid(each.tensor) and each.piece.start <= reach:
            reach = max(reach, each.piece.stop)
    return reach >= max(each.piece.stop for each in spans)
