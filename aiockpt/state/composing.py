"""Composes the tensors of one mesh from what several sources have of them.

`SourceLayouts` reads the layouts of distributed tensors, and says which elements of a
tensor each piece holds. `Composer` makes new pieces of the *boxes* that such pieces
have in common with a wanted shard (see `aiockpt.state.mesh`). The new pieces are the
entries of one more data segment, which lies in no file. What is whole in one source
stays a piece of that source.

Nothing is read here. `aiockpt.storage.boxes` reads the boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from math import prod
from typing import Any, Final, NamedTuple

from aiockpt.errors import StorageError, TemplateMismatchError
from aiockpt.format.dtypes import DTYPES, itemsize, torch_name
from aiockpt.format.entries import Entries, Entry
from aiockpt.format.manifest import CONJ, NEG, Manifest, TensorSpec, dense_stride
from aiockpt.format.references import check_numbers
from aiockpt.state.catalogue import Catalogue, Piece, in_memory
from aiockpt.state.mesh import (
    Box,
    Cover,
    ShardRuns,
    apart,
    block,
    cover,
    shape_of,
    shard_of,
)
from aiockpt.state.sharding import DTensorLayout, Layout, Partial, ShardedLayout

_PARTIAL: Final = "redistribute partial tensors before the save"
_LAZY: Final = CONJ | NEG  # the flags that change elements
_ALIGN_BYTES: Final = 64  # at least those of any element


class BoxCopy(NamedTuple):
    """A box of a source's piece that a new piece needs.

    Attributes:
        piece: The piece.
        number: Its number in the source.
        box: The elements; ``mine`` is where they are in the new piece.
    """

    piece: Piece
    number: int
    box: Box


class SourceShards(NamedTuple):
    """What a source has of a distributed tensor.

    Attributes:
        source: The source.
        numbers: Its pieces of the tensor.
        layout: The layout.
    """

    source: int
    numbers: list[int]
    layout: Layout

    @property
    def mesh(self) -> object:
        """What is equal for sources on the same mesh."""
        layout = self.layout
        return layout.mesh if isinstance(layout, DTensorLayout) else layout.group


def refusal(name: str, path: str, why: str) -> StorageError:
    """Return the error that the checkpoint ``name`` cannot bring a tensor."""
    return StorageError(name, f"{path or 'the state dict'}: {why}")


class SourceLayouts:
    """Reads the layouts of the sources and of a template.

    Many tensors have the same layout, so it is looked at once.

    Args:
        catalogue: What the sources hold.
        name: The name of the checkpoint, for errors.
    """

    def __init__(self, catalogue: Catalogue, name: str) -> None:
        self._catalogue, self._name = catalogue, name
        self._shards: dict[int, ShardRuns | None] = {}  # by the id of a layout
        self._fit: set[tuple[int, ...]] = set()  # the ids of layouts of one tensor
        # By layouts and shapes: the positions of the pieces that have elements, and
        # what each of them holds.
        self._holdings: dict[object, tuple[list[int], tuple[ShardRuns, ...]]] = {}

    def read(self, source: int, node: Any, path: str) -> SourceShards:
        """Return what a source has of a distributed tensor."""
        numbers, layout = self._catalogue.layouts.read((path,), node[1], node[2])
        first, stop = self._catalogue.firsts[source : source + 2]
        check_numbers(numbers, stop - first)
        return SourceShards(source, [first + each for each in numbers], layout)

    def shards_of(
        self, layout: Layout, sizes: Sequence[tuple[int, ...]]
    ) -> list[ShardRuns]:
        """Return what each local tensor of a layout holds.

        Args:
            layout: The layout.
            sizes: The shapes of the local tensors. One may be empty on a rank that is
                not in the mesh.
        """
        if not isinstance(layout, DTensorLayout):
            held = (layout.shards[each] for each in layout.held)
            return [block(each.offsets, each.sizes) for each in held]
        if id(layout) not in self._shards:
            try:
                self._shards[id(layout)] = shard_of(layout)
            except ValueError as error:
                why = f"no mesh splits a tensor like this: {error}"
                raise refusal(self._name, f"{layout}", why) from error
        shard = self._shards[id(layout)]
        return [tuple(() for _ in sizes[0]) if shard is None else shard]

    def of_pieces(self, row: SourceShards) -> list[ShardRuns]:
        """Return what each piece of a source holds."""
        sizes = [self._catalogue.shapes[each] for each in row.numbers]
        return self.shards_of(row.layout, sizes)

    def held_by(
        self, rows: Sequence[SourceShards], path: str
    ) -> tuple[Sequence[int], tuple[ShardRuns, ...]]:
        """Return the pieces of a tensor that have elements, and what each holds.

        If none has elements, return all pieces, since any says which dtype it has.

        Raises:
            StorageError: a piece has another shape than its layout says.
        """
        numbers = [number for row in rows for number in row.numbers]
        shapes = tuple([self._catalogue.shapes[number] for number in numbers])
        key = shapes, *[id(row.layout) for row in rows]
        if key not in self._holdings:
            owners = [row.source for row in rows for _ in row.numbers]
            shards = [shard for row in rows for shard in self.of_pieces(row)]
            for source, size, shard in zip(owners, shapes, shards, strict=True):
                if shape_of(shard) != size and 0 not in (*size, *shape_of(shard)):
                    what = f"its part in source {source} has the shape {[*size]}"
                    why = f"{what}, and its layout says otherwise"
                    raise refusal(self._name, path, why)
            full = [at for at, size in enumerate(shapes) if 0 not in size]
            self._holdings[key] = full, tuple([shards[at] for at in full])
        full, found = self._holdings[key]
        return [numbers[at] for at in full] or numbers, found

    def check(
        self, wanted: Layout | None, rows: Sequence[SourceShards], path: str
    ) -> None:
        """Check that shards of some layouts can bring those of the template's.

        Raises:
            TemplateMismatchError: the shapes differ, or tensors are partial.
            StorageError: the files disagree about the shape.
        """
        others = [row.layout for row in rows]
        every = others if wanted is None else [*others, wanted]
        key = id(wanted), *map(id, others)
        if key in self._fit:
            return
        shape = others[0].shape
        expected = f"{others[0]}"
        actual = "a full tensor" if wanted is None else f"{wanted}"
        if any(map(_is_partial, every)):
            raise TemplateMismatchError(
                path, expected=expected, actual=actual, detail=_PARTIAL
            )
        for other in others:
            if other.shape != shape:
                shapes = [*shape], [*other.shape]
                why = f"the files disagree about its shape: {shapes}"
                raise refusal(self._name, path, why)
        if wanted is not None and wanted.shape != shape:
            raise TemplateMismatchError(path, expected=expected, actual=actual)
        self._fit.add(key)


def _is_partial(layout: Layout) -> bool:
    return isinstance(layout, DTensorLayout) and any(
        isinstance(each, Partial) for each in layout.placements
    )


def dtype_of(layout: Layout) -> str:
    """Return the dtype of a tensor of which no source has an element."""
    return layout.dtype if isinstance(layout, ShardedLayout) else "float32"


def _covered(
    shards: tuple[ShardRuns, ...], mine: ShardRuns, *, prefer: int, is_alone: bool
) -> tuple[Cover, tuple[int, ...]]:
    """Return which shards bring all elements of ``mine``, and its shape.

    Raises:
        ValueError: they do not; the error says why.
    """
    try:
        are_apart, found = apart(shards), cover(mine, shards, prefer)
    except ValueError as error:
        raise ValueError(f"no mesh splits a tensor like this: {error}") from error
    if not are_apart:
        raise ValueError("shards of different ranks overlap in part")
    shape = shape_of(mine)
    if found.missing:
        lost = f"no file has {found.missing} of the {prod(shape)} elements"
        remedy = "the part of a rank is lost"
        if is_alone:
            remedy = (
                "this is the file of one rank: load the directory of all ranks, or "
                "pass rank= to load its local tensors"
            )
        raise ValueError(f"{lost} that this rank needs; {remedy}")
    return found, shape


class Composer:
    """Makes new pieces of boxes of the sources' pieces.

    Args:
        catalogue: What the sources hold.
        name: The name of the checkpoint, for errors.
        prefer: A number of this rank's own, by which ranks spread over replicas.

    Attributes:
        pieces: The new pieces.
        copies: For each of them, the boxes that bring all of its elements.
        paths: For each of them, the first path that has it.
    """

    def __init__(self, catalogue: Catalogue, name: str, prefer: int) -> None:
        self.pieces: list[Piece] = []
        self.copies: list[list[BoxCopy]] = []
        self.paths: list[str] = []
        self._catalogue, self._name = catalogue, name
        is_alone = len(catalogue.sources) == 1
        self._covered = cache(partial(_covered, prefer=prefer, is_alone=is_alone))
        self._piece = cache(catalogue.piece)
        self._entries: dict[object, int] = {}  # the number in `pieces` of a memory
        self._refs: list[tuple[int, int]] = []  # such a number, and flags
        self._made: dict[object, int] = {}  # the number of a tensor
        self._homes: dict[Piece, int] = {}

    def composed(
        self,
        numbers: Sequence[int],
        shards: tuple[ShardRuns, ...],
        mine: ShardRuns,
        path: str,
        *,
        flags: int = 0,
        dtype: str = "",
    ) -> int:
        """Return the number of a piece that is made of boxes of others.

        Args:
            numbers: The pieces.
            shards: What each has of the full tensor; empty if none has an element.
            mine: The wanted elements.
            path: The path of the tensor.
            flags: The flags of the new piece, besides those of its elements.
            dtype: The dtype if there is no piece.

        Raises:
            StorageError: the pieces lack elements, or do not fit each other.
        """
        codes = {self._catalogue.codes[number] for number in numbers}
        is_plain = len(codes) == 1 and None not in codes  # as most are
        dtypes = {self._kind_of(each)[0] for each in (() if is_plain else numbers)}
        if len(dtypes) > 1:
            why = f"the files disagree about its dtype: {sorted(dtypes)}"
            raise refusal(self._name, path, why)
        try:
            found, shape = self._covered(shards, mine)
        except ValueError as error:
            raise refusal(self._name, path, f"{error}") from error.__cause__
        dtype, lazy = self._kind_of(numbers[0]) if numbers else (dtype, 0)
        # Two tensors of the same memory become two of one piece's.
        homes = map(self._home_of, numbers) if self._catalogue.has_views else numbers
        key = id(found), dtype, *homes
        if (key, flags) in self._made:
            return self._made[key, flags]
        boxes: list[BoxCopy] = []
        for at, some in found.parts:
            piece = self._piece(numbers[at])
            number = numbers[at] - self._catalogue.firsts[piece.source]
            boxes += [BoxCopy(piece, number, box) for box in some]
        if len(boxes) == 1 and not flags:
            ((piece, _, box),) = boxes
            if box.sizes == shape == piece.shape and piece.flags == lazy:
                number = self._made[key, flags] = numbers[found.parts[0][0]]
                return number
        if key not in self._entries:
            self._entries[key] = len(self.pieces)
            self._add(dtype, shape, lazy, boxes, path)
        self._refs.append((self._entries[key], lazy | flags))
        number = len(self._catalogue) + len(self._refs) - 1
        self._made[key, flags] = number
        return number

    def segment(self) -> tuple[Manifest, Sequence[int]]:
        """Return the manifest of the new pieces, and the final number of each piece.

        A new piece that is no whole entry is a view, and views come last.
        """
        entries: dict[str, Entry] = {}
        for number, piece in enumerate(self.pieces):
            offsets, code = (piece.start, piece.stop), DTYPES[piece.dtype][1]
            shape = piece.shape if code else (piece.stop - piece.start,)
            entries[f"{number}"] = Entry(code or "U8", shape, offsets)
        views: list[TensorSpec] = []
        first, count = len(self._catalogue), len(self.pieces)
        numbers = [*range(first)]
        for number, flags in self._refs:
            piece = self.pieces[number]
            if DTYPES[piece.dtype][1] and not flags:
                numbers.append(first + number)
            else:  # only a view has a dtype without a code, or flags
                numbers.append(first + count + len(views))
                facts = piece.dtype, piece.shape, piece.stride, 0, flags
                views.append(TensorSpec(number, *facts))
        return in_memory(Entries.of(entries), views), numbers

    def _kind_of(self, number: int) -> tuple[str, int]:
        """Return the dtype of a piece, and the flags that change its elements."""
        code = self._catalogue.codes[number]
        if code is not None:  # it is plain, as most are
            return torch_name(code), 0
        piece = self._piece(number)
        return piece.dtype, piece.flags & _LAZY

    def _home_of(self, number: int) -> int:
        """Return what is equal for pieces of the same elements in the same memory."""
        piece = self._piece(number)
        own = piece._replace(flags=piece.flags & _LAZY)
        entry = self._catalogue.whole_entry(number)
        if own == self._piece(entry):
            return entry
        return self._homes.setdefault(own, number)

    def _add(
        self,
        dtype: str,
        shape: tuple[int, ...],
        flags: int,
        boxes: list[BoxCopy],
        path: str,
    ) -> None:
        """Add a piece that is put together from boxes."""
        last = self.pieces[-1].stop if self.pieces else 0
        start = -(-last // _ALIGN_BYTES) * _ALIGN_BYTES
        stop = start + prod(shape) * itemsize(dtype)
        where = len(self._catalogue.sources), len(self.pieces), start, stop
        stride = dense_stride(shape)
        self.pieces.append(Piece(*where, dtype, shape, stride, flags))
        self.copies.append(boxes)
        self.paths.append(path)
