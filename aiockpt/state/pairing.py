"""``have=``: finds memory that may hold the bytes of a checkpoint already.

In this module, "theirs" are the tensors and entries of the checkpoint's manifest, and
"ours" are those of a local state dict. Both are known by number. Tensors are paired if
they have the same path, dtype and shape. What differs is no error here, and a wrong
pair does no harm, because the reader of that memory compares digests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
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
from aiockpt.state.dispositions import PAIRS_PER_CALL
from aiockpt.state.flatten import Drafts, Survey
from aiockpt.state.leaves import DTYPE_NAMES

_NONE: Final = -1

# These flags may differ between the two tensors of a pair.
_LOCAL_FLAGS: Final = PARAMETER | REQUIRES_GRAD | COMPACTED


def alike(manifest: Manifest, own: Survey) -> Backings:
    """Return the memory of a state dict that may hold the bytes of each entry.

    An entry without such memory gets zero bytes.

    Raises:
        RemoteProtocolError: the tree names a tensor that the manifest lacks.
    """
    with collector_paused():
        theirs, mine = _paired(manifest, own.tree)
        found = _FoundMemory(manifest, own)
        for start in range(0, len(mine), PAIRS_PER_CALL):
            some = slice(start, start + PAIRS_PER_CALL)
            found.add(theirs[some], mine[some])
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


def _paired(manifest: Manifest, own: Node) -> tuple[array[int], array[int]]:
    """Return the numbers of their tensors, and of ours at the same paths.

    Both trees are read side by side while they have the same structure. From the first
    difference on, such as keys in another order, paths are looked up. That takes more
    time and much more memory, since there may be 100,000 paths.
    """
    theirs, mine = array("q"), array("q")
    beside: Iterator[Mention] | None = mentions(own)
    by_path: dict[Path, int] = {}
    for mention in mentions(manifest.tree):
        check_numbers(mention.numbers, manifest.tensor_count)
        if beside is not None:
            other = next(beside, None)
            if other and (other.path, other.names) == (mention.path, mention.names):
                theirs.extend(mention.numbers)
                mine.extend(other.numbers)
                continue
            beside = None
            every = chain.from_iterable(each.references() for each in mentions(own))
            by_path = {each.path: each.number for each in every}
        for path, _, number, _ in mention.references():
            if (found := by_path.get(path)) is not None:
                theirs.append(number)
                mine.append(found)
    return theirs, mine


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
