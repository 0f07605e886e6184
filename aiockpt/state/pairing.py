"""``have=``: finds memory that may hold the bytes of a checkpoint already.

In this module, "theirs" are the tensors and entries of the checkpoint's manifest, and
"ours" are those of a local state dict. Both are known by number. Tensors are paired if
they have the same path, dtype and shape. What differs is no error here, and a wrong
pair does no harm, because the reader of that memory compares digests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Final

from aiockpt.format.entries import Entries
from aiockpt.format.manifest import (
    COMPACTED,
    PARAMETER,
    REQUIRES_GRAD,
    Manifest,
    TensorSpec,
    dense_stride,
)
from aiockpt.format.paths import Node, Path
from aiockpt.format.references import Mention, check_numbers, mentions
from aiockpt.memory.copies import Backings, Part
from aiockpt.runtime.system import collector_paused
from aiockpt.state.flatten import Drafts, Survey
from aiockpt.state.leaves import DTYPE_NAMES

__all__ = ["alike"]

_NONE: Final = -1

# These flags may differ between the two tensors of a pair.
_LOCAL_FLAGS: Final = PARAMETER | REQUIRES_GRAD | COMPACTED

# Tensors compared by one call. Each of their numbers is an object meanwhile.
_SLICE: Final = 512


def alike(manifest: Manifest, own: Survey) -> Backings:
    """Return the memory of a state dict that may hold the bytes of each entry.

    An entry without such memory gets zero bytes.

    Raises:
        RemoteProtocolError: the tree names a tensor that the manifest lacks.
    """
    with collector_paused():
        places = _Places(own.tree)
        for mention in mentions(manifest.tree):
            check_numbers(mention.numbers, manifest.tensor_count)
            places.add(mention)
        found = _FoundMemory(manifest, own)
        for start in range(0, len(places.own), _SLICE):
            some = slice(start, start + _SLICE)
            found.add(places.theirs[some], places.own[some])
        return found.backings()


class _FoundMemory:
    """The memory that was found so far.

    Attributes:
        there: Our entry for each entry of theirs, or -1.
        parts: Our tensors with other strides, by their entry: the number of each, and
            where its elements lie in the entry.
    """

    def __init__(self, manifest: Manifest, own: Survey) -> None:
        self._manifest, self._own = manifest, own
        self.there = array("q", [_NONE]) * len(manifest.entries)
        self.parts: dict[int, list[tuple[int, Part]]] = {}

    def add(self, theirs: Sequence[int], mine: Sequence[int]) -> None:
        """Note our entry for each entry of tensors of theirs that are like ours."""
        entries, drafts = self._manifest.entries, self._own.drafts
        # A plain tensor has the number of its entry, on either side. Most are plain.
        if max(theirs) < len(entries):
            at, here = itemgetter(*theirs), itemgetter(*mine)
            if (at(entries.dtypes), at(entries.shapes)) == (
                here(drafts.codes),
                here(drafts.shapes),
            ):
                for number, other in zip(theirs, mine, strict=True):
                    self.there[number] = other
                return
        for number, other in zip(theirs, mine, strict=True):
            one, two = self._manifest.tensor(number), _spec(self._own, other)
            if _comparable(one) == _comparable(two):
                self.there[one.storage] = two.storage
            elif _elements(one) == _elements(two):
                tensor = self._own.tensors[other]
                part = Part(tensor, tuple(one.stride), one.offset)
                self.parts.setdefault(one.storage, []).append((other, part))

    def backings(self) -> Backings:
        """Return the memory of each entry of theirs."""
        entries, drafts = self._manifest.entries, self._own.drafts
        order = array("q", _fitting(self._manifest, drafts, self.there))
        whole = drafts.backings.taken(order)
        some = {
            entry: each
            for entry, each in self.parts.items()
            if order[entry] == _NONE and _are_words(entries, entry, each)
        }
        firsts = array("q", [_NONE]) * len(order)
        sizes = array("Q", [0]) * len(order)
        for entry, each in some.items():
            firsts[entry] = each[0][0]
            sizes[entry] = entries.stops[entry] - entries.starts[entry]
        held = drafts.held.taken(firsts)
        parts = {entry: (*(part for _, part in each),) for entry, each in some.items()}
        inner = {
            entry: drafts.held.taken([number for number, _ in each])
            for entry, each in some.items()
        }
        strided = Backings(held, held.addresses, sizes, parts, inner)
        return whole.filled(some, strided) if some else whole


def _are_words(entries: Entries, entry: int, parts: Iterable[tuple[int, Part]]) -> bool:
    """Say whether torch can see an entry as words of the size of its parts."""
    ends = entries.starts[entry], entries.stops[entry]
    return not any(end % part.tensor.itemsize for _, part in parts for end in ends)


def _spec(own: Survey, number: int) -> TensorSpec:
    """Return the spec that a manifest would have for one of our tensors."""
    entry = number
    if (owner := own.drafts.owners.get(number)) is not None:
        group, member = owner
        entry = group.first
        if (spec := group.spec(member, entry)) is not None:
            return spec
    tensor = own.tensors[number]
    name, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    return TensorSpec(entry, name, shape, dense_stride(shape), 0, 0)


def _elements(spec: TensorSpec) -> tuple[object, ...]:
    """Return what must be equal for the same elements, wherever they lie."""
    return spec.dtype, spec.shape, spec.flags & ~_LOCAL_FLAGS


def _comparable(spec: TensorSpec) -> tuple[object, ...]:
    """Return what must be equal; strides of one-element dimensions are left out."""
    stride: tuple[int, ...] = ()
    if 0 not in spec.shape:
        stride = tuple(
            step for size, step in zip(spec.shape, spec.stride, strict=True) if size > 1
        )
    return *_elements(spec), stride, spec.offset


class _Places:
    """Pairs their tensors to fill with ours while their tree is read.

    Both trees are read side by side while they have the same structure. From the first
    difference on, such as keys in another order, it looks paths up. That takes more
    time and much more memory, since there may be 100,000 paths.

    Args:
        own: Our tree.

    Attributes:
        theirs: The numbers of their paired tensors.
        own: Our number for each of them, at the same index.
    """

    def __init__(self, own: Node) -> None:
        self.theirs = array("q")
        self.own = array("q")
        self._tree, self._beside = own, mentions(own)
        self._by_path: dict[Path, int] = {}
        self._parted = False

    def add(self, mention: Mention) -> None:
        """Pair the tensors of their next node."""
        if not self._parted:
            mine = next(self._beside, None)
            if mine and (mine.path, mine.names) == (mention.path, mention.names):
                self.theirs.extend(mention.numbers)
                self.own.extend(mine.numbers)
                return
            self._part()
        self._look_up(mention)

    def _part(self) -> None:
        self._parted = True
        for mention in mentions(self._tree):
            for path, _, number, _ in mention.references():
                self._by_path[path] = number

    def _look_up(self, mention: Mention) -> None:
        for path, _, number, _ in mention.references():
            mine = self._by_path.get(path)
            if mine is not None:
                self.theirs.append(number)
                self.own.append(mine)


def _fitting(manifest: Manifest, drafts: Drafts, there: array[int]) -> Iterator[int]:
    """Yield our entry for each of theirs, or -1 if their sizes differ.

    Our group may have members that theirs lacks, so it may be larger.
    """
    entries = manifest.entries
    columns = zip(there, entries.starts, entries.stops, strict=True)
    for mine, start, stop in columns:
        fits = mine >= 0
        if fits and drafts.codes[mine] is None:
            group, _ = drafts.owners[mine]
            fits = group.nbytes == stop - start and start % group.align == 0
        yield mine if fits else _NONE
