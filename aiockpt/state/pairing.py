"""``have=``: finds memory that may hold the bytes of a checkpoint already.

In this module, "theirs" are the tensors and entries of the checkpoint's manifest, and
"ours" are those of a local state dict. Both are known by number. Tensors are paired if
they have the same path, dtype, shape and strides. What differs is no error here, and a
wrong pair does no harm, because the reader of that memory compares digests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final

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
from aiockpt.memory.copies import Backings
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
        there = array("q", [_NONE]) * len(manifest.entries)
        for start in range(0, len(places.own), _SLICE):
            near = slice(start, start + _SLICE)
            _pair(manifest, own, places.theirs[near], places.own[near], there)
    order = array("q", _fitting(manifest, own.drafts, there))
    return own.drafts.backings.taken(order)


def _pair(
    manifest: Manifest,
    own: Survey,
    theirs: Sequence[int],
    mine: Sequence[int],
    there: array[int],
) -> None:
    """Note our entry for each entry of these tensors of theirs that are like ours."""
    entries, drafts = manifest.entries, own.drafts
    # A plain tensor has the number of its entry, on either side. Most are plain.
    plain = max(theirs) < len(entries)
    if plain:
        at, here = itemgetter(*theirs), itemgetter(*mine)
        plain = at(entries.dtypes) == here(drafts.codes) and (
            at(entries.shapes) == here(drafts.shapes)
        )
    for number, other in zip(theirs, mine, strict=True):
        if plain:
            there[number] = other
            continue
        one, two = manifest.tensor(number), _spec(own, other)
        if _comparable(one) == _comparable(two):
            there[one.storage] = two.storage


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


def _comparable(spec: TensorSpec) -> tuple[object, ...]:
    """Return what must be equal; strides of one-element dimensions are left out."""
    stride: tuple[int, ...] = ()
    if 0 not in spec.shape:
        stride = tuple(
            step for size, step in zip(spec.shape, spec.stride, strict=True) if size > 1
        )
    return spec.dtype, spec.shape, stride, spec.offset, spec.flags & ~_LOCAL_FLAGS


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
