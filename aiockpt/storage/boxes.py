"""Reads the boxes of several sources into tensors that are put together from them.

`aiockpt.state.reshard` plans such tensors. A `BoxSource` reads them as a `FileSource`
reads its file: into the memory that a `Placement` gives. Bytes that are contiguous on
both sides go straight there. All others are *indirect*: they arrive in an arena, from
which their elements are copied. It takes one source after the other, so this arena is
at most as large as what is needed of one source.

Everything here blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import chain, islice
from math import gcd, prod
from operator import attrgetter, mul
from typing import Final, NamedTuple, TypeAlias

import torch

from aiockpt.format.chunks import ChunkGrid, ChunkHasher, digest
from aiockpt.format.dtypes import itemsize
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import CONJ, NEG, Manifest, dense_stride
from aiockpt.memory.arena import Arena
from aiockpt.memory.copies import WORDS, physical
from aiockpt.memory.device import Event
from aiockpt.runtime.system import allocating, collector_paused
from aiockpt.state.catalogue import Catalogue, Piece
from aiockpt.state.composing import BoxCopy
from aiockpt.state.leaves import DTYPES
from aiockpt.state.load_plan import Ranges
from aiockpt.state.mesh import Box, ByteRuns, byte_runs, merged, touched
from aiockpt.state.rebuild import parts_over
from aiockpt.state.reshard import Claim, United
from aiockpt.state.segment import Segment, check_memory
from aiockpt.storage.placement import Placement, Turns
from aiockpt.storage.read import LoadSource, OnBytes, Verify, read_segment

_SKIP_FROM_BYTES: Final = 64 << 10  # to read a smaller gap is faster than to skip it
_WINDOW_BYTES: Final = 64 << 20  # they are compared at once


class LoadedSource:
    """Values that a program has loaded already.

    Args:
        values: The values.
        limits: Bound their tree.
    """

    def __init__(self, values: object, *, limits: Limits) -> None:
        self.values, self._limits = values, limits

    @cached_property
    def segment(self) -> Segment:
        """The data segment; only a load of a part needs it."""
        return Segment.of(self.values, limits=self._limits)

    def read(
        self, placement: Placement, *, verify: Verify, on_bytes: OnBytes | None = None
    ) -> None:
        """Do nothing: all tensors are there."""


class BoxSource:
    """Tensors that are put together from the boxes of other sources.

    Args:
        united: The plan.
        sources: The sources.
        limits: Bound the memory.

    Attributes:
        segment: Its data segment, in memory.
    """

    def __init__(
        self, united: United, sources: Sequence[LoadSource], *, limits: Limits
    ) -> None:
        self.segment = Segment(united.manifest)
        self._pieces, self._copies = united.pieces, united.copies
        self._sources, self._limits = sources, limits

    def read(
        self, placement: Placement, *, verify: Verify, on_bytes: OnBytes | None = None
    ) -> None:
        """Read the ranges of ``placement``, which are whole tensors.

        Raises:
            StorageError, IntegrityError: see `FileSource.read`.
            LimitExceededError: the host has too little memory.
        """
        assembly = Assembly(self.segment.arena, placement)
        reused = _ReusedArena()
        with collector_paused():
            moves = moves_of(
                self._pieces, self._copies, placement.ranges, len(self._sources)
            )
        for source, some in zip(self._sources, moves, strict=True):
            if source.segment.tensors is not None:
                for move in some:
                    move.copy_tensor(source.segment.tensors[move.number], assembly)
            elif some:
                plan = BoxPlacement(some, assembly, reused.take)
                check_memory(plan.indirect, self._limits)
                source.read(plan, verify=verify, on_bytes=on_bytes)
                plan.finish()
        assembly.finish()


def moves_of(
    pieces: Sequence[Piece],
    copies: Sequence[Sequence[BoxCopy]],
    ranges: Ranges,
    sources: int,
) -> list[list[BoxMove]]:
    """Return what is moved of each source to the pieces in some ranges.

    Args:
        pieces: The pieces, in the order of their bytes.
        copies: For each of them, the boxes that bring its elements.
        ranges: The ranges.
        sources: How many sources there are.
    """
    found: list[list[BoxMove]] = [[] for _ in range(sources)]
    joint = cache(joint_bytes)  # most tensors have one of few shapes
    starts = [start for start, _ in ranges]
    for piece, some in zip(pieces, copies, strict=True):
        at = bisect_left(starts, piece.stop) - 1
        if at >= 0 and piece.start < min(piece.stop, ranges[at][1]):
            for copy in some:
                found[copy.piece.source].append(BoxMove(copy, piece, joint))
    return found


class Assembly:
    """The memory of the tensors that are put together."""

    def __init__(self, arena: Arena, placement: Placement) -> None:
        self._arena, self._placement = arena, placement
        self._divided: set[Piece] = set()  # those whose memory is not in one place

    def memory(self, piece: Piece) -> memoryview:
        """Return the memory of a piece: its final memory, if that is in the host."""
        views = self._views(piece)
        if len(views) == 1:
            return views[0]
        self._divided.add(piece)
        return self._own(piece)

    def prepare(self, start: int, stop: int) -> None:
        """Map the pages of a range; see `Placement.prepare`."""
        self._placement.prepare(start, stop)

    def finish(self) -> None:
        """Copy to the memory that is not in the host, or not in one place."""
        for piece in self._divided:
            data, at = self._own(piece), 0
            for view in self._views(piece):
                view[:] = data[at : at + view.nbytes]
                at += view.nbytes
        events: list[Event] = []
        whole = torch.frombuffer(self._arena.buffer, dtype=torch.uint8)
        for start, stop in self._placement.ranges:
            events += self._placement.send(start, stop, whole[start:stop])
        for event in events:
            event.synchronize()

    def _views(self, piece: Piece) -> Sequence[memoryview]:
        # What has no memory in the host stays in the arena until it is sent.
        stay = _Stay(self._own(piece))
        return self._placement.views(piece.start, piece.stop, stay)

    def _own(self, piece: Piece) -> memoryview:
        return self._arena.buffer[piece.start : piece.stop]


class _Stay(NamedTuple):
    """The memory of a piece, for its bytes that have no other place."""

    view: memoryview

    def turn(self, nbytes: int) -> memoryview:
        """Return this memory."""
        del nbytes
        return self.view


class BoxMove:
    """A box of a source's piece, and the piece that it goes to.

    Attributes:
        source: The piece of the source.
        number: Its number in the source.
        box: The box.
        destination: The piece that it goes to.
        nbytes: The bytes of its elements.
        straight: The range of its bytes, if they are contiguous on both sides.
        differs: The flags of lazy elements that only one side has.
    """

    def __init__(self, copy: BoxCopy, destination: Piece, joint: Joint) -> None:
        self.source, self.number, self.box = copy
        self.destination = destination
        self._size = itemsize(destination.dtype)
        self.nbytes = self.box.count * self._size
        self.differs = (self.source.flags ^ destination.flags) & (CONJ | NEG)
        self.straight: _PlacedRange | None = None
        shapes = self.source.shape, self.source.stride, destination.shape
        if not self.differs and (found := joint(self.box, *shapes, self._size)):
            theirs, mine, nbytes = found
            start = self.source.start + theirs
            self.straight = _PlacedRange(start, start + nbytes, destination, mine)

    def runs(self) -> Iterator[ByteRuns]:
        """Yield where the bytes are in the source, in the order of its memory."""
        piece, box = self.source, self.box
        dims = range(len(box.sizes))
        order = sorted(dims, key=piece.stride.__getitem__, reverse=True)
        first, sizes, shape, stride = (
            [column[dim] for dim in order]
            for column in (box.theirs, box.sizes, piece.shape, piece.stride)
        )
        for each in byte_runs(first, sizes, shape, stride, self._size):
            yield replace(each, start=piece.start + each.start)

    def copy(self, data: torch.Tensor, assembly: Assembly) -> None:
        """Copy the elements out of the bytes of the source's data segment."""
        piece = self.source
        first = piece.start + self._size * _dot(self.box.theirs, piece.stride)
        self._copy(data, first, piece.stride, assembly)

    def copy_tensor(self, tensor: torch.Tensor, assembly: Assembly) -> None:
        """Copy the elements of a tensor in memory."""
        part = _part(physical(tensor), self.box.theirs, self.box.sizes)
        data = _bytes_of(part)
        self._copy(data, 0, dense_stride(self.box.sizes), assembly)

    def copy_back(self, own: memoryview, data: torch.Tensor) -> None:
        """Copy the elements from the bytes of the other piece to those of the source.

        Args:
            own: The bytes of the piece that it goes to.
            data: The source's data segment.
        """
        first = self.source.start + self._size * _dot(
            self.box.theirs, self.source.stride
        )
        memory = torch.frombuffer(own, dtype=torch.uint8)
        theirs, mine = self._elements(data, first, self.source.stride, memory)
        theirs.copy_(mine)

    def _copy(
        self, data: torch.Tensor, first: int, stride: Sequence[int], assembly: Assembly
    ) -> None:
        memory = torch.frombuffer(assembly.memory(self.destination), dtype=torch.uint8)
        theirs, mine = self._elements(data, first, stride, memory)
        mine.copy_(theirs)
        if self.differs:
            dense = dense_stride(self.destination.shape)
            whole = memory.view(DTYPES[self.destination.dtype])
            whole = whole.as_strided(self.destination.shape, dense)
            part = _part(whole, self.box.mine, self.box.sizes)
            if self.differs & CONJ:
                part.conj_physical_()
            if self.differs & NEG:
                part.neg_()

    def _elements(
        self,
        data: torch.Tensor,
        first: int,
        stride: Sequence[int],
        memory: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elements as words: in the source's bytes, and in the piece's."""
        dense = dense_stride(self.destination.shape)
        start = self._size * _dot(self.box.mine, dense)
        # Torch's words must be aligned; a foreign file need not align its tensors.
        word = gcd(8, self._size, data.data_ptr(), memory.data_ptr(), first, start)
        made = partial(_elements, self.box.sizes, self._size, word)
        return made(stride, data, first), made(dense, memory, start)


Joint: TypeAlias = Callable[..., tuple[int, int, int] | None]


def joint_bytes(
    box: Box,
    shape: Sequence[int],
    stride: Sequence[int],
    full_shape: Sequence[int],
    itemsize: int,
) -> tuple[int, int, int] | None:
    """Return where the bytes of a box begin on both sides, and how many there are.

    None: they are not contiguous on both sides.

    Args:
        box: The box; ``mine`` is its position in the tensor that it goes to.
        shape: The shape of the tensor that it comes from.
        stride: The strides of that.
        full_shape: The shape of the tensor that it goes to, which is dense.
        itemsize: The bytes of an element.
    """
    theirs = byte_runs(box.theirs, box.sizes, shape, stride, itemsize)
    mine = byte_runs(
        box.mine, box.sizes, full_shape, dense_stride(full_shape), itemsize
    )
    (one, *more), (other, *others) = (islice(runs, 2) for runs in (theirs, mine))
    if more or others or one.count > 1 or other.count > 1:
        return None
    return one.start, other.start, one.length


def _dot(index: Sequence[int], stride: Sequence[int]) -> int:
    return sum(map(mul, index, stride))


def _elements(
    sizes: Sequence[int],
    itemsize: int,
    word: int,
    stride: Sequence[int],
    data: torch.Tensor,
    start: int,
) -> torch.Tensor:
    """Return elements in some bytes as words, along one more dimension."""
    count = itemsize // word
    words = data[: data.numel() // word * word].view(WORDS[word])
    steps = (*(each * count for each in stride), 1)
    first = int(words.storage_offset()) + start // word
    return words.as_strided((*sizes, count), steps, first)


def _part(
    tensor: torch.Tensor, first: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Return a box of a tensor."""
    for dim, (at, size) in enumerate(zip(first, sizes, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor


class _PlacedRange(NamedTuple):
    """A range of a source, and where its bytes go.

    Attributes:
        start: The first byte of the range.
        stop: Its end.
        piece: The piece that its bytes go to; None: they are indirect.
        offset: The first byte in the piece.
    """

    start: int
    stop: int
    piece: Piece | None = None
    offset: int = 0


class _ReusedArena:
    """An arena for the indirect bytes of one source after the other.

    Its pages are reused, because new ones would take longer than the bytes.
    """

    def __init__(self) -> None:
        self._arena, self._size = Arena(0), 0

    def take(self, ranges: Ranges) -> Arena:
        """Return an arena for some ranges; the pages of all others are freed."""
        if ranges and ranges[-1][1] > self._size:
            self._size = ranges[-1][1]
            with allocating("parts of tensors", self._size):
                self._arena = Arena(self._size)
        at = 0
        for start, stop in ranges:
            self._arena.discard(at, start)
            at = stop
        if ranges:
            self._arena.discard(at, self._size)
        return self._arena


class BoxPlacement(Placement):
    """Where the bytes of one source go.

    Args:
        moves: What is needed of the source.
        assembly: The memory of the tensors.
        arena_for: Returns memory for the indirect ranges, at their offsets in the
            source.

    Attributes:
        indirect: The ranges whose bytes arrive in an arena, and are copied from it.
    """

    def __init__(
        self,
        moves: Sequence[BoxMove],
        assembly: Assembly,
        arena_for: Callable[[Ranges], Arena],
    ) -> None:
        self._assembly = assembly
        straight, self._indirect = _sorted_out(moves)
        self.indirect: Ranges = _ranges_of(self._indirect)
        rows = [*straight, *(_PlacedRange(*each) for each in self.indirect)]
        self._rows = sorted(rows, key=attrgetter("start"))
        self._stops = [row.stop for row in self._rows]
        self.ranges = merged((row.start, row.stop) for row in self._rows)
        self.nbytes = sum(move.nbytes for move in moves)
        self._arena = arena_for(self.indirect)

    def finish(self) -> None:
        """Copy the indirect bytes."""
        if self._indirect:
            data = torch.frombuffer(self._arena.buffer, dtype=torch.uint8)
            for move in self._indirect:
                move.copy(data, self._assembly)

    def prepare(self, start: int, stop: int) -> None:
        """Map the pages for ``[start, stop)``; see `Placement.prepare`."""
        for row, first, last in self._between(start, stop):
            if row.piece is None:
                self._arena.populate(first, last)
            else:
                begin = row.piece.start + row.offset + first - row.start
                self._assembly.prepare(begin, begin + last - first)

    def views(self, start: int, stop: int, spare: Turns) -> Sequence[memoryview]:
        """Return memory for ``[start, stop)``."""
        found: list[memoryview] = []
        at, block = start, None
        for row, first, last in self._between(start, stop):
            if at < first:
                block = block or spare.turn(stop - start)
                found.append(block[at - start : first - start])
            if row.piece is None:
                found += self._arena.buffers(first, last)
            else:
                begin = row.offset + first - row.start
                memory = self._assembly.memory(row.piece)
                found.append(memory[begin : begin + last - first])
            at = last
        if at < stop:
            block = block or spare.turn(stop - start)
            found.append(block[at - start :])
        return found

    def bring_back(
        self,
        has: Callable[[Piece], bool],
        own: Callable[[Piece], memoryview],
        there: Ranges,
    ) -> Ranges:
        """Return the ranges of the source all of whose bytes are known.

        The indirect ones are copied from the pieces to the arena.

        Args:
            has: Says whether the bytes of a piece are known.
            own: Returns the bytes of a piece.
            there: The ranges of the arena that stay as they are.
        """
        found = [
            (row.start, row.stop)
            for row in self._rows
            if row.piece is not None and has(row.piece)
        ]
        data = torch.frombuffer(self._arena.buffer, dtype=torch.uint8)
        for (start, stop), moves in _by_source(self._indirect).items():
            # Two tensors may get the same elements.
            known = {
                each.box: each
                for each in moves
                if has(each.destination) and not each.differs
            }.values()
            is_whole = sum(move.nbytes for move in known) == stop - start
            if is_whole and not any(a < stop and start < b for a, b in there):
                found.append((start, stop))
                for move in known:
                    move.copy_back(own(move.destination), data)
        return merged(found)

    def placed(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the bytes of ``[start, stop)`` that go straight to the new segment.

        Each as its first byte in the source, and its first byte and its end there.
        """
        for row, first, last in self._between(start, stop):
            if row.piece is not None:
                begin = row.piece.start + row.offset + first - row.start
                yield first, begin, begin + last - first

    def _between(
        self, start: int, stop: int
    ) -> Iterator[tuple[_PlacedRange, int, int]]:
        """Yield the rows that overlap a range, and the part of the range."""
        for at in range(bisect_right(self._stops, start), len(self._rows)):
            row = self._rows[at]
            if row.start >= stop:
                break
            yield row, max(row.start, start), min(row.stop, stop)


def _by_source(moves: Iterable[BoxMove]) -> dict[tuple[int, int], list[BoxMove]]:
    """Return the moves out of each range of the source that is a piece's."""
    found: dict[tuple[int, int], list[BoxMove]] = {}
    for move in moves:
        found.setdefault((move.source.start, move.source.stop), []).append(move)
    return found


def _sorted_out(moves: Sequence[BoxMove]) -> tuple[list[_PlacedRange], list[BoxMove]]:
    """Return the ranges that go straight to their piece, and the indirect moves.

    A byte goes to one place only, so no two ranges overlap.
    """
    of_piece = _by_source(moves)
    indirect = {
        key
        for key, some in of_piece.items()
        if any(move.straight is None for move in some)
    }
    while True:
        ranges: list[tuple[int, int, tuple[int, int]]] = []
        for key, some in of_piece.items():
            if key in indirect:
                ranges.append((*key, key))
            else:
                rows = (move.straight for move in some)
                ranges += ((row.start, row.stop, key) for row in rows if row)
        ranges.sort()
        clash: set[tuple[int, int]] = set()
        end, last = -1, (0, 0)
        for start, stop, key in ranges:
            if start < end:
                clash.update((key, last))
            if stop > end:
                end, last = stop, key
        if clash <= indirect:
            break
        indirect |= clash
    straight = [
        move.straight
        for key, some in of_piece.items()
        for move in some
        if key not in indirect and move.straight is not None
    ]
    others = [m for key, some in of_piece.items() if key in indirect for m in some]
    return straight, others


def _ranges_of(moves: Iterable[BoxMove]) -> list[tuple[int, int]]:
    """Return the ranges with the bytes of some moves, without those of others."""
    found = (
        touched(chain.from_iterable(move.runs() for move in some), _SKIP_FROM_BYTES)
        for some in _by_source(moves).values()
    )
    return merged(chain.from_iterable(found))


# --------------------------------------------------------------- values that may differ


def compare(
    united: United,
    sources: Sequence[LoadSource],
    known: Mapping[Claim, bool],
    *,
    limits: Limits,
    verify: Verify,
    on_bytes: OnBytes | None = None,
) -> dict[Claim, bool]:
    """Say which of the claims that are not known hold.

    Chunks of equal digests at the same bytes are equal. Everything else is read in
    windows of 64 MiB, and its digests are compared. A piece whose elements lie in
    another order than those of its replica is read whole.

    Raises:
        StorageError, IntegrityError: see `FileSource.read`.
    """
    catalogue = _catalogue_of(sources, limits)
    claims = _compared(united, sources, known, catalogue)
    read: dict[int, dict[_Compared, None]] = {}
    for each in chain.from_iterable(claims.values()):
        read.setdefault(catalogue.source_of(each.number), {})[each] = None
    found: dict[_Compared, str] = {}
    for number, some in read.items():
        order = sorted(some, key=attrgetter("start", "stop"))
        bits = partial(_bits, catalogue, sources)
        found |= _digested(sources[number], order, bits, verify, on_bytes)
    return {
        claim: len({found[each] for each in some}) <= 1
        for claim, some in claims.items()
    }


def ranges_to_compare(
    united: United,
    sources: Sequence[LoadSource],
    known: Mapping[Claim, bool],
    *,
    limits: Limits,
) -> list[Ranges]:
    """Return the ranges of each source that `compare` reads."""
    catalogue = _catalogue_of(sources, limits)
    found: list[list[tuple[int, int]]] = [[] for _ in sources]
    for some in _compared(united, sources, known, catalogue).values():
        for each in some:
            found[catalogue.source_of(each.number)].append((each.start, each.stop))
    return [*map(merged, found)]


def _catalogue_of(sources: Sequence[LoadSource], limits: Limits) -> Catalogue:
    manifests = [source.segment.manifest for source in sources]
    return Catalogue(manifests, limits=limits, tree=["dict", [], []])


def _compared(
    united: United,
    sources: Sequence[LoadSource],
    known: Mapping[Claim, bool],
    catalogue: Catalogue,
) -> dict[Claim, list[_Compared]]:
    """Return the pieces to read for each claim; none if digests say that it holds."""
    claims: dict[Claim, list[_Compared]] = {}
    for claim in united.claims:
        if claim in known:
            continue
        pieces = [*map(catalogue.piece, claim)]
        claims[claim] = []
        digests = {_digests(each, catalogue.sources[each.source]) for each in pieces}
        if len(digests) == 1:
            continue
        is_raw = all(sources[each.source].segment.tensors is None for each in pieces)
        is_raw = is_raw and _are_alike(pieces)
        for number, piece in zip(claim, pieces, strict=True):
            compared = _Compared(number, piece.start, piece.stop, is_raw)
            claims[claim].append(compared)
    return claims


class _Compared(NamedTuple):
    """A piece whose elements are compared.

    Attributes:
        number: Its number in the catalogue.
        start: Its first byte.
        stop: Its end.
        is_raw: Whether its bytes are compared as they lie; else its elements in order.
    """

    number: int
    start: int
    stop: int
    is_raw: bool


def _are_alike(pieces: Sequence[Piece]) -> bool:
    """Say whether pieces are dense, and have their elements in the same order."""
    first = pieces[0]
    nbytes = prod(first.shape) * itemsize(first.dtype)
    return all(
        (each.stride, each.flags & (CONJ | NEG), each.stop - each.start)
        == (first.stride, first.flags & (CONJ | NEG), nbytes)
        for each in pieces
    )


def _digested(
    source: LoadSource,
    pieces: Sequence[_Compared],
    bits: Callable[[int], torch.Tensor],
    verify: Verify,
    on_bytes: OnBytes | None,
) -> dict[_Compared, str]:
    """Read pieces of a source, in order; return the digest of each."""
    found: dict[_Compared, str] = {}
    segment = source.segment
    hashers: dict[_Compared, ChunkHasher] = {}

    def take(window: Sequence[tuple[_Compared, int, int]]) -> None:
        ranges = merged((start, stop) for _, start, stop in window)
        read_segment(source, ranges, verify=verify, on_bytes=on_bytes)
        for piece, start, stop in window:
            if not piece.is_raw:
                view = bits(piece.number).numpy().data
                found[piece] = digest([view])
                continue
            size, first = piece.stop - piece.start, start - piece.start
            hasher = hashers.get(piece) or ChunkHasher(ChunkGrid(size, size))
            hashers[piece] = hasher
            for whole in hasher.update(first, *segment.arena.buffers(start, stop)):
                found[piece] = whole.digest
                del hashers[piece]
        if not segment.is_there:
            for start, stop in ranges:
                segment.arena.discard(start, stop)

    window: list[tuple[_Compared, int, int]] = []
    nbytes = 0
    step = segment.manifest.chunk_bytes if segment.manifest.digests else _WINDOW_BYTES
    for piece in pieces:
        for start, stop in _cut(piece, max(_WINDOW_BYTES // step, 1) * step):
            if window and nbytes + stop - start > _WINDOW_BYTES:
                take(window)
                window, nbytes = [], 0
            window.append((piece, start, stop))
            nbytes += stop - start
    if window:
        take(window)
    return found


def _cut(piece: _Compared, step: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of a piece between multiples of a number; the elements as one."""
    at = piece.start
    while at < piece.stop:
        end = min(at - at % step + step, piece.stop) if piece.is_raw else piece.stop
        yield at, end
        at = end


def _digests(piece: Piece, manifest: Manifest) -> object:
    """Return what is equal for pieces of equal bytes; unique without digests."""
    if not manifest.digests:
        return piece
    grid = manifest.grid
    first, last = grid.index_of(piece.start), grid.index_of(piece.stop - 1)
    chunks = range(first, last + 1)
    where = piece.start, piece.stop, piece.stride, piece.flags, manifest.algorithm
    return (
        *where,
        *map(grid.range, chunks),
        *map(manifest.digests.__getitem__, chunks),
    )


def _bits(
    catalogue: Catalogue, sources: Sequence[LoadSource], number: int
) -> torch.Tensor:
    """Return the elements of a piece as bytes."""
    at = catalogue.source_of(number)
    segment, local = sources[at].segment, number - catalogue.numbers_of(at).start
    if segment.tensors is not None:
        tensor = segment.tensors[local]
    else:
        made = parts_over(
            segment.manifest, segment.buffer, parts=set(), blobs=set(), fresh={local}
        )
        tensor = made[local]
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    return _bytes_of(physical(tensor))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements in their order."""
    # Torch calls a tensor of one element contiguous, whatever its strides are.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor)
    return flat.view(torch.uint8)
